"""PodDisruptionBudgets for preemption: which evictions, in order, would violate a budget.

Counted as kube-scheduler does: a pod that the API server has counted (`disruptedPods`) does not count again, and an unreadable
selector matches nothing. As in policy/v1, no selector matches nothing and an empty one every pod of the namespace
(kube-scheduler's preemption ignores budgets with an empty one). Budgets are respected where possible; they never block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from hodei.engine.preemption.victims import Disruption
from hodei.kube.api.objects import LabelSelector, Meta, PodDisruptionBudget
from hodei.kube.scheduler.selectors import InvalidSelector, UnknownOperator, selector
from hodei.model.affinity import Requirement, all_match
from hodei.model.ids import JobId

Key = tuple[str, str]


class _Budget(Struct, frozen=True):
    """`selector`: None if it matches no pod."""

    selector: tuple[Requirement, ...] | None
    allowed: int
    disrupted: Mapping[str, str]


class Budgets:
    """The `Guard` of preemption, updated by the watches of budgets (`put`) and of pods (`watch`, `forget`)."""

    def __init__(self) -> None:
        self.version = 0
        self._budgets: dict[str, dict[str, _Budget]] = {}  # by namespace and name
        self._pods: dict[JobId, dict[int, Meta]] = {}
        self._budgets_of: dict[
            JobId, dict[int, tuple[str, ...]]
        ] = {}  # names of the budgets of each member, computed on demand

    def put(self, key: Key, budget: PodDisruptionBudget | None) -> None:
        """None: the budget was deleted."""
        namespace, name = key
        budgets = self._budgets.setdefault(namespace, {})
        before = budgets.pop(name, None)
        if budget is not None:
            status = budget.status
            budgets[name] = _Budget(
                _selector_of(budget.spec.selector), status.disruptions_allowed, status.disrupted_pods
            )
        self.version += 1
        after = budgets.get(name)
        if before is None or after is None or before.selector != after.selector:
            self._budgets_of.clear()

    def watch(self, job: JobId, pod: Meta, member: int = 0) -> None:
        """Only name, namespace and labels of the pod are read."""
        members = self._pods.setdefault(job, {})
        if members.get(member) != pod:
            members[member] = pod
            self._budgets_of.pop(job, None)
            self.version += 1

    def forget(self, job: JobId) -> None:
        self._budgets_of.pop(job, None)
        if self._pods.pop(job, None) is not None:
            self.version += 1

    def guarded(self, job: JobId) -> bool:
        return bool(self._budgets) and any(self._covering_budgets(job).values())

    def violations(self, disruptions: Sequence[Disruption]) -> list[int]:
        counts: dict[Key, int] = {}
        return [
            sum(self._violates(job, member, counts) for member in members or sorted(self._pods.get(job, ())))
            for job, members in disruptions
        ]

    def _violates(self, job: JobId, member: int, counts: dict[Key, int]) -> bool:
        """Whether one more eviction violates a budget; counts it in `counts`."""
        violates = False
        for name in self._covering_budgets(job).get(member, ()):
            pod = self._pods[job][member]
            budget = self._budgets[pod.namespace][name]
            if pod.name in budget.disrupted:
                continue
            key = (pod.namespace, name)
            counts[key] = counts.get(key, 0) + 1
            violates = violates or counts[key] > budget.allowed
        return violates

    def _covering_budgets(self, job: JobId) -> dict[int, tuple[str, ...]]:
        covering = self._budgets_of.get(job)
        if covering is None:
            covering = self._budgets_of[job] = {
                member: tuple(
                    name
                    for name, budget in sorted(self._budgets.get(pod.namespace, {}).items())
                    if budget.selector is not None and all_match(budget.selector, pod.labels)
                )
                for member, pod in self._pods.get(job, {}).items()
            }
        return covering


def _selector_of(given: LabelSelector | None) -> tuple[Requirement, ...] | None:
    try:
        return selector(given)
    except (InvalidSelector, UnknownOperator):
        return None
