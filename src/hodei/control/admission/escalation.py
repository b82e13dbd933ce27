"""What is done about jobs that wait too long: another profile, rules that count as wishes, a higher class.

Each is an event with its cause, and is kept in `Job.escalation_state`, so that it is found again after a restart. Only what is
configured is watched: a job with nothing to come costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

from msgspec import Struct, structs

from hodei.control.admission.routing import Routing
from hodei.control.state import ClusterState, Timers
from hodei.engine.plan import Refusal
from hodei.engine.view import Gang
from hodei.model.escalation_state import (
    EscalationState,
    decode_escalation,
    encode_escalation,
    next_priority_class,
    priority_class_name,
    relax,
    relaxable_rules,
)
from hodei.model.job import Job, JobSpec, RelaxableRule
from hodei.model.resources import format_duration

# How long nodes are given to come, after a restart say, before none of them counts as able to take a job; then how often
# that is asked again.
_NODES_COME_MS = 5000
_LOOK_AGAIN_MS = 60_000
_KEPT = 10_000


class EscalationPolicy(Struct, frozen=True):
    """0 ms: never. What a job says of itself goes first, but nobody goes higher than `promote_to`."""

    relax: tuple[RelaxableRule, ...] = ()
    relax_after_ms: int = 0
    promote_after_ms: int = 0
    promote_to: int = 750

    def of(self, spec: JobSpec) -> EscalationPolicy:
        """For one job, with what it says itself."""
        said = spec.escalation
        if said == _NOTHING_SAID:
            return self
        cap = min(said.promote_to, self.promote_to) if said.promote_to else self.promote_to
        return EscalationPolicy(
            said.relax or self.relax,
            said.relax_after_ms or self.relax_after_ms,
            said.promote_after_ms or self.promote_after_ms,
            cap,
        )


class Fallback(Struct, frozen=True):
    """Where a profile's jobs go when no node of it could ever take them, or (above 0 ms) when they have waited so long."""

    to: str
    after_ms: int = 0


_NOTHING_SAID = structs.fields(JobSpec)[JobSpec.__struct_fields__.index("escalation")].default


class Escalations:
    """`lines` are the controller's; `enqueue` and `dequeue` put a job into its line and take it out again."""

    def __init__(
        self,
        policy: EscalationPolicy | None = None,
        of_profile: Mapping[str, EscalationPolicy] | None = None,
        fallbacks: Mapping[str, Fallback] | None = None,
        chain: tuple[str, ...] = (),
    ) -> None:
        """`chain`: the backends that are used one after another when one fails."""
        self._chain = chain
        self._policy = policy or EscalationPolicy()
        self._of_profile = dict(of_profile or {})
        self._fallbacks = dict(fallbacks or {})
        self._idle = self._nothing_to_do()
        self._timers = Timers()
        self._hopeless: dict[Hashable, bool] = {}
        self._generation = -1

    def bind(
        self,
        cluster: ClusterState,
        lines: Mapping[str, Any],
        never_fits: Callable[[JobSpec], Refusal | None],
        routing: Routing,
        enqueue: Callable[[Job, int], None],
        dequeue: Callable[[Job], None],
    ) -> None:
        self._cluster, self._lines, self._never_fits, self._routing = cluster, lines, never_fits, routing
        self._enqueue, self._dequeue = enqueue, dequeue

    def take_settings(self, other: Escalations) -> None:
        """From now on by another's settings; those who wait are watched anew when they are put into their lines."""
        self._policy, self._of_profile, self._fallbacks = other._policy, other._of_profile, other._fallbacks
        self._chain = other._chain
        self._idle = self._nothing_to_do()

    def _nothing_to_do(self) -> bool:
        return not (self._fallbacks or self._of_profile or self._policy_counts(""))

    def fallback_of(self, profile: str) -> Fallback | None:
        return self._fallbacks.get(profile)

    # ----------------------------------------------------------------------------------- what does not work

    def relocated(self, job: Job, now_ms: int, problem: str = "") -> Job:
        """The job in another profile if its own is not available (for `problem`, if that is known) and jobs fall back
        then; else itself."""
        there, here = self._routing.availability, job.spec.profile
        problem = problem or there.problem(here)
        to = there.instead_of(here) if problem and there.mode == "fallback" else ""
        if not to or not self._routing.open_to(to, job.spec.project):
            return job
        before = decode_escalation(job.escalation_state)
        escalation = structs.replace(
            before, profile=to, profile_before=before.profile_before or here, moved_ms=now_ms, cause=problem
        )
        self._cluster.emit("job.moved", now_ms, job=job.id, before=here, to=to, cause=problem)
        return self._changed(job, structs.replace(job.spec, profile=to), escalation, now_ms)

    def backend_failed(self, job: Job, backends: Collection[str], now_ms: int) -> Job:
        """A job could not be started there, or was lost: the others of the chain go first for it from now on."""
        before = decode_escalation(job.escalation_state)
        new = [name for name in self._chain if name in backends and name not in before.failed_on]
        if not new:
            return job
        escalation = structs.replace(before, failed_on=(*before.failed_on, *new), failed_ms=now_ms)
        self._cluster.emit("job.failed_over", now_ms, job=job.id, backends=new)
        return self._changed(job, structs.replace(job.spec, failed_on=escalation.failed_on), escalation, now_ms)

    # --------------------------------------------------------------------------------------------- watching

    def watch(self, job: Job, now_ms: int) -> None:
        """It begins to wait, or waits on: note when something is to be done about it."""
        if self._idle and job.spec.escalation is _NOTHING_SAID:
            return
        if self._fallbacks or job.spec.escalation != _NOTHING_SAID or self._policy_counts(job.spec.profile):
            at_ms = self._next_for(job, now_ms)
            if at_ms is not None:
                self._timers.set(max(at_ms, now_ms), job.id)

    def _policy_counts(self, profile: str) -> bool:
        policy = self._of_profile.get(profile, self._policy)
        return bool(policy.relax_after_ms or policy.promote_after_ms)

    def _next_for(self, job: Job, now_ms: int) -> int | None:
        policy, escalation, since = (
            self._for(job.spec),
            decode_escalation(job.escalation_state),
            job.queued_ms or job.submitted_ms,
        )
        due = []
        if policy.relax_after_ms and relaxable_rules(job.spec, policy.relax):
            due.append(since + policy.relax_after_ms)
        if policy.promote_after_ms and next_priority_class(job.spec.priority, policy.promote_to) > job.spec.priority:
            due.append(max(since, escalation.promoted_ms) + policy.promote_after_ms)
        fallback = self._open_fallback(job)
        if fallback is not None:
            due.append(now_ms + _NODES_COME_MS)
            if fallback.after_ms:
                due.append(max(since, escalation.moved_ms) + fallback.after_ms)
        return min(due, default=None)

    def _for(self, spec: JobSpec) -> EscalationPolicy:
        return self._of_profile.get(spec.profile, self._policy).of(spec)

    def _open_fallback(self, job: Job) -> Fallback | None:
        fallback = self._fallbacks.get(job.spec.profile)
        if fallback is None or fallback.to not in self._lines:
            return None
        return fallback if self._routing.open_to(fallback.to, job.spec.project) else None

    def next_ms(self) -> int | None:
        return self._timers.next_ms()

    # ------------------------------------------------------------------------------------------------ doing

    def run_out(self, now_ms: int) -> None:
        """Do what has become due."""
        for id in self._timers.due(now_ms):
            job = self._cluster.jobs.get(id)
            line = self._lines.get(job.spec.profile) if job is not None else None
            if job is None or job.state != "pending" or line is None or id not in line.gangs:
                continue  # it has started, or room is being made for it: nothing need be done
            changed = self._helped(job, line.gangs[id], now_ms)
            if changed is job:
                self._again(job, now_ms)
            else:
                gang = line.gangs[id]
                self._dequeue(job)
                self._enqueue(changed, now_ms)  # which watches it again
                moved = self._lines[changed.spec.profile].gangs.get(id)
                if moved is not None:
                    moved.attempts, moved.last_attempt_ms = gang.attempts, gang.last_attempt_ms

    def _again(self, job: Job, now_ms: int) -> None:
        """Nothing was due after all, or it is not helped yet."""
        at_ms = self._next_for(job, now_ms + _LOOK_AGAIN_MS - _NODES_COME_MS)
        if at_ms is not None:
            self._timers.set(max(at_ms, now_ms + 1), job.id)

    def _helped(self, job: Job, gang: Gang, now_ms: int) -> Job:
        policy, since = self._for(job.spec), job.queued_ms or job.submitted_ms
        wishes = relaxable_rules(job.spec, policy.relax) if policy.relax_after_ms else ()
        if wishes and since + policy.relax_after_ms <= now_ms:
            job = self._relax(job, wishes, now_ms)
        promoted_ms = max(since, decode_escalation(job.escalation_state).promoted_ms)
        if policy.promote_after_ms and promoted_ms + policy.promote_after_ms <= now_ms:
            job = self._promote(job, policy.promote_to, now_ms)
        return self._fall_back(job, gang, since, now_ms)

    def _relax(self, job: Job, wishes: tuple[RelaxableRule, ...], now_ms: int) -> Job:
        before = decode_escalation(job.escalation_state)
        escalation = structs.replace(before, rules=(*before.rules, *wishes), relaxed_ms=now_ms)
        cause = f"it has waited for {_waited(job, now_ms)}"
        self._cluster.emit("job.relaxed", now_ms, job=job.id, rules=list(wishes), cause=cause)
        return self._changed(job, relax(job.spec, wishes), escalation, now_ms)

    def _promote(self, job: Job, cap: int, now_ms: int) -> Job:
        priority = next_priority_class(job.spec.priority, cap)
        if priority == job.spec.priority:
            return job
        before = decode_escalation(job.escalation_state)
        first = before.priority_before if before.priority_before >= 0 else job.spec.priority
        escalation = structs.replace(before, priority=priority, priority_before=first, promoted_ms=now_ms)
        self._cluster.emit(
            "job.promoted", now_ms, job=job.id, before=priority_class_name(job.spec.priority), to=priority_class_name(priority),
            cause=f"it has waited for {_waited(job, now_ms)}",
        )  # fmt: skip
        return self._changed(job, structs.replace(job.spec, priority=priority), escalation, now_ms)

    def _fall_back(self, job: Job, gang: Gang, since_ms: int, now_ms: int) -> Job:
        fallback, before = self._open_fallback(job), decode_escalation(job.escalation_state)
        if fallback is None:
            return job
        since_ms = max(since_ms, before.moved_ms)
        if fallback.after_ms and since_ms + fallback.after_ms <= now_ms:
            cause = f"it has waited there for {format_duration((now_ms - since_ms) // 1000 * 1000)}"
        elif now_ms - since_ms >= _NODES_COME_MS and self._is_hopeless(job, gang):
            cause = "no node there could take it even when idle"
        else:
            return job
        here, to = job.spec.profile, fallback.to
        escalation = structs.replace(
            before, profile=to, profile_before=before.profile_before or here, moved_ms=now_ms, cause=cause
        )
        self._cluster.emit("job.moved", now_ms, job=job.id, before=here, to=to, cause=cause)
        return self._changed(job, structs.replace(job.spec, profile=to), escalation, now_ms)

    def _is_hopeless(self, job: Job, gang: Gang) -> bool:
        """Asked once for all who are alike, as long as the nodes stay."""
        generation = self._cluster.table.generation
        if self._generation != generation or len(self._hopeless) > _KEPT:
            self._generation = generation
            self._hopeless.clear()
        key = (job.spec.profile, gang.group)
        if key not in self._hopeless:
            self._hopeless[key] = self._never_fits(job.spec) is not None
        return self._hopeless[key]

    def _changed(self, job: Job, spec: JobSpec, escalation: EscalationState, now_ms: int) -> Job:
        # The line that it waits in is found by its spec, so the caller takes it out by the job as it was.
        return self._cluster.change_job(job, now_ms, spec=spec, escalation_state=encode_escalation(escalation))


def _waited(job: Job, now_ms: int) -> str:
    return format_duration((now_ms - (job.queued_ms or job.submitted_ms)) // 1000 * 1000)
