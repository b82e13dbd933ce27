"""Pods by the groups that they belong to: who is there, who is over, how long they have waited, and what is to be looked at
again. What becomes of them is for `kube.scheduler.pods`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from hodei.kube.api.objects import Owner
from hodei.kube.scheduler.cache import ClusterCache
from hodei.kube.scheduler.ended_members import EndedMembers
from hodei.kube.scheduler.entries import Entry, GroupKey, WaitingGang
from hodei.kube.scheduler.gang_assembly import GangAssembly
from hodei.kube.scheduler.gang_timeouts import GangTimeouts
from hodei.kube.scheduler.gangs import Group, Membership
from hodei.kube.scheduler.owners import Place, place_of
from hodei.kube.scheduler.placed_gangs import group_of_all
from hodei.model.decision import Reason
from hodei.model.ids import JobId


class GroupIndex:
    def __init__(self, around: ClusterCache) -> None:
        self._around = around
        self.entries: dict[str, Entry] = {}
        self.of_gang: dict[JobId, GroupKey] = {}
        self._gangs: dict[GroupKey, WaitingGang] = {}
        self._members: dict[GroupKey, dict[str, None]] = {}
        self._dirty: dict[GroupKey, None] = {}
        self.patience = GangTimeouts()
        self.past = EndedMembers(self._past_moved)
        # Groups that stand otherwise than before, for whoever tells of it.
        self.touched: dict[GroupKey, None] = {}
        # Called with the jobs of a gang that hold room: those that go together or not at all, and those that may go alone.
        self.tied: Callable[[GroupKey, Sequence[JobId], Sequence[JobId]], None] = lambda key, core, spare: None
        self.has_groups = asyncio.Event()
        # Groups whose size is that of the workloads that make their pods, by these; and whether one of them is a Job.
        self._by_owner: dict[Place, dict[GroupKey, None]] = {}
        around.sizes_wanted = self._by_owner
        self.wants_jobs = asyncio.Event()

    def join_group(self, entry: Entry, group: Membership) -> None:
        entry.group = group
        self.has_groups.set()
        self._members.setdefault(group.key, {})[entry.uid] = None
        self._dirty[group.key] = None
        if group.owner is not None:
            self._by_owner.setdefault(place_of(group.namespace, group.owner), {})[group.key] = None
            if group.owner.kind == "Job":
                self.wants_jobs.set()

    def leave_group(self, entry: Entry) -> None:
        if entry.group is None:
            return
        key = entry.group.key
        self._members[key].pop(entry.uid, None)
        self._dirty[key] = None
        if not self._members[key]:
            del self._members[key]
        if entry.group.owner is not None:
            self._leave_owner(key, entry.group.owner)

    def _leave_owner(self, key: GroupKey, owner: Owner) -> None:
        """The last member that this owner made has left its group."""
        place = place_of(key[1], owner)
        if any(one.group is not None and one.group.owner == owner for one in self.members(key)):
            return
        groups = self._by_owner.get(place, {})
        groups.pop(key, None)
        if not groups:
            self._by_owner.pop(place, None)

    def _sizes_moved(self) -> None:
        for place in self._around.take_sizes():
            self._dirty.update(self._by_owner.get(place, {}))

    def look_again(self, entry: Entry) -> None:
        """Something happened to a pod that its group, if it has one, must be gathered anew for."""
        if entry.group is not None:
            self._dirty[entry.group.key] = None

    def touch(self, entry: Entry) -> None:
        """The same if only its status may read differently."""
        if entry.group is not None:
            self.touched[entry.group.key] = None

    def _past_moved(self, key: GroupKey) -> None:
        self.touched[key] = None
        if key in self._members:
            self._dirty[key] = None

    def members(self, key: GroupKey) -> list[Entry]:
        """The pods of a group that are not over."""
        return [self.entries[uid] for uid in self._members.get(key, ())]

    def group(self, key: GroupKey) -> Group | None:
        """The gang; None if there is none, or it cannot be told yet."""
        return group_of_all(self.members(key), self.past.of(key), self._around.groups)

    def late(self, key: GroupKey, gathering: GangAssembly, now_ms: int) -> Reason | None:
        """What a gang is told that has waited for as long as it may, while it stands aside or is not all there."""
        members = self.members(key)
        group = gathering.group or (self.group(key) if any(entry.stage == "placed" for entry in members) else None)
        there = gathering.done + sum(entry.stage == "bound" for entry in members)
        return self.patience.judge(key, group, there, gathering.reason, now_ms)
