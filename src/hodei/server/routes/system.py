"""The server itself: state, configuration, events and audit log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hodei import __version__
from hodei.api.config import ConfigHistory, ConfigView, config_view, read_body
from hodei.api.resources import AuditList, audit_view
from hodei.api.views import CheckList, EventList, Info
from hodei.jobfile.render import iso
from hodei.jobfile.schema import job_schema
from hodei.model.audit import AuditQuery
from hodei.model.config import ConfigChange, SchedulingConfig
from hodei.model.errors import Unavailable
from hodei.server.route import ADMIN, API, PUBLIC, READ, Call, Param, Policy, Reply, Route, read_since_ms
from hodei.server.stream import EventStream

if TYPE_CHECKING:
    from hodei.runtime.config_changes import ConfigChanges

_TEXT = "text/plain; charset=utf-8"


async def info(call: Call) -> Info:
    service, scope = call.service, call.scope
    host = next(value for name, value in scope["headers"] if name == b"host").decode("latin-1")
    return Info(
        version=__version__,
        api="v1",
        installation=service.installation,
        address=f"{scope.get('scheme', 'http')}://{host}",
        epoch=service.epoch,
        started_at=iso(service.started_ms),
        ready=service.ready,
        profiles=list(service.profiles),
        backends=list(service.backends),
        jobs=await service.read(service.store.counts),
    )


async def scheduling(call: Call) -> SchedulingConfig:
    return call.service.scheduling


async def checks(call: Call) -> CheckList:
    return CheckList(await call.service.checks())


async def schema_job(call: Call) -> Reply:
    return Reply(msgspec.json.encode(job_schema()), media_type="application/schema+json")


async def openapi_document(call: Call) -> Reply:
    return Reply(call.shared.openapi)


async def livez(call: Call) -> Reply:
    return Reply(b"ok\n", media_type=_TEXT)


async def readyz(call: Call) -> Reply:
    await call.service.check_ready()
    # Jobs are accepted nevertheless, and wait. The error itself is for authenticated callers: hodei doctor.
    unhealthy = [name for name, error in call.service.backend_manager.errors().items() if error]
    text = "".join(["ok\n", *(f"backend {name} is unhealthy\n" for name in unhealthy)])
    return Reply(text.encode(), media_type=_TEXT)


async def metrics(call: Call) -> Reply:
    return Reply(
        call.service.metrics() + await call.service.observers.collect(),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


async def root(call: Call) -> Reply:
    return Reply(f"Hodei {__version__}, a job scheduler. The API is at {API}/openapi.json\n".encode(), media_type=_TEXT)


def metrics_route(policy: Policy) -> Route:
    return Route("GET", "/metrics", policy, "Prometheus metrics", metrics, response=bytes, media_type="text/plain")


ROUTES = (
    Route("GET", f"{API}/info", READ, "Version, address and state of this server", info, response=Info),
    Route("GET", f"{API}/scheduling", READ, "The active scheduling configuration", scheduling, response=SchedulingConfig),
    Route("GET", f"{API}/checks", READ, "The server's checks of `hodei doctor`", checks, response=CheckList),
    Route("GET", f"{API}/schema/job", PUBLIC, "The JSON Schema of a job document", schema_job,
          media_type="application/schema+json"),
    Route("GET", f"{API}/openapi.json", PUBLIC, "This document", openapi_document),
    Route("GET", "/livez", PUBLIC, "Liveness: the process answers", livez, response=bytes,
          media_type="text/plain", concurrency="exempt"),
    Route("GET", "/readyz", PUBLIC, "Readiness: jobs are accepted; else 503 with the reason", readyz, response=bytes,
          media_type="text/plain", concurrency="exempt"),
    Route("GET", "/", PUBLIC, "One line about this server", root, response=bytes, media_type="text/plain"),
)  # fmt: skip


_DRY_RUN = Param("dry_run", "1: only report what would change", type=int, default=0, maximum=1)
_TO = Param("to", "number of the configuration to restore; default: undo the last change that is not undone", type=int, default=0,
            minimum=1)  # fmt: skip


def _config_changes(call: Call) -> ConfigChanges:
    found = call.service.config_changes
    if found is None:
        raise Unavailable("this server cannot change its configuration while it runs")
    return found


async def show_config(call: Call) -> ConfigView:
    current = _config_changes(call).current
    return config_view(current, iso(current.at_ms))


async def config_history(call: Call) -> ConfigHistory:
    return ConfigHistory([config_view(each, iso(each.at_ms)) for each in reversed(_config_changes(call).history)])


async def put_config(call: Call) -> ConfigChange:
    found, lines = read_body(call.body, call.content_type)
    with call.shared.what_ifs.hold(call.limit_key):
        return await _config_changes(call).put(found, lines, call.who.name, dry_run=bool(call.args["dry_run"]))


async def reload_config(call: Call) -> ConfigChange:
    with call.shared.what_ifs.hold(call.limit_key):
        return await _config_changes(call).reload(call.who.name, dry_run=bool(call.args["dry_run"]))


async def undo_config(call: Call) -> ConfigChange:
    with call.shared.what_ifs.hold(call.limit_key):
        dry_run = bool(call.args["dry_run"])
        return await _config_changes(call).undo(call.who.name, to=call.args["to"], dry_run=dry_run)


CONFIG_ROUTES = (
    Route("GET", f"{API}/config", ADMIN, "The active configuration", show_config, response=ConfigView),
    Route("PUT", f"{API}/config", ADMIN, "Set the scheduling configuration, in TOML, YAML or JSON", put_config,
          request=SchedulingConfig, response=ConfigChange, params=(_DRY_RUN,), concurrency="long",
          accepts=("application/toml", "application/yaml")),
    Route("GET", f"{API}/config/history", ADMIN, "Earlier configurations, newest first", config_history,
          response=ConfigHistory),
    Route("POST", f"{API}/config/reload", ADMIN, "Read the configuration file again", reload_config,
          response=ConfigChange, params=(_DRY_RUN,), concurrency="long"),
    Route("POST", f"{API}/config/undo", ADMIN, "Undo a change of the configuration", undo_config,
          response=ConfigChange, params=(_DRY_RUN, _TO), concurrency="long"),
)  # fmt: skip


async def list_audit(call: Call) -> AuditList:
    args, service = call.args, call.service
    query = AuditQuery(
        who=args["who"], what=args["what"], target=args["target"], before=args["before"], after=args["after"],
        since_ms=read_since_ms(args["since"], call.shared.now_ms()), limit=args["limit"],
    )  # fmt: skip
    return AuditList([audit_view(entry) for entry in await service.read(service.store.audit, query)])


AUDIT_ROUTES = (
    Route(
        "GET", f"{API}/audit", ADMIN, "The audit log: newest first, or oldest first with `after`", list_audit,
        response=AuditList,
        params=(
            Param("who", "only requests of this caller", default=""),
            Param("what", "only this verb (`jobs.cancel`), resource (`jobs`) or action (`cancel`)", default=""),
            Param("target", "only changes of this object", default=""),
            Param("since", "only since: ISO 8601, epoch milliseconds, or an age such as 90m", default=""),
            Param("before", "`seq` of the last row of the previous page", type=int, default=0),
            Param("after", "oldest first, starting after this `seq`", type=int, default=None),
            Param("limit", "rows per page", type=int, default=100, minimum=1, maximum=1000),
        ),
    ),
)  # fmt: skip


_JOB = Param("job", "only events of this job", type=int, default=0)


async def list_events(call: Call) -> EventList:
    args, service = call.args, call.service
    events = await service.read(service.store.events, after=args["after"], job=args["job"], limit=args["limit"])
    return EventList(events, events[-1].seq if events else args["after"])


async def stream_events(call: Call) -> EventStream:
    """The Last-Event-ID of a client that reconnects is newer than the `after` of its URL."""
    args = call.args
    after = args["Last-Event-ID"] if args["Last-Event-ID"] is not None else args["after"]
    release = call.shared.streams.acquire(call.limit_key)
    return EventStream(call.shared, call.who, after=after, job=args["job"], release=release)


EVENT_ROUTES = (
    Route(
        "GET", f"{API}/events", READ, "One page of events, oldest first", list_events, response=EventList,
        params=(
            Param("after", "`last` of the previous page", type=int, default=0),
            _JOB,
            Param("limit", "events per page", type=int, default=1000, minimum=1, maximum=10_000),
        ),
    ),
    Route(
        "GET", f"{API}/events/stream", READ, "Events as they happen (server-sent events)", stream_events,
        response=bytes, media_type="text/event-stream", concurrency="long",
        params=(
            Param("after", "first replay the events after this one; default: only new events", type=int, default=None),
            Param("Last-Event-ID", "the same, as sent by browsers", type=int, where="header", default=None),
            _JOB,
        ),
    ),
)  # fmt: skip
