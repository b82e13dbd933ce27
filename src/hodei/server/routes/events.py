"""Events: what has happened, as pages and as a stream."""

from __future__ import annotations

from hodei.api.views import EventList
from hodei.server.route import API, READ, Call, Param, Route
from hodei.server.stream import EventStream

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


ROUTES = (
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
