"""Who wants to hear of it: streams of events, and those who wait for a job's end. All of it after the commit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from hodei.model.effects import Event
from hodei.model.ids import JobId

_BUFFER = 10_000


class Subscription:
    """New events, in order. A reader too slow for its buffer is cut off with `lagged` rather than let it grow."""

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub
        self._events: deque[Event] = deque()
        self._more = asyncio.Event()
        self.lagged = False
        self.closed = False

    def push(self, events: Iterable[Event]) -> None:
        if self.lagged:
            return
        self._events.extend(events)
        if len(self._events) > _BUFFER:
            self.lagged = True
            self._events.clear()
        self._more.set()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._read()

    async def _read(self) -> AsyncIterator[Event]:
        while not self.closed:
            while self._events:
                yield self._events.popleft()
            if self.lagged:
                return
            self._more.clear()
            await self._more.wait()

    def close(self) -> None:
        self.closed = True
        self._more.set()
        self._hub.leave(self)


class EventHub:
    def __init__(self) -> None:
        self._readers: set[Subscription] = set()
        self._waiting: dict[JobId, list[asyncio.Future[None]]] = {}

    def subscribe(self) -> Subscription:
        reader = Subscription(self)
        self._readers.add(reader)
        return reader

    def leave(self, reader: Subscription) -> None:
        self._readers.discard(reader)

    def publish(self, events: list[Event], ended: list[JobId]) -> None:
        if events:
            for reader in self._readers:
                reader.push(events)
        for job in ended:
            for future in self._waiting.pop(job, ()):
                if not future.done():
                    future.set_result(None)

    def end_of(self, job: JobId) -> asyncio.Future[None]:
        """Done when the job's end has been committed. Ask before reading the store, so that no end is missed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job, []).append(future)
        return future

    def give_up(self, job: JobId, future: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(job, [])
        if future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._waiting[job]

    def close(self) -> None:
        for reader in list(self._readers):
            reader.close()
