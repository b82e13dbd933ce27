"""The admission gate: what a job must fulfil before it is accepted. A refusal names the rule, the value, and what to do.

Also, for jobs that were accepted: whether every backend that could take one is unavailable.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from hodei.control.admission.routing import Routing
from hodei.engine.cycle import Engine
from hodei.engine.explain import objections
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.profile import Profile
from hodei.engine.view import Gang, View, gang_of
from hodei.model.array import element_count
from hodei.model.backend import NEEDS, needs_of
from hodei.model.errors import InvalidInput, QueueFull, did_you_mean
from hodei.model.facts import BackendReported
from hodei.model.job import JobSpec
from hodei.model.resources import human_amount

UNAVAILABLE = "BACKEND_UNAVAILABLE"
DISABLED = "BACKEND_DISABLED"
_MAX_CACHED = 10_000


class AdmissionPolicy(Struct, frozen=True):
    """`oversized`: a job that is too large for the present nodes even when idle is refused, or waits for more nodes."""

    oversized: Literal["reject", "wait"] = "reject"
    max_members: int = 100_000


class UnreachedBackends:
    """Backends that were never reached, by name. Their nodes are unknown, so that a job may fit there."""

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
        """Why each of those that the job may use is down."""
        return [report.down for _, report in sorted(self.reports.items()) if _may_use(spec, report)]


def _may_use(spec: JobSpec, backend: BackendReported) -> bool:
    if spec.backend.mode == "specific" and backend.backend not in spec.backend.names:
        return False
    return any(
        (not task.backends or backend.backend in task.backends) and not set(needs_of(spec, task)) & set(backend.cannot)
        for task in spec.tasks
    )


class Gate:
    """Checks specs against the profiles and the nodes. Answers are cached by size until the nodes change."""

    def __init__(self, engine: Engine, policy: AdmissionPolicy, unreached: UnreachedBackends) -> None:
        self._engine = engine
        self._policy = policy
        self.unreached = unreached
        self.routing = Routing()
        self._generation = -1
        self._idle = Table()
        self._sizes: dict[Hashable, Refusal | None] = {}

    def check(self, specs: Sequence[JobSpec], pending: Mapping[str, int]) -> None:
        """InvalidInput or QueueFull for the first spec that cannot be admitted; all are admitted, or none. An array is
        checked once, as its elements differ only in their index."""
        more, seen = dict[str, int](), dict[int, JobSpec]()
        for place, given in enumerate(specs):
            # Jobs that share one spec are checked once.
            known = seen.get(id(given))
            spec = seen[id(given)] = known or self.routing.route(given)
            profile = self._engine.profiles.get(spec.profile)
            if profile is None:
                raise InvalidInput(
                    f"{spec.title}: there is no profile {spec.profile!r}{did_you_mean(spec.profile, self._engine.profiles)}",
                    hint=f"one of: {', '.join(sorted(self._engine.profiles))}",
                    code="UNKNOWN_PROFILE",
                )
            if known is None:
                self.routing.check(spec)
                if spec.size > self._policy.max_members:
                    most = self._policy.max_members
                    raise InvalidInput(f"{spec.title}: {spec.size} members, at most {most} are allowed")
            more[spec.profile] = more.get(spec.profile, 0) + element_count(spec)
            if pending.get(spec.profile, 0) + more[spec.profile] > profile.max_pending:
                raise QueueFull(
                    f"the queue of profile {spec.profile!r} is full ({profile.max_pending} jobs pending)",
                    hint="wait for jobs to finish, or raise max_pending of the profile",
                )
            if known is None and self._policy.oversized == "reject":
                refusal = self._too_large(spec)
                if refusal is not None and not self.unreached.usable_by(spec):
                    which = f"document {place + 1} ({spec.name})" if len(specs) > 1 else spec.title
                    raise InvalidInput(
                        f"{which} can never run here: {self._describe(spec, refusal)}",
                        hint='ask for less, or add a node; admission.oversized = "wait" lets such jobs wait',
                        code="LARGER_THAN_CLUSTER",
                    )

    def take_settings(self, other: Gate) -> None:
        """Use another policy; cached answers belong to the old profiles."""
        self._policy = other._policy
        self._sizes.clear()

    def never_fits(self, spec: JobSpec) -> Refusal | None:
        """The refusal by these nodes even when idle and healthy; None if they could take the job, or without nodes."""
        return self._on_idle(spec, self._all_filters(spec))

    def could_take(self, table: Table, spec: JobSpec) -> bool:
        """Whether these idle and healthy nodes could take the job, by all filters of its profile."""
        return bool(table.names) and self._try(table, spec, self._all_filters(spec)) is None

    def _all_filters(self, spec: JobSpec) -> Profile:
        profile = self._engine.profiles.get(spec.profile) or self._engine.profiles["default"]
        # A filter that may require other jobs refuses every idle cluster, which says nothing about the nodes.
        filters = tuple(f for f in profile.filters if not getattr(f, "needs_residents", False))
        return Profile(profile.name, profile.queue, filters, layouts=profile.layouts)

    def _too_large(self, spec: JobSpec) -> Refusal | None:
        """The same by size alone: an operator can change labels and taints, but not the size of nodes."""
        self._update()
        size = (spec.profile, *((task.needed, *task.request.items()) for task in spec.tasks))
        if size not in self._sizes:
            if len(self._sizes) > _MAX_CACHED:
                self._sizes.clear()
            profile = self._engine.profiles[spec.profile]
            filters = tuple(f for f in profile.filters if getattr(f, "checks_size", False))
            self._sizes[size] = self._on_idle(spec, Profile(profile.name, profile.queue, filters))
        return self._sizes[size]

    def _on_idle(self, spec: JobSpec, profile: Profile) -> Refusal | None:
        self._update()
        return self._try(self._idle, spec, profile) if self._idle.names else None

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

    def _update(self) -> None:
        table = self._engine.table
        table.settle()
        if self._generation != table.generation:
            self._generation = table.generation
            self._sizes.clear()
            self._idle = table.idle_copy()
            self._idle.settle()

    def _describe(self, spec: JobSpec, refusal: Refusal) -> str:
        task = next((task for task in spec.tasks if task.name == refusal.task), spec.tasks[0])
        for resource, amount in task.request.items():
            largest = self._idle.largest(resource)
            if amount > largest:
                return (
                    f"it asks for {human_amount(resource, amount)} {resource} and the largest node"
                    f" has {human_amount(resource, largest)}"
                )
        if refusal.fitted:
            needed = sum(task.needed for task in spec.tasks)
            return f"only {refusal.fitted} of its {needed} members fit on all {refusal.nodes} nodes together, empty"
        return f"none of the {refusal.nodes} nodes has all that it asks for together"


class BackendAvailability:
    """Whether a job waits only because every backend that could take it is down or was never reached.

    That is tried with the filters of the job on idle and healthy nodes: first on those of available backends, then on
    all. Of backends that were never reached only the name and the capabilities are known."""

    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine, self._gate = engine, gate
        self._unreached = gate.unreached
        self._seen = (-1, -1)
        self._down: dict[str, tuple[str, str]] = {}  # by node: why its backend is down, with the code
        self._up, self._all = Table(), Table()
        self._texts: dict[Hashable, str] = {}

    def problem(self, gang: Gang, refusal: Refusal) -> str:
        """The text if only unavailable backends could take the gang; "" if that is not the reason."""
        if refusal.verdicts and not refusal.verdicts[0].count:
            return ""  # refused before any node was evaluated
        self._update()
        if not self._down and not self._unreached.reports:
            return ""
        found = self._texts.get(gang.group)
        if found is None:
            if len(self._texts) > _MAX_CACHED:
                self._texts.clear()
            found = self._texts[gang.group] = self._find(gang)
        return found

    def _find(self, gang: Gang) -> str:
        spec = gang.job
        if self._gate.could_take(self._up, spec):
            return ""
        causes = list[str]()
        if self._down and self._gate.could_take(self._all, spec):
            causes = self._suitable(gang)
        causes += self._unreached.usable_by(spec)
        if not causes:
            return "; ".join(
                f"{fact.down}; and backend {fact.backend} cannot {' or '.join(NEEDS[need].what for need in unmet)}"
                for fact, unmet in self._named_but_unfit(spec)
            )
        return f"every backend that could take it is unavailable: {'; '.join(causes[:5])}"

    def advice(self, spec: JobSpec) -> str:
        """What to do about a job that would not start even if the backends that it names were reached; "" if it might."""
        if self._unreached.usable_by(spec):
            return ""
        needs = [need for _, unmet in self._named_but_unfit(spec) for need in unmet]
        return "; ".join(NEEDS[need].hint for need in dict.fromkeys(needs))

    def _named_but_unfit(self, spec: JobSpec) -> list[tuple[BackendReported, list[str]]]:
        """Unreached backends that the job names, each with the needs that it is known not to meet."""
        wanted = set(spec.backend.names) if spec.backend.mode == "specific" else set[str]()
        wanted = wanted.union(*(task.backends for task in spec.tasks))
        needs = dict.fromkeys(need for task in spec.tasks for need in needs_of(spec, task))
        reports = self._unreached.reports
        found = [reports[name] for name in sorted(wanted & reports.keys())]
        return [(fact, unmet) for fact in found if (unmet := [need for need in needs if need in fact.cannot])]

    def _suitable(self, gang: Gang) -> list[str]:
        """Why backends with a node for one of its members are down."""
        profile, names = self._engine.profile(gang), set[str]()
        for member in gang.members:
            found = objections(profile, self._engine.runner, member, self._all, View(0))
            names |= {
                name for name, refused in zip(self._all.names, found.refused.tolist(), strict=True) if not refused
            }
        down = {self._down[name] for name in names if name in self._down}
        # If an operator has disabled all of them, their nodes give that reason.
        return sorted(cause for cause, _ in down) if any(code != DISABLED for _, code in down) else []

    def _update(self) -> None:
        table = self._engine.table
        table.settle()
        now = (table.generation, self._unreached.version)
        if self._seen == now:
            return
        self._seen = now
        self._texts.clear()
        self._down = {
            node.name: (node.not_ready_reason, node.not_ready_code) for node in table.nodes if node.not_ready_code
        }
        if self._down or self._unreached.reports:
            self._all, self._up = table.idle_copy(), table.idle_copy(backends_up=True)
            self._all.settle()
            self._up.settle()
