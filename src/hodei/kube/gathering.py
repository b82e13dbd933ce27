"""Pods that have come, gathered into the gangs that they belong to; and a gang of pods as one job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct, structs

from hodei.kube.gangs import NO_GROUPS, Group, Groups, Membership, group_of, membership, missing
from hodei.kube.translate import Wanted
from hodei.kube.wording import WAITS_FOR_GANG
from hodei.kubeapi.objects import Pod
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


class Gathering(Struct):
    """Pods that are placed together or not at all (`group` None: one pod by itself).

    `waiting` are those without a node, in the order in which they came; `bound` counts those that have one; `needed`: how
    many of the waiting must be placed together. `reason`: why the gang cannot start yet.
    """

    waiting: list[Pod]
    group: Group | None = None
    bound: int = 0
    needed: int = 1
    reason: Reason | None = None


def gather(pods: Iterable[Pod], groups: Groups = NO_GROUPS) -> list[Gathering]:
    """All pods that could run, as gangs; those that somebody holds back by a gate are not there yet. Pods only ever join
    groups of their own namespace."""
    said: dict[tuple[str, str, str], list[tuple[Pod, Membership]]] = {}
    out: list[Gathering] = []
    for pod in pods:
        if pod.over or pod.leaving or (pod.spec.scheduling_gates and not pod.spec.node_name):
            continue
        found = membership(pod)
        if isinstance(found, Membership):
            said.setdefault(found.key, []).append((pod, found))
        elif not pod.spec.node_name:
            out.append(Gathering([pod], reason=found))
    for members in said.values():
        out += _gathered(members, groups)
    return out


def _gathered(members: list[tuple[Pod, Membership]], groups: Groups) -> list[Gathering]:
    waiting = [pod for pod, _ in members if not pod.spec.node_name]
    if not waiting:
        return []
    first = members[0][1]
    group = group_of(first, groups, siblings=tuple(one for _, one in members[1:]))
    if group is None:
        return [Gathering([pod]) for pod in waiting]
    if isinstance(group, Reason):
        return [Gathering(waiting, reason=group)]
    there: dict[str, int] = {}
    for _, one in members:
        there[one.part] = there.get(one.part, 0) + 1
    bound = len(members) - len(waiting)
    needed = min(len(waiting), max(1, group.min_count - bound))
    reason = Reason("gang", "GANG_INCOMPLETE", WAITS_FOR_GANG) if missing(group, there) else None
    return [Gathering(waiting, group, bound, needed, reason)]


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
