"""Dependencies: jobs that are queued only after other jobs have ended or data has appeared.

Waiting jobs are pending, but in no queue. A reverse index leads from a job to its dependents, so that a graph costs as
much as it has edges. Facts are only noted when they arrive; `resolve`, once per step, works out what follows, until
nothing more does. A dependency that was met stays met. A job fails as soon as too few of its dependencies can still be
met.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping

from msgspec import structs

from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.queue.base import SchedulingQueue
from hodei.control.state import CHUNK_SIZE, ClusterState, Timers, chunks
from hodei.model.dependency import Dependencies as Requirements
from hodei.model.dependency import Dependency, DependencyStatus
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, Job
from hodei.model.resources import format_duration

WAITING_FOR_DEPENDENCY, NEVER_MET, TIMED_OUT = "WAITING_FOR_DEPENDENCY", "DEPENDENCY_NEVER_MET", "DEPENDENCY_TIMEOUT"
_OPEN, _MET, _NEVER = 0, 1, 2
# Dependencies that a reason names.
_NAMED = 3
# The final states of at least this many ended jobs are kept: a job may end while one that depends on it is being
# submitted. Older ones come with the fact (`DependencyStatus`).
_ENDS_KEPT = 16_384


class _Wait:
    """The status of each requirement of a waiting job. `named`: those in its reason; those before `upto` are done."""

    __slots__ = ("failed", "met", "named", "never", "profile", "required", "status", "upto")

    def __init__(self, required: Requirements, profile: str) -> None:
        self.required, self.profile = required, profile
        self.status = [_OPEN] * len(required.of)
        self.met = self.never = self.upto = 0
        self.named: list[int] = []
        self.failed: list[str] = []


class Dependencies:
    """`in_profile`: the number of waiting jobs by profile."""

    def __init__(self, cluster: ClusterState, lifecycle: JobLifecycle) -> None:
        self._cluster, self._lifecycle = cluster, lifecycle
        cluster.signals.job_ended.append(self._job_ended)
        cluster.signals.checkpoint_saved.append(self._checkpoint_saved)
        self._waits: dict[JobId, _Wait] = {}
        # Waiting jobs, with the index of the requirement, by what they wait for.
        self._on_job: dict[JobId, list[tuple[JobId, int]]] = {}
        self._on_data: dict[str, dict[tuple[JobId, int], None]] = {}
        self.in_profile: Counter[str] = Counter()
        self._timers = Timers()
        # What happened since the last `resolve`: new jobs; states of jobs, and whether they saved a checkpoint; data.
        self._arrived: dict[JobId, None] = {}
        self._job_changes: list[tuple[JobId, str, bool]] = []
        self._new_data: list[str] = []
        # Waiting jobs with a changed requirement, and jobs with changed dependents.
        self._touched: dict[JobId, None] = {}
        self._changed: dict[JobId, None] = {}
        self._had_checkpoint: set[JobId] = set()
        self._ends: dict[JobId, str] = {}
        self._older_ends: dict[JobId, str] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, job: object) -> bool:
        return job in self._waits or job in self._arrived

    @property
    def data(self) -> Iterable[str]:
        """The files and addresses that jobs wait for."""
        return self._on_data.keys()

    def dependents(self, job: JobId) -> list[JobId]:
        """The jobs that wait for this one now, each once."""
        waiting = ((waiter, self._waits.get(waiter), i) for waiter, i in self._on_job.get(job, ()))
        return list(dict.fromkeys(waiter for waiter, wait, i in waiting if wait and wait.status[i] == _OPEN))

    def required_jobs(self, job: JobId) -> list[JobId]:
        """The jobs that this one waits for now, each once."""
        return list(dict.fromkeys(one.job for one, state in self.progress(job) if state == "open" and one.job))

    def progress(self, job: JobId) -> list[tuple[Dependency, str]]:
        """Each of its dependencies with its status: open, met or never. Empty if it does not wait."""
        wait = self._waits.get(job)
        if wait is None:
            return []
        return [
            (one, ("open", "met", "never")[status]) for one, status in zip(wait.required.of, wait.status, strict=True)
        ]

    def statuses(self, job: JobId) -> tuple[DependencyStatus, ...]:
        """What another controller needs so that the job waits there for the same (data excluded)."""
        out = []
        for one, state in self.progress(job):
            if one.job and state == "open":
                out.append(DependencyStatus(one.job, "pending"))
            elif one.job and state == "met":
                out.append(DependencyStatus(one.job, "failed" if one.on == "failed" else "succeeded"))
            elif one.job:
                out.append(DependencyStatus(one.job, "cancelled"))
        return tuple(out)

    def submitted(self, job: Job, dependency_statuses: Iterable[DependencyStatus]) -> Job:
        """A new job with dependencies; it is queued when they are met."""
        self.note(dependency_statuses)
        self.arrive(job)
        return structs.replace(job, queued_ms=0)

    def restored(self, job: Job, dependency_statuses: Iterable[DependencyStatus]) -> None:
        self.note(dependency_statuses)
        if job.spec.after.of and job.state in ("pending", "held") and not (job.queued_ms or job.attempt):
            self.arrive(job)

    def note(self, dependency_statuses: Iterable[DependencyStatus]) -> None:
        for one in dependency_statuses:
            if not self._state_of(one.job):  # the state known here is at least as new
                self._remember(one.job, one.state)
            if one.saved:
                self._had_checkpoint.add(one.job)

    def arrive(self, job: Job) -> None:
        """Its requirements are checked in `resolve`, when all jobs submitted with it are known."""
        self._arrived[job.id] = None

    def data_appeared(self, what: str) -> None:
        self._new_data.append(what)

    def next_ms(self) -> int | None:
        return self._timers.next_ms()

    def _job_ended(self, job: Job) -> None:
        self._remember(job.id, job.state)
        if job.id in self._waits:
            self._forget(job.id)
        if job.id in self._on_job:
            self._job_changes.append((job.id, job.state, False))

    def _checkpoint_saved(self, job: JobId) -> None:
        if job in self._on_job:
            self._job_changes.append((job, "running", True))

    def _remember(self, job: JobId, state: str) -> None:
        self._ends[job] = state
        if len(self._ends) >= _ENDS_KEPT:
            self._ends, self._older_ends = {}, self._ends

    def _forget(self, job: JobId) -> None:
        wait = self._waits.pop(job)
        self.in_profile[wait.profile] -= 1
        self._note_change(wait)
        for i, one in enumerate(wait.required.of):
            # Entries in `_on_job` are skipped later; data that no job waits for is not looked for.
            if one.on == "exists" and (waiting := self._on_data.get(one.what)) is not None:
                waiting.pop((job, i), None)
                if not waiting:
                    del self._on_data[one.what]

    def _note_change(self, wait: _Wait) -> None:
        self._changed |= dict.fromkeys(one.job for one in wait.required.of if one.job)

    def take_changed(self) -> dict[JobId, None]:
        """The jobs whose dependents have changed since the last call."""
        changed, self._changed = self._changed, {}
        return changed

    def resolve(self, now_ms: int) -> Generator[None, None, None]:
        """Everything that follows from the noted facts, until nothing more does; in chunks."""
        due_ms = self._timers.next_ms()
        if due_ms is not None and due_ms <= now_ms:
            self._time_out(now_ms)
        while self._arrived or self._job_changes or self._new_data:
            arrived, self._arrived = self._arrived, {}
            for part in chunks(arrived):
                for id in part:
                    job = self._cluster.jobs.get(id)
                    if job is not None:
                        self._start_wait(job)
                if len(arrived) > CHUNK_SIZE:
                    yield
            self._had_checkpoint.clear()
            job_changes, self._job_changes = self._job_changes, []
            for part_of_changes in chunks(job_changes):
                for required, state, saved in part_of_changes:
                    self._apply_state(required, state, saved=saved)
                if len(job_changes) > CHUNK_SIZE:
                    yield
            data, self._new_data = self._new_data, []
            for what in data:
                for waiter, i in self._on_data.pop(what, ()):
                    self._set_status(waiter, i, met=True)
            touched, self._touched = self._touched, {}
            for part in chunks(touched):
                for id in part:
                    self._conclude(id, now_ms)
                if len(touched) > CHUNK_SIZE:
                    yield

    def _start_wait(self, job: Job) -> None:
        self._touched[job.id] = None
        if job.id in self._waits:
            return  # it was released from a hold, and still waits
        required = job.spec.after
        wait = self._waits[job.id] = _Wait(required, job.spec.profile)
        self.in_profile[wait.profile] += 1
        self._note_change(wait)
        if required.timeout_ms:
            since_ms = job.submitted_ms
            if since_ms + required.timeout_ms <= job.changed_ms:
                since_ms = job.changed_ms  # changed after its timeout: it was requeued since
            self._timers.set(since_ms + required.timeout_ms, job.id)
        for i, one in enumerate(required.of):
            if one.on == "exists":
                self._on_data.setdefault(one.what, {})[job.id, i] = None
                continue
            state = self._state_of(one.job)
            met = one.met_by(state, saved=self._has_checkpoint(one.job)) if state else one.on == "completed"
            if met is None:
                self._on_job.setdefault(one.job, []).append((job.id, i))
            else:
                self._set_status(job.id, i, met=met, state=state)

    def _state_of(self, job: JobId) -> str:
        """Empty for a job that is not known any more."""
        known = self._cluster.jobs.get(job)
        return known.state if known is not None else self._ends.get(job) or self._older_ends.get(job, "")

    def _has_checkpoint(self, job: JobId) -> bool:
        return job in self._had_checkpoint or any(run.checkpoint_ms for run in self._cluster.runs.get(job, {}).values())

    def _apply_state(self, required: JobId, state: str, *, saved: bool) -> None:
        still_open = []
        for waiter, i in self._on_job.pop(required, ()):
            wait = self._waits.get(waiter)
            if wait is None or wait.status[i] != _OPEN:
                continue
            met = wait.required.of[i].met_by(state, saved=saved)
            if met is None:
                still_open.append((waiter, i))
            else:
                self._set_status(waiter, i, met=met, state=state)
        if still_open:
            self._on_job[required] = still_open

    def _set_status(self, waiter: JobId, i: int, *, met: bool, state: str = "") -> None:
        wait = self._waits.get(waiter)
        if wait is None or wait.status[i] != _OPEN:
            return
        if met:
            wait.status[i], wait.met = _MET, wait.met + 1
        else:
            wait.status[i], wait.never = _NEVER, wait.never + 1
            if len(wait.failed) < _NAMED:
                wait.failed.append(f"{wait.required.of[i]}, but that {_describe_end(state)}")
        self._touched[waiter] = None

    def _conclude(self, id: JobId, now_ms: int) -> None:
        wait, job = self._waits.get(id), self._cluster.jobs.get(id)
        if wait is None or job is None:
            return
        count, needed = len(wait.required.of), wait.required.needed
        if wait.met >= needed:
            self._release(job, wait, now_ms)
        elif count - wait.never < needed:
            failed = "; ".join(wait.failed) + ("; and others" if wait.never > len(wait.failed) else "")
            text = f"it waited for {failed}"
            if needed < count:
                text = f"needs {needed} of {count} and {wait.never} can never be met any more: {text}"
            self._lifecycle.finish(job, "failed", now_ms, NEVER_MET, text)
        elif job.state == "pending":
            self._cluster.set_reason(job, WAITING_FOR_DEPENDENCY, self._reason(wait), now_ms)

    def _release(self, job: Job, wait: _Wait, now_ms: int) -> None:
        self._forget(job.id)
        self._cluster.emit("job.dependencies_met", now_ms, job=job.id, met=wait.met, of=len(wait.status))
        if job.state == "held":
            self._cluster.change_job(job, now_ms, queued_ms=now_ms)
        else:
            job = self._cluster.change_job(job, now_ms, queued_ms=now_ms, reason_code="", reason="")
            self._cluster.enqueue(job, now_ms)

    def _time_out(self, now_ms: int) -> None:
        for id in self._timers.due(now_ms):
            wait, job = self._waits.get(id), self._cluster.jobs.get(id)
            if wait is not None and job is not None:
                text = f"after {format_duration(wait.required.timeout_ms)} it still {self._reason(wait)}"
                self._lifecycle.finish(job, "failed", now_ms, TIMED_OUT, text)

    def _reason(self, wait: _Wait) -> str:
        """Names the first open ones. It gives no number of the others, which would change too often."""
        wait.named = [i for i in wait.named if wait.status[i] == _OPEN]
        while len(wait.named) < _NAMED and wait.upto < len(wait.status):
            if wait.status[wait.upto] == _OPEN:
                wait.named.append(wait.upto)
            wait.upto += 1
        names = ", ".join(str(wait.required.of[i]) for i in wait.named)
        more = " and others" if len(wait.status) - wait.met - wait.never > len(wait.named) else ""
        some = wait.required.needed < len(wait.status)
        return f"waits for {f'{wait.required.needed - wait.met} of: ' if some else ''}{names}{more}"


def _describe_end(state: str) -> str:
    if state not in JOB_ENDED:
        return "is not known any more"
    return "was cancelled" if state == "cancelled" else state


class PriorityInheritance:
    """A job is queued with the highest priority of the jobs that wait for it, directly or through others. Only the queue
    order changes: it preempts with its own priority, and loses the inherited one when they end or stop waiting.

    `inherited`: the priorities of jobs that have one."""

    def __init__(self, cluster: ClusterState, dependencies: Dependencies, queues: Mapping[str, object]) -> None:
        self._cluster, self._dependencies, self._queues = cluster, dependencies, queues
        self.inherited: dict[JobId, int] = {}

    def update(self) -> None:
        """Once per step: follow the changes of dependents."""
        changed = self._dependencies.take_changed()
        while changed:
            job, _ = changed.popitem()
            if self._update_job(job):
                changed |= dict.fromkeys(self._dependencies.required_jobs(job))

    def _update_job(self, id: JobId) -> bool:
        """Returns whether its priority in the queue has changed."""
        job, before = self._cluster.jobs.get(id), self.inherited.get(id)
        dependents = self._dependencies.dependents(id) if job is not None else []
        to = max(map(self._priority, dependents), default=None)
        if job is None or to is None or to <= job.spec.priority:
            to = None
        if to == before:
            return False
        if to is None:
            del self.inherited[id]
        else:
            self.inherited[id] = to
        queue = self._queues.get(job.spec.profile) if job is not None else None
        if isinstance(queue, SchedulingQueue):
            queue.set_inherited_priority(id, to)
        return True

    def _priority(self, id: JobId) -> int:
        job = self._cluster.jobs.get(id)
        own = job.spec.priority if job is not None else 0
        return max(own, self.inherited.get(id, own))
