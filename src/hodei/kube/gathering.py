"""Pods that have come, gathered into the gangs that they belong to; and a gang of pods as the engine places it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct, structs

from hodei.engine.view import Gang, Member
from hodei.kube.gangs import NO_GROUPS, Group, Groups, Membership, group_of, membership, missing
from hodei.kube.objects import Pod
from hodei.kube.translate import Wanted
from hodei.kube.wording import WAITS_FOR_GANG
from hodei.model.decision import Reason
from hodei.model.job import GangRules


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


def gang(id: int, submitted_ms: int, pods: Sequence[Wanted], needed: int, group: Group | None = None) -> Gang:
    """Pods as one gang of the engine: the first `needed` are placed together, the others are taken along if there is room.
    Equal pods share one member, so that they are judged once."""
    rules = GangRules(topology=group.topology) if group is not None and group.topology else GangRules()
    members: dict[bytes, Member] = {}
    numbers: dict[bytes, tuple[list[int], list[int]]] = {}
    for number, pod in enumerate(pods):
        member = _alike(pod, rules)
        written = msgspec.msgpack.encode(member)
        members.setdefault(written, member)
        numbers.setdefault(written, ([], []))[number >= needed].append(number)
    return Gang(
        id,
        next(iter(members.values())).job,
        submitted_ms,
        tuple(members.values()),
        tuple(tuple(first) for first, _ in numbers.values()),
        tuple(tuple(more) for _, more in numbers.values()),
        queued_ms=submitted_ms,
        estimate_ms=max(pod.job.estimate_ms for pod in pods),
        expected_ms=max(pod.job.estimate_ms for pod in pods),
    )


def _alike(pod: Wanted, rules: GangRules) -> Member:
    """A pod without its name, which nothing in scheduling reads."""
    task = structs.replace(pod.job.tasks[0], name="pod")
    job = structs.replace(pod.job, tasks=(task,), gang=rules, annotations={})
    return Member(structs.replace(job, name=""), task)
