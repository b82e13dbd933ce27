"""Which of several schedulers (profiles) a job goes to: the one it names, or the first rule that fits it; and who may use it.

Rules hold for jobs that name no profile (`default`). A rule whose profile is not open to the job's project is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct, structs

from hodei.control.admission.profile_availability import ProfileAvailability
from hodei.control.admission.wait_limits import WaitDefaults
from hodei.model.errors import InvalidInput
from hodei.model.job import JobSpec
from hodei.model.resources import GPU
from hodei.model.selector import Requirement, all_match

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
                code="PROFILE_NOT_OPEN",
            )
