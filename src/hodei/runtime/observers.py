"""Observers of committed steps: event streams and waits (`EventHub`), event sinks and metric collectors (`Observers`).

A sink or collector is an extension that decides nothing. Each runs on its own daemon thread behind a bounded queue. One
that raises, hangs or is slow neither stops nor delays the scheduler: what does not fit is dropped and counted. Delivery
is at most once; a reader that must not miss an event follows `GET /api/v1/events` by sequence number instead.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest

from hodei.model.effects import Event, Save, SaveEvent, SaveJob
from hodei.model.errors import InvalidInput
from hodei.model.ids import JobId
from hodei.model.job import Job
from hodei.ports import Collector

log = logging.getLogger("hodei.observers")

_SUBSCRIPTION_BUFFER = 10_000
# The queue of one sink, in saves of committed steps.
MAX_SAVES = 50_000
_COLLECT_S = 1.0
HOOKS = {
    "job.submitted": "on_job_queued",
    "job.released": "on_job_queued",
    "job.resumed": "on_job_queued",
    "job.requeued": "on_job_queued",
    "job.dependencies_met": "on_job_queued",
    "job.scheduled": "on_job_scheduled",
    "job.started": "on_job_started",
    "job.ended": "on_job_ended",
    "job.preempted": "on_job_preempted",
}
METHODS = ("on_event", *dict.fromkeys(HOOKS.values()))
# Submitted jobs that do not enter the queue yet: on hold, or waiting for other jobs.
_NOT_QUEUED = "held"


class Subscription:
    """New events, in order. A subscriber that falls too far behind is cut off: `lagged` is set and its buffer dropped."""

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
        if len(self._events) > _SUBSCRIPTION_BUFFER:
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
        self._hub.unsubscribe(self)


class EventHub:
    """In-process subscribers: event streams, and waits for the end of a job."""

    def __init__(self) -> None:
        self._subscribers: set[Subscription] = set()
        self._waiting: dict[JobId, list[asyncio.Future[None]]] = {}

    def subscribe(self) -> Subscription:
        subscription = Subscription(self)
        self._subscribers.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscribers.discard(subscription)

    def publish(self, events: list[Event], ended: list[JobId]) -> None:
        if events:
            for subscription in self._subscribers:
                subscription.push(events)
        for job in ended:
            for future in self._waiting.pop(job, ()):
                if not future.done():
                    future.set_result(None)

    def end_of(self, job: JobId) -> asyncio.Future[None]:
        """Done when the job's end is committed. Call it before reading the store, so that no end is missed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job, []).append(future)
        return future

    def cancel_wait(self, job: JobId, future: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(job, [])
        if future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._waiting[job]

    def close(self) -> None:
        for subscription in list(self._subscribers):
            subscription.close()


class SinkThread:
    """Calls one sink for every committed step, in order."""

    def __init__(self, name: str, sink: Any, dropped: Counter, errors: Counter, max_saves: int = MAX_SAVES) -> None:
        self.name, self._sink, self._max = name, sink, max_saves
        self._dropped, self._errors = dropped.labels(name), errors.labels(name)
        self._hooks = {method: call for method in METHODS if callable(call := getattr(sink, method, None))}
        self._steps: deque[tuple[Sequence[Save], Mapping[JobId, Job]]] = deque()
        self._saves = 0
        self._changed = threading.Condition()
        self._closing = self._warned_drop = self._warned_error = False
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def publish(self, saves: Sequence[Save], jobs: Mapping[JobId, Job]) -> None:
        """`jobs`: the jobs of the events. Never waits for the sink."""
        with self._changed:
            full = self._saves and self._saves + len(saves) > self._max
            if not full and not self._closing:
                self._steps.append((saves, jobs))
                self._saves += len(saves)
                self._changed.notify()
                return
        self._dropped.inc(sum(isinstance(save, SaveEvent) for save in saves))
        if not self._warned_drop:
            self._warned_drop = True
            log.warning("sink %s is too slow: events are dropped (hodei_sink_dropped_total counts them)", self.name)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._steps and not self._closing:
                    self._changed.wait()
                if not self._steps:
                    break
                saves, jobs = self._steps.popleft()
            self._deliver(saves, jobs)
            with self._changed:
                self._saves -= len(saves)
        self._call(getattr(self._sink, "close", None))

    def _deliver(self, saves: Sequence[Save], jobs: Mapping[JobId, Job]) -> None:
        for save in saves:
            if not isinstance(save, SaveEvent):
                continue
            event = save.event
            self._call(self._hooks.get("on_event"), event)
            hook, job = HOOKS.get(event.kind, ""), jobs.get(event.job)
            if hook in self._hooks and job is not None and not (hook == "on_job_queued" and job.state == _NOT_QUEUED):
                self._call(self._hooks[hook], job, event)

    def _call(self, hook: Callable[..., Any] | None, *arguments: Any) -> None:
        if hook is None:
            return
        try:
            hook(*arguments)
        except Exception:
            self._errors.inc()
            if not self._warned_error:
                self._warned_error = True
                log.exception("sink %s failed; further failures are only counted (hodei_sink_errors_total)", self.name)

    def close(self) -> None:
        """Deliver what is queued, then stop; `join` waits for it."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._changed:
                left = [save for saves, _ in self._steps for save in saves if isinstance(save, SaveEvent)]
                self._steps.clear()
            self._dropped.inc(len(left))
            log.warning("sink %s did not finish in time: %d queued events are dropped", self.name, len(left))
            return False
        return True


class CollectorThread:
    """Reads one collector, without delaying a scrape for longer than a second."""

    def __init__(self, name: str, collector: Collector, errors: Counter) -> None:
        self.name, self._errors = name, errors.labels(name)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        self._wanted, self._done = threading.Event(), threading.Event()
        self._warned = False
        self.text = b""
        threading.Thread(target=self._run, name=f"collector-{name}", daemon=True).start()

    def _run(self) -> None:
        while self._wanted.wait():
            self._wanted.clear()
            try:
                self.text = generate_latest(self._registry)
            except Exception:
                self.text = b""
                self._errors.inc()
                if not self._warned:
                    self._warned = True
                    log.exception("collector %s failed; further failures are only counted", self.name)
            self._done.set()

    def refresh(self) -> None:
        self._done.clear()
        self._wanted.set()

    async def read(self, deadline_s: float) -> bytes:
        """The current metrics, or the previous ones if the collector is slow."""
        while not self._done.is_set() and time.monotonic() < deadline_s:  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0.005)
        return self.text


class Observers:
    """All sinks and collectors of a server. `find_job`: a job of the controller that a step does not save."""

    def __init__(self, registry: CollectorRegistry, find_job: Callable[[JobId], Job | None] = lambda _: None) -> None:
        self._find_job = find_job
        self._dropped = Counter(
            "hodei_sink_dropped", "Events that a slow sink did not get", ["sink"], registry=registry
        )
        self._errors = Counter("hodei_sink_errors", "Calls of a sink that failed", ["sink"], registry=registry)
        self._failed = Counter(
            "hodei_collector_errors", "Failed reads of a collector", ["collector"], registry=registry
        )
        self._sinks: list[SinkThread] = []
        self._collectors: list[CollectorThread] = []

    def add_sink(self, name: str, sink: Any) -> None:
        if not any(callable(getattr(sink, method, None)) for method in METHODS):
            raise InvalidInput(f"sinks.{name}: the sink has no hook", hint=f"give it one of: {', '.join(METHODS)}")
        self._sinks.append(SinkThread(name, sink, self._dropped, self._errors))

    def add_collector(self, name: str, collector: Any) -> None:
        if not callable(getattr(collector, "collect", None)):
            raise InvalidInput(f"collectors.{name}: it has no method collect()", hint="docs/how-to/write-a-plugin.md")
        self._collectors.append(CollectorThread(name, collector, self._failed))

    def publish(self, saves: Sequence[Save]) -> None:
        """After the commit of a step, before the next one."""
        if not self._sinks:
            return
        jobs: dict[JobId, Job] = {save.job.id: save.job for save in saves if isinstance(save, SaveJob)}
        # A preempted job, for example, is saved only when its runs have stopped.
        named = {save.event.job for save in saves if isinstance(save, SaveEvent) and save.event.kind in HOOKS}
        for id in named - jobs.keys():
            if (job := self._find_job(id)) is not None:
                jobs[id] = job
        for sink in self._sinks:
            sink.publish(saves, jobs)

    async def collect(self) -> bytes:
        for collector in self._collectors:
            collector.refresh()
        deadline_s = time.monotonic() + _COLLECT_S
        return b"".join([await collector.read(deadline_s) for collector in self._collectors])

    async def close(self, timeout_s: float = 5.0) -> None:
        """Sinks share `timeout_s` to finish. One that hangs is left behind on its daemon thread."""
        for sink in self._sinks:
            sink.close()
        ends = time.monotonic() + timeout_s
        for sink in self._sinks:
            await asyncio.to_thread(sink.join, max(0.0, ends - time.monotonic()))


class JsonLines:
    """Appends every event to a file, one JSON object per line."""

    def __init__(self, path: str, kinds: Iterable[str] = ()) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - open until `close`
        self._kinds = frozenset(kinds)

    def on_event(self, event: Event) -> None:
        if not self._kinds or event.kind in self._kinds:
            self._file.write(msgspec.json.encode(event) + b"\n")

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


class ProcessMetrics(ProcessCollector):
    """Memory, CPU time and open files of the server's process."""

    def __init__(self) -> None:
        super().__init__(registry=None)
