"""Server-sent events: history from the store first, then live, without gap or repeat.

A client that reads too slowly is never buffered without bound: it gets the event `resync` and is closed, and comes
back with the last id it saw. All tasks of a stream end with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from hodei.model.effects import Event
from hodei.server.route import Principal, Shared

PAGE = 500
MOST_WAITING = 256
REVOCATION_CHECK_S = 2.0
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
_encode = msgspec.json.Encoder().encode


class Stuck(Exception):
    """The client takes nothing any more."""


class EventStream:
    """One client's stream, as an ASGI app. `after` None starts with what is new. Calls `give_back` when it is over."""

    def __init__(
        self, shared: Shared, who: Principal, *, after: int | None, job: int, give_back: Callable[[], None]
    ) -> None:
        self._shared, self._who, self._job, self._give_back = shared, who, job, give_back
        self._replaying = after is not None
        self._last = after or 0
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        tasks: list[asyncio.Future[Any]] = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            pump = asyncio.ensure_future(self._pump())
            gone = asyncio.ensure_future(_until_gone(receive))
            revoked = asyncio.ensure_future(self._until_revoked())
            tasks = [pump, gone, revoked, asyncio.ensure_future(self._shared.closing.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            if not gone.done():
                # A client that does not read must not keep a stream open that it has no right to any more.
                await self._write(b"", more=False, timeout_s=1.0 if revoked.done() else None)
        except Stuck:
            # Closing politely would wait for the client to take what is already buffered, perhaps for ever.
            abort = scope.get("extensions", {}).get("hodei", {}).get("abort")
            if abort is not None:
                abort()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._give_back()

    async def _until_revoked(self) -> None:
        while self._shared.tokens.current(self._who):  # noqa: ASYNC110
            await asyncio.sleep(REVOCATION_CHECK_S)

    async def _pump(self) -> None:
        await self._write(b"retry: 2000\n\n")
        service = self._shared.service
        while True:
            # Far behind, first catch up without a subscription: its bounded buffer would only overflow meanwhile.
            await self._replay()
            subscription = service.subscribe()
            try:
                # What was committed before the subscription began is in the store, what came after is in the
                # subscription, and what is in both is known by its number.
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
        waiting: deque[Event] = deque()
        news, room = asyncio.Event(), asyncio.Event()

        async def collect() -> None:
            async for event in subscription:
                if subscription.lagged:
                    return  # some were dropped before this one: the client has to fetch them first
                if event.seq <= self._last or (self._job and event.job != self._job):
                    continue
                waiting.append(event)
                news.set()
                while len(waiting) >= MOST_WAITING:
                    room.clear()
                    await room.wait()

        collector = asyncio.ensure_future(collect())
        collector.add_done_callback(lambda _: news.set())
        clock = asyncio.get_running_loop().time
        spoke = clock()
        try:
            while not collector.done() or waiting:
                try:
                    async with asyncio.timeout(self._shared.heartbeat_s):
                        await news.wait()
                except TimeoutError:
                    pass
                news.clear()
                now = clock()
                if waiting:
                    events = list(waiting)
                    waiting.clear()
                    room.set()
                    await self._write_events(events)
                    spoke = now
                elif now - spoke >= self._shared.heartbeat_s:
                    await self._write(b": still here\n\n")
                    spoke = now
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
            raise Stuck from None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
