"""Which pods belong together, by everybody's conventions: one answer for all of them.

`membership` reads the pod alone. `group_of` adds what an object of the cluster says, where the convention has one. A group's
size is always declared, by the pods, by an object of the group, or by the workload that makes the pods (`kube.scheduler.owners`): the
pods that happen to be there never tell how many there will be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct, structs

from hodei.kube.api.objects import GroupedWorkload, MemberGroup, Owner, Pod, PodGroup, TaskGroup
from hodei.kube.api.quantities import MAX_INT32, bounded, read_count, read_seconds_ms, seconds_ms
from hodei.kube.scheduler.messages import WAITS_FOR_GANG
from hodei.kube.scheduler.owners import NO_OWNED, SIMPLE_SIZE, Owned, size_by_owners
from hodei.kube.scheduler.translate import Wanted
from hodei.model.job import GangRules, JobSpec, Reason, TaskSpec
from hodei.model.resources import parse_duration_ms

Convention = Literal["kubernetes", "workload", "scheduler-plugins", "volcano", "kueue", "yunikorn", "annotation"]

PLUGINS_LABEL = "scheduling.x-k8s.io/pod-group"
VOLCANO_GROUP = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
VOLCANO_MIN, VOLCANO_QUEUE = "scheduling.volcano.sh/group-min-member", "scheduling.volcano.sh/queue-name"
VOLCANO_TASK, VOLCANO_PATIENCE = "volcano.sh/task-spec", "volcano.sh/sla-waiting-time"
KUEUE_GROUP, KUEUE_TOTAL = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
YUNIKORN = "yunikorn.apache.org/"
YUNIKORN_APPS = (f"{YUNIKORN}app-id", "applicationId", "spark-app-selector")
SIMPLE, SIMPLE_TIMEOUT = "pod-group", "pod-group-timeout"

# How long a gang that has begun may take until all its pods are placed, where nobody says.
DEFAULT_TIMEOUT_MS: dict[Convention, int] = {
    "kubernetes": 300_000,
    "workload": 300_000,
    "scheduler-plugins": 60_000,
    "volcano": 0,
    "kueue": 0,
    "yunikorn": 900_000,
    "annotation": 300_000,
}


class Membership(Struct, frozen=True):
    """What a pod says of its group. `part`: which part of it the pod is. `min_count`: how many it declares (0: an object
    does). `parts`: how many of each part are needed. `owner`: who made the pod, where only that can tell the size."""

    convention: Convention
    namespace: str
    name: str
    part: str = ""
    min_count: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    timeout_ms: int | None = None
    queue: str = ""
    owner: Owner | None = None

    @property
    def key(self) -> tuple[Convention, str, str]:
        return (self.convention, self.namespace, self.name)

    @property
    def declared(self) -> bool:
        """Whether it says more than a name that anybody may have chosen for anything."""
        return self.convention != "annotation" or self.min_count > 0


class Group(Struct, frozen=True):
    """A gang, whoever's convention: `min_count` pods together or none, and of each of `parts` so many at least.
    `topology`: the label of which all share one value. `whole`: evicted together, if at all. `queue`: whose it is. `since`:
    when its object was made, "" if it has none. `timed`: somebody said how long it may wait."""

    key: tuple[Convention, str, str]
    min_count: int
    parts: tuple[tuple[str, int], ...] = ()
    timeout_ms: int = 0
    queue: str = ""
    topology: str = ""
    whole: bool = False
    since: str = ""
    timed: bool = False


class Groups(Struct, frozen=True):
    """The objects of the cluster, by (namespace, name)."""

    kubernetes: Mapping[tuple[str, str], PodGroup] = {}
    workloads: Mapping[tuple[str, str], GroupedWorkload] = {}
    plugins: Mapping[tuple[str, str], MemberGroup] = {}
    volcano: Mapping[tuple[str, str], MemberGroup] = {}
    owned: Owned = NO_OWNED


NO_GROUPS = Groups()


def membership(pod: Pod) -> Membership | Reason | None:
    """The group that a pod belongs to; None for none, a Reason if it says so in a way that cannot be read. A pod that
    follows several conventions is taken by the first of them, Kubernetes' own before all others."""
    try:
        for read in _READERS:
            found = read(pod)
            if found is not None:
                return found
    except Exception as bad:  # whatever it says, also a text that is nested too deeply
        return Reason("gang", "INVALID_POD_GROUP", f"the pod's group cannot be read: {str(bad)[:300]}")
    return None


def group_of(
    member: Membership, groups: Groups = NO_GROUPS, *, siblings: tuple[Membership, ...] = ()
) -> Group | Reason | None:
    """The gang; None if its pods go one by one after all; a Reason while it cannot be told. `siblings`: what other pods of
    the group say, where one alone need not say all."""
    match member.convention:
        case "kubernetes":
            return _of_kubernetes(member, groups)
        case "workload":
            return _of_workload(member, groups)
        case "scheduler-plugins":
            return _of_plugins(member, groups)
        case "volcano":
            return _of_volcano(member, groups)
        case _:
            return _of_pods(member, siblings, groups.owned)


def missing(group: Group, there: Mapping[str, int]) -> int:
    """How many pods have not come yet, when so many of each part are there (bound ones included)."""
    parts = sum(max(0, need - there.get(part, 0)) for part, need in group.parts)
    return max(parts, group.min_count - sum(there.values()), 0)


# ------------------------------------------------------------------------------------------- what pods say


def _kubernetes(pod: Pod) -> Membership | None:
    group = pod.spec.scheduling_group
    if group is not None and group.pod_group_name:
        return Membership("kubernetes", pod.metadata.namespace, group.pod_group_name)
    return None


def _workload(pod: Pod) -> Membership | None:
    ref = pod.spec.workload_ref
    if ref is None or not ref.name:
        return None
    name = "/".join(part for part in (ref.name, ref.pod_group, ref.pod_group_replica_key) if part)
    return Membership("workload", pod.metadata.namespace, name, ref.pod_group)


def _plugins(pod: Pod) -> Membership | None:
    name = pod.metadata.labels.get(PLUGINS_LABEL)
    return Membership("scheduler-plugins", pod.metadata.namespace, name) if name else None


def _volcano(pod: Pod) -> Membership | None:
    said = pod.metadata.annotations
    name = next((said[key] for key in VOLCANO_GROUP if said.get(key)), "")
    if not name:
        return None
    patience = said.get(VOLCANO_PATIENCE)
    return Membership(
        "volcano",
        pod.metadata.namespace,
        name,
        part=said.get(VOLCANO_TASK, ""),
        min_count=read_count(said[VOLCANO_MIN], VOLCANO_MIN) if VOLCANO_MIN in said else 0,
        timeout_ms=parse_duration_ms(patience) if patience else None,
        queue=said.get(VOLCANO_QUEUE, ""),
    )


def _kueue(pod: Pod) -> Membership | None:
    meta = pod.metadata
    name = meta.labels.get(KUEUE_GROUP)
    if not name:
        return None
    total = meta.annotations.get(KUEUE_TOTAL)
    count = read_count(total, KUEUE_TOTAL) if total is not None else 0
    return Membership("kueue", meta.namespace, name, min_count=count, queue=meta.labels.get(KUEUE_QUEUE, ""))


def _yunikorn(pod: Pod) -> Membership | None:
    meta = pod.metadata
    said = {**meta.labels, **meta.annotations}
    task = said.get(f"{YUNIKORN}task-group-name", "")
    written = meta.annotations.get(f"{YUNIKORN}task-groups")
    app = next((said[key] for key in YUNIKORN_APPS if said.get(key)), "")
    if not app or not (task or written):
        return None
    groups = msgspec.json.decode(written, type=list[TaskGroup]) if written else []
    parts = tuple((group.name, group.min_member) for group in groups)
    return Membership(
        "yunikorn",
        meta.namespace,
        app,
        part=task,
        min_count=sum(count for _, count in parts),
        parts=parts,
        timeout_ms=_placeholder_timeout(meta.annotations.get(f"{YUNIKORN}schedulingPolicyParameters", "")),
        queue=said.get(f"{YUNIKORN}queue", ""),
    )


def _simple(pod: Pod) -> Membership | None:
    said = pod.metadata.annotations
    name = said.get(SIMPLE) or pod.metadata.labels.get(SIMPLE)
    if not name:
        return None
    size, timeout = said.get(SIMPLE_SIZE), said.get(SIMPLE_TIMEOUT)
    return Membership(
        "annotation",
        pod.metadata.namespace,
        name,
        min_count=read_count(size, SIMPLE_SIZE) if size is not None else 0,
        timeout_ms=parse_duration_ms(timeout) if timeout is not None else None,
        owner=next((one for one in pod.metadata.owner_references if one.controller), None) if size is None else None,
    )


_READERS: tuple[Callable[[Pod], Membership | None], ...] = (
    _kubernetes, _workload, _plugins, _volcano, _kueue, _yunikorn, _simple,
)  # fmt: skip


def _placeholder_timeout(parameters: str) -> int | None:
    for word in parameters.split():
        key, _, value = word.partition("=")
        if key == "placeholderTimeoutInSeconds":
            return read_seconds_ms(value, key)
    return None


# ------------------------------------------------------------------------------------------ what objects say


def _of_kubernetes(member: Membership, groups: Groups) -> Group | Reason | None:
    found = groups.kubernetes.get((member.namespace, member.name))
    if found is None:
        return _waits(f'waiting for pods\'s pod group "{member.name}" to appear in scheduling queue')
    spec = found.spec
    if spec.parent_composite_pod_group_name:
        field = "PodGroup spec.parentCompositePodGroupName"
        return Reason("gang", "UNSUPPORTED_FEATURE", f"{field} is not supported by this scheduler")
    if spec.scheduling_policy.gang is None:
        return None
    mode = spec.disruption_mode
    whole = "all" in mode or "podGroup" in mode if isinstance(mode, dict) else mode in ("All", "PodGroup")
    topology = spec.scheduling_constraints.topology
    return _group(
        member,
        spec.scheduling_policy.gang.min_count,
        topology=topology[0].key if topology else "",
        whole=whole,
        since=found.metadata.creation_timestamp,
    )


def _of_workload(member: Membership, groups: Groups) -> Group | Reason | None:
    name = member.name.partition("/")[0]
    found = groups.workloads.get((member.namespace, name))
    if found is None:
        return _waits(f'waiting for pods\'s workload "{name}" to appear in scheduling queue')
    policy = next((part.policy for part in found.spec.pod_groups if part.name == member.part), None)
    if policy is None:
        return _waits(f'pod group "{member.part}" doesn\'t exist for a workload "{name}"')
    return (
        None if policy.gang is None else _group(member, policy.gang.min_count, since=found.metadata.creation_timestamp)
    )


def _of_plugins(member: Membership, groups: Groups) -> Group | Reason:
    found = groups.plugins.get((member.namespace, member.name))
    if found is None:
        return _waits(f'waiting for the PodGroup "{member.name}" of {PLUGINS_LABEL} to be created')
    seconds = found.spec.schedule_timeout_seconds
    since = found.metadata.creation_timestamp
    return _group(
        member, found.spec.min_member, timeout_ms=None if seconds is None else seconds_ms(seconds), since=since
    )


def _of_volcano(member: Membership, groups: Groups) -> Group | Reason:
    found = groups.volcano.get((member.namespace, member.name))
    if found is None and not member.min_count:
        return _waits(f'waiting for the PodGroup "{member.name}" of {VOLCANO_GROUP[0]} to be created')
    spec = found.spec if found is not None else MemberGroup().spec
    parts = tuple(sorted(spec.min_task_member.items()))
    since = found.metadata.creation_timestamp if found is not None else None
    return _group(member, spec.min_member or member.min_count, parts=parts, queue=spec.queue, since=since)


def _of_pods(member: Membership, siblings: tuple[Membership, ...], owned: Owned) -> Group | Reason:
    """Conventions without an object: any pod of the group may say how many there are, or else whoever made them."""
    everyone = (member, *(one for one in siblings if one.key == member.key))
    sizes = sorted({one.min_count for one in everyone if one.min_count})
    if not sizes and member.convention == "annotation":
        learnt = size_by_owners(member.namespace, member.name, [one.owner for one in everyone], owned)
        if isinstance(learnt, Reason):
            return learnt
        sizes = [learnt]
    if not sizes:
        annotation = KUEUE_TOTAL if member.convention == "kueue" else f"{YUNIKORN}task-groups"
        return Reason(
            "gang", "POD_GROUP_SIZE", f'the size of pod group "{member.name}" is not declared (annotation {annotation})'
        )
    if len(sizes) > 1:
        told = ", ".join(map(str, sizes))
        return Reason("gang", "POD_GROUP_SIZE", f'the pods of group "{member.name}" declare different sizes: {told}')
    parts = next((one.parts for one in everyone if one.parts), ())
    timeouts = [one.timeout_ms for one in everyone if one.timeout_ms is not None]
    return _group(member, sizes[0], parts=parts, timeout_ms=max(timeouts, default=None))


def _group(
    member: Membership,
    min_count: int,
    *,
    parts: tuple[tuple[str, int], ...] = (),
    timeout_ms: int | None = None,
    queue: str = "",
    topology: str = "",
    whole: bool = False,
    since: str | None = None,
) -> Group:
    said = member.timeout_ms if timeout_ms is None else timeout_ms
    return Group(
        member.key,
        bounded(min_count, 1, MAX_INT32),
        parts,
        DEFAULT_TIMEOUT_MS[member.convention] if said is None else said,
        queue or member.queue,
        topology,
        whole,
        since or "",
        # What Volcano calls a waiting time is a wish to start by then, not a reason to step aside.
        said is not None and member.convention != "volcano",
    )


def _waits(text: str) -> Reason:
    return Reason("gang", "POD_GROUP_MISSING", text)


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
