"""Pods that have come, gathered into the gangs that they belong to; and a gang of pods as one job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct, structs

from hodei.kube.api.objects import Pod
from hodei.kube.scheduler.gangs import NO_GROUPS, Group, Groups, Membership, group_of, membership, missing
from hodei.kube.scheduler.messages import WAITS_FOR_GANG
from hodei.kube.scheduler.translate import Wanted
from hodei.model.decision import Reason
from hodei.model.job import GangRules, JobSpec, TaskSpec

# What the cluster itself writes on each pod of a set to tell them apart. Kept, no two members of a gang were alike.
_PER_POD = frozenset(
    {
        "apps.kubernetes.io/pod-index",
        "batch.kubernetes.io/job-completion-index",
        "statefulset.kubernetes.io/pod-name",
        "volcano.sh/task-index",
    }
)


class GangAssembly(Struct):
    """Pods that are placed together or not at all (`group` None: one pod by itself).

    `waiting` are those without a node, in the order in which they came; `bound` counts those that have one, `done` those
    that have succeeded; `needed`: how many of the waiting must be placed together. `reason`: why the gang cannot start yet.
    """

    waiting: list[Pod]
    group: Group | None = None
    bound: int = 0
    needed: int = 1
    reason: Reason | None = None
    done: int = 0

    @property
    def lacks_members(self) -> bool:
        """It has begun, and has fewer than it needs: a pod that waits takes the place of one that was lost."""
        begun = self.bound + self.done
        return self.group is not None and 0 < begun < self.group.min_count


def gather(pods: Iterable[Pod], groups: Groups = NO_GROUPS) -> list[GangAssembly]:
    """All pods that could run, as gangs; those that somebody holds back by a gate are not there yet. Members that have
    succeeded count: a gang need not be whole again for its last pods. Pods only ever join groups of their own namespace."""
    said: dict[tuple[str, str, str], list[tuple[Pod, Membership]]] = {}
    over: dict[tuple[str, str, str], list[tuple[Pod, Membership]]] = {}
    out: list[GangAssembly] = []
    for pod in pods:
        if pod.status.phase == "Succeeded":
            was = membership(pod)
            if isinstance(was, Membership):
                over.setdefault(was.key, []).append((pod, was))
            continue
        if pod.over or pod.leaving or (pod.spec.scheduling_gates and not pod.spec.node_name):
            continue
        found = membership(pod)
        if isinstance(found, Membership):
            said.setdefault(found.key, []).append((pod, found))
        elif not pod.spec.node_name:
            out.append(GangAssembly([pod], reason=found))
    for key, members in said.items():
        out += _gathered(members, groups, over.get(key, []))
    return out


def counted(over: Iterable[Pod], members: Iterable[Pod], group: Group) -> list[Pod]:
    """Of the members that are over, those of the gang as it is now: of the same owner as one that is there, or, without
    an owner, not older than the group's object. A name that is used again does not bring back what ran under it before."""
    owners = {_owner(pod) for pod in members} - {""}
    out = []
    for pod in over:
        owner, made = _owner(pod), pod.metadata.creation_timestamp or ""
        if owner in owners or (not owner and group.since and group.since <= made):
            out.append(pod)
    return out


def _owner(pod: Pod) -> str:
    return next((one.uid for one in pod.metadata.owner_references if one.controller), "")


def _gathered(
    members: list[tuple[Pod, Membership]], groups: Groups, over: list[tuple[Pod, Membership]]
) -> list[GangAssembly]:
    waiting = [pod for pod, _ in members if not pod.spec.node_name]
    if not waiting:
        return []
    first = members[0][1]
    group = group_of(first, groups, siblings=tuple(one for _, one in members[1:]))
    if group is None:
        return [GangAssembly([pod]) for pod in waiting]
    if isinstance(group, Reason):
        return [GangAssembly(waiting, reason=group)]
    there: dict[str, int] = {}
    parts = {pod.metadata.uid: one.part for pod, one in over}
    done = [parts[pod.metadata.uid] for pod in counted([pod for pod, _ in over], [pod for pod, _ in members], group)]
    for part in (*(one.part for _, one in members), *done):
        there[part] = there.get(part, 0) + 1
    bound = len(members) - len(waiting)
    needed = min(len(waiting), max(1, group.min_count - bound - len(done)))
    reason = Reason("gang", "GANG_INCOMPLETE", WAITS_FOR_GANG) if missing(group, there) else None
    return [GangAssembly(waiting, group, bound, needed, reason, len(done))]


def as_job(pods: Sequence[Wanted], needed: int, group: Group | None = None) -> tuple[JobSpec, list[int]]:
    """Pods as one job, and which of them each of its members is: the first `needed` are placed together, the others are
    taken along if there is room. Equal pods are one task, so that they are judged once; the highest priority counts."""
    tasks: dict[bytes, TaskSpec] = {}
    members: dict[bytes, list[int]] = {}
    least: dict[bytes, int] = {}
    for number, pod in enumerate(pods):
        labels = {key: value for key, value in pod.job.labels.items() if key not in _PER_POD}
        task = structs.replace(pod.job.tasks[0], labels=labels)
        written = msgspec.msgpack.encode(task)
        tasks.setdefault(written, task)
        members.setdefault(written, []).append(number)
        least[written] = least.get(written, 0) + (number < needed)
    # Those of which none is needed come last: a task needs one member at least.
    kinds = sorted(tasks, key=lambda written: not least[written])
    first = pods[0].job
    job = structs.replace(
        first,
        tasks=tuple(
            structs.replace(tasks[kind], name=f"pod-{place}", count=len(members[kind]), min_count=least[kind])
            for place, kind in enumerate(kinds)
            if least[kind]
        ),
        labels={},
        priority=max(pod.job.priority for pod in pods),
        preempts=all(pod.job.preempts for pod in pods),
        estimate_ms=max(pod.job.estimate_ms for pod in pods),
        gang=GangRules(topology=group.topology if group is not None else ""),
    )
    return job, [number for kind in kinds if least[kind] for number in members[kind]]
