"""Routing: the profile of a job, how long it may wait there, and what happens if the profile is unavailable.

Rules apply to jobs that name no profile (`default`): the first one that matches, and whose profile is open to the project
of the job.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, structs

from hodei.control.admission.escalation import Escalations
from hodei.control.lifecycle.retry import Backoff, BreakerPolicy, Breakers
from hodei.control.state import ClusterState
from hodei.engine.explain import summary
from hodei.engine.plan import Refusal
from hodei.engine.points import Trigger
from hodei.model.affinity import Requirement, all_match
from hodei.model.errors import InvalidInput
from hodei.model.escalation_state import EscalationStep, apply_escalation, escalation_steps
from hodei.model.explanation import Status
from hodei.model.job import Job, JobSpec
from hodei.model.resources import GPU, format_duration, format_time

if TYPE_CHECKING:
    from hodei.control.admission.gate import Gate

DEFAULT = "default"
# A plugin that has failed in this many rounds in a row counts as broken.
FAULTS = 3
_DEFAULT_GRACE_MS = structs.fields(JobSpec)[JobSpec.__struct_fields__.index("grace_ms")].default


# How long a job may wait before it fails: by the job itself, else by its profile, else by the server.


class WaitLimits(Struct, frozen=True):
    """Milliseconds, 0 for none. `timeout_from` and `queue_time_from`: where they are set, for messages."""

    scheduling_timeout_ms: int = 0
    max_queue_time_ms: int = 0
    timeout_from: str = ""
    queue_time_from: str = ""
    grace_ms: int = 0


class WaitDefaults:
    def __init__(self, of_profile: Mapping[str, WaitLimits] | None = None, others: WaitLimits | None = None) -> None:
        """`others`: for all other profiles."""
        self._of_profile, self._others = dict(of_profile or {}), others or WaitLimits()
        self.any = any(
            limits.scheduling_timeout_ms or limits.max_queue_time_ms or limits.grace_ms
            for limits in (self._others, *self._of_profile.values())
        )

    def apply(self, spec: JobSpec) -> JobSpec:
        """The spec with the defaults for what it leaves out."""
        limits = self._of_profile.get(spec.profile, self._others)
        changes: dict[str, int | str] = {}
        if limits.scheduling_timeout_ms and not spec.scheduling_timeout_ms:
            changes["scheduling_timeout_ms"] = limits.scheduling_timeout_ms
            changes["scheduling_timeout_from"] = limits.timeout_from
        if limits.max_queue_time_ms and not spec.max_queue_time_ms:
            changes["max_queue_time_ms"] = limits.max_queue_time_ms
            changes["max_queue_time_from"] = limits.queue_time_from
        if limits.grace_ms and spec.grace_ms == _DEFAULT_GRACE_MS:
            changes["grace_ms"] = limits.grace_ms  # the default value counts as left out
        return structs.replace(spec, **changes) if changes else spec


def wait_deadline_ms(job: Job) -> int | None:
    """When a pending job fails because it has waited too long; None for never."""
    found = _deadline(job)
    return found[0] if found is not None else None


def wait_exceeded(job: Job, now_ms: int, refusal: Refusal | None = None) -> tuple[str, str] | None:
    """The code and the text with which a pending job fails now, if it has waited too long. `refusal`: the last refusal of
    jobs of its shape: of many equal jobs only the first is tried and has its own reason."""
    found = _deadline(job)
    if found is None or found[0] > now_ms:
        return None
    last = job.reason
    if not last or job.reason_code == "REQUEUED":  # why it was queued, not why it still waits
        last = summary(refusal.verdicts, refusal.nodes) if refusal is not None else "other jobs were ahead"
    if found[1] == "scheduling_timeout":
        return "SCHEDULING_TIMEOUT", f"not scheduled within its scheduling timeout; {last}"
    longest = format_duration(job.spec.max_queue_time_ms)
    return "QUEUE_TIME_EXCEEDED", f"not started within its longest time in the queue ({longest}); {last}"


def wait_limit_steps(job: Job) -> tuple[EscalationStep, ...]:
    """For `why`: until when the job may wait, and where that is set."""
    found = _deadline(job)
    if found is None:
        return ()
    at_ms, name = found
    span_ms, set_by = job.spec.max_queue_time_ms, job.spec.max_queue_time_from
    if name == "scheduling_timeout":
        span_ms, set_by = job.spec.scheduling_timeout_ms, job.spec.scheduling_timeout_from
    source = f"{name} from {set_by}" if set_by else f"its own {name}"
    return (EscalationStep(f"fails if it still waits at {format_time(at_ms)} ({format_duration(span_ms)}: {source})"),)


def _deadline(job: Job) -> tuple[int, str] | None:
    """The earlier of the two deadlines, and its name."""
    spec, since = job.spec, job.waiting_since_ms
    due = []
    if spec.scheduling_timeout_ms:
        due.append((since + spec.scheduling_timeout_ms, "scheduling_timeout"))
    if spec.max_queue_time_ms and not job.attempt:
        due.append((since + spec.max_queue_time_ms, "max_queue_time"))
    return min(due, default=None)


class ProfileAvailability:
    """Which profiles can be used. `profiles`: those that exist. `fallbacks`: where the jobs of a profile go. `broken`:
    profiles that could not be built, and why. `mode`: jobs of an unavailable profile are held or fall back."""

    def __init__(
        self,
        mode: Literal["hold", "fallback"] = "hold",
        profiles: Collection[str] = (),
        fallbacks: Mapping[str, str] | None = None,
        paused: Collection[str] = (),
        broken: Mapping[str, str] | None = None,
    ) -> None:
        self.mode = mode
        self.paused = frozenset(paused)
        self._profiles, self._fallbacks, self._broken = frozenset(profiles), dict(fallbacks or {}), dict(broken or {})
        # Nothing to check: the usual case.
        self.idle = mode == "hold" and not self.paused

    def problem(self, profile: str) -> str:
        """Why the profile is not available; "" if it is."""
        if profile in self.paused:
            return f"profile {profile} is paused"
        if profile in self._broken:
            return f"profile {profile} cannot be used: {self._broken[profile]}"
        if self._profiles and profile not in self._profiles:
            return f"profile {profile} is not configured"
        return ""

    def fallback(self, profile: str) -> str:
        """The first available profile after this one; "" if there is none."""
        seen = {profile}
        at = profile
        while (at := self._fallbacks.get(at, DEFAULT)) not in seen:
            if not self.problem(at):
                return at
            seen.add(at)
        return ""


class RouteRule(Struct, frozen=True):
    """Conditions that all must hold; one that is left out (None, "", ()) matches every job. `text`: for messages."""

    profile: str
    gpu: bool | None = None
    priority_at_least: int | None = None
    project: str = ""
    user: str = ""
    labels: tuple[Requirement, ...] = ()
    workload: str = ""
    text: str = ""

    def matches(self, spec: JobSpec) -> bool:
        if self.gpu is not None and self.gpu != any(task.request.get(GPU, 0) for task in spec.tasks):
            return False
        if self.priority_at_least is not None and spec.priority < self.priority_at_least:
            return False
        if self.project and not fnmatchcase(spec.project, self.project):
            return False
        if self.user and not fnmatchcase(spec.user, self.user):
            return False
        if self.workload and spec.workload.__struct_config__.tag != self.workload:
            return False
        return all_match(self.labels, spec.labels)


class Routing:
    """`projects`: by profile, the patterns of the projects that may use it; none: all. `waits`: default wait limits."""

    def __init__(
        self,
        rules: Sequence[RouteRule] = (),
        projects: Mapping[str, Sequence[str]] | None = None,
        waits: WaitDefaults | None = None,
        availability: ProfileAvailability | None = None,
    ) -> None:
        self._rules, self._waits = tuple(rules), waits or WaitDefaults()
        self.availability = availability or ProfileAvailability()
        self._projects = {name: tuple(names) for name, names in (projects or {}).items() if names}
        self._last: tuple[JobSpec, JobSpec] | None = None

    def route(self, spec: JobSpec) -> JobSpec:
        """The spec with its profile and wait limits."""
        if not self._rules and not self._waits.any and self.availability.mode == "hold":
            return spec
        if self._last is not None and self._last[0] is spec:
            return self._last[1]  # jobs of a bulk submit share one spec, and keep sharing it
        found = self._match(spec) if spec.profile == DEFAULT and not spec.routed_by else spec
        found = self._waits.apply(self._available(found))
        self._last = (spec, found)
        return found

    def _match(self, spec: JobSpec) -> JobSpec:
        for number, rule in enumerate(self._rules, 1):
            if rule.matches(spec) and self.open_to(rule.profile, spec.project):
                return structs.replace(spec, profile=rule.profile, routed_by=f"rule {number} ({rule.text})")
        return spec

    def _available(self, spec: JobSpec) -> JobSpec:
        """With the fallback profile if its own is not available."""
        availability = self.availability
        problem = availability.problem(spec.profile) if availability.mode == "fallback" else ""
        to = availability.fallback(spec.profile) if problem else ""
        # A profile that is closed to the project stays, and `check` refuses it: a pause grants no rights.
        if not to or not self.open_to(spec.profile, spec.project) or not self.open_to(to, spec.project):
            return spec
        by = spec.routed_by or "fallback"
        return structs.replace(spec, profile=to, routed_by=f"{by}, as {problem}")

    def take_settings(self, other: Routing) -> None:
        self._rules, self._projects, self._last = other._rules, other._projects, None
        self._waits, self.availability = other._waits, other.availability

    def open_to(self, profile: str, project: str) -> bool:
        names = self._projects.get(profile)
        return names is None or any(fnmatchcase(project, name) for name in names)

    def check(self, spec: JobSpec) -> None:
        """InvalidInput if the job's project may not use the profile that it asks for."""
        if self._projects and not self.open_to(spec.profile, spec.project):
            allowed = ", ".join(self._projects[spec.profile])
            raise InvalidInput(
                f"{spec.title}: profile {spec.profile!r} is not open to project {spec.project!r}",
                hint=f"it is open to: {allowed}; leave profile out, or name another",
                code="PROFILE_FORBIDDEN",
            )


class ProfileRouter:
    """Routing, escalation and timed retries of all profiles, as one object for the controller."""

    def __init__(
        self,
        routing: Routing | None = None,
        escalations: Escalations | None = None,
        breaker: BreakerPolicy | None = None,
    ) -> None:
        self.routing = routing or Routing()
        self.escalations = escalations or Escalations()
        self.breakers = Breakers(breaker)
        self._tick_ms: int | None = None

    def bind(self, cluster: ClusterState, queues: Mapping[str, Any], gate: Gate) -> None:
        """Connect it to the controller that uses it."""
        gate.routing = self.routing
        self._queues = queues
        self.escalations.bind(cluster, queues, gate, self.routing)

    def take_settings(self, other: ProfileRouter) -> None:
        self.routing.take_settings(other.routing)
        self.escalations.take_settings(other.escalations)
        self.breakers.take_settings(other.breakers)

    def route(self, job: Job) -> Job:
        """A new job with its profile."""
        spec = self.routing.route(job.spec)
        return job if spec is job.spec else structs.replace(job, spec=spec)

    def restore(self, job: Job) -> Job:
        """A stored job with its escalations applied."""
        spec = apply_escalation(job.spec, job.escalation_state)
        return job if spec is job.spec else structs.replace(job, spec=spec)

    def wake(self, triggers: Collection[Trigger], now_ms: int) -> Collection[str]:
        """Wake the gangs that a trigger may unblock. Returns the queues that are retried because time has passed."""
        self.breakers.woken(triggers)
        if "time" not in triggers:
            for queue in self._queues.values():
                if queue.gangs:
                    queue.wake(*triggers)
            return ()
        facts = [trigger for trigger in triggers if trigger != "time"]
        ticked = {name for name in self._queues if self.breakers.allows(name, now_ms)}
        for name, queue in self._queues.items():
            if name in ticked:
                queue.wake(*triggers)
            elif facts:
                queue.wake(*facts)
        return ticked

    def expire(self, now_ms: int) -> bool:
        """Carry out due escalations; returns whether a timed retry is due."""
        self.escalations.expire(now_ms)
        if self._tick_ms is None or now_ms < self._tick_ms:
            return False
        self._tick_ms = self.breakers.resume_ms(now_ms)
        return True

    def next_ms(self) -> int | None:
        return min((at for at in (self._tick_ms, self.escalations.next_ms()) if at is not None), default=None)

    def ticked(self, queue: str, tried: int, refused: int, now_ms: int) -> None:
        """Count a timed round of a queue."""
        if tried:
            self.breakers.ticked(queue, tried - refused, now_ms)

    def schedule_retry(self, queue: str, now_ms: int, known_ms: int | None) -> None:
        """A gang was refused that time may unblock; `known_ms`: the earliest time, if it is known."""
        at_ms = self.breakers.next_ms(queue, now_ms, known_ms)
        self._tick_ms = at_ms if self._tick_ms is None else min(self._tick_ms, at_ms)

    def after_fault(self, queue: str, now_ms: int, backoff: Backoff) -> int:
        return self.breakers.after_fault(queue, now_ms, backoff)

    def is_broken(self, queue: str) -> bool:
        """Whether a plugin of this profile has failed in several rounds in a row."""
        breaker = self.breakers.of.get(queue)
        return breaker is not None and breaker.faults >= FAULTS

    def escalation_steps(self, job: Job, status: Status) -> tuple[EscalationStep, ...]:
        """The escalations of a job so far, and those that may follow."""
        out, profile = list(escalation_steps(job.spec, job.escalation_state)), job.spec.profile
        if job.state != "pending":
            return tuple(out)
        out += wait_limit_steps(job)
        fallback, breaker = self.escalations.fallback_of(profile), self.breakers.of.get(profile)
        if fallback is not None and self.routing.open_to(fallback.to, job.spec.project):
            when = f"after {format_duration(fallback.after_ms)} or " if fallback.after_ms else ""
            text = f"goes to profile {fallback.to} {when}if no node of {profile} could ever take it"
            out.append(EscalationStep(text))
        elif status == "unsatisfiable" and len(self._queues) > 1:
            out.append(EscalationStep(f"unschedulable: its profile {profile} has no fallback that it could go to"))
        if breaker is not None and breaker.open:
            every = f"every {breaker.pause_ms / 1000:g} s, and at once when capacity is freed"
            text = f"the cluster stays full: the queue of profile {profile} is retried {every}"
            out.append(EscalationStep(text, breaker.since_ms))
        return tuple(out)
