"""Pods by the groups that they belong to: who is there, who is over, how long they have waited, and what is to be looked at
again. What becomes of them is for `kube.scheduler.pods`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from msgspec import Struct, structs

from hodei.kube.api.client import Api
from hodei.kube.api.objects import Meta, Node, Owner, Pod, PodSpec, PodStatus
from hodei.kube.api.reflector import Reflector, Resource
from hodei.kube.scheduler.background import NoBackground
from hodei.kube.scheduler.cache import ClusterCache
from hodei.kube.scheduler.gangs import GangAssembly, Group, Groups, Membership, counted, group_of, membership
from hodei.kube.scheduler.owners import Place, place_of
from hodei.kube.scheduler.translate import Wanted
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import JobSpec, Reason

GroupKey = tuple[str, str, str]
# aside: nothing to do about it (it is held back, cannot be read, or is on a node that has gone). gang: it waits with others.
Stage = Literal["aside", "gang", "queued", "placed", "bound"]


class Entry(Struct):
    """A pod and its job. `reasons`: why it is aside, if it is ours and somebody should know."""

    uid: str
    pod: Pod
    wanted: Wanted
    stage: Stage = "aside"
    id: JobId = 0
    run: RunId = ""
    node: NodeName = ""
    group: Membership | None = None
    leaving: bool = False
    reasons: tuple[Reason, ...] = ()
    told: str | None = None  # the last that it was told, with which reason, and when
    told_reason: str = ""
    told_ms: int = 0
    tries: int = 0
    seen: int = 0  # how many newcomers had come anywhere when it was placed

    @property
    def holds(self) -> bool:
        return self.stage in ("placed", "bound")

    @property
    def name(self) -> str:
        return f"{self.pod.metadata.namespace}/{self.pod.metadata.name}"


class WaitingGang(Struct):
    """The job that the waiting pods of a group are: `order` says which pod each of its members is."""

    id: JobId
    uids: tuple[str, ...]
    order: tuple[str, ...]
    needed: int
    first: bool = False


# ------------------------------------------------------------------------------------------------ diff
# What changed of a pod or a node, as far as scheduling reads it.


def same_spec(a: Pod, b: Pod) -> bool:
    """Whether a binding is all that happened to it."""
    if a.metadata.labels != b.metadata.labels or resizes(a) or resizes(b):
        return False
    return a.spec == b.spec or structs.replace(a.spec, node_name=b.spec.node_name) == b.spec


def same_hold(a: JobSpec, b: JobSpec) -> bool:
    return a is b or a == b


def differs(a: Pod, b: Pod) -> bool:
    """Whether anything changed that scheduling reads."""
    old, new = a.metadata, b.metadata
    return (
        a.spec != b.spec
        or old.labels != new.labels
        or (old.annotations != new.annotations and said(old) != said(new))
        or (old.deletion_timestamp is None) != (new.deletion_timestamp is None)
        or resizes(a)
        or resizes(b)
    )


def said(meta: Meta) -> dict[str, str]:
    """Without what we write on pods ourselves."""
    return {name: value for name, value in meta.annotations.items() if not name.startswith("hodei.io/expected-start")}


def has_claims(pod: Pod) -> bool:
    return any(one.persistent_volume_claim is not None or one.ephemeral is not None for one in pod.spec.volumes)


def resizes(pod: Pod) -> bool:
    return any(one.type.startswith("PodResize") for one in pod.status.conditions)


def node_differs(a: Node, b: Node) -> bool:
    return (
        a.spec != b.spec
        or a.metadata.labels != b.metadata.labels
        or a.status.allocatable != b.status.allocatable
        or a.status.images != b.status.images
        or a.status.conditions != b.status.conditions
    )


# --------------------------------------------------------------------------------------- ended members
# Members of groups that are over: a gang counts those that succeeded, and a group's status tells of all.


class EndedMembers:
    """`moved` is called with the key of each group of which a member ended, or was forgotten by the cluster."""

    def __init__(self, moved: Callable[[GroupKey], None]) -> None:
        self._moved = moved
        self._groups: dict[GroupKey, dict[str, Pod]] = {}
        self._key: dict[str, GroupKey] = {}

    def of(self, key: GroupKey) -> list[Pod]:
        return list(self._groups.get(key, {}).values())

    # ------------------------------------------------------------------------------------- the reflector's sink

    def listed(self, objects: Iterable[Pod], /) -> None:
        there = set()
        for pod in objects:
            there.add(pod.metadata.uid)
            self._put(pod)
        for uid in [uid for uid in self._key if uid not in there]:
            self._forget(uid)

    def changed(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], pod: Pod, /) -> None:
        if kind == "DELETED":
            self._forget(pod.metadata.uid)
        else:
            self._put(pod)

    def _put(self, pod: Pod) -> None:
        uid, found = pod.metadata.uid, membership(pod)
        if not isinstance(found, Membership):
            return
        here = self._groups.setdefault(found.key, {})
        if uid not in here or here[uid].status.phase != pod.status.phase:
            self._key[uid] = found.key
            said = PodSpec(scheduling_group=pod.spec.scheduling_group, workload_ref=pod.spec.workload_ref)
            here[uid] = structs.replace(pod, spec=said, status=PodStatus(pod.status.phase))
            self._moved(found.key)

    def _forget(self, uid: str) -> None:
        key = self._key.pop(uid, None)
        if key is not None:
            here = self._groups[key]
            del here[uid]
            if not here:
                del self._groups[key]
            self._moved(key)


class EndedMembersInformer(NoBackground):
    """Has `past` told, once `wanted`; `stir` is called when there is something new."""

    def __init__(
        self, api: Api, scheduler: str, past: EndedMembers, wanted: asyncio.Event, stir: Callable[[], None]
    ) -> None:
        self._past, self._wanted, self._stir = past, wanted, stir
        phases = ",".join(f"status.phase!={phase}" for phase in ("Pending", "Running", "Unknown"))
        over = {"fieldSelector": f"spec.schedulerName={scheduler},{phases}"}
        self._reflector = Reflector(api, Resource("/api/v1/pods", Pod), self, selector=over)

    async def run(self) -> None:
        await self._wanted.wait()
        await self._reflector.run()

    def listed(self, objects: Iterable[Pod], /) -> None:
        self._past.listed(objects)

    def changed(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], pod: Pod, /) -> None:
        self._past.changed(kind, pod)

    def flushed(self) -> None:
        self._stir()


# ----------------------------------------------------------------------------------------------------


# --------------------------------------------------------------------------------------- gang timeouts
# How long gangs may wait, where somebody says it (`scheduleTimeoutSeconds`, `pod-group-timeout`): the time runs from
# the first pod that waits until enough are bound. A gang whose time is up lets go of all that is kept for it, steps
# aside for a moment, says so, and begins anew.


_PAUSE_MS, _LONGEST_PAUSE_MS = 1000, 10_000


class _Clock(Struct):
    timeout_ms: int
    ends_ms: int
    aside_until_ms: int = 0
    told: str = ""
    tries: int = 0


class GangTimeouts:
    def __init__(self) -> None:
        self._clocks: dict[GroupKey, _Clock] = {}

    def judge(
        self, key: GroupKey, group: Group | None, there: int, lacking: Reason | None, now_ms: int
    ) -> Reason | None:
        """What a gang is to be told of which so many are bound or done: that its time was up, while it stands aside or is
        not all there (`lacking`); None if nothing."""
        if group is None or not group.timed or not group.timeout_ms or there >= group.min_count:
            self.settled(key)
            return None
        self.waits(key, group.timeout_ms, now_ms)
        told = self.told(key)
        if lacking is not None and lacking.code == "GANG_INCOMPLETE" and told:
            return structs.replace(lacking, text=f"{lacking.text}; {told}")
        return Reason("gang", "GANG_TIMEOUT", told) if self.aside(key) else None

    def waits(self, key: GroupKey, timeout_ms: int, now_ms: int) -> None:
        """It waits, since now if it did not before."""
        clock = self._clocks.get(key)
        if clock is None or clock.timeout_ms != timeout_ms:
            self._clocks[key] = _Clock(timeout_ms, now_ms + timeout_ms)

    def settled(self, key: GroupKey) -> None:
        """Enough are bound, or nobody is left."""
        self._clocks.pop(key, None)

    def run_out(self, now_ms: int) -> tuple[list[tuple[GroupKey, str]], list[GroupKey]]:
        """Those whose time is up, with what they are to be told; and those whose moment aside is over."""
        late, back = [], []
        for key, clock in self._clocks.items():
            if clock.ends_ms <= now_ms:
                pause_ms = min(_PAUSE_MS << min(clock.tries, 10), _LONGEST_PAUSE_MS)
                clock.tries += 1
                clock.aside_until_ms = now_ms + pause_ms
                clock.ends_ms = clock.aside_until_ms + clock.timeout_ms
                clock.told = f'pod group "{key[2]}" rejected due to timeout after waiting {clock.timeout_ms / 1000:g}s'
                late.append((key, clock.told))
            elif clock.aside_until_ms and clock.aside_until_ms <= now_ms:
                clock.aside_until_ms = 0
                back.append(key)
        return late, back

    def aside(self, key: GroupKey) -> bool:
        clock = self._clocks.get(key)
        return clock is not None and clock.aside_until_ms > 0

    def told(self, key: GroupKey) -> str:
        """What it was told when its time was up last; "" if it never was."""
        clock = self._clocks.get(key)
        return clock.told if clock is not None else ""

    def next_ms(self) -> int | None:
        return min((clock.aside_until_ms or clock.ends_ms for clock in self._clocks.values()), default=None)


# ----------------------------------------------------------------------------------------------------


# ---------------------------------------------------------------------------------------- placed gangs
# The pods of a gang that have their nodes: which of them go together if one has to go, and which the gang can do
# without.


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


# ----------------------------------------------------------------------------------------------------


class GroupIndex:
    def __init__(self, cache: ClusterCache) -> None:
        self._cache = cache
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
        cache.sizes_wanted = self._by_owner
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
        for place in self._cache.take_sizes():
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
        return group_of_all(self.members(key), self.past.of(key), self._cache.groups)

    def late(self, key: GroupKey, gathering: GangAssembly, now_ms: int) -> Reason | None:
        """What a gang is told that has waited for as long as it may, while it stands aside or is not all there."""
        members = self.members(key)
        group = gathering.group or (self.group(key) if any(entry.stage == "placed" for entry in members) else None)
        there = gathering.done + sum(entry.stage == "bound" for entry in members)
        return self.patience.judge(key, group, there, gathering.reason, now_ms)
