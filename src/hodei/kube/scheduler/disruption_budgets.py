"""PodDisruptionBudgets as preemption reads them: which pods would pass a budget if they were told to go, in what order.

They are counted as kube-scheduler counts them: every budget of the pod's namespace whose selector picks it allows so many
disruptions, a pod that the API server has already counted (`disruptedPods`) does not count again, and a selector that
cannot be read picks nothing. A selector means what policy/v1 says: none picks nothing, an empty one every pod of the
namespace (kube-scheduler's own preemption overlooks budgets with an empty one). Nobody is refused by a budget: it is
respected where that can be done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from hodei.engine.preemption.victims import Going
from hodei.kube.api.objects import LabelSelector, Meta, PodDisruptionBudget
from hodei.kube.scheduler.selectors import BadSelector, UnknownOperator, selector
from hodei.model.affinity import Requirement, all_match
from hodei.model.ids import JobId

Key = tuple[str, str]


class _Budget(Struct, frozen=True):
    """`picks`: None for a budget that picks no pod."""

    picks: tuple[Requirement, ...] | None
    allowed: int
    disrupted: Mapping[str, str]


class Budgets:
    """The `Guard` of a tenancy, kept up to date by whoever watches budgets (`put`) and pods (`watch`, `forget`)."""

    def __init__(self) -> None:
        self.version = 0
        self._budgets: dict[str, dict[str, _Budget]] = {}  # of each namespace, by name
        self._pods: dict[JobId, dict[int, Meta]] = {}
        self._covering: dict[
            JobId, dict[int, tuple[str, ...]]
        ] = {}  # the budgets that pick a pod, worked out when asked

    # ------------------------------------------------------------------------------------------ keeping up

    def put(self, key: Key, budget: PodDisruptionBudget | None) -> None:
        """What is known of a budget, by (namespace, name); None: it is gone."""
        namespace, name = key
        here = self._budgets.setdefault(namespace, {})
        before = here.pop(name, None)
        if budget is not None:
            status = budget.status
            here[name] = _Budget(_picks(budget.spec.selector), status.disruptions_allowed, status.disrupted_pods)
        self.version += 1
        after = here.get(name)
        if before is None or after is None or before.picks != after.picks:
            self._covering.clear()

    def watch(self, job: JobId, pod: Meta, member: int = 0) -> None:
        """The pod that a member of a job is; only its name, namespace and labels are read."""
        members = self._pods.setdefault(job, {})
        if members.get(member) != pod:
            members[member] = pod
            self._covering.pop(job, None)
            self.version += 1

    def forget(self, job: JobId) -> None:
        self._covering.pop(job, None)
        if self._pods.pop(job, None) is not None:
            self.version += 1

    # --------------------------------------------------------------------------------------------- answering

    def guarded(self, job: JobId) -> bool:
        return bool(self._budgets) and any(self._of(job).values())

    def violations(self, going: Sequence[Going]) -> list[int]:
        taken: dict[Key, int] = {}
        return [sum(self._passes(job, member, taken) for member in self._members(job, some)) for job, some in going]

    def _members(self, job: JobId, some: Sequence[int]) -> Sequence[int]:
        return some or sorted(self._pods.get(job, ()))

    def _passes(self, job: JobId, member: int, taken: dict[Key, int]) -> bool:
        """Whether the pod's going passes a budget, when so many have been `taken` from each; it takes its own."""
        passes = False
        for name in self._of(job).get(member, ()):
            pod = self._pods[job][member]
            budget = self._budgets[pod.namespace][name]
            if pod.name in budget.disrupted:
                continue
            key = (pod.namespace, name)
            taken[key] = taken.get(key, 0) + 1
            passes = passes or taken[key] > budget.allowed
        return passes

    def _of(self, job: JobId) -> dict[int, tuple[str, ...]]:
        """The names of the budgets that cover each member."""
        found = self._covering.get(job)
        if found is None:
            found = self._covering[job] = {
                member: tuple(
                    name
                    for name, budget in sorted(self._budgets.get(pod.namespace, {}).items())
                    if budget.picks is not None and all_match(budget.picks, pod.labels)
                )
                for member, pod in self._pods.get(job, {}).items()
            }
        return found


def _picks(given: LabelSelector | None) -> tuple[Requirement, ...] | None:
    try:
        return selector(given)
    except (BadSelector, UnknownOperator):
        return None
