"""Backends: how they are, and adding, disabling, enabling and removing them while the server runs. Commands beside runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hodei.api.views import (
    BackendList,
    BackendRequest,
    BackendView,
    ExecutedView,
    ExecuteRequest,
    NodeExecutedView,
    NodeExecuteRequest,
    NodeUsageView,
    UsageList,
)
from hodei.jobfile.render import iso
from hodei.model.array import shell_reference
from hodei.model.audit import mask_settings
from hodei.model.errors import Conflict, InvalidInput, NotFound
from hodei.model.job import RUN_ENDED
from hodei.server.route import ADMIN, API, READ, WRITE, Call, Param, Route

if TYPE_CHECKING:
    from hodei.runtime.backend_manager import BackendStatus

_NAME = Param("name", "the backend's name", where="path", maximum=63)
_NODE = Param("name", "the node's name", where="path", maximum=253)
_ID = Param("id", "the job's number", type=int, where="path", minimum=1)
_FORCE = Param("force", "1: even if runs are there; they are lost", type=int, default=0, maximum=1)
_request = msgspec.json.Decoder(BackendRequest)
_execute = msgspec.json.Decoder(ExecuteRequest)
_execute_on = msgspec.json.Decoder(NodeExecuteRequest)
_LONGEST_S = 300


async def list_backends(call: Call) -> BackendList:
    return BackendList([_view(status) for status in call.service.fleet.all()])


async def show_backend(call: Call) -> BackendView:
    return _view(call.service.fleet.status(call.args["name"]))


async def add_backend(call: Call) -> BackendView:
    asked = _request.decode(call.body)
    if "kind" in asked.settings or "enabled" in asked.settings:
        raise InvalidInput("`kind` and `enabled` are no settings here", hint="give the kind beside the settings")
    return _view(await call.service.fleet.add(asked.name, {"kind": asked.kind, **asked.settings}))


async def disable_backend(call: Call) -> BackendView:
    return _view(await call.service.fleet.disable(call.args["name"]))


async def enable_backend(call: Call) -> BackendView:
    return _view(await call.service.fleet.enable(call.args["name"]))


async def remove_backend(call: Call) -> BackendView:
    return _view(await call.service.fleet.remove(call.args["name"], force=bool(call.args["force"])))


async def usage(call: Call) -> UsageList:
    found = await call.service.fleet.usage(call.args["name"])
    return UsageList([NodeUsageView(node, dict(of.used)) for node, of in sorted(found.items())])


async def execute(call: Call) -> ExecutedView:
    asked, service = _execute.decode(call.body), call.service
    _check(asked.command, asked.timeout_s, "hodei exec JOB -- PROGRAM WORDS")
    id = call.args["id"]
    job = await service.read(service.store.job, id)
    if job is None:
        raise NotFound(f"there is no job {id}", hint="hodei jobs --all")
    service.rights.check_owner(job)
    if not job.spec.has_member(asked.member):
        raise NotFound(
            f"there is no member {asked.member} in job {id}",
            hint=f"it has {job.spec.size}, counted from 0", code="NO_SUCH_MEMBER",
        )  # fmt: skip
    runs = [run for run in await service.read(service.store.runs, id) if run.member == asked.member]
    if not runs or runs[-1].state in RUN_ENDED:
        raise Conflict(
            f"member {asked.member} of job {id} does not run",
            hint=f"hodei job show {shell_reference(id, job.spec.array)}", code="NOT_RUNNING",
        )  # fmt: skip
    with call.shared.waits.hold(call.holder):
        done = await service.fleet.execute(runs[-1], tuple(asked.command), asked.timeout_s * 1000)
    return ExecutedView(
        runs[-1].id,
        done.exit_code,
        done.stdout.decode(errors="replace"),
        done.stderr.decode(errors="replace"),
        done.cut,
    )


async def execute_on_node(call: Call) -> NodeExecutedView:
    asked, node = _execute_on.decode(call.body), call.args["name"]
    _check(asked.command, asked.timeout_s, "hodei node exec NODE -- PROGRAM WORDS")
    with call.shared.waits.hold(call.holder):
        done = await call.service.fleet.execute_on(node, tuple(asked.command), asked.timeout_s * 1000)
    stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return NodeExecutedView(node, done.exit_code, stdout, stderr, done.cut)


def _check(command: list[str], timeout_s: int, usage: str) -> None:
    if not command or any("\0" in word for word in command):
        raise InvalidInput("a command is one word or more, without a NUL", hint=usage)
    if not 1 <= timeout_s <= _LONGEST_S:
        raise InvalidInput(f"timeout_s is from 1 to {_LONGEST_S}", hint="longer work is a job")


def _view(status: BackendStatus) -> BackendView:
    backend = status.backend
    settings = {key: value for key, value in status.table.items() if key != "kind"}
    return BackendView(
        backend.name, backend.kind, status.state, iso(status.since_ms), status.text, status.source, status.nodes,
        status.runs, status.took_ms, list(backend.capabilities.enabled_names()), mask_settings(settings, env="names"),
    )  # fmt: skip


ROUTES = (
    Route("GET", f"{API}/backends", READ, "Every backend, and how it is", list_backends, response=BackendList),
    Route("POST", f"{API}/backends", ADMIN, "Add a backend; it is kept over restarts", add_backend,
          request=BackendRequest, response=BackendView, status=201),
    Route("GET", f"{API}/backends/{{name}}", READ, "One backend", show_backend, response=BackendView, params=(_NAME,)),
    Route("GET", f"{API}/backends/{{name}}/usage", READ, "What is used on its nodes, as measured", usage,
          response=UsageList, params=(_NAME,)),
    Route("POST", f"{API}/backends/{{name}}/disable", ADMIN, "Start nothing more there; what runs goes on",
          disable_backend, response=BackendView, params=(_NAME,)),
    Route("POST", f"{API}/backends/{{name}}/enable", ADMIN, "Let jobs start there again", enable_backend,
          response=BackendView, params=(_NAME,)),
    Route("DELETE", f"{API}/backends/{{name}}", ADMIN, "Remove a backend that was added", remove_backend,
          response=BackendView, params=(_NAME, _FORCE)),
    Route("POST", f"{API}/jobs/{{id}}/execute", WRITE, "Run a command beside a running job", execute,
          request=ExecuteRequest, response=ExecutedView, params=(_ID,), lane="long"),
    Route("POST", f"{API}/nodes/{{name}}/execute", ADMIN, "Run a command on a node", execute_on_node,
          request=NodeExecuteRequest, response=NodeExecutedView, params=(_NODE,), lane="long"),
)  # fmt: skip
