"""Gangs that run with members missing: who is to be brought back, who may still join, and in which place.

A member's end is the end of its gang unless the `stop_reason` of the run says that the gang goes on: another run is to take
its place ("repair"), or none ("shrink"). All that is kept here follows from the latest run of each member, so that
after a crash it is found again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

from msgspec import Struct

from hodei.control.lifecycle.retry import RetryPolicy
from hodei.control.state import ClusterState
from hodei.engine.preemption.victims import Place
from hodei.engine.profile import Profile
from hodei.engine.view import Gang, Member
from hodei.model.facts import RunObserved
from hodei.model.ids import JobId, NodeName
from hodei.model.job import RUN_ENDED, Job, Run, RunState
from hodei.model.outcome import StopReason, may_retry, run_failure_class

REPAIR = StopReason("member_ended", gang="repair")
SHRUNK = StopReason("member_ended", gang="shrink")
# How runs end that never began: the backend did not start it, or was out of reach. The second is no attempt of the job.
START_FAILED = "start_failed"
NOT_REACHED_RUN = "not_reached"
NEVER_BEGAN = (START_FAILED, NOT_REACHED_RUN)


def latest(runs: Iterable[Run]) -> dict[int, Run]:
    """The last run of each member, by member."""
    out: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: (run.member, run.attempt)):
        out[run.member] = run
    return out


def gang_goes_on(run: Run) -> Literal["", "repair", "shrink"]:
    return run.stop_reason.gang if run.stop_reason is not None else ""


def is_missing(run: Run) -> bool:
    """Ended, and another run is to take its place."""
    return run.state in RUN_ENDED and run.state != "succeeded" and gang_goes_on(run) == "repair"


def lost_together(run: Run, at_ms: int) -> bool:
    """Members that went down with one node are one loss."""
    return run.state == "lost" and gang_goes_on(run) == "repair" and run.finished_ms == at_ms


class Repair(Struct):
    """A gang that wants members back. Until `not_before_ms` the room that they had is kept for them."""

    gang: Gang
    since_ms: int
    not_before_ms: int = 0
    kept: list[Place] = []
    fresh: bool = True


class Gangs:
    """`drop_hold`: capacity held for missing members of a job is no longer needed. `check_per_node`: a run of a job that
    runs on every node has changed."""

    def __init__(
        self,
        cluster: ClusterState,
        profiles: Mapping[str, Profile],
        retry: RetryPolicy,
        drop_hold: Callable[[JobId], None],
        check_per_node: Callable[[JobId], None],
    ) -> None:
        self._cluster, self._profiles, self._retry = cluster, profiles, retry
        self._drop_hold, self._check_per_node = drop_hold, check_per_node
        self.repairs: dict[JobId, Repair] = {}
        self.growing: dict[JobId, None] = {}
        self._grew = False

    def take_settings(self, other: Gangs) -> None:
        self._retry = other._retry

    # --------------------------------------------------------------------------------------- what an end means

    def mark_for(self, job: Job, run: Run, state: RunState, fact: RunObserved) -> StopReason | None:
        """REPAIR or SHRUNK if the gang can live with this end, None if it is the end of the gang."""
        spec = job.spec
        runs = latest(self._cluster.runs.get(job.id, {}).values())
        others = [other for other in runs.values() if other.member != run.member]
        asked = job.cancel_requested or job.requeue_requested or job.suspend_requested
        if (
            spec.gang.per_node
        ):  # each node is on its own; what becomes of this one is seen in `control.lifecycle.per_node`
            return None if asked or any(self._is_going(other) for other in others) else SHRUNK
        if spec.size == 1 or asked or fact.permanent:
            return None
        if any(self._is_going(other) for other in others):
            return None
        if state == "lost" and spec.gang.elastic and self._enough(job, others, run):
            return SHRUNK
        if spec.gang.on_failure != "repair" or spec.restart == "never":
            return None
        if not may_retry(spec.retry_on, run_failure_class("lost" if state == "lost" else fact.reason_code)):
            return None
        if fact.reason_code == NOT_REACHED_RUN:
            return REPAIR
        if state == "lost" or fact.reason_code == START_FAILED:
            counted = any(lost_together(other, fact.at_ms) for other in others)
            return REPAIR if counted or job.losses < self._retry.max_losses else None
        return REPAIR if spec.restart == "always" or job.failures < spec.retries else None

    @staticmethod
    def _is_going(run: Run) -> bool:
        """The gang is being stopped, or has failed already."""
        if gang_goes_on(run):
            return False
        return run.stop_reason is not None or run.state in ("failed", "lost")

    @staticmethod
    def _enough(job: Job, others: Collection[Run], run: Run) -> bool:
        task = job.spec.task_of(run.member)
        there = [other for other in others if other.task == task.name and _stays(other)]
        return len(there) >= task.needed

    # ------------------------------------------------------------------------------------------ who is missing

    def look(self, job: Job, now_ms: int, *, pause_ms: int = 0) -> Job:
        """Learn anew which members the gang lacks; said in the job's reason as long as it does."""
        cluster, spec = self._cluster, job.spec
        if spec.gang.per_node:
            self._check_per_node(job.id)
            return job
        runs = latest(cluster.runs.get(job.id, {}).values())
        asked = job.cancel_requested or job.requeue_requested or job.suspend_requested
        if asked or any(self._is_going(run) for run in runs.values()):
            self.forget(job.id)
            return job
        lacking = [run for run in runs.values() if is_missing(run)]
        absent = [m for m in range(spec.size) if m not in runs or _is_away(runs[m])]
        ending = any(run.state == "succeeded" for run in runs.values())
        if lacking:
            self._want(job, lacking, now_ms, pause_ms)
        else:
            self._settled(job.id)
        self.growing.pop(job.id, None)
        if absent and spec.gang.elastic and not ending:
            self.growing[job.id] = None
            self._grew = True
        code, text = "", ""
        if lacking or absent:
            there = spec.size - len(lacking) - len(absent)
            code, text = "PARTIAL", f"{there} of {spec.size} members run"
            if lacking:
                text += f"; member {lacking[0].member} is being replaced"
            elif spec.gang.elastic and not ending:
                text += "; more join when there is room"
        if (job.reason_code, job.reason) != (code, text):
            job = cluster.change_job(job, now_ms, reason_code=code, reason=text)
        return job

    def _want(self, job: Job, lacking: list[Run], now_ms: int, pause_ms: int) -> None:
        known = self.repairs.get(job.id)
        if known is not None:
            self._let_go(known)
        kept = []
        for run in lacking:
            if pause_ms and run.state == "failed":
                member = Member(job.spec, job.spec.task_of(run.member))
                self._cluster.table.hold(run.node, member.task.request, member, run.grant)
                kept.append(Place(run.node, member, run.grant))
        self.repairs[job.id] = Repair(
            self._joining(job, [run.member for run in lacking]),
            since_ms=known.since_ms if known is not None else now_ms,
            not_before_ms=now_ms + pause_ms,
            kept=kept,
        )

    def forget(self, id: JobId) -> None:
        """The gang is going, has ended or starts again from the beginning: no room is kept for it any more."""
        if self.repairs:
            self._settled(id)
        if self.growing:
            self.growing.pop(id, None)
        self._drop_hold(id)

    def leave_node(self, node: NodeName) -> None:
        """A node is about to go: nothing is kept on it any more."""
        for repair in self.repairs.values():
            for name, member, grant in repair.kept:
                if name == node:
                    self._cluster.table.let_go(name, member.task.request, member, grant)
            repair.kept = [place for place in repair.kept if place.node != node]

    def _settled(self, id: JobId) -> None:
        repair = self.repairs.pop(id, None)
        if repair is not None:
            self._let_go(repair)

    def _let_go(self, repair: Repair) -> None:
        for name, member, grant in repair.kept:
            self._cluster.table.let_go(name, member.task.request, member, grant)
        repair.kept = []

    # ------------------------------------------------------------------------------------------- whose turn it is

    def due(self, now_ms: int, *, woken: bool) -> list[Gang]:
        """Gangs whose missing members may be placed now; they come before anyone who waits."""
        out = []
        for id in sorted(self.repairs):
            repair = self.repairs[id]
            if repair.not_before_ms <= now_ms and (woken or repair.fresh):
                repair.fresh = False
                self._let_go(repair)
                out.append(repair.gang)
        return out

    def next_ms(self) -> int | None:
        return min(
            (repair.not_before_ms if repair.fresh else self._patience_ends(repair) for repair in self.repairs.values()),
            default=None,
        )

    def hopeless(self, now_ms: int) -> list[JobId]:
        """Gangs whose missing member found no place in all that time: two of them could wait for each other for ever."""
        return sorted(id for id, repair in self.repairs.items() if self._patience_ends(repair) <= now_ms)

    def _patience_ends(self, repair: Repair) -> int:
        return repair.since_ms + (repair.gang.job.gang.assembly_timeout_ms or self._retry.repair_patience_ms)

    def may_grow(self, *, woken: bool) -> list[Gang]:
        """Gangs that would take in more members, the first in line first."""
        if not self.growing or not (woken or self._grew):
            return []
        self._grew = False
        gangs = []
        for id in self.growing:
            job = self._cluster.jobs[id]
            runs = latest(self._cluster.runs.get(id, {}).values())
            gangs.append(self._joining(job, [m for m in range(job.spec.size) if m not in runs or _is_away(runs[m])]))
        return sorted(gangs, key=lambda gang: gang.order)

    def _joining(self, job: Job, numbers: list[int]) -> Gang:
        """Members for a gang that runs already: one of them at least, the others if there is room for them too."""
        spec = job.spec
        members, needed, extra, first = list[Member](), list[tuple[int, ...]](), list[tuple[int, ...]](), 0
        for task in spec.tasks:
            wanted = tuple(number for number in numbers if first <= number < first + task.count)
            first += task.count
            if wanted:
                members.append(Member(spec, task))
                needed.append(wanted[:1] if len(members) == 1 else ())
                extra.append(wanted[1:] if len(members) == 1 else wanted)
        beside = tuple(sorted({run.node for run in self._cluster.live_runs(job.id)}))
        gang = Gang(
            job.id, spec, job.submitted_ms, tuple(members), tuple(needed), tuple(extra),
            queued_ms=job.submitted_ms, joins=True, beside=beside,
            estimate_ms=self._cluster.estimates.get(job.id) or self._cluster.limit_ms(spec),
        )  # fmt: skip
        (self._profiles.get(spec.profile) or self._profiles["default"]).admit(gang)  # it may outlive its profile
        return gang


def _stays(run: Run) -> bool:
    return run.state == "succeeded" or (run.state not in RUN_ENDED and not run.stop_reason)


def _is_away(run: Run) -> bool:
    return run.state in RUN_ENDED and run.state != "succeeded" and gang_goes_on(run) == "shrink"
