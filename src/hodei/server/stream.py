"""Server-sent events: stored events first, then live ones, without gaps or repeats.

The buffer for a slow client is bounded: when it overflows, the client gets the event `resync` and is disconnected, and
reconnects with the last id that it saw. All tasks of a stream end with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from hodei.model.effects import Event
from hodei.process import cancel_tasks
from hodei.server.route import Principal, Shared

PAGE = 500
MAX_BUFFERED = 256
REVOCATION_CHECK_S = 2.0
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
_encode = msgspec.json.Encoder().encode


class ClientStalled(Exception):
    """The client does not read any more."""


class EventStream:
    """The stream of one client, as an ASGI app. `after` None: only new events. Calls `release` at the end."""

    def __init__(
        self, shared: Shared, who: Principal, *, after: int | None, job: int, release: Callable[[], None]
    ) -> None:
        self._shared, self._who, self._job, self._release = shared, who, job, release
        self._replaying = after is not None
        self._last = after or 0
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        tasks: list[asyncio.Future[Any]] = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            pump = asyncio.ensure_future(self._pump())
            disconnected = asyncio.ensure_future(until_disconnected(receive))
            revoked = asyncio.ensure_future(self._until_revoked())
            tasks = [pump, disconnected, revoked, asyncio.ensure_future(self._shared.closing.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            if not disconnected.done():
                # A client that does not read must not keep a revoked stream open.
                await self._write(b"", more=False, timeout_s=1.0 if revoked.done() else None)
        except ClientStalled:
            # A graceful close would wait for the client to read what is buffered, perhaps forever.
            abort = scope.get("extensions", {}).get("hodei", {}).get("abort")
            if abort is not None:
                abort()
        finally:
            await cancel_tasks(tasks)
            self._release()

    async def _until_revoked(self) -> None:
        while self._shared.tokens.current(self._who):  # noqa: ASYNC110
            await asyncio.sleep(REVOCATION_CHECK_S)

    async def _pump(self) -> None:
        await self._write(b"retry: 2000\n\n")
        service = self._shared.service
        while True:
            # Catch up without a subscription first: its bounded buffer would overflow meanwhile.
            await self._replay()
            subscription = service.event_hub.subscribe()
            try:
                # Events from before the subscription are in the store, later ones in the subscription; those in both are
                # recognized by their numbers.
                await self._replay()
                if self._replaying and subscription.lagged:
                    continue
                await self._live(subscription)
                if subscription.lagged:
                    await self._write(b"event: resync\ndata: " + _encode({"last": self._last}) + b"\n\n")
                return
            finally:
                subscription.close()

    async def _replay(self) -> None:
        service = self._shared.service
        while self._replaying:
            events = await service.read(service.store.events, after=self._last, job=self._job, limit=PAGE)
            if events:
                await self._write_events(events)
            if len(events) < PAGE:
                return

    async def _live(self, subscription: Any) -> None:
        buffer: deque[Event] = deque()
        arrived, has_room = asyncio.Event(), asyncio.Event()

        async def collect() -> None:
            async for event in subscription:
                if subscription.lagged:
                    return  # events before this one were dropped: the client has to fetch them first
                if event.seq <= self._last or (self._job and event.job != self._job):
                    continue
                buffer.append(event)
                arrived.set()
                while len(buffer) >= MAX_BUFFERED:
                    has_room.clear()
                    await has_room.wait()

        collector = asyncio.ensure_future(collect())
        collector.add_done_callback(lambda _: arrived.set())
        clock = asyncio.get_running_loop().time
        sent_s = clock()
        try:
            while not collector.done() or buffer:
                try:
                    async with asyncio.timeout(self._shared.heartbeat_s):
                        await arrived.wait()
                except TimeoutError:
                    pass
                arrived.clear()
                now_s = clock()
                if buffer:
                    events = list(buffer)
                    buffer.clear()
                    has_room.set()
                    await self._write_events(events)
                    sent_s = now_s
                elif now_s - sent_s >= self._shared.heartbeat_s:
                    await self._write(b": heartbeat\n\n")
                    sent_s = now_s
            collector.result()
        finally:
            collector.cancel()
            await asyncio.gather(collector, return_exceptions=True)

    async def _write_events(self, events: list[Event]) -> None:
        await self._write(b"".join(b"id: %d\ndata: %b\n\n" % (event.seq, _encode(event)) for event in events))
        self._last = events[-1].seq

    async def _write(self, data: bytes, *, more: bool = True, timeout_s: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout_s or self._shared.send_timeout_s):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientStalled from None


async def until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
