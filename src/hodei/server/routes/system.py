"""The server itself: what it is, how it is, what it understands."""

from __future__ import annotations

import msgspec

from hodei import __version__
from hodei.api.resources import AuditList, audit_view
from hodei.api.views import CheckList, EventList, Info
from hodei.jobfile.render import iso
from hodei.jobfile.schema import job_schema
from hodei.model.audit import AuditQuery
from hodei.model.config import SchedulingConfig
from hodei.server.params import read_since_ms
from hodei.server.route import ADMIN, API, PUBLIC, READ, Call, Param, Policy, Reply, Route
from hodei.server.stream import EventStream

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
    # Jobs are taken all the same, and wait. What is wrong with it is told to those who may ask: hodei doctor.
    unwell = [name for name, error in call.service.backend_errors().items() if error]
    return Reply("".join(["ok\n", *(f"backend {name} is unhealthy\n" for name in unwell)]).encode(), media_type=_TEXT)


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
    Route("GET", f"{API}/info", READ, "What this server is", info, response=Info),
    Route("GET", f"{API}/scheduling", READ, "What its decisions depend on", scheduling, response=SchedulingConfig),
    Route("GET", f"{API}/checks", READ, "What `hodei doctor` finds", checks, response=CheckList),
    Route("GET", f"{API}/schema/job", PUBLIC, "The JSON Schema of a job document", schema_job,
          media_type="application/schema+json"),
    Route("GET", f"{API}/openapi.json", PUBLIC, "This document", openapi_document),
    Route("GET", "/livez", PUBLIC, "Whether the process answers at all", livez, response=bytes,
          media_type="text/plain", lane="free"),
    Route("GET", "/readyz", PUBLIC, "Whether jobs are taken; 503 with the reason while not", readyz, response=bytes,
          media_type="text/plain", lane="free"),
    Route("GET", "/", PUBLIC, "One line that says what this is", root, response=bytes, media_type="text/plain"),
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- audit
# The audit, for administrators.


async def list_audit(call: Call) -> AuditList:
    args, service = call.args, call.service
    query = AuditQuery(
        who=args["who"], what=args["what"], target=args["target"], before=args["before"], after=args["after"],
        since_ms=read_since_ms(args["since"], call.shared.now_ms()), limit=args["limit"],
    )  # fmt: skip
    return AuditList([audit_view(entry) for entry in await service.read(service.store.audit, query)])


AUDIT_ROUTES = (
    Route(
        "GET", f"{API}/audit", ADMIN, "Who did what when: newest first, or with `after` oldest first", list_audit,
        response=AuditList,
        params=(
            Param("who", "only acts of this caller", default=""),
            Param("what", "only this verb (`jobs.cancel`), these things (`jobs`) or this act (`cancel`)", default=""),
            Param("target", "only what was done to this", default=""),
            Param("since", "only since: ISO 8601, epoch milliseconds, or an age such as 90m", default=""),
            Param("before", "the `seq` of the last row of the page before", type=int, default=0),
            Param("after", "oldest first, from the row after this `seq` on", type=int, default=None),
            Param("limit", "rows per page", type=int, default=100, minimum=1, maximum=1000),
        ),
    ),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- events
# Events: what has happened, as pages and as a stream.


_JOB = Param("job", "only events of this job", type=int, default=0)


async def list_events(call: Call) -> EventList:
    args, service = call.args, call.service
    events = await service.read(service.store.events, after=args["after"], job=args["job"], limit=args["limit"])
    return EventList(events, events[-1].seq if events else args["after"])


async def stream_events(call: Call) -> EventStream:
    """A browser that reconnects says where it was in the header; that is newer than what stands in its URL."""
    args = call.args
    after = args["Last-Event-ID"] if args["Last-Event-ID"] is not None else args["after"]
    give_back = call.shared.streams.take(call.holder)
    return EventStream(call.shared, call.who, after=after, job=args["job"], give_back=give_back)


EVENT_ROUTES = (
    Route(
        "GET", f"{API}/events", READ, "One page of events, oldest first", list_events, response=EventList,
        params=(
            Param("after", "`last` of the page before", type=int, default=0),
            _JOB,
            Param("limit", "events per page", type=int, default=1000, minimum=1, maximum=10_000),
        ),
    ),
    Route(
        "GET", f"{API}/events/stream", READ, "Events as they happen (server-sent events)", stream_events,
        response=bytes, media_type="text/event-stream", lane="long",
        params=(
            Param("after", "replay what came after this event first; without it only what is new", type=int,
                  default=None),
            Param("Last-Event-ID", "the same, as browsers say it", type=int, where="header", default=None),
            _JOB,
        ),
    ),
)  # fmt: skip
