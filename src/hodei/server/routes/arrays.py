"""Arrays as a whole: look, wait, cancel, hold, release, requeue. Elements are jobs like all others."""

from __future__ import annotations

import asyncio

import msgspec

from hodei.api.views import CancelRequest, JobView, RequeueReply, RequeueRequest
from hodei.jobfile.render import folded_view
from hodei.model.errors import InvalidInput
from hodei.runtime import arrays
from hodei.runtime.requeue import requeue_all
from hodei.server.errors import Busy
from hodei.server.route import API, MIB, READ, WRITE, Call, Param, Route

_ID = Param("id", "the number of any element's job", type=int, where="path", minimum=1)
_cancel_request = msgspec.json.Decoder(CancelRequest)
_requeue_request = msgspec.json.Decoder(RequeueRequest)
MOST_REQUEUED = 100_000


async def show_array(call: Call) -> JobView:
    return _view(await arrays.array_status(call.service, call.args["id"]))


async def cancel_array(call: Call) -> JobView:
    request = _cancel_request.decode(call.body) if call.body.strip() else CancelRequest()
    if len(request.reason) > 1000:
        raise InvalidInput("the reason is longer than 1000 characters")
    reason = request.reason or f"cancelled by {call.who.name}"
    return _view(await arrays.cancel_array(call.service, call.args["id"], reason))


async def hold_array(call: Call) -> JobView:
    return _view(await arrays.hold_array(call.service, call.args["id"]))


async def release_array(call: Call) -> JobView:
    return _view(await arrays.release_array(call.service, call.args["id"]))


async def wait_array(call: Call) -> JobView:
    """Answers when every element has ended or the time is over; the states tell which."""
    with call.shared.waits.hold(call.holder):
        timeout_ms = call.args["timeout_s"] * 1000
        waiting = asyncio.ensure_future(arrays.wait_array(call.service, call.args["id"], timeout_ms))
        closing = asyncio.ensure_future(call.shared.closing.wait())
        try:
            await asyncio.wait((waiting, closing), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Busy("the server is about to stop", hint="ask again when it is back", code="CLOSING")
            return _view(waiting.result())
        finally:
            for task in (waiting, closing):
                task.cancel()
            await asyncio.gather(waiting, closing, return_exceptions=True)


async def requeue_many(call: Call) -> RequeueReply:
    request = _requeue_request.decode(call.body)
    if len(request.jobs) + len(request.arrays) > MOST_REQUEUED:
        raise InvalidInput(f"more than {MOST_REQUEUED} jobs at once", hint="name fewer, or whole arrays")
    done = await requeue_all(call.service, request.jobs, request.arrays, failed=request.failed)
    return RequeueReply(done.requeued, done.revived, done.refused)


def _view(status: arrays.ArrayStatus) -> JobView:
    return folded_view(status.job, status.states)


ROUTES = (
    Route("GET", f"{API}/arrays/{{id}}", READ, "An array as a whole", show_array, response=JobView, params=(_ID,)),
    Route("GET", f"{API}/arrays/{{id}}/wait", READ, "Wait until every element has ended or the time is over", wait_array,
          response=JobView, lane="long",
          params=(_ID, Param("timeout_s", "how long", type=int, default=30, maximum=60))),
    Route("POST", f"{API}/arrays/{{id}}/cancel", WRITE, "Ask for every element to end", cancel_array,
          request=CancelRequest, response=JobView, params=(_ID,)),
    Route("POST", f"{API}/arrays/{{id}}/hold", WRITE, "Keep the elements that wait from being placed", hold_array,
          response=JobView, params=(_ID,)),
    Route("POST", f"{API}/arrays/{{id}}/release", WRITE, "Let held elements be placed again", release_array,
          response=JobView, params=(_ID,)),
    Route("POST", f"{API}/jobs/requeue", WRITE, "Start many jobs again, or only those of them that have failed", requeue_many,
          request=RequeueRequest, response=RequeueReply, body_limit=4 * MIB, verb="requeue_many"),
)  # fmt: skip
