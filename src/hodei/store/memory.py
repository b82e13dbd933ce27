"""A store that is lost with its process: the semantics of the port, without durability. For tests and trials."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeVar, get_args

from msgspec import structs

from hodei.model.accounting import AccountPath, CostRow, UsageRow
from hodei.model.affinity import all_match
from hodei.model.audit import AuditEntry, AuditQuery, DamagedRecord, matches_query
from hodei.model.capacity import NodeOrder
from hodei.model.cron import Periodic
from hodei.model.effects import Event, Save, SaveKey
from hodei.model.errors import Conflict, NotFound, StaleEpoch, Unavailable
from hodei.model.ids import JobId, NodeName, RunId, job_of
from hodei.model.job import JOB_ENDED, Job, JobState, Run
from hodei.model.node import NodeOverrides
from hodei.model.reservation import Reservation
from hodei.ports import JobPage, JobQuery, NodeRunsPage, NodeRunsQuery, Opened
from hodei.store.batch import Batch, keep_decision, keep_spec, sort_saves

T = TypeVar("T")
_seq = attrgetter("seq")

_DAY_MS = 86_400_000


def from_url(url: str, home: Path) -> MemoryStore:
    """`memory:`. Everything is lost when the server stops."""
    return MemoryStore()


class _Memory:
    """The data; several stores may share it, as several programs may share a file."""

    def __init__(self, installation: str) -> None:
        self.lock = threading.RLock()
        self.installation = installation
        self.epoch = self.last_job = self.last_event = 0
        self.jobs: dict[JobId, Job] = {}
        self.ids: list[JobId] = []
        self.counts: Counter[str] = Counter()
        self.active: set[JobId] = set()
        self.runs: dict[JobId, dict[RunId, Run]] = {}
        self.awaits: dict[JobId, set[JobId]] = {}
        self.events: list[Event] = []
        self.events_of: dict[JobId, list[Event]] = {}
        self.overrides: dict[NodeName, NodeOverrides] = {}
        self.reservations: dict[str, Reservation] = {}
        self.node_orders: dict[NodeName, NodeOrder] = {}
        self.keys: dict[str, SaveKey] = {}
        self.notes: dict[str, str] = {}
        self.usage: dict[tuple[AccountPath, str, int], UsageRow] = {}
        self.periodics: dict[str, Periodic] = {}
        self.audit: list[AuditEntry] = []
        self.last_audit = 0


class MemoryStore:
    """See `ports.Store`. With `of`, a second store on the same data: a restarted or a competing server."""

    def __init__(self, *, of: MemoryStore | None = None, installation: str = "memory22") -> None:
        self._memory: _Memory = of._memory if of is not None else _Memory(installation)
        self._epoch = 0

    def open(self) -> Opened:
        memory = self._memory
        with memory.lock:
            memory.epoch += 1
            self._epoch = memory.epoch
            return Opened(memory.installation, memory.epoch, memory.last_job, memory.last_event)

    def commit(self, saves: Sequence[Save]) -> None:
        batch = sort_saves(saves)
        memory = self._memory
        with memory.lock:
            self._fence()
            _refuse_conflicts(memory, batch)
            # Nothing below can fail, so all of it happens.
            for job in batch.new_jobs.values():
                insort(memory.ids, job.id)
                for one in job.spec.after.of:
                    if one.job:
                        memory.awaits.setdefault(one.job, set()).add(job.id)
                _put_job(memory, job)
            for job in batch.jobs.values():
                _put_job(memory, keep_spec(memory.jobs[job.id], job))
            for run in batch.new_runs.values():
                memory.runs.setdefault(run.job, {})[run.id] = run
            for run in batch.runs.values():
                memory.runs[run.job][run.id] = keep_decision(memory.runs[run.job][run.id], run)
            for event in batch.events.values():
                insort(memory.events, event, key=_seq)
                insort(memory.events_of.setdefault(event.job, []), event, key=_seq)
            for overrides in batch.overrides.values():
                _replace(memory.overrides, overrides.node, None if overrides.empty else overrides)
            for kept in batch.periodics.values():
                _replace(memory.periodics, kept.periodic.name, None if kept.deleted else kept.periodic)
            for entry in batch.audits:
                memory.last_audit += 1
                memory.audit.append(structs.replace(entry, seq=memory.last_audit))
            for saved in batch.reservations.values():
                _replace(memory.reservations, saved.reservation.name, None if saved.deleted else saved.reservation)
            for ordered in batch.node_orders.values():
                _replace(memory.node_orders, ordered.order.name, None if ordered.deleted else ordered.order)
            memory.keys.update(batch.keys)
            memory.notes.update(batch.notes)
            if batch.usage:
                memory.usage |= batch.usage
                memory.usage = {key: row for key, row in memory.usage.items() if row.amount}
            memory.last_job = max(memory.last_job, batch.last_job)
            memory.last_event = max(memory.last_event, batch.last_event)

    def prune(self, *, ended_before_ms: int, limit: int = 1000) -> list[JobId]:
        memory = self._memory
        with memory.lock:
            self._fence()
            old = [job for job in memory.jobs.values() if job.state in JOB_ENDED and job.changed_ms < ended_before_ms]
            pruned = sorted(old, key=lambda job: (job.changed_ms, job.id))[:limit]
            deleted: set[int] = set()
            for job in pruned:
                memory.counts[job.state] -= 1
                del memory.jobs[job.id]
                memory.runs.pop(job.id, None)
                memory.awaits.pop(job.id, None)
                deleted.update(event.seq for event in memory.events_of.pop(job.id, ()))
            memory.events = [event for event in memory.events if event.seq not in deleted]
            memory.ids = [id for id in memory.ids if id in memory.jobs]
            return [job.id for job in pruned]

    def prune_unattached(self, *, before_ms: int, limit: int = 1000) -> int:
        memory = self._memory
        with memory.lock:
            self._fence()
            of_no_job = memory.events_of.get(0, [])
            aged = {event.seq for event in of_no_job[:limit] if event.at_ms < before_ms}
            memory.events_of[0] = [event for event in of_no_job if event.seq not in aged]
            memory.events = [event for event in memory.events if event.seq not in aged]
            first = list(memory.keys.values())[: limit - len(aged)]
            keys = [key.key for key in first if key.at_ms < before_ms - _DAY_MS]
            for key in keys:
                del memory.keys[key]
            return len(aged) + len(keys)

    def shrink(self, limit: int) -> int:
        return 0

    def active(self) -> list[tuple[Job, tuple[Run, ...]]]:
        memory = self._memory
        with memory.lock:
            jobs = [memory.jobs[id] for id in sorted(memory.active)]
            return [(job, tuple(run for run in self.runs(job.id) if run.attempt >= job.first_attempt)) for job in jobs]

    def overrides(self) -> list[NodeOverrides]:
        with self._memory.lock:
            return [self._memory.overrides[node] for node in sorted(self._memory.overrides)]

    def node_orders(self) -> list[NodeOrder]:
        with self._memory.lock:
            return [self._memory.node_orders[name] for name in sorted(self._memory.node_orders)]

    def reservations(self) -> list[Reservation]:
        with self._memory.lock:
            return [self._memory.reservations[name] for name in sorted(self._memory.reservations)]

    def usage(self) -> list[UsageRow]:
        with self._memory.lock:
            return [self._memory.usage[key] for key in sorted(self._memory.usage)]

    def periodics(self) -> list[Periodic]:
        with self._memory.lock:
            return [self._memory.periodics[name] for name in sorted(self._memory.periodics)]

    def audit(self, query: AuditQuery) -> list[AuditEntry]:
        with self._memory.lock:
            found = [entry for entry in self._memory.audit if matches_query(entry, query)]
        return (found if query.after is not None else found[::-1])[: max(1, query.limit)]

    def prune_audit(self, *, before_ms: int, limit: int = 1000) -> int:
        memory = self._memory
        with memory.lock:
            self._fence()
            old = {entry.seq for entry in memory.audit[:limit] if entry.at_ms < before_ms}
            memory.audit = [entry for entry in memory.audit if entry.seq not in old]
            return len(old)

    def states_between(self, first: JobId, last: JobId) -> dict[str, int]:
        with self._memory.lock:
            jobs = self._memory.jobs
            return dict(sorted(Counter(jobs[id].state for id in jobs if first <= id <= last).items()))

    def job(self, job: JobId) -> Job | None:
        return self._memory.jobs.get(job)

    def jobs(self, query: JobQuery) -> JobPage:
        memory = self._memory
        limit = max(1, query.limit)
        page: list[Job] = []
        with memory.lock:
            ids = sorted(set(query.ids) & memory.jobs.keys()) if query.ids else memory.ids
            end = bisect_left(ids, query.after) if query.after else len(ids)
            for index in range(end - 1, -1, -1):
                job = memory.jobs[ids[index]]
                if _matches(job, query):
                    if len(page) == limit:
                        return JobPage(page, page[-1].id)
                    page.append(job)
        return JobPage(page)

    def counts(self) -> dict[str, int]:
        with self._memory.lock:
            return {state: self._memory.counts[state] for state in get_args(JobState)}

    def runs(self, job: JobId) -> list[Run]:
        with self._memory.lock:
            return sorted(self._memory.runs.get(job, {}).values(), key=lambda run: (run.attempt, run.member))

    def run(self, run: RunId) -> Run | None:
        try:
            return self._memory.runs.get(job_of(run), {}).get(run)
        except ValueError:
            return None

    def runs_on(self, query: NodeRunsQuery) -> NodeRunsPage:
        with self._memory.lock:
            every = [run for runs in self._memory.runs.values() for run in runs.values()]
        found = sorted(((run.job, run.attempt, run.member), run.id, run) for run in every if run.node == query.node)
        page: list[Run] = []
        for key, _, run in reversed(found):
            if query.after is not None and key >= query.after:
                continue
            if run.placed_ms < query.until_ms and (not run.finished_ms or run.finished_ms > query.since_ms):
                page.append(run)
                if len(page) == max(1, query.limit):
                    return NodeRunsPage(page, key)
        return NodeRunsPage(page)

    def costs(self, since_ms: int, until_ms: int) -> list[CostRow]:
        sums: dict[tuple[str, str, str], tuple[int, float]] = {}
        with self._memory.lock:
            for job, runs in self._memory.runs.items():
                spec = self._memory.jobs[job].spec
                for run in runs.values():
                    span_ms = min(run.finished_ms or until_ms, until_ms) - max(run.placed_ms, since_ms)
                    if run.cost_milli and span_ms > 0:
                        count, cost = sums.get((spec.project, spec.user, run.backend), (0, 0.0))
                        cost += run.cost_milli * span_ms / 3.6e9
                        sums[spec.project, spec.user, run.backend] = (count + 1, cost)
        return [CostRow(*key, *found) for key, found in sorted(sums.items())]

    def events(self, *, after: int = 0, job: JobId = 0, limit: int = 1000) -> list[Event]:
        with self._memory.lock:
            events = self._memory.events_of.get(job, []) if job else self._memory.events
            start = bisect_right(events, after, key=_seq)
            return events[start : start + max(0, limit)]

    def dependents(self, awaited: Sequence[JobId], limit: int = 10_000) -> list[tuple[JobId, JobId]]:
        with self._memory.lock:
            return [(id, job) for id in sorted(set(awaited)) for job in sorted(self._memory.awaits.get(id, ()))][:limit]

    def key(self, key: str) -> SaveKey | None:
        return self._memory.keys.get(key)

    def note(self, name: str) -> str:
        return self._memory.notes.get(name, "")

    suspects: Sequence[tuple[str, JobId]] = ()

    def mark_suspect(self, kind: str, key: JobId | str, reason: str) -> None:
        pass  # data in memory is never damaged

    def repair_conflicts(self, saves: Sequence[Save], now_ms: int) -> list[DamagedRecord]:
        return []

    def repair(
        self, now_ms: int, known: Mapping[JobId, tuple[Job, Sequence[Run]]] | None = None
    ) -> list[DamagedRecord]:
        return []

    def damaged(self) -> list[DamagedRecord]:
        return []

    def scan(self, kind: str, after: object, limit: int) -> None:
        return None

    def check_disk_space(self) -> None:
        pass

    def check(self) -> list[tuple[str, bool, str]]:
        return [("store", True, "in memory: everything is lost when the server stops")]

    def close(self) -> None:
        self._epoch = 0

    def _fence(self) -> None:
        if self._epoch == 0:
            raise Unavailable("the store is not open", hint="open it before writing")
        if self._epoch != self._memory.epoch:
            raise StaleEpoch("another writer has opened this store since", hint="stop this server")


def _replace(table: dict[str, T], key: str, value: T | None) -> None:
    """The new value is the last one; None deletes."""
    table.pop(key, None)
    if value is not None:
        table[key] = value


def _put_job(memory: _Memory, job: Job) -> None:
    before = memory.jobs.get(job.id)
    if before is not None:
        memory.counts[before.state] -= 1
    memory.counts[job.state] += 1
    memory.jobs[job.id] = job
    if job.state in JOB_ENDED:
        memory.active.discard(job.id)
    else:
        memory.active.add(job.id)


def _refuse_conflicts(memory: _Memory, batch: Batch) -> None:
    def stored(runs: Iterable[Run]) -> int:
        return sum(run.id in memory.runs.get(run.job, ()) for run in runs)

    if not memory.jobs.keys().isdisjoint(batch.new_jobs):
        raise Conflict("this job is already stored")
    if not memory.jobs.keys() >= batch.jobs.keys():
        raise NotFound("a job that was never stored (or is pruned) cannot be changed")
    if stored(batch.new_runs.values()):
        raise Conflict("this run is already stored")
    if stored(batch.runs.values()) != len(batch.runs):
        raise NotFound("a run that was never stored cannot be changed")
    for seq in batch.events:
        at = bisect_left(memory.events, seq, key=_seq)
        if at < len(memory.events) and memory.events[at].seq == seq:
            raise Conflict("this event is already stored")
    if not memory.keys.keys().isdisjoint(batch.keys):
        raise Conflict("this key is already stored")


def _matches(job: Job, query: JobQuery) -> bool:
    spec = job.spec
    return (
        (not query.states or job.state in query.states)
        and (not query.project or spec.project == query.project)
        and (not query.user or spec.user == query.user)
        and (not query.name or spec.name == query.name)
        and job.submitted_ms >= query.since_ms
        and all_match(query.labels, spec.labels)
    )
