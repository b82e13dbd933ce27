"""Escalation: what is done for jobs that wait too long: relax rules, promote, move to another profile.

Each step is an event with its cause, and is kept in `Job.escalation_state`, so that it is known after a restart. Only
jobs with an escalation to come are watched.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from hodei.control.state import ClusterState, Timers
from hodei.engine.view import Gang
from hodei.model.escalation_state import (
    next_priority_class,
    priority_class_name,
    relax,
    relaxable_rules,
)
from hodei.model.job import EscalationState, Job, JobSpec, RelaxableRule
from hodei.model.resources import format_duration

if TYPE_CHECKING:
    from hodei.control.admission.gate import Gate
    from hodei.control.admission.routing import Routing

# Nodes get this long to join, for example after a restart, before a job counts as impossible; then the check is repeated.
_NODES_JOIN_MS = 5000
_CHECK_AGAIN_MS = 60_000
_MAX_CACHED = 10_000


class EscalationPolicy(Struct, frozen=True):
    """0 ms: never. The settings of a job come first, but `promote_to` is the limit for all."""

    relax: tuple[RelaxableRule, ...] = ()
    relax_after_ms: int = 0
    promote_after_ms: int = 0
    promote_to: int = 750

    def of(self, spec: JobSpec) -> EscalationPolicy:
        """The policy of one job, with its own settings."""
        own = spec.escalation
        if own == _DEFAULT_ESCALATION:
            return self
        cap = min(own.promote_to, self.promote_to) if own.promote_to else self.promote_to
        return EscalationPolicy(
            own.relax or self.relax,
            own.relax_after_ms or self.relax_after_ms,
            own.promote_after_ms or self.promote_after_ms,
            cap,
        )


class Fallback(Struct, frozen=True):
    """The profile for jobs that no node of their own could ever take, or that have waited for `after_ms` (0: never)."""

    to: str
    after_ms: int = 0


_DEFAULT_ESCALATION = structs.fields(JobSpec)[JobSpec.__struct_fields__.index("escalation")].default


class Escalations:
    def __init__(
        self,
        policy: EscalationPolicy | None = None,
        of_profile: Mapping[str, EscalationPolicy] | None = None,
        fallbacks: Mapping[str, Fallback] | None = None,
        chain: tuple[str, ...] = (),
    ) -> None:
        """`chain`: the backends that are used in this order when one fails."""
        self._chain = chain
        self._policy = policy or EscalationPolicy()
        self._of_profile = dict(of_profile or {})
        self._fallbacks = dict(fallbacks or {})
        self._idle = self._nothing_to_do()
        self._timers = Timers()
        self._impossible: dict[Hashable, bool] = {}
        self._generation = -1

    def bind(self, cluster: ClusterState, queues: Mapping[str, Any], gate: Gate, routing: Routing) -> None:
        self._cluster, self._queues, self._gate, self._routing = cluster, queues, gate, routing

    def take_settings(self, other: Escalations) -> None:
        """Use other settings; pending jobs are watched again when they are put into their new queues."""
        self._policy, self._of_profile, self._fallbacks = other._policy, other._of_profile, other._fallbacks
        self._chain = other._chain
        self._idle = self._nothing_to_do()

    def _nothing_to_do(self) -> bool:
        return not (self._fallbacks or self._of_profile or self._policy_counts(""))

    def fallback_of(self, profile: str) -> Fallback | None:
        return self._fallbacks.get(profile)

    def leave_profile(self, job: Job, now_ms: int, problem: str = "") -> Job:
        """The job in a fallback profile, if its own is unavailable (because of `problem`) and there is one; else itself."""
        availability = self._routing.availability
        problem = problem or availability.problem(job.spec.profile)
        to = availability.fallback(job.spec.profile) if problem and availability.mode == "fallback" else ""
        if not to or not self._routing.open_to(to, job.spec.project):
            return job
        return self._move(job, to, problem, now_ms)

    def backend_failed(self, job: Job, backends: Collection[str], now_ms: int) -> Job:
        """The job could not be started on these backends, or was lost: from now on it prefers the others of the chain."""
        before = job.escalation_state
        new = [name for name in self._chain if name in backends and name not in before.failed_on]
        if not new:
            return job
        escalation = structs.replace(before, failed_on=(*before.failed_on, *new), failed_ms=now_ms)
        self._cluster.emit("job.failed_over", now_ms, job=job.id, backends=new)
        return self._changed(job, structs.replace(job.spec, failed_on=escalation.failed_on), escalation, now_ms)

    def watch(self, job: Job, now_ms: int) -> None:
        """Set a timer for the next escalation of a pending job."""
        if self._idle and job.spec.escalation is _DEFAULT_ESCALATION:
            return
        if self._fallbacks or job.spec.escalation != _DEFAULT_ESCALATION or self._policy_counts(job.spec.profile):
            at_ms = self._next_for(job, now_ms)
            if at_ms is not None:
                self._timers.set(max(at_ms, now_ms), job.id)

    def _policy_counts(self, profile: str) -> bool:
        policy = self._of_profile.get(profile, self._policy)
        return bool(policy.relax_after_ms or policy.promote_after_ms)

    def _next_for(self, job: Job, now_ms: int) -> int | None:
        policy, escalation, since = self._for(job.spec), job.escalation_state, job.waiting_since_ms
        due = []
        if policy.relax_after_ms and relaxable_rules(job.spec, policy.relax):
            due.append(since + policy.relax_after_ms)
        if policy.promote_after_ms and next_priority_class(job.spec.priority, policy.promote_to) > job.spec.priority:
            due.append(max(since, escalation.promoted_ms) + policy.promote_after_ms)
        fallback = self._open_fallback(job)
        if fallback is not None:
            due.append(now_ms + _NODES_JOIN_MS)
            if fallback.after_ms:
                due.append(max(since, escalation.moved_ms) + fallback.after_ms)
        return min(due, default=None)

    def _for(self, spec: JobSpec) -> EscalationPolicy:
        return self._of_profile.get(spec.profile, self._policy).of(spec)

    def _open_fallback(self, job: Job) -> Fallback | None:
        fallback = self._fallbacks.get(job.spec.profile)
        if fallback is None or fallback.to not in self._queues:
            return None
        return fallback if self._routing.open_to(fallback.to, job.spec.project) else None

    def next_ms(self) -> int | None:
        return self._timers.next_ms()

    def expire(self, now_ms: int) -> None:
        """Carry out the escalations that are due."""
        for id in self._timers.due(now_ms):
            job = self._cluster.jobs.get(id)
            queue = self._queues.get(job.spec.profile) if job is not None else None
            if job is None or job.state != "pending" or queue is None or id not in queue.gangs:
                continue  # it has started, or victims are being preempted for it
            changed = self._escalate(job, queue.gangs[id], now_ms)
            if changed is job:
                self._watch_again(job, now_ms)
            else:
                gang = queue.gangs[id]
                self._cluster.dequeue(job)
                self._cluster.enqueue(changed, now_ms)  # which watches it again
                moved = self._queues[changed.spec.profile].gangs.get(id)
                if moved is not None:
                    moved.attempts, moved.last_attempt_ms = gang.attempts, gang.last_attempt_ms

    def _watch_again(self, job: Job, now_ms: int) -> None:
        at_ms = self._next_for(job, now_ms + _CHECK_AGAIN_MS - _NODES_JOIN_MS)
        if at_ms is not None:
            self._timers.set(max(at_ms, now_ms + 1), job.id)

    def _escalate(self, job: Job, gang: Gang, now_ms: int) -> Job:
        policy, since = self._for(job.spec), job.waiting_since_ms
        rules = relaxable_rules(job.spec, policy.relax) if policy.relax_after_ms else ()
        if rules and since + policy.relax_after_ms <= now_ms:
            job = self._relax(job, rules, now_ms)
        promoted_ms = max(since, job.escalation_state.promoted_ms)
        if policy.promote_after_ms and promoted_ms + policy.promote_after_ms <= now_ms:
            job = self._promote(job, policy.promote_to, now_ms)
        return self._fall_back(job, gang, since, now_ms)

    def _relax(self, job: Job, rules: tuple[RelaxableRule, ...], now_ms: int) -> Job:
        before = job.escalation_state
        escalation = structs.replace(before, rules=(*before.rules, *rules), relaxed_ms=now_ms)
        cause = f"it has waited for {_waited(job, now_ms)}"
        self._cluster.emit("job.relaxed", now_ms, job=job.id, rules=list(rules), cause=cause)
        return self._changed(job, relax(job.spec, rules), escalation, now_ms)

    def _promote(self, job: Job, cap: int, now_ms: int) -> Job:
        priority = next_priority_class(job.spec.priority, cap)
        if priority == job.spec.priority:
            return job
        before = job.escalation_state
        first = before.priority_before if before.priority_before >= 0 else job.spec.priority
        escalation = structs.replace(before, priority=priority, priority_before=first, promoted_ms=now_ms)
        self._cluster.emit(
            "job.promoted", now_ms, job=job.id, before=priority_class_name(job.spec.priority), to=priority_class_name(priority),
            cause=f"it has waited for {_waited(job, now_ms)}",
        )  # fmt: skip
        return self._changed(job, structs.replace(job.spec, priority=priority), escalation, now_ms)

    def _fall_back(self, job: Job, gang: Gang, since_ms: int, now_ms: int) -> Job:
        fallback = self._open_fallback(job)
        if fallback is None:
            return job
        since_ms = max(since_ms, job.escalation_state.moved_ms)
        if fallback.after_ms and since_ms + fallback.after_ms <= now_ms:
            cause = f"it has waited there for {format_duration((now_ms - since_ms) // 1000 * 1000)}"
        elif now_ms - since_ms >= _NODES_JOIN_MS and self._is_impossible(job, gang):
            cause = "no node there could take it even when idle"
        else:
            return job
        return self._move(job, fallback.to, cause, now_ms)

    def _move(self, job: Job, to: str, cause: str, now_ms: int) -> Job:
        """The job in another profile."""
        before, here = job.escalation_state, job.spec.profile
        escalation = structs.replace(
            before, profile=to, profile_before=before.profile_before or here, moved_ms=now_ms, cause=cause
        )
        self._cluster.emit("job.moved", now_ms, job=job.id, before=here, to=to, cause=cause)
        return self._changed(job, structs.replace(job.spec, profile=to), escalation, now_ms)

    def _is_impossible(self, job: Job, gang: Gang) -> bool:
        """Whether no node could take it even when idle; cached for equal gangs until the nodes change."""
        generation = self._cluster.table.generation
        if self._generation != generation or len(self._impossible) > _MAX_CACHED:
            self._generation = generation
            self._impossible.clear()
        key = (job.spec.profile, gang.group)
        if key not in self._impossible:
            self._impossible[key] = self._gate.never_fits(job.spec) is not None
        return self._impossible[key]

    def _changed(self, job: Job, spec: JobSpec, escalation: EscalationState, now_ms: int) -> Job:
        # Its queue is found by the spec, so that the caller dequeues the job as it was before.
        return self._cluster.change_job(job, now_ms, spec=spec, escalation_state=escalation)


def _waited(job: Job, now_ms: int) -> str:
    return format_duration((now_ms - job.waiting_since_ms) // 1000 * 1000)
