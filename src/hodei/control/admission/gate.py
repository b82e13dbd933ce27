"""The gate: what a job must be before it is let in. A refusal says which rule, what was asked, and what to do."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from hodei.control.admission.routing import Routing
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.profile import Profile
from hodei.engine.view import View, gang_of
from hodei.model.array import element_count
from hodei.model.backend import needs_of
from hodei.model.errors import InvalidInput, QueueFull, did_you_mean
from hodei.model.facts import BackendReported
from hodei.model.job import JobSpec
from hodei.model.resources import human_amount


class AdmissionPolicy(Struct, frozen=True):
    """`oversized`: a job too large for the present nodes even when they are empty is refused, or waits for more."""

    oversized: Literal["reject", "wait"] = "reject"
    max_members: int = 100_000


class UnreachedBackends:
    """Backends that were never reached, by name. Their nodes are unknown, so a job may fit there."""

    def __init__(self) -> None:
        self.reports: dict[str, BackendReported] = {}
        self.version = 0

    def reported(self, fact: BackendReported) -> None:
        self.version += 1
        if fact.down:
            self.reports[fact.backend] = fact
        else:
            self.reports.pop(fact.backend, None)

    def usable_by(self, spec: JobSpec) -> list[str]:
        """Of those that the job may use: why each is down."""
        return [report.down for _, report in sorted(self.reports.items()) if _may_use(spec, report)]


def _may_use(spec: JobSpec, backend: BackendReported) -> bool:
    if spec.backend.mode == "specific" and backend.backend not in spec.backend.names:
        return False
    return any(
        (not task.backends or backend.backend in task.backends) and not set(needs_of(spec, task)) & set(backend.cannot)
        for task in spec.tasks
    )


class Gate:
    """Checks specs against the profiles and the nodes. Answers are kept by size for as long as the nodes stay."""

    def __init__(self, engine: Engine, policy: AdmissionPolicy, unreached: UnreachedBackends) -> None:
        self._engine = engine
        self._policy = policy
        self.unreached = unreached
        self.routing = Routing()
        self._generation = -1
        self._empty = Table()
        self._sizes: dict[Hashable, Refusal | None] = {}

    def check(self, specs: Sequence[JobSpec], pending: Mapping[str, int]) -> None:
        """InvalidInput or QueueFull for the first spec that cannot be let in; all or none are. An array is looked at once:
        its elements differ in their index alone."""
        asked, seen = dict[str, int](), dict[int, JobSpec]()
        for place, given in enumerate(specs):
            # Jobs that share one spec are looked at once.
            known = seen.get(id(given))
            spec = seen[id(given)] = known or self.routing.routed(given)
            profile = self._engine.profiles.get(spec.profile)
            if profile is None:
                raise InvalidInput(
                    f"{spec.name}: there is no profile {spec.profile!r}{did_you_mean(spec.profile, self._engine.profiles)}",
                    hint=f"one of: {', '.join(sorted(self._engine.profiles))}",
                    code="UNKNOWN_PROFILE",
                )
            if known is None:
                self.routing.check(spec)
                if spec.size > self._policy.max_members:
                    most = self._policy.max_members
                    raise InvalidInput(f"{spec.name}: {spec.size} members, at most {most} are allowed")
            asked[spec.profile] = asked.get(spec.profile, 0) + element_count(spec)
            if pending.get(spec.profile, 0) + asked[spec.profile] > profile.max_pending:
                raise QueueFull(
                    f"the queue of profile {spec.profile!r} is full ({profile.max_pending} jobs pending)",
                    hint="wait for jobs to finish, or raise max_pending of the profile",
                )
            if known is None and self._policy.oversized == "reject":
                refusal = self._too_large(spec)
                if refusal is not None and not self.unreached.usable_by(spec):
                    which = f"document {place + 1} ({spec.name})" if len(specs) > 1 else spec.name
                    raise InvalidInput(
                        f"{which} can never run here: {self._in_words(spec, refusal)}",
                        hint='ask for less, or add a node; admission.oversized = "wait" lets such jobs wait',
                        code="LARGER_THAN_CLUSTER",
                    )

    def take_settings(self, other: Gate) -> None:
        """From now on by another's policy; what was known of sizes under the old profiles is forgotten."""
        self._policy = other._policy
        self._sizes.clear()

    def never_fits(self, spec: JobSpec) -> Refusal | None:
        """The refusal that even an empty and healthy cluster of these nodes would give, by all the filters of the
        job's profile; None if it could take the job, or if there are no nodes yet to judge by."""
        return self._on_empty(spec, self._by_all_filters(spec))

    def could_take(self, table: Table, spec: JobSpec) -> bool:
        """Whether these nodes, which are empty and healthy, could take the job by all the filters of its profile."""
        return bool(table.names) and self._try(table, spec, self._by_all_filters(spec)) is None

    def _by_all_filters(self, spec: JobSpec) -> Profile:
        whole = self._engine.profiles.get(spec.profile) or self._engine.profiles["default"]
        # An empty cluster has no company either; that it lacks is no reason to give up.
        filters = tuple(f for f in whole.filters if f.name != "job_affinity")
        return Profile(whole.name, whole.queue, filters, layouts=whole.layouts)

    def _too_large(self, spec: JobSpec) -> Refusal | None:
        """The same by size alone: labels and taints are an operator's word away, only sheer size is hopeless."""
        self._keep_up()
        size = (spec.profile, *((task.needed, *task.request.items()) for task in spec.tasks))
        if size not in self._sizes:
            if len(self._sizes) > 10_000:
                self._sizes.clear()
            whole = self._engine.profiles[spec.profile]
            by_size = Profile(whole.name, whole.queue, tuple(f for f in whole.filters if f.name == "fit"))
            self._sizes[size] = self._on_empty(spec, by_size)
        return self._sizes[size]

    def _on_empty(self, spec: JobSpec, profile: Profile) -> Refusal | None:
        self._keep_up()
        return self._try(self._empty, spec, profile) if self._empty.names else None

    @staticmethod
    def _try(table: Table, spec: JobSpec, profile: Profile) -> Refusal | None:
        gang = gang_of(0, spec, 0)
        profile.admit(gang)
        engine = Engine(table, {spec.profile: profile})
        result = engine.try_gang(gang, View(0))
        if isinstance(result, Refusal):
            return result
        engine.withdraw(gang, result)
        return None

    def _keep_up(self) -> None:
        table = self._engine.table
        table.settle()
        if self._generation != table.generation:
            self._generation = table.generation
            self._sizes.clear()
            self._empty = table.at_best()
            self._empty.settle()

    def _in_words(self, spec: JobSpec, refusal: Refusal) -> str:
        task = next((task for task in spec.tasks if task.name == refusal.task), spec.tasks[0])
        for resource, amount in task.request.items():
            largest = self._engine.table.largest(resource)
            if amount > largest:
                return (
                    f"it asks for {human_amount(resource, amount)} {resource} and the largest node"
                    f" has {human_amount(resource, largest)}"
                )
        if refusal.fitted:
            needed = sum(task.needed for task in spec.tasks)
            return f"only {refusal.fitted} of its {needed} members fit on all {refusal.nodes} nodes together, empty"
        return f"none of the {refusal.nodes} nodes has all that it asks for together"
