"""A service that records its calls and schedules nothing.

It tests only how the HTTP layer handles the answers and errors of a service: not durability, admission, transactions, the
order of commit and publish, or whether a job ever runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from msgspec import Struct
from prometheus_client import CollectorRegistry

from builders import NOW_MS
from hodei.api.views import Check
from hodei.control.explain.whatif import Question
from hodei.model.audit import AuditEntry, AuditQuery
from hodei.model.config import SchedulingConfig
from hodei.model.cron import Periodic
from hodei.model.effects import Event, SaveAudit
from hodei.model.errors import Conflict, NotFound, Unavailable
from hodei.model.estimate import Estimate, StartForecast
from hodei.model.explanation import Explanation, ProjectedStart, WhatIf
from hodei.model.facts import NodeOverridden
from hodei.model.job import JOB_ENDED, Job, JobSpec, Run
from hodei.model.node import Node
from hodei.model.reservation import CapacityHold, LateRun, Reservation, ReservationSpec
from hodei.model.resources import Resources
from hodei.ports import JobPage, JobQuery
from hodei.runtime.metrics import Metrics
from hodei.runtime.observers import Observers
from hodei.runtime.run_usage import LiveUsage


class NodeStatus(Struct, frozen=True):
    node: Node
    used: Resources = {}
    runs: int = 0
    holds: tuple[CapacityHold, ...] = ()


class ReservationStatus(Struct, frozen=True):
    reservation: Reservation
    active: bool = False
    late: tuple[LateRun, ...] = ()


class Submitted(Struct, frozen=True):
    ids: tuple[int, ...]
    repeated: bool = False


class FakeStore:
    def __init__(self) -> None:
        self.by_id: dict[int, Job] = {}
        self.run_list: list[Run] = []
        self.event_list: list[Event] = []
        self.queries: list[JobQuery] = []

    def job(self, job: int) -> Job | None:
        return self.by_id.get(job)

    def jobs(self, query: JobQuery) -> JobPage:
        self.queries.append(query)
        found = [job for id, job in sorted(self.by_id.items(), reverse=True) if not query.after or id < query.after]
        page = found[: query.limit]
        return JobPage(page, page[-1].id if len(found) > query.limit else 0)

    def states_between(self, first: int, last: int) -> dict[str, int]:
        return {"pending": sum(first <= id <= last for id in self.by_id)}

    def audit(self, query: AuditQuery) -> list[AuditEntry]:
        return []

    def runs(self, job: int) -> list[Run]:
        return [run for run in self.run_list if run.job == job]

    def counts(self) -> dict[str, int]:
        return {"pending": len(self.by_id)}

    def events(self, *, after: int = 0, job: int = 0, limit: int = 1000) -> list[Event]:
        return [e for e in self.event_list if e.seq > after and (not job or e.job == job)][:limit]


class FakeCron:
    """Stores periodic jobs and never creates a job."""

    def __init__(self) -> None:
        self.stored: dict[str, Periodic] = {}

    def periodics(self) -> list[Periodic]:
        return list(self.stored.values())

    def get(self, name: str) -> Periodic:
        if name not in self.stored:
            raise NotFound(f"there is no periodic job {name!r}")
        return self.stored[name]

    async def add(self, periodic: Periodic) -> Periodic:
        self.stored[periodic.name] = periodic
        return periodic

    async def pause(self, name: str) -> Periodic:
        return self.get(name)

    async def resume(self, name: str) -> Periodic:
        return self.get(name)

    async def run_now(self, name: str) -> int:
        return self.get(name).last_job

    async def remove(self, name: str) -> Periodic:
        return self.stored.pop(name)


class Subscription:
    """Bounded like the real one: with more than `limit` unread events it drops them, lags and ends."""

    def __init__(self, owner: FakeService, limit: int) -> None:
        self.lagged = self.closed = False
        self._owner, self._limit = owner, limit
        self._unread: deque[Event] = deque()
        self._changed = asyncio.Event()

    def push(self, event: Event) -> None:
        self._unread.append(event)
        if len(self._unread) > self._limit:
            self.lagged = True
            self._unread.clear()
        self._changed.set()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        while not self._unread:
            if self.lagged or self.closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._unread.popleft()

    def close(self) -> None:
        self.closed = True
        self._owner.subscriptions.discard(self)
        self._changed.set()


@dataclass
class FakeService:
    async def check_ready(self) -> None:
        if not self.ready:
            raise Unavailable(self.not_ready_reason, hint="try again in a moment", code="NOT_READY")

    store: FakeStore = field(default_factory=FakeStore)
    observers: Observers = field(default_factory=lambda: Observers(CollectorRegistry()))
    installation: str = "test"
    epoch: int = 1
    started_ms: int = NOW_MS
    profiles: tuple[str, ...] = ("default",)
    backends: tuple[str, ...] = ("local",)
    ready: bool = True
    not_ready_reason: str = ""
    errors: dict[str, str] = field(default_factory=dict)
    subscription_size: int = 1000
    submitted: list[tuple[Sequence[JobSpec], str, str]] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    subscriptions: set[Subscription] = field(default_factory=set)
    node_list: list[NodeStatus] = field(default_factory=lambda: [NodeStatus(Node("n1", "local"))])
    reserved: dict[str, ReservationStatus] = field(default_factory=dict)
    run_time: Estimate = field(default_factory=lambda: Estimate(60_000, 90_000, "learned", 75, 8))
    start_forecast: StartForecast | None = None
    questions: list[tuple[Question, SchedulingConfig | None]] = field(default_factory=list)
    log: bytes = b"hello\nworld\n"
    fail_with: Exception | None = None
    recorded: list[AuditEntry] = field(default_factory=list)
    cron: FakeCron = field(default_factory=FakeCron)
    on_read: Callable[[], None] | None = None
    live_usage: dict[str, LiveUsage] = field(default_factory=dict)
    rights: SimpleNamespace = field(default_factory=SimpleNamespace)
    prometheus: Metrics = field(default_factory=Metrics)

    @property
    def backend_manager(self) -> Any:
        return SimpleNamespace(errors=lambda: self.errors, logs=self.logs)

    @property
    def run_usage(self) -> Any:
        async def read(runs: Sequence[Run], timeout_s: float = 0) -> dict[str, LiveUsage]:
            return {run.id: self.live_usage[run.id] for run in runs if run.id in self.live_usage}

        def running(**only: str) -> list[tuple[Job, Run]]:
            self.calls.append(("running", only))
            return [(self.store.by_id[run.job], run) for run in self.store.run_list if run.state == "running"]

        return SimpleNamespace(read=read, running=running)

    @property
    def damaged_records(self) -> Any:
        return SimpleNamespace(text=lambda job: "")

    @property
    def event_hub(self) -> Any:
        return SimpleNamespace(subscribe=self.subscribe)

    async def save(self, save: SaveAudit) -> None:
        self.recorded.append(save.entry)

    async def submit(self, specs: Sequence[JobSpec], *, key: str = "", fingerprint: str = "") -> Submitted:
        if self.fail_with:
            raise self.fail_with
        self.submitted.append((specs, key, fingerprint))
        first = len(self.store.by_id) + 1
        for number, spec in enumerate(specs, first):
            self.store.by_id[number] = Job(number, spec, "pending", NOW_MS, NOW_MS)
        return Submitted(tuple(range(first, first + len(specs))))

    def _known(self, job: int) -> Job:
        if job not in self.store.by_id:
            raise NotFound(f"there is no job {job}")
        return self.store.by_id[job]

    async def cancel(self, job: int, reason: str) -> Job:
        self.calls.append(("cancel", job, reason))
        return self._known(job)

    async def hold(self, job: int) -> Job:
        self.calls.append(("hold", job))
        return self._known(job)

    async def release(self, job: int) -> Job:
        if self._known(job).state != "held":
            raise Conflict(f"job {job} is not held")
        return self._known(job)

    async def requeue(self, job: int) -> Job:
        self.calls.append(("requeue", job))
        return self._known(job)

    async def override_node(self, change: NodeOverridden) -> NodeStatus:
        self.calls.append(("mark", change))
        return next((status for status in self.node_list if status.node.name == change.node), self.node_list[0])

    def nodes(self) -> list[NodeStatus]:
        return self.node_list

    def estimate(self, job: Job) -> Estimate | None:
        return None if job.state in JOB_ENDED else self.run_time

    def forecast(self, job: Job) -> StartForecast | None:
        return self.start_forecast if job.state == "pending" else None

    async def what_if(self, question: Question, policy: SchedulingConfig | None = None) -> WhatIf:
        self.questions.append((question, policy))
        return WhatIf(
            NOW_MS, tuple(ProjectedStart(spec.name, start_ms=NOW_MS, nodes=("n1",)) for spec in question.jobs)
        )

    def reservations(self) -> list[ReservationStatus]:
        return list(self.reserved.values())

    def reservation(self, name: str) -> ReservationStatus:
        if name not in self.reserved:
            raise NotFound(f"there is no reservation {name!r}")
        return self.reserved[name]

    async def reserve(self, spec: ReservationSpec) -> ReservationStatus:
        places = tuple((node, spec.request) for node in spec.named or ("n1",))
        reservation = Reservation(spec.name, spec.project, spec.start_ms, spec.end_ms, places, spec.by, NOW_MS)
        self.reserved[spec.name] = ReservationStatus(reservation, late=(LateRun("n1", "7.0.1"),))
        return self.reserved[spec.name]

    async def unreserve(self, name: str, by: str) -> ReservationStatus:
        self.calls.append(("unreserve", name, by))
        removed = self.reservation(name)
        del self.reserved[name]
        return removed

    async def why(self, job: int, node: str = "") -> Explanation:
        return Explanation(
            "waiting", "INSUFFICIENT_RESOURCES", f"{node or 'no node'} has capacity", job=self._known(job).id
        )

    async def plan(self, specs: Sequence[JobSpec]) -> list[Explanation]:
        return [Explanation("placed", "PLACED", "would start now", name=spec.name) for spec in specs]

    async def wait(self, job: int, timeout_ms: int) -> Job:
        if self._known(job).state not in JOB_ENDED:
            await asyncio.sleep(timeout_ms / 1000)
        return self._known(job)

    async def logs(self, run: Run, stream: str, offset: int, limit: int) -> tuple[bytes, int]:
        self.calls.append(("logs", run.id, stream))
        data = self.log[offset : offset + limit]
        return data, offset + len(data)

    async def bulk_read(self, call: Callable[..., Any], *args: Any) -> Any:
        return await self.read(call, *args)

    async def read(self, call: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        answer = await asyncio.to_thread(call, *args, **kw)
        if self.on_read:
            self.on_read()
        return answer

    def subscribe(self) -> Subscription:
        subscription = Subscription(self, self.subscription_size)
        self.subscriptions.add(subscription)
        return subscription

    def publish(self, count: int = 1, *, job: int = 1, detail: dict[str, Any] | None = None) -> None:
        """Commit `count` further events and hand them to every subscription."""
        for _ in range(count):
            event = Event(len(self.store.event_list) + 1, NOW_MS, "job.submitted", job=job, detail=detail or {})
            self.store.event_list.append(event)
            for subscription in tuple(self.subscriptions):
                subscription.push(event)

    async def checks(self) -> list[Check]:
        return [Check("store", "ok", "fine")]

    def metrics(self) -> bytes:
        return b"hodei_jobs 1\n"
