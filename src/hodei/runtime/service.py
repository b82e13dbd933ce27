"""The server without HTTP: owns the loop, the store and the background tasks, and offers every operation of the API.

`start` restores the state from the store and connects to the backends. `stop` ends all tasks; runs continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct, structs

from hodei.control.capacity.planner import outlooks_of_new_jobs
from hodei.control.controller import Controller
from hodei.control.explain import why as explain
from hodei.control.explain.suggestions import explain_on_node
from hodei.control.explain.whatif import Question
from hodei.control.explain.why import holds_on, priority_breakdown
from hodei.control.reservations.reservations import choose_nodes, late_runs
from hodei.control.state import chunks
from hodei.model.array import count_jobs, first_ids, iter_expanded, shell_reference
from hodei.model.audit import RECORD_DAMAGED as DAMAGED
from hodei.model.config import SchedulingConfig
from hodei.model.dependency import AllowedData
from hodei.model.effects import Save, SaveKey
from hodei.model.errors import Conflict, NotFound, Unavailable
from hodei.model.estimate import Estimate, RuntimeSample, StartForecast, runtime_sample
from hodei.model.explanation import Explanation, PriorityBreakdown, WhatIf
from hodei.model.facts import (
    EventNoted,
    Fact,
    HistoryRestored,
    JobCancelled,
    JobHeld,
    JobReleased,
    JobRequeued,
    JobSubmitted,
    NodeOrderRestored,
    NodeOverridden,
    OverridesRestored,
    ReservationDeleted,
    ReservationMade,
    UsageRestored,
)
from hodei.model.ids import JobId
from hodei.model.interning import SpecInterner
from hodei.model.job import JOB_ENDED, Job, JobSpec
from hodei.model.node import Node
from hodei.model.reservation import CapacityHold, LateRun, Reservation, ReservationSpec
from hodei.model.resources import Resources
from hodei.ports import Backend, Clock, JobQuery, Opened, Store
from hodei.process import cancel_tasks
from hodei.runtime.backend_manager import BackendFactory, BackendManager
from hodei.runtime.capacity_task import CapacityTask
from hodei.runtime.clock import steady_ms
from hodei.runtime.config_changes import ConfigChanges
from hodei.runtime.cron import CronTask
from hodei.runtime.decision_log import DecisionLog
from hodei.runtime.dependency_lookup import DataWatch, DependencyLookup
from hodei.runtime.forecast_task import ForecastTask
from hodei.runtime.fork_worker import QueryQueue
from hodei.runtime.loop import Loop, write_pending
from hodei.runtime.metrics import Metrics
from hodei.runtime.observers import EventHub, Observers
from hodei.runtime.rights import CALLER, Rights
from hodei.runtime.run_usage import RunUsageReader
from hodei.runtime.store_maintenance import DamagedRecords, Retention
from hodei.runtime.watcher import HealthPolicy

log = logging.getLogger("hodei.service")
T = TypeVar("T")
_RESTORE_BATCH = 1000
# How many ended jobs a learning estimator gets at start-up.
_HISTORY = 5000
# A plan for more jobs than this runs in a forked child instead of on the loop.
_MAX_PLANNED_ON_LOOP = 8
_MAX_BULK_READS = 2


class NodeStatus(Struct, frozen=True):
    node: Node
    used: Resources
    runs: int
    holds: tuple[CapacityHold, ...] = ()


class ReservationStatus(Struct, frozen=True):
    """A reservation, whether its window is open, and the runs that may not end before it starts."""

    reservation: Reservation
    active: bool = False
    late: tuple[LateRun, ...] = ()


class Submitted(Struct, frozen=True):
    ids: tuple[JobId, ...]
    repeated: bool = False


class Service:
    def __init__(
        self,
        store: Store,
        opened: Opened,
        controller: Controller,
        backends: Mapping[str, Backend],
        clock: Clock,
        *,
        retention_ms: int = 0,
        audit_retention_ms: int = 0,
        trust_clock: bool = False,
        steady_ms: Callable[[], int] = steady_ms,
        decision_log: DecisionLog | None = None,
        checks: Callable[[Service], Awaitable[list[Any]]] | None = None,
        scheduling: SchedulingConfig | None = None,
        trial_controller: Callable[[SchedulingConfig], Controller] | None = None,
        health: HealthPolicy | None = None,
        backend_factory: BackendFactory | None = None,
    ) -> None:
        self.store = store
        self.installation, self.epoch = opened.installation, opened.epoch
        self.clock = clock
        self.started_ms = clock.now_ms()
        self.controller = controller
        self.scheduling = scheduling or SchedulingConfig()
        self.profiles = tuple(sorted(controller.engine.profiles))
        self.prometheus = Metrics()
        self.event_hub = EventHub()
        self.observers = Observers(self.prometheus.registry, lambda job: controller.cluster.jobs.get(job))
        self._last_job = opened.last_job
        self._is_restart = opened.last_event > 0
        self._checks = checks
        self._decision_log = decision_log
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="reader")
        self._submissions: dict[str, asyncio.Task[Submitted]] = {}  # by idempotency key
        self._tasks: list[asyncio.Task[None]] = []
        self._reservation_lock = asyncio.Lock()
        self._queries = QueryQueue()
        self._spec_pool = SpecInterner()
        self._bulk_reads = asyncio.Semaphore(_MAX_BULK_READS)
        self.config_changes: ConfigChanges | None = None
        self.agents: Any = None  # the hub of joined agents (`backends.remote`), for the routes of the server
        self.dependency_lookup = DependencyLookup(controller, store, self.read, AllowedData(self.scheduling.data.allow))
        self.damaged_records = DamagedRecords(self)
        self.rights = Rights(lambda: controller.accounts.policy, controller.cluster.jobs)
        self.loop = Loop(
            controller, store, clock, self.event_hub, self.prometheus, self._act, decision_log, rights=self.rights,
            on_commit=self.observers.publish, on_damage=self.damaged_records.report,
        )  # fmt: skip
        self.forecasts = ForecastTask(
            controller, store, clock, self.prometheus, self.scheduling.forecast, trial_controller
        )
        self.cron = CronTask(self)
        self.capacity = CapacityTask(controller, clock, self.loop.enqueue)
        self.retention = Retention(
            self, retention_ms=retention_ms, audit_retention_ms=audit_retention_ms, trust_clock=trust_clock,
            steady_ms=steady_ms,
        )  # fmt: skip
        self.backend_manager = BackendManager(self, backends, health or HealthPolicy(), backend_factory)
        self.run_usage = RunUsageReader(self.backend_manager.backends, controller.cluster, clock.now_ms)

    async def start(self) -> None:
        """Returns when the state is restored and the loop runs; the backends connect in the background."""
        await self.damaged_records.load()
        facts, saves = await self._stored_state()
        if self.store.suspects:
            await self.damaged_records.quarantine(starting=True)
            facts, saves = await self._stored_state()
        self._spawn(self.loop.run())
        if saves:
            log.warning("%d jobs and runs have times ahead of the clock, which are set to now", len(saves))
            await self.loop.commit((), saves)
        # Popped, so that the memory of restored facts is free for what the controller builds from them.
        facts.reverse()
        while facts:
            batch = [facts.pop() for _ in range(min(_RESTORE_BATCH, len(facts)))]
            await self.loop.commit(batch)
        if self._is_restart:  # before the nodes join again
            self.loop.enqueue([EventNoted("server.restarted", detail={"epoch": self.epoch})])
        self.backend_manager.start()
        self._spawn(self.damaged_records.run())
        self._spawn(self.damaged_records.scan())
        if self.retention.enabled:
            self._spawn(self.retention.run())
        if self.dependency_lookup.allowed:
            dependencies = self.controller.dependencies
            watch = DataWatch(lambda: dependencies.data, self.loop.enqueue, self.dependency_lookup.allowed)
            self._spawn(watch.run())
        await self.cron.load()
        self._spawn(self.cron.run())
        self._spawn(self.capacity.run())
        if self.forecasts.enabled:
            self.loop.step_listeners.append(self.forecasts.observe)
            commit = partial(self.loop.commit, ())
            self._spawn(self.forecasts.run(commit, self.loop.enqueue, self.backend_manager.expected_starts))

    async def _stored_state(self) -> tuple[list[Fact], list[Save]]:
        """The state of the store as facts, and the saves for records whose times were ahead of the clock."""
        facts: list[Fact] = [OverridesRestored(overrides) for overrides in await self.read(self.store.overrides)]
        if self.controller.estimator.learns:
            facts.append(HistoryRestored(await self.read(self.run_history)))
        restored, saves = await self.read(self.dependency_lookup.restore, self.clock.now_ms())
        facts += restored
        # After the runs, which an expired reservation may affect.
        if self.controller.accounts.sharing is not None:
            facts.append(UsageRestored(tuple(await self.read(self.store.usage))))
        facts += [
            ReservationMade(reservation, restored=True) for reservation in await self.read(self.store.reservations)
        ]
        # Before the nodes, which the backends report later.
        facts += [NodeOrderRestored(order) for order in await self.read(self.store.node_orders)]
        return facts, saves

    def run_history(self) -> tuple[RuntimeSample, ...]:
        """Run times of the latest ended jobs, oldest first. Blocks."""
        ended, after = list[Job](), 0
        while len(ended) < _HISTORY:
            page = self.store.jobs(JobQuery(states=("succeeded", "failed"), after=after, limit=1000))
            ended += page.jobs
            after = page.next_after
            if not after:
                break
        ended.sort(key=lambda job: (job.finished_ms, job.id))
        return tuple(each for job in ended if (each := runtime_sample(job)) is not None)

    async def stop(self) -> None:
        self.loop.stop()
        self.event_hub.close()
        if self._tasks:
            await self._tasks[0]
        await cancel_tasks(self._tasks)
        await self.backend_manager.stop()
        await self.observers.close()
        self.forecasts.close()
        self.capacity.close()
        self._readers.shutdown(wait=True)
        if self._decision_log is not None:
            self._decision_log.close()
        self.store.close()

    async def until_ready(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self.backend_manager.until_ready()
            # An empty commit: the controller has the first nodes after it.
            await self.loop.commit([])
        except TimeoutError:
            return False
        return True

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(sorted(self.backend_manager.backends))

    async def until_loop_ends(self) -> None:
        await asyncio.wait({self._tasks[0]})

    @property
    def ready(self) -> bool:
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        if self.loop.fatal is not None:
            return self.loop.fatal.message
        if not self._tasks or self._tasks[0].done():
            return "the scheduling loop is not running"
        if self.loop.store_error is not None:
            return f"the store is not writable: {self.loop.store_error.message}; {self.loop.store_error.hint}"
        missing = self.backend_manager.missing
        return f"still connecting to {', '.join(missing)}" if missing else ""

    async def check_ready(self) -> None:
        """Unavailable, with the reason, while jobs are not accepted. Tries a write if there was none lately."""
        try:
            if not self.not_ready_reason:
                await self.read(self.store.check_disk_space)
                await self.loop.check_writable()
        except Unavailable as error:
            raise Unavailable(
                f"the store is not writable: {error.message}",
                hint=error.hint or "check the disk of the server, and its log in HOME/server.log",
                code="NOT_READY",
            ) from error
        if reason := self.not_ready_reason:
            raise Unavailable(reason, hint="try again in a moment", code="NOT_READY")

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_log_failure)
        self._tasks.append(task)

    def _act(self, acts: Any) -> None:
        self.backend_manager.act(acts)

    async def read(self, call: Callable[..., T], *args: Any, **named: Any) -> T:
        """A blocking read of the store, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(call, *args, **named))

    async def bulk_read(self, call: Callable[..., T], *args: Any) -> T:
        """A read of many rows, in a thread. Few at once, so that the loop gets the interpreter often enough."""
        async with self._bulk_reads:
            return await self.read(call, *args)

    async def save(self, save: Save) -> None:
        """One row in its own commit, durable when it returns."""
        await self.loop.commit((), [save])

    async def audit_before(self, detail: str = "") -> None:
        """Make the audit row durable before an act that is no commit. Unavailable: the act must not be done."""
        caller = CALLER.get()
        if caller is not None:
            caller.record_first(detail)
            await self.loop.commit(())

    async def submit(self, specs: Sequence[JobSpec], *, key: str = "", fingerprint: str = "") -> Submitted:
        """All or none, durable and visible when it returns. The same key gives the same answer again."""
        if not key:
            return await self._submit(specs)
        while key in self._submissions:
            await self._wait_for(self._submissions[key])
        # A separate task: the key must stay taken until the jobs are committed, even if the caller is cancelled.
        submission = self._submissions[key] = asyncio.create_task(self._submit_once(specs, key, fingerprint))
        submission.add_done_callback(partial(self._release_key, key))
        await self._wait_for(submission)
        return submission.result()

    async def _wait_for(self, submission: asyncio.Task[Submitted]) -> None:
        """A client does not wait for a store that is down: it gets WRITE_PENDING, and the submission continues."""
        if CALLER.get() is None:
            await asyncio.wait({submission})
            return
        while True:
            either: set[asyncio.Future[Any]] = {submission, self.loop.store_failed()}
            # Needed even if it is done: its key is released by a callback, which runs in the next turn of the event loop.
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if submission.done():
                return
            # The store may already be back: then the submission continues and is waited for again.
            if self.loop.store_error is not None:
                raise write_pending(self.loop.store_error)

    def _release_key(self, key: str, submission: asyncio.Task[Submitted]) -> None:
        del self._submissions[key]
        if not submission.cancelled():
            submission.exception()  # retrieved even if the caller was cancelled

    async def _submit_once(self, specs: Sequence[JobSpec], key: str, fingerprint: str) -> Submitted:
        used = await self.read(self.store.key, key)
        if used is None:
            return await self._submit(specs, key, fingerprint, wait_for_store=True)
        if not used.fingerprint and not used.jobs:
            raise Conflict(
                "the record of this Idempotency-Key is damaged; it is unknown whether its jobs were created",
                hint="check with `hodei jobs`, and use a new key if they were not", code=DAMAGED,
            )  # fmt: skip
        if used.fingerprint != fingerprint:
            raise Conflict(
                "this Idempotency-Key was used for another request", hint="use a new key for a new request",
                code="KEY_REUSED",
            )  # fmt: skip
        return Submitted(used.jobs, repeated=True)

    async def _submit(
        self, specs: Sequence[JobSpec], key: str = "", fingerprint: str = "", *, wait_for_store: bool = False
    ) -> Submitted:
        specs = self.rights.admitted(specs)
        dependencies = await self.dependency_lookup.look_up(specs)
        pending = self.controller.pending()
        if self.loop.uncommitted_jobs:
            pending = {name: count + self.loop.uncommitted_jobs for name, count in pending.items()}
        first = self._last_job + 1
        specs = dependencies.resolve(specs, first)
        ids, total = first_ids(specs, first), count_jobs(specs)
        specs = list(map(self._spec_pool.spec, self.controller.accounts.admit(specs)))
        self.controller.gate.check(specs, pending)
        now = self.clock.now_ms()
        self._last_job += total
        saves = [SaveKey(key, fingerprint, ids, now)] if key else []
        # The numbers and the room in the queue are taken from here on: the event loop may run in between.
        self.loop.uncommitted_jobs += total
        try:
            facts = list[Fact]()
            for part in chunks(enumerate(iter_expanded(specs, first), first)):
                if facts:
                    await asyncio.sleep(0)
                facts += [
                    JobSubmitted(Job(id, spec, "pending", now, now, queued_ms=now), dependencies.of(spec))
                    for id, spec in part
                ]
            await self.loop.commit(facts, saves, wait_for_store=wait_for_store)
        finally:
            self.loop.uncommitted_jobs -= total
        return Submitted(ids)

    async def job(self, job: JobId) -> Job:
        """From the store; NotFound if there is no such job."""
        found = await self.read(self.store.job, job)
        if found is None:
            raise NotFound(f"there is no job {job}", hint="hodei jobs --all")
        return found

    async def apply(self, job: JobId, fact: Fact) -> Job:
        """Commits the fact; the job after it."""
        await self.loop.commit([fact])
        return await self.job(job)

    async def cancel(self, job: JobId, reason: str = "") -> Job:
        found = await self.job(job)
        if found.state in JOB_ENDED:
            if self.backend_manager.orphans_of(job):
                self.rights.check_owner(found)
                await self.audit_before()
                self.backend_manager.stop_orphans(job)
                return found
            raise Conflict(f"job {job} has already {found.state}", hint="there is nothing left to cancel")
        cancelled = await self.apply(job, JobCancelled(job, reason))
        self.backend_manager.stop_orphans(job)
        return cancelled

    async def hold(self, job: JobId) -> Job:
        found = await self.job(job)
        if found.state == "held":
            self.rights.check_owner(found)
            return found
        if found.state != "pending":
            raise Conflict(
                f"job {job} is {found.state}; only a pending job can be held",
                hint=f"hodei cancel {shell_reference(job, found.spec.array)}",
            )
        return await self.apply(job, JobHeld(job))

    async def release(self, job: JobId) -> Job:
        found = await self.job(job)
        if found.state != "held":
            raise Conflict(f"job {job} is {found.state}, not held")
        if self.backend_manager.orphans_of(job):
            raise Conflict(
                f"a run of job {job} may still be active: its record is damaged",
                hint=f"hodei cancel {shell_reference(job, found.spec.array)}, then requeue it",
            )
        return await self.apply(job, JobReleased(job))

    async def requeue(self, job: JobId) -> Job:
        found = await self.job(job)
        if found.state in ("pending", "held"):
            raise Conflict(f"job {job} is {found.state}: it has not started yet")
        record = found if found.state in JOB_ENDED else None
        return await self.apply(job, JobRequeued(job, record, await self.dependency_lookup.of_record(record)))

    async def wait(self, job: JobId, timeout_ms: int) -> Job:
        """The job when it has ended, or at the timeout."""
        end = self.event_hub.end_of(job)
        try:
            found = await self.job(job)
            if found.state not in JOB_ENDED:
                await asyncio.wait({end}, timeout=timeout_ms / 1000)
                found = await self.job(job)
            return found
        finally:
            self.event_hub.cancel_wait(job, end)

    async def why(self, job: JobId, node: str = "") -> Explanation:
        """`node`: only the reasons of that node."""
        known, found = self.controller.cluster.jobs.get(job), None
        if known is not None and known.state == "pending":
            found = await self._queries.run(
                ("why", job), lambda: explain.why(self.controller, job, self.clock.now_ms())
            )
            known = self.controller.cluster.jobs.get(job)
        elif known is not None:
            progress = self.backend_manager.start_progress(job)
            found = explain.why(self.controller, job, self.clock.now_ms(), progress)
        if known is None or found is None:
            known = await self.job(job)
            runs = await self.read(self.store.runs, job)
            found = explain.explain_placement(known, runs, self.clock.now_ms(), self.controller.beat_ms)
        found = structs.replace(found, forecast=self.forecast(known))
        if damage := self.damaged_records.escalation_steps(job):
            found = structs.replace(found, escalation_steps=(*found.escalation_steps, *damage))
        return explain_on_node(self.controller, known.spec, found, node, self.clock.now_ms()) if node else found

    async def priority(self, job: JobId) -> PriorityBreakdown | None:
        """None for a job that is not in a queue."""
        if job not in self.controller.cluster.jobs:
            return None
        return await self._queries.run(
            ("priority", job), lambda: priority_breakdown(self.controller, job, self.clock.now_ms())
        )

    def forecast(self, job: Job) -> StartForecast | None:
        """The probable start; None if the job is not pending or there is no forecast."""
        return self.forecasts.latest(job.id) if job.state == "pending" else None

    async def what_if(self, question: Question, policy: SchedulingConfig | None = None) -> WhatIf:
        question = structs.replace(question, jobs=tuple(self.rights.admitted(question.jobs)))
        dependencies, first = await self.dependency_lookup.look_up(question.jobs), self._last_job + 1
        jobs, statuses = tuple(dependencies.resolve(question.jobs, first)), tuple(dependencies.statuses.values())
        question = structs.replace(question, jobs=jobs, first=first, dependency_statuses=statuses)
        return await self.forecasts.what_if(question, policy)

    async def plan(self, specs: Sequence[JobSpec]) -> list[Explanation]:
        specs = self.rights.admitted(specs)
        dependencies = await self.dependency_lookup.look_up(specs)
        specs = dependencies.resolve(specs, self._last_job + 1)
        statuses = tuple(dependencies.statuses.values())

        def answer() -> list[Explanation]:
            return explain.plan(self.controller, specs, self.clock.now_ms(), statuses)

        if len(specs) > _MAX_PLANNED_ON_LOOP:
            found = await self.forecasts.query_worker.run(answer)
        else:
            found = await self._queries.run(object(), answer)
        if self.controller.scaling.offers_nodes and any(each.status == "waiting" for each in found):
            outlooks = await self.forecasts.query_worker.run(
                lambda: outlooks_of_new_jobs(self.controller, specs, self.clock.now_ms())
            )
            found = [structs.replace(each, capacity=new) for each, new in zip(found, outlooks, strict=False)]
        return found

    def nodes(self) -> list[NodeStatus]:
        """Also potential ones, by name."""
        cluster, table = self.controller.cluster, self.controller.cluster.table
        table.settle()
        out = []
        for name in sorted(cluster.nodes):
            row = table.row.get(name)
            if row is None:
                out.append(NodeStatus(cluster.nodes[name], {}, 0))
            else:
                out.append(
                    NodeStatus(table.nodes[row], table.usage(row), int(table.runs[row]), holds_on(cluster, name))
                )
        return out

    async def override_node(self, change: NodeOverridden) -> NodeStatus:
        if change.node not in self.controller.cluster.nodes:
            raise NotFound(f"there is no node {change.node!r}", hint="hodei nodes")
        await self.loop.commit([change])
        return next(status for status in self.nodes() if status.node.name == change.node)

    def reservations(self) -> list[ReservationStatus]:
        """By start time."""
        reservations = self.controller.cluster.availability.reservations.values()
        return [
            self._reservation_status(each) for each in sorted(reservations, key=lambda each: (each.start_ms, each.name))
        ]

    def reservation(self, name: str) -> ReservationStatus:
        reservation = self.controller.cluster.availability.reservations.get(name)
        if reservation is None:
            raise NotFound(f"there is no reservation {name!r}", hint="hodei reservation list")
        return self._reservation_status(reservation)

    async def reserve(self, spec: ReservationSpec) -> ReservationStatus:
        """Durable when it returns. One at a time, so that no two get the same capacity."""
        async with self._reservation_lock:
            self.controller.cluster.table.settle()
            reservation = choose_nodes(self.controller.cluster, spec, self.clock.now_ms())
            await self.loop.commit([ReservationMade(reservation)])
        return self._reservation_status(reservation)

    async def unreserve(self, name: str, by: str) -> ReservationStatus:
        async with self._reservation_lock:
            status = self.reservation(name)
            await self.loop.commit([ReservationDeleted(name, by=by)])
        return status

    def _reservation_status(self, reservation: Reservation) -> ReservationStatus:
        now_ms = self.clock.now_ms()
        late = tuple(late_runs(self.controller.cluster, reservation, now_ms))
        return ReservationStatus(reservation, reservation.start_ms <= now_ms < reservation.end_ms, late)

    def estimate(self, job: Job) -> Estimate | None:
        """The expected run time; None once the job has ended."""
        return None if job.state in JOB_ENDED else self.controller.estimator.estimate(job.spec)

    def metrics(self) -> bytes:
        self.prometheus.backend_up.clear()
        for name, healthy in self.backend_manager.healthy().items():
            self.prometheus.backend_up.labels(name).set(healthy)
        self.backend_manager.export_usage()
        return self.prometheus.render(self.controller)

    async def checks(self) -> list[Any]:
        """The server's part of `hodei doctor`."""
        return await self._checks(self) if self._checks is not None else []


def _log_failure(task: asyncio.Task[None]) -> None:
    """Background tasks run as long as the server; one that fails must not end silently."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a background task has failed: %s", task.get_coro(), exc_info=error)
