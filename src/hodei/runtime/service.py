"""The house as others use it: everything that a caller may ask of a running Hodei, without HTTP.

`start` brings it to life (store, recovery, backends, loop), `stop` lays it down; runs go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct, structs

from hodei.control.controller import Controller
from hodei.control.explain import why as explain
from hodei.control.explain.suggestions import on_node
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
    Fact,
    HistoryRestored,
    JobCancelled,
    JobHeld,
    JobReleased,
    JobRequeued,
    JobSubmitted,
    NodeOverridden,
    OverridesRestored,
    ReservationCancelled,
    ReservationMade,
    UsageRestored,
)
from hodei.model.ids import JobId
from hodei.model.interning import SpecInterner
from hodei.model.job import JOB_ENDED, Job, JobSpec, Run
from hodei.model.node import Node
from hodei.model.reservation import CapacityHold, LateRun, Reservation, ReservationSpec
from hodei.model.resources import Resources
from hodei.ports import Backend, Clock, JobQuery, Opened, Store
from hodei.runtime.backend_manager import BackendChanges, BackendManager
from hodei.runtime.clock import steady_ms
from hodei.runtime.config_changes import ConfigChanges
from hodei.runtime.cron import CronTask
from hodei.runtime.damaged_records import DamagedRecords
from hodei.runtime.decision_log import DecisionLog
from hodei.runtime.dependency_lookup import DataWatch, DependencyLookup
from hodei.runtime.event_hub import EventHub, Subscription
from hodei.runtime.forecast_task import ForecastTask
from hodei.runtime.fork_worker import QueryQueue
from hodei.runtime.health_monitor import HealthPolicy
from hodei.runtime.loop import Loop, held
from hodei.runtime.metrics import Metrics
from hodei.runtime.observers import Observers
from hodei.runtime.retention import Retention
from hodei.runtime.rights import CALLER, Rights

log = logging.getLogger("hodei.service")
T = TypeVar("T")
_RESTORE_BATCH = 1000
# So many ended jobs are looked at when a server that learns from them starts.
_HISTORY = 5000
# So many jobs of a plan are tried on the loop; more of them beside it.
_PLANNED_HERE = 8
# A start is told as in doubt when its backend has not answered for so long.
_DOUBT_AFTER_MS = 2000
_BROWSING = 2


class NodeStatus(Struct, frozen=True):
    node: Node
    used: Resources
    runs: int
    holds: tuple[CapacityHold, ...] = ()


class ReservationStatus(Struct, frozen=True):
    """A reservation, what its project holds of it now, and the runs that may not make way for it in time."""

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
        fleet: BackendChanges | None = None,
    ) -> None:
        self.store = store
        self.installation, self.epoch = opened.installation, opened.epoch
        self.clock = clock
        self.started_ms = clock.now_ms()
        self.controller = controller
        self.scheduling = scheduling or SchedulingConfig()
        self.profiles = tuple(sorted(controller.engine.profiles))
        self.prometheus = Metrics()
        self.hub = EventHub()
        self.observers = Observers(self.prometheus.registry, lambda job: controller.cluster.jobs.get(job))
        self._last_job = opened.last_job
        self._checks = checks
        self._decision_log = decision_log
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="reader")
        self._keys: dict[str, asyncio.Task[Submitted]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._reserving = asyncio.Lock()
        self._answers = QueryQueue()
        self._pool = SpecInterner()
        self._browsing = asyncio.Semaphore(_BROWSING)
        self.configuring: ConfigChanges | None = None
        self.depending = DependencyLookup(controller, store, self.read, AllowedData(self.scheduling.data.allow))
        self.loop = Loop(controller, store, clock, self.hub, self.prometheus, self._act, decision_log)
        self.loop.on_commit = self.observers.publish
        self.rights = self.loop.rights = Rights(lambda: controller.accounts.policy, controller.cluster.jobs)
        self.foresight = ForecastTask(
            controller, store, clock, self.prometheus, self.scheduling.forecast, trial_controller
        )
        self.calendar = CronTask(self)
        self.records = DamagedRecords(self)
        self.loop.on_damage = self.records.tell
        self.housekeeping = Retention(
            self, retention_ms=retention_ms, audit_retention_ms=audit_retention_ms, trust_clock=trust_clock,
            steady_ms=steady_ms,
        )  # fmt: skip
        self.fleet = BackendManager(self, backends, health or HealthPolicy(), fleet)
        self.foresight.begins = self.fleet.begins

    # --------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Restore what the store remembers, then connect to the backends; returns when the loop turns."""
        await self.records.load()
        facts, saves = await self._remembered()
        if self.store.suspects:
            await self.records.mend(starting=True)
            facts, saves = await self._remembered()
        self._spawn(self.loop.run())
        if saves:
            log.warning("%d jobs and runs have times ahead of the clock, and are brought back to now", len(saves))
            await self.loop.committed((), saves)
        # Taken away as they are told, so that what is made in their stead can have their memory.
        facts.reverse()
        while facts:
            batch = [facts.pop() for _ in range(min(_RESTORE_BATCH, len(facts)))]
            await self.loop.committed(batch)
        self.fleet.start()
        self._spawn(self.records.run())
        self._spawn(self.records.look_over())
        if self.housekeeping.needed:
            self._spawn(self.housekeeping.run())
        if self.depending.allowed:
            waits = self.controller.dependencies
            self._spawn(DataWatch(lambda: waits.data, self.loop.tell, self.depending.allowed).run())
        await self.calendar.load()
        self._spawn(self.calendar.run())
        if self.foresight.enabled:
            self.loop.on_step, self.foresight.tell = self.foresight.stepped, self.loop.tell
            self._spawn(self.foresight.run(partial(self.loop.committed, ())))

    async def _remembered(self) -> tuple[list[Fact], list[Save]]:
        """What the store knows, as facts; and what is to be written because its times were ahead of the clock."""
        facts: list[Fact] = [OverridesRestored(overrides) for overrides in await self.read(self.store.overrides)]
        if self.controller.estimator.learns:
            facts.append(HistoryRestored(await self.read(self._history)))
        restored, saves = await self.read(self.depending.restored, self.clock.now_ms())
        facts += restored
        # After the runs: a window that has closed meanwhile may mean something to them.
        if self.controller.accounts.sharing is not None:
            facts.append(UsageRestored(tuple(await self.read(self.store.usage))))
        facts += [
            ReservationMade(reservation, restored=True) for reservation in await self.read(self.store.reservations)
        ]
        return facts, saves

    def _history(self) -> tuple[RuntimeSample, ...]:
        """What the most recent jobs that the store remembers tell about how long their like run, the oldest first."""
        ended, after = list[Job](), 0
        while len(ended) < _HISTORY:
            page = self.store.jobs(JobQuery(states=("succeeded", "failed"), after=after, limit=1000))
            ended += page.jobs
            after = page.next_after
            if not after:
                break
        ended.sort(key=lambda job: (job.finished_ms, job.id))
        return tuple(told for job in ended if (told := runtime_sample(job)) is not None)

    def hurry(self) -> None:
        """A stop is coming: nobody is to wait for a store that is out of order."""
        self.loop.hurry()

    async def stop(self) -> None:
        self.loop.stop()
        self.hub.close()
        if self._tasks:
            await self._tasks[0]
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fleet.stop()
        await self.observers.close()
        self.foresight.close()
        self._readers.shutdown(wait=True)
        if self._decision_log is not None:
            self._decision_log.close()
        self.store.close()

    async def until_ready(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self.fleet.until_ready()
            # One empty round: the facts of the first look at the nodes have been learnt.
            await self.loop.committed([])
        except TimeoutError:
            return False
        return True

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(sorted(self.fleet.backends))

    async def ended(self) -> None:
        """Returns when the loop has ended, for whatever reason."""
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
        if self.loop.trouble is not None:
            return f"nothing can be stored: {self.loop.trouble.message}; {self.loop.trouble.hint}"
        missing = self.fleet.missing
        return f"still connecting to {', '.join(missing)}" if missing else ""

    async def check_ready(self) -> None:
        """Unavailable, with the reason, while jobs are not taken. Tries to write if nothing was written lately."""
        try:
            if not self.not_ready_reason:
                await self.read(self.store.check_disk_space)
                await self.loop.writable()
        except Unavailable as error:
            raise Unavailable(
                f"nothing can be stored: {error.message}", hint=error.hint or "run `hodei doctor`", code="NOT_READY"
            ) from error
        if reason := self.not_ready_reason:
            raise Unavailable(reason, hint="try again in a moment", code="NOT_READY")

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_told_if_failed)
        self._tasks.append(task)

    def _act(self, acts: Any) -> None:
        self.fleet.binder.act(acts)

    async def read(self, call: Callable[..., T], *args: Any, **named: Any) -> T:
        """A blocking read of the store, from a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, partial(call, *args, **named))

    async def browse(self, call: Callable[..., T], *args: Any) -> T:
        """A read of many rows, from a thread; no more than a few at once, so that they leave the interpreter to the loop."""
        async with self._browsing:
            return await self.read(call, *args)

    async def record(self, save: Save) -> None:
        """One row of its own, durable when it returns."""
        await self.loop.committed((), [save])

    async def record_before(self, detail: str = "") -> None:
        """For acts that are not commits of the store. The caller's audit row is durable when this returns. Unavailable if
        that cannot be: the act must not be done then."""
        caller = CALLER.get()
        if caller is not None:
            caller.begin(detail)
            await self.loop.committed(())

    # --------------------------------------------------------------------------------------------- jobs

    async def submit(self, specs: Sequence[JobSpec], *, key: str = "", fingerprint: str = "") -> Submitted:
        """All or none, durable and visible when it returns. The same key again gives the same answer again."""
        if not key:
            return await self._submit(specs)
        while key in self._keys:
            await self._or_held(self._keys[key])
        # A task of its own: a caller who gives up must not set the key free while his jobs are still on their way.
        once = self._keys[key] = asyncio.create_task(self._submit_once(specs, key, fingerprint))
        once.add_done_callback(partial(self._submitted_once, key))
        await self._or_held(once)
        return once.result()

    async def _or_held(self, once: asyncio.Task[Submitted]) -> None:
        """Until it is done, but a client does not wait for a store that takes nothing. The task goes on, and its key is
        taken for as long."""
        if CALLER.get() is None:
            await asyncio.wait({once})
            return
        while True:
            either: set[asyncio.Future[Any]] = {once, self.loop.held_up()}
            # Also if it is done: its key is set free in the next turn of the event loop, which must have one.
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if once.done():
                return
            # The trouble may be over before this is heard of it: then its turn has come, and it is waited for again.
            if self.loop.trouble is not None:
                raise held(self.loop.trouble)

    def _submitted_once(self, key: str, once: asyncio.Task[Submitted]) -> None:
        del self._keys[key]
        if not once.cancelled():
            once.exception()  # looked at, also when the caller is gone

    async def _submit_once(self, specs: Sequence[JobSpec], key: str, fingerprint: str) -> Submitted:
        used = await self.read(self.store.key, key)
        if used is None:
            return await self._submit(specs, key, fingerprint, patient=True)
        if not used.fingerprint and not used.jobs:
            raise Conflict(
                "the record of this Idempotency-Key is damaged, and nobody can tell whether its jobs were made",
                hint="look with `hodei jobs`, then use a new key if they were not", code=DAMAGED,
            )  # fmt: skip
        if used.fingerprint != fingerprint:
            raise Conflict(
                "this Idempotency-Key was used for another request", hint="use a new key for a new request",
                code="KEY_REUSED",
            )  # fmt: skip
        return Submitted(used.jobs, repeated=True)

    async def _submit(
        self, specs: Sequence[JobSpec], key: str = "", fingerprint: str = "", *, patient: bool = False
    ) -> Submitted:
        specs = self.rights.admitted(specs)
        known = await self.depending.look_up(specs)
        pending = self.controller.pending()
        if self.loop.waiting_jobs:
            pending = {name: count + self.loop.waiting_jobs for name, count in pending.items()}
        first = self._last_job + 1
        specs = known.resolved(specs, first)
        ids, total = first_ids(specs, first), count_jobs(specs)
        specs = list(map(self._pool.spec, self.controller.accounts.admit(specs)))
        self.controller.gate.check(specs, pending)
        now = self.clock.now_ms()
        self._last_job += total
        saves = [SaveKey(key, fingerprint, ids, now)] if key else []
        # From here on nobody else is given these numbers or this room, so the rest may take its time.
        self.loop.waiting_jobs += total
        try:
            facts = list[Fact]()
            for part in chunks(enumerate(iter_expanded(specs, first), first)):
                if facts:
                    await asyncio.sleep(0)
                facts += [
                    JobSubmitted(Job(id, spec, "pending", now, now, queued_ms=now), known.of(spec)) for id, spec in part
                ]
            await self.loop.committed(facts, saves, patient=patient)
        finally:
            self.loop.waiting_jobs -= total
        return Submitted(ids)

    async def cancel(self, job: JobId, reason: str = "") -> Job:
        found = await self._stored(job)
        if found.state in JOB_ENDED:
            if self.fleet.spared_of(job):
                self.rights.check_owner(found)
                await self.record_before()
                self.fleet.stop_spared(job)
                return found
            raise Conflict(f"job {job} has {found.state} already", hint="there is nothing left to cancel")
        cancelled = await self._changed(job, JobCancelled(job, reason))
        self.fleet.stop_spared(job)
        return cancelled

    async def hold(self, job: JobId) -> Job:
        found = await self._stored(job)
        if found.state == "held":
            self.rights.check_owner(found)
            return found
        if found.state != "pending":
            raise Conflict(
                f"job {job} is {found.state}; only a pending job can be held",
                hint=f"hodei cancel {shell_reference(job, found.spec.array)}",
            )
        return await self._changed(job, JobHeld(job))

    async def release(self, job: JobId) -> Job:
        found = await self._stored(job)
        if found.state != "held":
            raise Conflict(f"job {job} is {found.state}, not held")
        if self.fleet.spared_of(job):
            raise Conflict(
                f"a run of job {job} may still be going on: its record is damaged",
                hint=f"hodei cancel {shell_reference(job, found.spec.array)}, then requeue it",
            )
        return await self._changed(job, JobReleased(job))

    async def requeue(self, job: JobId) -> Job:
        found = await self._stored(job)
        if found.state in ("pending", "held"):
            raise Conflict(f"job {job} is {found.state}: it has not started yet")
        record = found if found.state in JOB_ENDED else None
        return await self._changed(job, JobRequeued(job, record, await self.depending.of_record(record)))

    async def wait(self, job: JobId, timeout_ms: int) -> Job:
        """The job when it has ended, or as it stands when the time is over."""
        end = self.hub.end_of(job)
        try:
            found = await self._stored(job)
            if found.state not in JOB_ENDED:
                await asyncio.wait({end}, timeout=timeout_ms / 1000)
                found = await self._stored(job)
            return found
        finally:
            self.hub.give_up(job, end)

    async def why(self, job: JobId, node: str = "") -> Explanation:
        """`node`: only what that one node says."""
        known, found = self.controller.cluster.jobs.get(job), None
        if known is not None and known.state == "pending":
            found = await self._answers.ask(
                ("why", job), lambda: explain.why(self.controller, job, self.clock.now_ms())
            )
            known = self.controller.cluster.jobs.get(job)
        elif known is not None:
            found = explain.why(self.controller, job, self.clock.now_ms())
            if found is not None and known.state == "scheduled" and (unsure := self._unsure(job)):
                found = explain.in_doubt(found, unsure)
        if known is None or found is None:
            known = await self._stored(job)
            runs = await self.read(self.store.runs, job)
            found = explain.landed(known, runs, self.clock.now_ms(), self.controller.beat_ms)
        found = self.fleet.backend_queue(job, structs.replace(found, forecast=self.forecast(known)))
        if damage := self.records.escalation_steps(job):
            found = structs.replace(found, escalation_steps=(*found.escalation_steps, *damage))
        return on_node(self.controller, known.spec, found, node, self.clock.now_ms()) if node else found

    def _unsure(self, job: JobId) -> list[str]:
        """The backends that have not answered for a while whether the job's runs have started."""
        since_ms = self.clock.now_ms() - _DOUBT_AFTER_MS
        live, doubtful = self.controller.cluster.live_runs(job), self.fleet.binder.doubtful
        return sorted({run.backend for run in live if run.placed_ms <= since_ms and doubtful(run.id)})

    async def standing(self, job: JobId) -> PriorityBreakdown | None:
        """None for a job that does not wait in a line."""
        if job not in self.controller.cluster.jobs:
            return None
        return await self._answers.ask(
            ("priority", job), lambda: priority_breakdown(self.controller, job, self.clock.now_ms())
        )

    def forecast(self, job: Job) -> StartForecast | None:
        """When it will probably start; None if it does not wait or nobody can tell."""
        return self.foresight.latest(job.id) if job.state == "pending" else None

    async def what_if(self, question: Question, policy: SchedulingConfig | None = None) -> WhatIf:
        """What would be different; nothing is changed."""
        question = structs.replace(question, jobs=tuple(self.rights.admitted(question.jobs)))
        known, first = await self.depending.look_up(question.jobs), self._last_job + 1
        jobs, dependency_statuses = (
            tuple(known.resolved(question.jobs, first)),
            tuple(known.dependency_statuses.values()),
        )
        question = structs.replace(question, jobs=jobs, first=first, dependency_statuses=dependency_statuses)
        return await self.foresight.what_if(question, policy)

    async def plan(self, specs: Sequence[JobSpec]) -> list[Explanation]:
        specs = self.rights.admitted(specs)
        known = await self.depending.look_up(specs)
        specs = known.resolved(specs, self._last_job + 1)
        dependency_statuses = tuple(known.dependency_statuses.values())

        def answer() -> list[Explanation]:
            return explain.plan(self.controller, specs, self.clock.now_ms(), dependency_statuses)

        if len(specs) > _PLANNED_HERE:
            return await self.foresight.aside.ask(answer)
        return await self._answers.ask(object(), answer)

    async def logs(self, run: Run, stream: Any, offset: int, limit: int) -> tuple[bytes, int]:
        return await self.fleet.logs(run, stream, offset, limit)

    async def log_times(self, run: Run, stream: Any) -> list[tuple[int, int]]:
        return await self.fleet.log_times(run, stream)

    async def _stored(self, job: JobId) -> Job:
        found = await self.read(self.store.job, job)
        if found is None:
            raise NotFound(f"there is no job {job}", hint="hodei jobs --all")
        return found

    async def _changed(self, job: JobId, fact: Fact) -> Job:
        await self.loop.committed([fact])
        return await self._stored(job)

    # -------------------------------------------------------------------------------------------- nodes

    def nodes(self) -> list[NodeStatus]:
        table = self.controller.cluster.table
        table.settle()
        cluster = self.controller.cluster
        return [
            NodeStatus(node, table.usage(row), int(table.runs[row]), holds_on(cluster, node.name))
            for row, node in enumerate(table.nodes)
        ]

    async def mark_node(self, change: NodeOverridden) -> NodeStatus:
        if change.node not in self.controller.cluster.nodes:
            raise NotFound(f"there is no node {change.node!r}", hint="hodei nodes")
        await self.loop.committed([change])
        return next(status for status in self.nodes() if status.node.name == change.node)

    # ---------------------------------------------------------------------------------------- reservations

    def reservations(self) -> list[ReservationStatus]:
        """By the time at which they begin."""
        reservations = self.controller.cluster.availability.reservations.values()
        return [self._reserved(reservation) for reservation in sorted(reservations, key=lambda b: (b.start_ms, b.name))]

    def reservation(self, name: str) -> ReservationStatus:
        reservation = self.controller.cluster.availability.reservations.get(name)
        if reservation is None:
            raise NotFound(f"there is no reservation {name!r}", hint="hodei reservation list")
        return self._reserved(reservation)

    async def reserve(self, wish: ReservationSpec) -> ReservationStatus:
        """Durable when it returns. One after another, so that no two are given the same room."""
        async with self._reserving:
            self.controller.cluster.table.settle()
            reservation = choose_nodes(self.controller.cluster, wish, self.clock.now_ms())
            await self.loop.committed([ReservationMade(reservation)])
        return self._reserved(reservation)

    async def unreserve(self, name: str, by: str) -> ReservationStatus:
        async with self._reserving:
            gone = self.reservation(name)
            await self.loop.committed([ReservationCancelled(name, by=by)])
        return gone

    def _reserved(self, reservation: Reservation) -> ReservationStatus:
        now_ms = self.clock.now_ms()
        late = tuple(late_runs(self.controller.cluster, reservation, now_ms))
        return ReservationStatus(reservation, reservation.start_ms <= now_ms < reservation.end_ms, late)

    # ------------------------------------------------------------------------------------------- looking

    def expected(self, job: Job) -> Estimate | None:
        """How long it is expected to run, by what is known now; None once it has ended."""
        return None if job.state in JOB_ENDED else self.controller.estimator.estimate(job.spec)

    def damage_of(self, job: JobId) -> str:
        """What is to be known of its record, "" for most."""
        return self.records.text(job)

    def subscribe(self) -> Subscription:
        return self.hub.subscribe()

    def metrics(self) -> bytes:
        self.prometheus.backend_up.clear()
        for name, well in self.fleet.well().items():
            self.prometheus.backend_up.labels(name).set(well)
        self.fleet.show_usage()
        return self.prometheus.render(self.controller)

    async def checks(self) -> list[Any]:
        """The server's own part of `doctor`."""
        return await self._checks(self) if self._checks is not None else []

    def backend_errors(self) -> dict[str, str]:
        return self.fleet.errors()


def _told_if_failed(task: asyncio.Task[None]) -> None:
    """What should go on for as long as the server does is not missed in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("a part of the server has ended: %s", task.get_coro(), exc_info=error)
