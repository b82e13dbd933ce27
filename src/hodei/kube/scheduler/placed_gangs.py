"""The pods of a gang that have their nodes: which of them go together if one has to go, and which the gang can do without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from hodei.kube.api.objects import Pod
from hodei.kube.scheduler.gang_assembly import counted
from hodei.kube.scheduler.gangs import Group, Groups, Membership, group_of, membership
from hodei.kube.scheduler.translate import Wanted
from hodei.model.ids import JobId


class Placed(Protocol):
    """A pod that holds room, as one job."""

    id: JobId
    pod: Pod
    wanted: Wanted
    group: Membership | None


def tied_together(placed: Sequence[Placed], past: Sequence[Pod], groups: Groups) -> tuple[list[JobId], list[JobId]]:
    """The jobs that the gang needs, and those beyond its minimum, those to go first last; none if it is no gang."""
    group = group_of_all(placed, (), groups)
    if group is None:
        return [], []
    if group.whole:
        return [one.id for one in placed], []
    over = [pod for pod in past if pod.status.phase == "Succeeded"]
    done = len(counted(over, [one.pod for one in placed], group))
    left, parts = max(len(placed) + done - group.min_count, 0), dict(group.parts)
    there = Counter(one.group.part for one in placed if one.group is not None)
    core, spare = list[JobId](), list[JobId]()
    # The lowest go first, of equals those that came last; none that a part of the gang needs.
    youngest = sorted(placed, key=lambda one: (one.pod.metadata.creation_timestamp or "", one.id), reverse=True)
    for one in sorted(youngest, key=lambda one: one.wanted.job.priority):
        part = one.group.part if one.group is not None else ""
        if len(spare) < left and there[part] > parts.get(part, 0):
            there[part] -= 1
            spare.append(one.id)
        else:
            core.append(one.id)
    return (core, spare[::-1]) if core else ([], [])


def group_of_all(placed: Sequence[Placed], past: Sequence[Pod], groups: Groups) -> Group | None:
    """The gang that these are members of, or were; None if it is none, or cannot be told yet."""
    said = [one.group for one in placed if one.group is not None]
    said = said or [was for pod in past if isinstance(was := membership(pod), Membership)]
    found = group_of(said[0], groups, siblings=tuple(said[1:])) if said else None
    return found if isinstance(found, Group) else None
