"""Periodic jobs: made, looked at, paused, resumed, run out of turn, removed."""

from __future__ import annotations

import msgspec
from msgspec import structs

from hodei.api.resources import PeriodicList, PeriodicRequest, PeriodicView, parse_periodic, periodic_view
from hodei.api.views import SubmitReply
from hodei.model.cron import Periodic
from hodei.server.route import API, READ, WRITE, Call, Param, Route

_NAME = Param("name", "the periodic job's name", where="path", maximum=63)
_request = msgspec.json.Decoder(PeriodicRequest)


async def add_periodic(call: Call) -> PeriodicView:
    periodic = parse_periodic(_request.decode(call.body), call.who.name)
    spec = structs.replace(periodic.job, user=call.who.name)
    return await _view(call, await call.service.calendar.add(structs.replace(periodic, job=spec)))


async def list_periodic(call: Call) -> PeriodicList:
    return PeriodicList([await _view(call, one, whole=False) for one in call.service.calendar.all()])


async def show_periodic(call: Call) -> PeriodicView:
    return await _view(call, call.service.calendar.one(call.args["name"]))


async def pause_periodic(call: Call) -> PeriodicView:
    return await _view(call, await call.service.calendar.pause(call.args["name"]))


async def resume_periodic(call: Call) -> PeriodicView:
    return await _view(call, await call.service.calendar.resume(call.args["name"]))


async def run_periodic(call: Call) -> SubmitReply:
    return SubmitReply([await call.service.calendar.run_now(call.args["name"])])


async def remove_periodic(call: Call) -> PeriodicView:
    return await _view(call, await call.service.calendar.remove(call.args["name"]))


async def _view(call: Call, periodic: Periodic, *, whole: bool = True) -> PeriodicView:
    last = await call.service.read(call.service.store.job, periodic.last_job) if periodic.last_job else None
    return periodic_view(periodic, last, with_job=whole, env=call.who.sees_of(periodic.by))


def _change(verb: str, summary: str, handler: object, response: type = PeriodicView) -> Route:
    path = f"{API}/periodic/{{name}}/{verb}"
    return Route("POST", path, WRITE, summary, handler, response=response, params=(_NAME,))  # type: ignore[arg-type]


ROUTES = (
    Route("POST", f"{API}/periodic", WRITE, "Make a periodic job", add_periodic,
          request=PeriodicRequest, response=PeriodicView, status=201),
    Route("GET", f"{API}/periodic", READ, "Every periodic job", list_periodic, response=PeriodicList),
    Route("GET", f"{API}/periodic/{{name}}", READ, "One periodic job", show_periodic, response=PeriodicView, params=(_NAME,)),
    _change("pause", "Make no more jobs until it is resumed", pause_periodic),
    _change("resume", "Go on from the next time on", resume_periodic),
    _change("run", "Make a job now, out of turn", run_periodic, SubmitReply),
    Route("DELETE", f"{API}/periodic/{{name}}", WRITE, "Remove a periodic job; jobs that it made go on", remove_periodic,
          response=PeriodicView, params=(_NAME,)),
)  # fmt: skip
