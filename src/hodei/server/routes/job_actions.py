"""A job that lives: suspend it, let it go on, have it save its work, move it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from hodei.api.views import JobView, MigrateRequest
from hodei.jobfile.render import job_view
from hodei.runtime import job_actions
from hodei.server.route import API, WRITE, Call, Param, Route

_ID = Param("id", "the job's number", type=int, where="path", minimum=1)
_migrate_request = msgspec.json.Decoder(MigrateRequest)


async def suspend_job(call: Call) -> JobView:
    return job_view(await job_actions.suspend(call.service, call.args["id"]))


async def resume_job(call: Call) -> JobView:
    return job_view(await job_actions.resume(call.service, call.args["id"]))


async def save_work(call: Call) -> JobView:
    return job_view(await job_actions.save_work(call.service, call.args["id"]))


async def migrate_job(call: Call) -> JobView:
    request = _migrate_request.decode(call.body) if call.body.strip() else MigrateRequest()
    return job_view(await job_actions.migrate(call.service, call.args["id"], request.to, request.force))


def _change(verb: str, summary: str, handler: Callable[[Call], Awaitable[Any]], request: Any = None) -> Route:
    path = f"{API}/jobs/{{id}}/{verb}"
    return Route("POST", path, WRITE, summary, handler, request=request, response=JobView, params=(_ID,))


ROUTES = (
    _change("suspend", "Let a running job save its work and give back its nodes until it is resumed", suspend_job),
    _change("resume", "Let a suspended job go on", resume_job),
    _change("checkpoint", "Let a running job save its work, and go on", save_work),
    _change("migrate", "Move a running job to other nodes", migrate_job, MigrateRequest),
)
