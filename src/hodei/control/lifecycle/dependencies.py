"""Who waits for what: jobs that may not stand in line before other jobs have ended, or data has appeared.

They are pending, but in no line, and cost nothing there. Who waits for a job is found by the job (a reverse index), so a
graph costs as much as it has edges. Facts are only noted as they come; `settling`, once per step, works out what follows,
as often as something follows from that. A dependency that was met stays met, whatever becomes of the job later; one that
can never be met any more ends the job that has it, as soon as too few of the others are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping

from msgspec import structs

from hodei.control.lifecycle.jobs import JobLifecycle
from hodei.control.queue.base import SchedulingQueue
from hodei.control.state import PART, ClusterState, Timers, parts
from hodei.model.dependency import Dependencies as Wanted
from hodei.model.dependency import Dependency, DependencyStatus
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, Job
from hodei.model.resources import format_duration

WAITING_FOR_DEPENDENCY, NEVER_MET, TIMED_OUT = "WAITING_FOR_DEPENDENCY", "DEPENDENCY_NEVER_MET", "DEPENDENCY_TIMEOUT"
_OPEN, _MET, _NEVER = 0, 1, 2
# So many are named in a reason; the next ones take their places.
_NAMED = 3
# How a job ended is remembered for the last so many ended jobs at least: one may end while a job that waits for it is
# on its way here. What ended longer ago is told with the fact (`DependencyStatus`).
_ENDS_KEPT = 16_384


class _Wait:
    """One job that waits. `upto`: those before it are settled or named in the reason already."""

    __slots__ = ("lost", "met", "named", "never", "profile", "status", "upto", "wanted")

    def __init__(self, wanted: Wanted, profile: str) -> None:
        self.wanted, self.profile = wanted, profile
        self.status = [_OPEN] * len(wanted.of)
        self.met = self.never = self.upto = 0
        self.named: list[int] = []
        self.lost: list[str] = []


class Dependencies:
    def __init__(self, cluster: ClusterState, lifecycle: JobLifecycle, enqueue: Callable[[Job, int], None]) -> None:
        self._cluster, self._lifecycle, self._enqueue = cluster, lifecycle, enqueue
        cluster.signals.job_ended.append(self._ended)
        cluster.signals.checkpoint_saved.append(self._saved)
        self._waits: dict[JobId, _Wait] = {}
        self._on_job: dict[JobId, list[tuple[JobId, int]]] = {}
        self._on_data: dict[str, dict[tuple[JobId, int], None]] = {}
        self.in_profile: Counter[str] = Counter()
        self._timers = Timers()
        self._arrived: dict[JobId, None] = {}
        self._news: list[tuple[JobId, str, bool]] = []
        self._data_news: list[str] = []
        self._touched: dict[JobId, None] = {}
        self._changed: dict[JobId, None] = {}
        self._had_saved: set[JobId] = set()
        self._ends: dict[JobId, str] = {}
        self._older_ends: dict[JobId, str] = {}

    # ----------------------------------------------------------------------------------------------- asking

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, job: object) -> bool:
        return job in self._waits or job in self._arrived

    @property
    def data(self) -> Iterable[str]:
        """The files and addresses that someone waits for now."""
        return self._on_data.keys()

    def dependents(self, job: JobId) -> list[JobId]:
        """The jobs that wait for this one now, each once."""
        waiting = ((waiter, self._waits.get(waiter), i) for waiter, i in self._on_job.get(job, ()))
        return list(dict.fromkeys(waiter for waiter, wait, i in waiting if wait and wait.status[i] == _OPEN))

    def awaited(self, job: JobId) -> list[JobId]:
        """The jobs that this one waits for now, each once."""
        return list(dict.fromkeys(one.job for one, state in self.progress(job) if state == "open" and one.job))

    def progress(self, job: JobId) -> list[tuple[Dependency, str]]:
        """Each of its dependencies: open, met or never. Empty if it does not wait."""
        wait = self._waits.get(job)
        if wait is None:
            return []
        return [
            (one, ("open", "met", "never")[status]) for one, status in zip(wait.wanted.of, wait.status, strict=True)
        ]

    def told(self, job: JobId) -> tuple[DependencyStatus, ...]:
        """What another controller must be told so that the job waits there for no more and no less (but for data)."""
        out = []
        for one, state in self.progress(job):
            if one.job and state == "open":
                out.append(DependencyStatus(one.job, "pending"))
            elif one.job and state == "met":
                out.append(DependencyStatus(one.job, "failed" if one.on == "failed" else "succeeded"))
            elif one.job:
                out.append(DependencyStatus(one.job, "cancelled"))
        return tuple(out)

    # ------------------------------------------------------------------------------------------------ noting

    def submitted(self, job: Job, dependency_statuses: Iterable[DependencyStatus]) -> Job:
        """A job that depends on something is queued when that is met, not before."""
        self.note(dependency_statuses)
        self.arrive(job)
        return structs.replace(job, queued_ms=0)

    def restored(self, job: Job, dependency_statuses: Iterable[DependencyStatus]) -> None:
        self.note(dependency_statuses)
        if job.spec.after.of and job.state in ("pending", "held") and not (job.queued_ms or job.attempt):
            self.arrive(job)

    def note(self, dependency_statuses: Iterable[DependencyStatus]) -> None:
        for one in dependency_statuses:
            if not self._state_of(one.job):  # what is known here is never older than what was looked up
                self._remember(one.job, one.state)
            if one.saved:
                self._had_saved.add(one.job)

    def arrive(self, job: Job) -> None:
        """It is judged in `settling`, when all jobs that came with it are known too."""
        self._arrived[job.id] = None

    def appeared(self, what: str) -> None:
        self._data_news.append(what)

    def next_ms(self) -> int | None:
        return self._timers.next_ms()

    def _ended(self, job: Job) -> None:
        self._remember(job.id, job.state)
        if job.id in self._waits:
            self._forget(job.id)
        if job.id in self._on_job:
            self._news.append((job.id, job.state, False))

    def _saved(self, job: JobId) -> None:
        if job in self._on_job:
            self._news.append((job, "running", True))

    def _remember(self, job: JobId, state: str) -> None:
        self._ends[job] = state
        if len(self._ends) >= _ENDS_KEPT:
            self._ends, self._older_ends = {}, self._ends

    def _forget(self, job: JobId) -> None:
        wait = self._waits.pop(job)
        self.in_profile[wait.profile] -= 1
        self._note_change(wait)
        for i, one in enumerate(wait.wanted.of):
            # What is left behind at jobs is skipped there; data would be looked for in vain.
            if one.on == "exists" and (those := self._on_data.get(one.what)) is not None:
                those.pop((job, i), None)
                if not those:
                    del self._on_data[one.what]

    def _note_change(self, wait: _Wait) -> None:
        self._changed |= dict.fromkeys(one.job for one in wait.wanted.of if one.job)

    def take_changed(self) -> dict[JobId, None]:
        """The jobs for which others began or ceased to wait since this was last asked."""
        changed, self._changed = self._changed, {}
        return changed

    # ---------------------------------------------------------------------------------------------- settling

    def settling(self, now_ms: int) -> Generator[None, None, None]:
        """All that follows from what was noted, and from that again, until nothing does; in parts."""
        due_ms = self._timers.next_ms()
        if due_ms is not None and due_ms <= now_ms:
            self._time_out(now_ms)
        while self._arrived or self._news or self._data_news:
            arrived, self._arrived = self._arrived, {}
            for part in parts(arrived):
                for id in part:
                    job = self._cluster.jobs.get(id)
                    if job is not None:
                        self._begin(job)
                if len(arrived) > PART:
                    yield
            self._had_saved.clear()
            news, self._news = self._news, []
            for part_of_news in parts(news):
                for awaited, state, saved in part_of_news:
                    self._hear(awaited, state, saved=saved)
                if len(news) > PART:
                    yield
            data, self._data_news = self._data_news, []
            for what in data:
                for waiter, i in self._on_data.pop(what, ()):
                    self._judge(waiter, i, met=True)
            touched, self._touched = self._touched, {}
            for part in parts(touched):
                for id in part:
                    self._conclude(id, now_ms)
                if len(touched) > PART:
                    yield

    def _begin(self, job: Job) -> None:
        self._touched[job.id] = None
        if job.id in self._waits:
            return  # released, and not yet free to go
        wanted = job.spec.after
        wait = self._waits[job.id] = _Wait(wanted, job.spec.profile)
        self.in_profile[wait.profile] += 1
        self._note_change(wait)
        if wanted.timeout_ms:
            since_ms = job.submitted_ms
            if since_ms + wanted.timeout_ms <= job.changed_ms:
                since_ms = job.changed_ms  # it was touched after its time was up: it has been requeued since
            self._timers.set(since_ms + wanted.timeout_ms, job.id)
        for i, one in enumerate(wanted.of):
            if one.on == "exists":
                self._on_data.setdefault(one.what, {})[job.id, i] = None
                continue
            state = self._state_of(one.job)
            met = one.met_by(state, saved=self._has_saved(one.job)) if state else one.on == "completed"
            if met is None:
                self._on_job.setdefault(one.job, []).append((job.id, i))
            else:
                self._judge(job.id, i, met=met, how=state)

    def _state_of(self, job: JobId) -> str:
        """Of a job that is not known any more: nothing."""
        known = self._cluster.jobs.get(job)
        return known.state if known is not None else self._ends.get(job) or self._older_ends.get(job, "")

    def _has_saved(self, job: JobId) -> bool:
        return job in self._had_saved or any(run.checkpoint_ms for run in self._cluster.runs.get(job, {}).values())

    def _hear(self, awaited: JobId, state: str, *, saved: bool) -> None:
        left = []
        for waiter, i in self._on_job.pop(awaited, ()):
            wait = self._waits.get(waiter)
            if wait is None or wait.status[i] != _OPEN:
                continue
            met = wait.wanted.of[i].met_by(state, saved=saved)
            if met is None:
                left.append((waiter, i))
            else:
                self._judge(waiter, i, met=met, how=state)
        if left:
            self._on_job[awaited] = left

    def _judge(self, waiter: JobId, i: int, *, met: bool, how: str = "") -> None:
        wait = self._waits.get(waiter)
        if wait is None or wait.status[i] != _OPEN:
            return
        if met:
            wait.status[i], wait.met = _MET, wait.met + 1
        else:
            wait.status[i], wait.never = _NEVER, wait.never + 1
            if len(wait.lost) < _NAMED:
                wait.lost.append(f"{wait.wanted.of[i]}, but that {_end(how)}")
        self._touched[waiter] = None

    def _conclude(self, id: JobId, now_ms: int) -> None:
        wait, job = self._waits.get(id), self._cluster.jobs.get(id)
        if wait is None or job is None:
            return
        all_of_them, needed = len(wait.wanted.of), wait.wanted.needed
        if wait.met >= needed:
            self._release(job, wait, now_ms)
        elif all_of_them - wait.never < needed:
            lost = "; ".join(wait.lost) + ("; and others" if wait.never > len(wait.lost) else "")
            text = f"it waited for {lost}"
            if needed < all_of_them:
                text = f"needs {needed} of {all_of_them} and {wait.never} can never be met any more: {text}"
            self._lifecycle.finish(job, "failed", now_ms, NEVER_MET, text)
        elif job.state == "pending":
            text = self._reason(wait)
            if (job.reason_code, job.reason) != (WAITING_FOR_DEPENDENCY, text):
                self._cluster.change_job(job, now_ms, reason_code=WAITING_FOR_DEPENDENCY, reason=text)

    def _release(self, job: Job, wait: _Wait, now_ms: int) -> None:
        self._forget(job.id)
        self._cluster.emit("job.dependencies_met", now_ms, job=job.id, met=wait.met, of=len(wait.status))
        if job.state == "held":
            self._cluster.change_job(job, now_ms, queued_ms=now_ms)
        else:
            self._enqueue(self._cluster.change_job(job, now_ms, queued_ms=now_ms, reason_code="", reason=""), now_ms)

    def _time_out(self, now_ms: int) -> None:
        for id in self._timers.due(now_ms):
            wait, job = self._waits.get(id), self._cluster.jobs.get(id)
            if wait is not None and job is not None:
                patience = format_duration(wait.wanted.timeout_ms)
                self._lifecycle.finish(
                    job, "failed", now_ms, TIMED_OUT, f"after {patience} it still {self._reason(wait)}"
                )

    def _reason(self, wait: _Wait) -> str:
        """Names the first few that are open. How many there are besides is for `why`: it would change too often."""
        wait.named = [i for i in wait.named if wait.status[i] == _OPEN]
        while len(wait.named) < _NAMED and wait.upto < len(wait.status):
            if wait.status[wait.upto] == _OPEN:
                wait.named.append(wait.upto)
            wait.upto += 1
        names = ", ".join(str(wait.wanted.of[i]) for i in wait.named)
        more = " and others" if len(wait.status) - wait.met - wait.never > len(wait.named) else ""
        few = wait.wanted.needed < len(wait.status)
        return f"waits for {f'{wait.wanted.needed - wait.met} of: ' if few else ''}{names}{more}"


def _end(state: str) -> str:
    if state not in JOB_ENDED:
        return "is not known any more"
    return "was cancelled" if state == "cancelled" else state


# -------------------------------------------------------------------------------- priority inheritance
# Priority inheritance: a job counts in its line for as much as the most important job that waits for it, or for one
# that waits for it. What it was submitted with does not change: it takes nobody's place for it, and shows it no
# longer when they have ended or do not wait any more.


class PriorityInheritance:
    def __init__(self, cluster: ClusterState, dependencies: Dependencies, lines: Mapping[str, object]) -> None:
        self._cluster, self._dependencies, self._lines = cluster, dependencies, lines
        self.lifts: dict[JobId, int] = {}

    def follow(self) -> None:
        """Once a step: what has changed in who waits for whom."""
        changed = self._dependencies.take_changed()
        while changed:
            job, _ = changed.popitem()
            if self._lift(job):
                changed |= dict.fromkeys(self._dependencies.awaited(job))

    def _lift(self, id: JobId) -> bool:
        """Whether it counts for more or less than before."""
        job, before = self._cluster.jobs.get(id), self.lifts.get(id)
        waiting = [self._worth(waiter) for waiter in self._dependencies.dependents(id)] if job is not None else []
        to = max(waiting, default=None)
        if job is None or to is None or to <= job.spec.priority:
            to = None
        if to == before:
            return False
        if to is None:
            del self.lifts[id]
        else:
            self.lifts[id] = to
        line = self._lines.get(job.spec.profile) if job is not None else None
        if isinstance(line, SchedulingQueue):
            line.lift(id, to)
        return True

    def _worth(self, id: JobId) -> int:
        job = self._cluster.jobs.get(id)
        own = job.spec.priority if job is not None else 0
        return max(own, self.lifts.get(id, own))
