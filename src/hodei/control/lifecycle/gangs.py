"""Gangs that run with members missing: which members are replaced, which may join, and where.

The end of a member is the end of its gang, unless the `stop_reason` of the run says otherwise: the member is replaced
("repair") or left out ("shrink"). Everything here follows from the latest run of each member, so that it is the same
after a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from hodei.control.lifecycle.per_node import PerNode
from hodei.control.lifecycle.retry import RetryPolicy
from hodei.control.lifecycle.runs import (
    NOT_REACHED_RUN,
    START_FAILED,
    gang_action,
    is_missing,
    latest_runs,
    lost_together,
    place_of,
)
from hodei.control.state import ClusterState
from hodei.engine.preemption.victims import Place
from hodei.engine.profile import Profile
from hodei.engine.view import Gang, Member
from hodei.model.facts import RunObserved
from hodei.model.ids import JobId, NodeName
from hodei.model.job import RUN_ENDED, Job, Run, RunState
from hodei.model.outcome import StopReason, may_retry, run_failure_class

REPAIR = StopReason("member_ended", gang="repair")
SHRINK = StopReason("member_ended", gang="shrink")


class Repair(Struct):
    """Missing members of a gang. Until `not_before_ms` their capacity is kept (`kept`). `untried`: not tried yet."""

    gang: Gang
    since_ms: int
    not_before_ms: int = 0
    kept: list[Place] = []
    untried: bool = True


class Gangs:
    def __init__(
        self, cluster: ClusterState, profiles: Mapping[str, Profile], retry: RetryPolicy, per_node: PerNode
    ) -> None:
        self._cluster, self._profiles, self._retry, self._per_node = cluster, profiles, retry, per_node
        self.repairs: dict[JobId, Repair] = {}
        self.growing: dict[JobId, None] = {}
        self._untried_growth = False

    def take_settings(self, other: Gangs) -> None:
        self._retry = other._retry

    def after_end(self, job: Job, run: Run, state: RunState, fact: RunObserved) -> StopReason | None:
        """REPAIR or SHRINK if the gang goes on after this end of a member; None if it is the end of the gang."""
        spec = job.spec
        runs = latest_runs(self._cluster.runs.get(job.id, {}).values())
        others = [other for other in runs.values() if other.member != run.member]
        stopping = job.stop_requested or any(_stops_gang(other) for other in others)
        if spec.gang.per_node:  # nodes are independent: `control.lifecycle.per_node` decides about a retry
            return None if stopping else SHRINK
        if spec.size == 1 or stopping or fact.permanent:
            return None
        if state == "lost" and spec.gang.elastic and _enough(job, others, run):
            return SHRINK
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

    def update(self, job: Job, now_ms: int, *, pause_ms: int = 0) -> Job:
        """Find out which members the gang lacks; the reason of the job says so."""
        cluster, spec = self._cluster, job.spec
        if spec.gang.per_node:
            self._per_node.update(job.id)
            return job
        runs = latest_runs(cluster.runs.get(job.id, {}).values())
        if job.stop_requested or any(_stops_gang(run) for run in runs.values()):
            self.release(job.id)
            return job
        missing = [run for run in runs.values() if is_missing(run)]
        absent = _absent(job, runs)
        ending = any(run.state == "succeeded" for run in runs.values())
        if missing:
            self._start_repair(job, missing, now_ms, pause_ms)
        else:
            self._end_repair(job.id)
        self.growing.pop(job.id, None)
        if absent and spec.gang.elastic and not ending:
            self.growing[job.id] = None
            self._untried_growth = True
        code, text = "", ""
        if missing or absent:
            code, text = "PARTIAL", f"{spec.size - len(missing) - len(absent)} of {spec.size} members run"
            if missing:
                text += f"; member {missing[0].member} is being replaced"
            elif spec.gang.elastic and not ending:
                text += "; more join when there is capacity"
        return cluster.set_reason(job, code, text, now_ms)

    def _start_repair(self, job: Job, missing: list[Run], now_ms: int, pause_ms: int) -> None:
        known = self.repairs.get(job.id)
        if known is not None:
            self._free_kept(known)
        kept = []
        for run in missing:
            if pause_ms and run.state == "failed":
                kept.append(place_of(job.spec, run))
                self._cluster.table.place_by_name(*kept[-1])
        self.repairs[job.id] = Repair(
            self._joining_gang(job, [run.member for run in missing]),
            since_ms=known.since_ms if known is not None else now_ms,
            not_before_ms=now_ms + pause_ms,
            kept=kept,
        )

    def release(self, id: JobId) -> None:
        """The gang stops, ends or starts again: nothing is kept for its missing members."""
        if self.repairs:
            self._end_repair(id)
        if self.growing:
            self.growing.pop(id, None)
        for listener in self._cluster.signals.gang_released:
            listener(id)

    def release_node(self, node: NodeName) -> None:
        """A node is about to be removed: nothing is kept on it."""
        for repair in self.repairs.values():
            for place in repair.kept:
                if place.node == node:
                    self._cluster.table.release_by_name(*place)
            repair.kept = [place for place in repair.kept if place.node != node]

    def _end_repair(self, id: JobId) -> None:
        repair = self.repairs.pop(id, None)
        if repair is not None:
            self._free_kept(repair)

    def _free_kept(self, repair: Repair) -> None:
        for place in repair.kept:
            self._cluster.table.release_by_name(*place)
        repair.kept = []

    def due_repairs(self, now_ms: int, *, woken: bool) -> list[Gang]:
        """Gangs whose missing members may be placed now; they go before all pending gangs."""
        out = []
        for id in sorted(self.repairs):
            repair = self.repairs[id]
            if repair.not_before_ms <= now_ms and (woken or repair.untried):
                repair.untried = False
                self._free_kept(repair)
                out.append(repair.gang)
        return out

    def next_ms(self) -> int | None:
        return min(
            (repair.not_before_ms if repair.untried else self._deadline_ms(repair) for repair in self.repairs.values()),
            default=None,
        )

    def expired_repairs(self, now_ms: int) -> list[JobId]:
        """Gangs whose missing member was not placed in time: two of them could wait for each other forever."""
        return sorted(id for id, repair in self.repairs.items() if self._deadline_ms(repair) <= now_ms)

    def _deadline_ms(self, repair: Repair) -> int:
        return repair.since_ms + (repair.gang.job.gang.assembly_timeout_ms or self._retry.repair_timeout_ms)

    def due_growth(self, *, woken: bool) -> list[Gang]:
        """Elastic gangs with absent members, in queue order."""
        if not self.growing or not (woken or self._untried_growth):
            return []
        self._untried_growth = False
        gangs = []
        for id in self.growing:
            job = self._cluster.jobs[id]
            runs = latest_runs(self._cluster.runs.get(id, {}).values())
            gangs.append(self._joining_gang(job, _absent(job, runs)))
        return sorted(gangs, key=lambda gang: gang.order)

    def _joining_gang(self, job: Job, numbers: list[int]) -> Gang:
        """Members that join a running gang: at least one of them, the others as capacity allows."""
        spec = job.spec
        members, needed, extra, first = list[Member](), list[tuple[int, ...]](), list[tuple[int, ...]](), 0
        for task in spec.tasks:
            joining = tuple(number for number in numbers if first <= number < first + task.count)
            first += task.count
            if joining:
                members.append(Member(spec, task))
                needed.append(joining[:1] if len(members) == 1 else ())
                extra.append(joining[1:] if len(members) == 1 else joining)
        running_nodes = tuple(sorted({run.node for run in self._cluster.live_runs(job.id)}))
        gang = Gang(
            job.id, spec, job.submitted_ms, tuple(members), tuple(needed), tuple(extra),
            queued_ms=job.submitted_ms, is_joining=True, running_nodes=running_nodes,
            estimate_ms=self._cluster.estimates.get(job.id) or self._cluster.limit_ms(spec),
        )  # fmt: skip
        # A new configuration may have removed its profile.
        (self._profiles.get(spec.profile) or self._profiles["default"]).admit(gang)
        return gang


def _stops_gang(run: Run) -> bool:
    """The whole gang is being stopped, or has failed."""
    if gang_action(run):
        return False
    return run.stop_reason is not None or run.state in ("failed", "lost")


def _enough(job: Job, others: Collection[Run], run: Run) -> bool:
    task = job.spec.task_of(run.member)
    staying = [
        other
        for other in others
        if other.task == task.name
        and (other.state == "succeeded" or (other.state not in RUN_ENDED and not other.stop_reason))
    ]
    return len(staying) >= task.needed


def _absent(job: Job, runs: Mapping[int, Run]) -> list[int]:
    """Members that an elastic gang runs without."""
    return [member for member in range(job.spec.size) if member not in runs or _was_shrunk(runs[member])]


def _was_shrunk(run: Run) -> bool:
    return run.state in RUN_ENDED and run.state != "succeeded" and gang_action(run) == "shrink"
