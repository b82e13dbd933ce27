"""Pods by pod group: the members of each group, those that have ended, gang timeouts, and which groups have changed.

`kube.scheduler.pods` decides what follows from it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from msgspec import Struct, structs

from hodei.kube.api.objects import Meta, Node, OwnerReference, Pod, PodSpec, PodStatus
from hodei.kube.scheduler.cache import ClusterCache
from hodei.kube.scheduler.gangs import (
    GangAssembly,
    Group,
    Groups,
    Membership,
    WorkloadKey,
    group_of,
    membership,
    of_this_gang,
    workload_key,
)
from hodei.kube.scheduler.translate import PodInfo
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job import Reason

GroupKey = tuple[str, str, str]
# inactive: not queued (gated, unreadable, incomplete gang, or on a deleted node). gang: pending as a member of a gang job.
Stage = Literal["inactive", "gang", "queued", "placed", "bound"]


class Entry(Struct):
    """A pod and its job. `reasons`: why a pod of ours is not queued. `arrivals_seen`: see `Pods.lacking_resource`."""

    uid: str
    pod: Pod
    info: PodInfo
    stage: Stage = "inactive"
    id: JobId = 0
    run: RunId = ""
    node: NodeName = ""
    group: Membership | None = None
    terminating: bool = False
    reasons: tuple[Reason, ...] = ()
    reported: str | None = None  # the last reported message, its reason and its time
    reported_reason: str = ""
    reported_ms: int = 0
    tries: int = 0
    arrivals_seen: int = 0

    @property
    def assigned(self) -> bool:
        return self.stage in ("placed", "bound")

    @property
    def name(self) -> str:
        return f"{self.pod.metadata.namespace}/{self.pod.metadata.name}"


class PendingGang(Struct):
    """The job of a group's pending pods. `order`: the pod of each member. `urgent`: it replaces lost members."""

    id: JobId
    uids: tuple[str, ...]
    order: tuple[str, ...]
    needed: int
    urgent: bool = False


def only_bound(a: Pod, b: Pod) -> bool:
    """Whether nothing but the node differs."""
    if a.metadata.labels != b.metadata.labels or is_resizing(a) or is_resizing(b):
        return False
    return a.spec == b.spec or structs.replace(a.spec, node_name=b.spec.node_name) == b.spec


def pod_differs(a: Pod, b: Pod) -> bool:
    old, new = a.metadata, b.metadata
    return (
        a.spec != b.spec
        or old.labels != new.labels
        or (old.annotations != new.annotations and _foreign_annotations(old) != _foreign_annotations(new))
        or (old.deletion_timestamp is None) != (new.deletion_timestamp is None)
        or is_resizing(a)
        or is_resizing(b)
    )


def _foreign_annotations(meta: Meta) -> dict[str, str]:
    """Without the ones that this scheduler writes."""
    return {name: value for name, value in meta.annotations.items() if not name.startswith("hodei.io/expected-start")}


def has_claims(pod: Pod) -> bool:
    return any(one.persistent_volume_claim is not None or one.ephemeral is not None for one in pod.spec.volumes)


def is_resizing(pod: Pod) -> bool:
    return any(one.type.startswith("PodResize") for one in pod.status.conditions)


def node_differs(a: Node, b: Node) -> bool:
    return (
        a.spec != b.spec
        or a.metadata.labels != b.metadata.labels
        or a.status.allocatable != b.status.allocatable
        or a.status.images != b.status.images
        or a.status.conditions != b.status.conditions
    )


class EndedMembers:
    """The sink of a watch on ended pods: a gang counts its succeeded members, and a group's status counts all.

    `on_change` is called with the key of each group that gained or lost an ended member, `flushed` after a batch."""

    def __init__(self, on_change: Callable[[GroupKey], None], flushed: Callable[[], None]) -> None:
        self._on_change, self.flushed = on_change, flushed
        self._groups: dict[GroupKey, dict[str, Pod]] = {}
        self._key: dict[str, GroupKey] = {}

    def of(self, key: GroupKey) -> list[Pod]:
        return list(self._groups.get(key, {}).values())

    def listed(self, objects: Iterable[Pod], /) -> None:
        listed = set()
        for pod in objects:
            listed.add(pod.metadata.uid)
            self._put(pod)
        for uid in [uid for uid in self._key if uid not in listed]:
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
        members = self._groups.setdefault(found.key, {})
        if uid not in members or members[uid].status.phase != pod.status.phase:
            self._key[uid] = found.key
            spec = PodSpec(scheduling_group=pod.spec.scheduling_group, workload_ref=pod.spec.workload_ref)
            members[uid] = structs.replace(pod, spec=spec, status=PodStatus(pod.status.phase))
            self._on_change(found.key)

    def _forget(self, uid: str) -> None:
        key = self._key.pop(uid, None)
        if key is not None:
            members = self._groups[key]
            del members[uid]
            if not members:
                del self._groups[key]
            self._on_change(key)


_PAUSE_MS, _LONGEST_PAUSE_MS = 1000, 10_000


class _Timer(Struct):
    timeout_ms: int
    ends_ms: int
    backoff_until_ms: int = 0
    message: str = ""
    tries: int = 0


class GangTimeouts:
    """How long gangs with a declared timeout may wait (`scheduleTimeoutSeconds`, `pod-group-timeout`): from the first
    pending pod until enough are bound. A gang that times out releases its nodes, backs off for a moment and starts again."""

    def __init__(self) -> None:
        self._timers: dict[GroupKey, _Timer] = {}

    def check(
        self, key: GroupKey, group: Group | None, started: int, lacking: Reason | None, now_ms: int
    ) -> Reason | None:
        """Start or stop the timer of a gang with so many bound or succeeded members. A reason while it backs off, or while
        members are missing (`lacking`) after a timeout."""
        if group is None or not group.timed or not group.timeout_ms or started >= group.min_count:
            self._timers.pop(key, None)
            return None
        timer = self._timers.get(key)
        if timer is None or timer.timeout_ms != group.timeout_ms:
            timer = self._timers[key] = _Timer(group.timeout_ms, now_ms + group.timeout_ms)
        if lacking is not None and lacking.code == "GANG_INCOMPLETE" and timer.message:
            return structs.replace(lacking, text=f"{lacking.text}; {timer.message}")
        return Reason("gang", "GANG_TIMEOUT", timer.message) if timer.backoff_until_ms else None

    def expire(self, now_ms: int) -> tuple[list[tuple[GroupKey, str]], list[GroupKey]]:
        """The gangs that have timed out, with a message; and those whose backoff is over."""
        late, back = [], []
        for key, timer in self._timers.items():
            if timer.ends_ms <= now_ms:
                pause_ms = min(_PAUSE_MS << min(timer.tries, 10), _LONGEST_PAUSE_MS)
                timer.tries += 1
                timer.backoff_until_ms = now_ms + pause_ms
                timer.ends_ms = timer.backoff_until_ms + timer.timeout_ms
                seconds = timer.timeout_ms / 1000
                timer.message = f'pod group "{key[2]}" rejected due to timeout after waiting {seconds:g}s'
                late.append((key, timer.message))
            elif timer.backoff_until_ms and timer.backoff_until_ms <= now_ms:
                timer.backoff_until_ms = 0
                back.append(key)
        return late, back

    def next_ms(self) -> int | None:
        return min((timer.backoff_until_ms or timer.ends_ms for timer in self._timers.values()), default=None)


class PlacedPod(Protocol):
    """A pod with a node, as a job of its own."""

    id: JobId
    pod: Pod
    info: PodInfo
    group: Membership | None


def preemption_units(
    placed: Sequence[PlacedPod], ended: Sequence[Pod], groups: Groups
) -> tuple[list[JobId], list[JobId]]:
    """The jobs that a gang needs, which are preempted together, and the spare ones beyond its minimum, which are preempted
    one by one from the last. Both empty if the pods are no gang."""
    group = resolve_group(placed, (), groups)
    if group is None:
        return [], []
    if group.all_or_nothing:
        return [one.id for one in placed], []
    succeeded = [pod for pod in ended if pod.status.phase == "Succeeded"]
    done = len(of_this_gang(succeeded, [one.pod for one in placed], group))
    surplus, needed = max(len(placed) + done - group.min_count, 0), dict(group.parts)
    present = Counter(one.group.part for one in placed if one.group is not None)
    core, spare = list[JobId](), list[JobId]()
    # The lowest priority goes first, then the youngest; never a pod that a part of the gang needs.
    youngest = sorted(placed, key=lambda one: (one.pod.metadata.creation_timestamp or "", one.id), reverse=True)
    for one in sorted(youngest, key=lambda one: one.info.job.priority):
        part = one.group.part if one.group is not None else ""
        if len(spare) < surplus and present[part] > needed.get(part, 0):
            present[part] -= 1
            spare.append(one.id)
        else:
            core.append(one.id)
    return (core, spare[::-1]) if core else ([], [])


def resolve_group(placed: Sequence[PlacedPod], ended: Sequence[Pod], groups: Groups) -> Group | None:
    """The gang of these pods; None if they are no gang, or its definition is not known yet."""
    members = [one.group for one in placed if one.group is not None]
    members = members or [found for pod in ended if isinstance(found := membership(pod), Membership)]
    group = group_of(members[0], groups, siblings=tuple(members[1:])) if members else None
    return group if isinstance(group, Group) else None


class GroupIndex:
    """`link_members` is called with the `preemption_units` of each placed gang."""

    def __init__(
        self,
        cache: ClusterCache,
        link_members: Callable[[GroupKey, Sequence[JobId], Sequence[JobId]], None] = lambda key, core, spare: None,
    ) -> None:
        self._cache, self.link_members = cache, link_members
        self.entries: dict[str, Entry] = {}
        self.group_of_job: dict[JobId, GroupKey] = {}
        self._gangs: dict[GroupKey, PendingGang] = {}
        self._members: dict[GroupKey, dict[str, None]] = {}
        # Groups to assemble again, and groups whose status may have changed.
        self._dirty: dict[GroupKey, None] = {}
        self.status_dirty: dict[GroupKey, None] = {}
        self.timeouts = GangTimeouts()
        self.ended_members = EndedMembers(self._member_ended, cache.announce)
        self.has_groups = asyncio.Event()
        # Groups whose size comes from a workload, by that workload; set if one of them is a Job.
        self._by_workload: dict[WorkloadKey, dict[GroupKey, None]] = cache.sizing_workloads
        self.needs_jobs = asyncio.Event()

    def join_group(self, entry: Entry, group: Membership) -> None:
        entry.group = group
        self.has_groups.set()
        self._members.setdefault(group.key, {})[entry.uid] = None
        self._dirty[group.key] = None
        if group.owner is not None:
            self._by_workload.setdefault(workload_key(group.namespace, group.owner), {})[group.key] = None
            if group.owner.kind == "Job":
                self.needs_jobs.set()

    def leave_group(self, entry: Entry) -> None:
        if entry.group is None:
            return
        key = entry.group.key
        self._members[key].pop(entry.uid, None)
        self._dirty[key] = None
        if not self._members[key]:
            del self._members[key]
        if entry.group.owner is not None:
            self._leave_workload(key, entry.group.owner)

    def _leave_workload(self, key: GroupKey, owner: OwnerReference) -> None:
        if any(one.group is not None and one.group.owner == owner for one in self.members(key)):
            return
        workload = workload_key(key[1], owner)
        groups = self._by_workload.get(workload, {})
        groups.pop(key, None)
        if not groups:
            self._by_workload.pop(workload, None)

    def mark_dirty(self, entry: Entry) -> None:
        if entry.group is not None:
            self._dirty[entry.group.key] = None

    def mark_status_dirty(self, entry: Entry) -> None:
        if entry.group is not None:
            self.status_dirty[entry.group.key] = None

    def _member_ended(self, key: GroupKey) -> None:
        self.status_dirty[key] = None
        if key in self._members:
            self._dirty[key] = None

    def _mark_changed_groups(self) -> None:
        """Mark groups whose objects, or the workloads that define their size, have changed."""
        for namespace, name in self._cache.take_changed_groups():
            for key in self._members:
                if key[1] == namespace and key[2].partition("/")[0] == name:
                    self._dirty[key] = None
        for workload in self._cache.take_resized_workloads():
            self._dirty.update(self._by_workload.get(workload, {}))

    def members(self, key: GroupKey) -> list[Entry]:
        """The pods of a group that have not ended."""
        return [self.entries[uid] for uid in self._members.get(key, ())]

    def group(self, key: GroupKey) -> Group | None:
        """None if it is no gang, or its definition is not known yet."""
        return resolve_group(self.members(key), self.ended_members.of(key), self._cache.groups)

    def timeout_reason(self, key: GroupKey, assembly: GangAssembly, now_ms: int) -> Reason | None:
        members = self.members(key)
        group = assembly.group or (self.group(key) if any(entry.stage == "placed" for entry in members) else None)
        started = assembly.done + sum(entry.stage == "bound" for entry in members)
        return self.timeouts.check(key, group, started, assembly.reason, now_ms)
