"""How many pods belong to a group whose pods do not say it: as many as the workload that makes them wants at once.

Only where that is certain: one Job, StatefulSet, ReplicaSet or Deployment makes all of them, and makes them at the same time.
Else the group is refused by name, and told what to declare. Two workloads of one group look like one until the pods of the
second come, so such groups must declare their size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from hodei.kube.api.objects import Owner, Workload
from hodei.kube.api.quantities import MAX_INT32, bounded, is_whole
from hodei.model.job import Reason

SIMPLE_SIZE = "pod-group-size"
# (namespace, kind, name)
Place = tuple[str, str, str]
_DESIRED = "deployment.kubernetes.io/desired-replicas"
# The kinds that are read, by their API group, and who may have made them without adding pods of its own to the group.
_KNOWN = {"Job": ("batch", "CronJob"), "StatefulSet": ("apps", ""), "ReplicaSet": ("apps", "Deployment")}


class Owned(Struct, frozen=True):
    """The workloads of the cluster. `planned`: how many pods those have that are only planned, or why that is unknown."""

    workloads: Mapping[Place, Workload] = {}
    jobs: Mapping[tuple[str, str], Workload] = {}
    planned: Mapping[Place, int | str] = {}

    def find(self, namespace: str, owner: Owner) -> Workload | None:
        if owner.kind == "Job":
            found = self.jobs.get((namespace, owner.name))
        else:
            found = self.workloads.get((namespace, owner.kind, owner.name))
        # One of the same name that came after it is another one.
        return found if found is not None and found.metadata.uid == owner.uid else None


NO_OWNED = Owned()


def size_by_owners(namespace: str, group: str, owners: Sequence[Owner | None], owned: Owned) -> int | Reason:
    """The size of a group by those who made its pods that are there; a Reason while that cannot be told."""
    sizes: dict[str, int] = {}
    for owner in dict.fromkeys(owners):
        if owner is None:
            return _unknown(group, "a pod of it has no owner to learn it from")
        found = _size(namespace, owner, owned)
        if found is None:
            text = f'waiting for {owner.kind} "{owner.name}" to be read, which tells the size of pod group "{group}"'
            return Reason("gang", "POD_GROUP_MISSING", text)
        if isinstance(found, str):
            return _unknown(group, found)
        whose, size = found
        sizes[whose] = max(sizes.get(whose, 0), size)
    if len(sizes) != 1:
        return _unknown(group, f"its pods have several owners: {', '.join(sorted(sizes))[:300]}")
    return bounded(next(iter(sizes.values())), 1, MAX_INT32)


def place_of(namespace: str, owner: Owner) -> Place:
    return (namespace, owner.kind, owner.name)


def says(workload: Workload | None) -> tuple[object, ...]:
    """All of a workload that a size is learnt from."""
    if workload is None:
        return ()
    meta = workload.metadata
    return (meta.uid, meta.annotations.get(_DESIRED), workload.spec, _maker(workload))


def _size(namespace: str, owner: Owner, owned: Owned) -> tuple[str, int] | str | None:
    """Whose pods they are in the end, and how many of them there are at once; or why that is not certain. None: it is not
    known yet."""
    name = f"{owner.kind}/{owner.name}"
    if not owner.uid and (planned := owned.planned.get(place_of(namespace, owner))) is not None:
        return planned if isinstance(planned, str) else (name, planned)
    api, may_be_of = _KNOWN.get(owner.kind, ("", ""))
    if not api or owner.api_version.partition("/")[0] != api:
        return f"its owner {name} ({owner.api_version or 'of an unknown group'}) is of a kind that does not tell it"
    found = owned.find(namespace, owner)
    if found is None:
        return None
    maker = _maker(found)
    if maker is not None and maker.kind != may_be_of:
        return f"{name} is made by {maker.kind}/{maker.name}, which may make more pods"
    spec = found.spec
    if owner.kind == "Job":
        at_once = 1 if spec.parallelism is None else spec.parallelism
        return name, at_once if spec.completions is None else min(at_once, spec.completions)
    wanted = 1 if spec.replicas is None else spec.replicas
    if owner.kind == "StatefulSet":
        return (name, wanted) if wanted < 2 or spec.pod_management_policy == "Parallel" else one_by_one(name)
    if maker is not None:
        # Of a deployment that is being updated each replica set has a part; all of them say how many it wants.
        desired = found.metadata.annotations.get(_DESIRED, "")
        return f"Deployment/{maker.name}", int(desired) if is_whole(desired) else wanted
    return name, wanted


def one_by_one(name: str) -> str:
    return f"{name} makes its pods one after the other (podManagementPolicy is not Parallel)"


def _maker(workload: Workload) -> Owner | None:
    return next((one for one in workload.metadata.owner_references if one.controller), None)


def _unknown(group: str, why: str) -> Reason:
    text = f'the size of pod group "{group}" is not declared (annotation {SIMPLE_SIZE}) and cannot be learnt: {why}'
    return Reason("gang", "POD_GROUP_SIZE", text)
