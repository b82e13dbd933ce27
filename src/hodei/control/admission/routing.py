"""Which of several schedulers (profiles) a job goes to: the one it names, or the first rule that fits it; and who may use it.

Rules hold for jobs that name no profile (`default`). A rule whose profile is not open to the job's project is passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from msgspec import Struct, structs

from hodei.engine.explain import summary
from hodei.engine.plan import Refusal
from hodei.model.affinity import Requirement, all_match
from hodei.model.errors import InvalidInput
from hodei.model.escalation_state import EscalationStep
from hodei.model.job import Job, JobSpec
from hodei.model.resources import GPU, format_duration, format_time

# ----------------------------------------------------------------------------------------- wait limits
# How long a job may wait before it fails: what the job says, else its profile, else the server.


_USUAL_GRACE_MS = structs.fields(JobSpec)[JobSpec.__struct_fields__.index("grace_ms")].default


class WaitLimits(Struct, frozen=True):
    """Milliseconds, 0 for none. `timeout_from` and `queue_time_from`: who has set them, for people."""

    scheduling_timeout_ms: int = 0
    max_queue_time_ms: int = 0
    timeout_from: str = ""
    queue_time_from: str = ""
    grace_ms: int = 0


class WaitDefaults:
    def __init__(self, of_profile: Mapping[str, WaitLimits] | None = None, others: WaitLimits | None = None) -> None:
        """`others`: for profiles that are not named."""
        self._of_profile, self._others = dict(of_profile or {}), others or WaitLimits()
        self.any = any(
            limits.scheduling_timeout_ms or limits.max_queue_time_ms or limits.grace_ms
            for limits in (self._others, *self._of_profile.values())
        )

    def given(self, spec: JobSpec) -> JobSpec:
        """The spec with what it leaves to the defaults."""
        limits = self._of_profile.get(spec.profile, self._others)
        changes: dict[str, int] = {}
        said = []
        if limits.scheduling_timeout_ms and not spec.scheduling_timeout_ms:
            changes["scheduling_timeout_ms"] = limits.scheduling_timeout_ms
            said.append(f"scheduling_timeout from {limits.timeout_from}")
        if limits.max_queue_time_ms and not spec.max_queue_time_ms:
            changes["max_queue_time_ms"] = limits.max_queue_time_ms
            said.append(f"max_queue_time from {limits.queue_time_from}")
        if limits.grace_ms and spec.grace_ms == _USUAL_GRACE_MS:
            changes["grace_ms"] = limits.grace_ms  # asking for just what everyone gets counts as not saying
        if not changes:
            return spec
        return structs.replace(spec, **changes, waits_by=", ".join(said) or spec.waits_by)


def due_ms(job: Job) -> int | None:
    """When a job that waits fails because of it; None for never."""
    found = _due(job)
    return found[0] if found is not None else None


def overdue(job: Job, now_ms: int, refusal: Refusal | None = None) -> tuple[str, str] | None:
    """The code and the text with which a job that waits fails now. `refusal`: what its line last heard of jobs of its
    shape; of many that are alike only the first is asked about, and only that one has it as its own reason."""
    found = _due(job)
    if found is None or found[0] > now_ms:
        return None
    last = job.reason
    if (
        not last or job.reason_code == "REQUEUED"
    ):  # that it was requeued tells why it is in line, not why it still waits
        last = summary(refusal.verdicts, refusal.nodes) if refusal is not None else "other jobs were ahead"
    if found[1] == "scheduling_timeout":
        return "SCHEDULING_TIMEOUT", f"not scheduled within its scheduling timeout; {last}"
    longest = format_duration(job.spec.max_queue_time_ms)
    return "QUEUE_TIME_EXCEEDED", f"not started within its longest time in the queue ({longest}); {last}"


def limits_told(job: Job) -> tuple[EscalationStep, ...]:
    """For `why`: until when it may wait, and who says so."""
    found = _due(job)
    if found is None:
        return ()
    at_ms, name = found
    whose = next((part for part in job.spec.waits_by.split(", ") if part.startswith(f"{name} ")), f"its own {name}")
    span_ms = job.spec.scheduling_timeout_ms if name == "scheduling_timeout" else job.spec.max_queue_time_ms
    return (EscalationStep(f"fails if it still waits at {format_time(at_ms)} ({format_duration(span_ms)}: {whose})"),)


def _due(job: Job) -> tuple[int, str] | None:
    """The first of the two moments, and which it is."""
    spec, since = job.spec, job.queued_ms or job.submitted_ms
    due = []
    if spec.scheduling_timeout_ms:
        due.append((since + spec.scheduling_timeout_ms, "scheduling_timeout"))
    if spec.max_queue_time_ms and not job.attempt:
        due.append((since + spec.max_queue_time_ms, "max_queue_time"))
    return min(due, default=None)


# ----------------------------------------------------------------------------------------------------


# -------------------------------------------------------------------------------- profile availability
# A scheduler profile that is not available: not configured, paused, or with a plugin that fails. What becomes of its
# jobs.


# A plugin that has failed in so many rounds one after another is taken to be broken.
FAULTS = 3


class ProfileAvailability:
    """`profiles`: those that there are. `fallbacks`: where a profile's jobs go. `paused`: names. `broken`: profiles that
    could not be made, and why."""

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
        # Whether there is anything to look at: most servers have every profile at work.
        self.idle = mode == "hold" and not self.paused

    def problem(self, profile: str) -> str:
        """Why it is not available; "" if it is."""
        if profile in self.paused:
            return f"profile {profile} is paused"
        if profile in self._broken:
            return f"profile {profile} cannot be used: {self._broken[profile]}"
        if self._profiles and profile not in self._profiles:
            return f"profile {profile} is not configured"
        return ""

    def instead_of(self, profile: str) -> str:
        """The first available profile after this one; "" if there is none."""
        seen = {profile}
        at = profile
        while (at := self._fallbacks.get(at, DEFAULT)) not in seen:
            if not self.problem(at):
                return at
            seen.add(at)
        return ""


# ----------------------------------------------------------------------------------------------------

DEFAULT = "default"


class RouteRule(Struct, frozen=True):
    """What a job must be like, all of it; what is not said (None, "", ()) fits every job. `text`: the rule as told."""

    profile: str
    gpu: bool | None = None
    priority_at_least: int | None = None
    project: str = ""
    user: str = ""
    labels: tuple[Requirement, ...] = ()
    workload: str = ""
    text: str = ""

    def fits(self, spec: JobSpec) -> bool:
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
    """`projects`: by profile, the names (with `*`) of the projects that may use it; none named: all may. `waits`: how long
    jobs may wait that do not say it themselves."""

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

    def routed(self, spec: JobSpec) -> JobSpec:
        """The spec with the profile that it goes to, and with how long it may wait there."""
        if not self._rules and not self._waits.any and self.availability.mode == "hold":
            return spec
        if self._last is not None and self._last[0] is spec:
            return self._last[1]  # the jobs of a bulk submit that share one spec go on sharing one
        found = self._found(spec) if spec.profile == DEFAULT and not spec.routed_by else spec
        found = self._waits.given(self._available(found))
        self._last = (spec, found)
        return found

    def _found(self, spec: JobSpec) -> JobSpec:
        for number, rule in enumerate(self._rules, 1):
            if rule.fits(spec) and self.open_to(rule.profile, spec.project):
                return structs.replace(spec, profile=rule.profile, routed_by=f"rule {number} ({rule.text})")
        return spec

    def _available(self, spec: JobSpec) -> JobSpec:
        """With another profile if its own is not available, and there is one to fall back to."""
        there = self.availability
        problem = there.problem(spec.profile) if there.mode == "fallback" else ""
        to = there.instead_of(spec.profile) if problem else ""
        # A profile that is closed to the project stays, and is refused by `check`: a pause gives no rights.
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
                f"{spec.name}: profile {spec.profile!r} is not open to project {spec.project!r}",
                hint=f"it is open to: {allowed}; leave profile out, or name another",
                code="PROFILE_FORBIDDEN",
            )
