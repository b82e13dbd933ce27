"""Gangs: the pod group conventions of Kubernetes, scheduler-plugins, Volcano, Kueue, YuniKorn and plain annotations.

`membership` reads the pod alone; `group_of` adds the group's object, where the convention has one. The size of a group is always
declared: by its pods, by its object, or by the workload that creates the pods. It is never the number of pods that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct, structs

from hodei.kube.api.objects import GroupedWorkload, MemberGroup, OwnerReference, Pod, PodGroup, TaskGroup, Workload
from hodei.kube.api.quantities import MAX_INT32, bounded, is_integer, read_count, read_seconds_ms, seconds_ms
from hodei.kube.scheduler.messages import WAITS_FOR_GANG
from hodei.kube.scheduler.translate import PodInfo
from hodei.model.job import GangRules, JobSpec, Reason, TaskSpec
from hodei.model.resources import parse_duration_ms

Convention = Literal["kubernetes", "workload", "scheduler-plugins", "volcano", "kueue", "yunikorn", "annotation"]

PLUGINS_LABEL = "scheduling.x-k8s.io/pod-group"
VOLCANO_GROUP = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
VOLCANO_MIN, VOLCANO_QUEUE = "scheduling.volcano.sh/group-min-member", "scheduling.volcano.sh/queue-name"
VOLCANO_TASK, VOLCANO_SLA = "volcano.sh/task-spec", "volcano.sh/sla-waiting-time"
KUEUE_GROUP, KUEUE_TOTAL = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
YUNIKORN = "yunikorn.apache.org/"
YUNIKORN_APPS = (f"{YUNIKORN}app-id", "applicationId", "spark-app-selector")
ANNOTATION, ANNOTATION_TIMEOUT = "pod-group", "pod-group-timeout"

ANNOTATION_SIZE = "pod-group-size"
# (namespace, kind, name) of a workload.
WorkloadKey = tuple[str, str, str]
_DESIRED_REPLICAS = "deployment.kubernetes.io/desired-replicas"
# Kinds that define a size: their API group, and the kind that may own them without adding pods to the group.
_SIZED_KINDS = {"Job": ("batch", "CronJob"), "StatefulSet": ("apps", ""), "ReplicaSet": ("apps", "Deployment")}

# The time from the first pending pod until the gang is placed, where none is declared.
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
    """The group that a pod names. `part`: its part of the group. `min_count`: the declared size (0: see the group's object).
    `parts`: the members needed of each part. `owner`: the pod's controller, if only that defines the size."""

    convention: Convention
    namespace: str
    name: str
    part: str = ""
    min_count: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    timeout_ms: int | None = None
    queue: str = ""
    owner: OwnerReference | None = None

    @property
    def key(self) -> tuple[Convention, str, str]:
        return (self.convention, self.namespace, self.name)

    @property
    def declared(self) -> bool:
        """Whether it is more than a label that may mean anything."""
        return self.convention != "annotation" or self.min_count > 0


class Group(Struct, frozen=True):
    """A gang of any convention: at least `min_count` pods start together, and so many of each of `parts`.

    `topology`: the label whose value all members share. `all_or_nothing`: members are evicted together. `since`: creation time
    of the group's object, "" without one. `timed`: the timeout is declared, not a default.
    """

    key: tuple[Convention, str, str]
    min_count: int
    parts: tuple[tuple[str, int], ...] = ()
    timeout_ms: int = 0
    queue: str = ""
    topology: str = ""
    all_or_nothing: bool = False
    since: str = ""
    timed: bool = False


class Workloads(Struct, frozen=True):
    """The workloads that define the size of groups. `planned`: by `hodei kube plan`, or why a size is unknown."""

    workloads: Mapping[WorkloadKey, Workload] = {}
    jobs: Mapping[tuple[str, str], Workload] = {}
    planned: Mapping[WorkloadKey, int | str] = {}

    def find(self, namespace: str, owner: OwnerReference) -> Workload | None:
        if owner.kind == "Job":
            found = self.jobs.get((namespace, owner.name))
        else:
            found = self.workloads.get((namespace, owner.kind, owner.name))
        # A workload with another uid was created later under the same name.
        return found if found is not None and found.metadata.uid == owner.uid else None


NO_WORKLOADS = Workloads()


class Groups(Struct, frozen=True):
    """The group objects of the cluster, by (namespace, name)."""

    kubernetes: Mapping[tuple[str, str], PodGroup] = {}
    workloads: Mapping[tuple[str, str], GroupedWorkload] = {}
    plugins: Mapping[tuple[str, str], MemberGroup] = {}
    volcano: Mapping[tuple[str, str], MemberGroup] = {}
    sized_by: Workloads = NO_WORKLOADS


NO_GROUPS = Groups()


def membership(pod: Pod) -> Membership | Reason | None:
    """The group that a pod belongs to, by the first convention that it follows; a Reason if its declaration is invalid."""
    try:
        for read in _CONVENTIONS:
            found = read(pod)
            if found is not None:
                return found
    except Exception as error:  # including JSON that is nested too deeply
        return Reason("gang", "INVALID_POD_GROUP", f"the pod's group cannot be read: {str(error)[:300]}")
    return None


def group_of(
    member: Membership, groups: Groups = NO_GROUPS, *, siblings: tuple[Membership, ...] = ()
) -> Group | Reason | None:
    """The gang; None if the pods are scheduled one by one, a Reason while the definition is missing or invalid. `siblings`: the
    other members, for conventions where any pod may declare the size."""
    match member.convention:
        case "kubernetes":
            return _kubernetes_group(member, groups)
        case "workload":
            return _workload_group(member, groups)
        case "scheduler-plugins":
            return _plugins_group(member, groups)
        case "volcano":
            return _volcano_group(member, groups)
        case _:
            return _declared_group(member, siblings, groups.sized_by)


def missing_count(group: Group, present: Mapping[str, int]) -> int:
    """How many pods are still missing, when so many of each part exist."""
    parts = sum(max(0, need - present.get(part, 0)) for part, need in group.parts)
    return max(parts, group.min_count - sum(present.values()), 0)


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
    annotations = pod.metadata.annotations
    name = next((annotations[key] for key in VOLCANO_GROUP if annotations.get(key)), "")
    if not name:
        return None
    sla = annotations.get(VOLCANO_SLA)
    return Membership(
        "volcano",
        pod.metadata.namespace,
        name,
        part=annotations.get(VOLCANO_TASK, ""),
        min_count=read_count(annotations[VOLCANO_MIN], VOLCANO_MIN) if VOLCANO_MIN in annotations else 0,
        timeout_ms=parse_duration_ms(sla) if sla else None,
        queue=annotations.get(VOLCANO_QUEUE, ""),
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
    annotations = {**meta.labels, **meta.annotations}
    task = annotations.get(f"{YUNIKORN}task-group-name", "")
    encoded = meta.annotations.get(f"{YUNIKORN}task-groups")
    app = next((annotations[key] for key in YUNIKORN_APPS if annotations.get(key)), "")
    if not app or not (task or encoded):
        return None
    groups = msgspec.json.decode(encoded, type=list[TaskGroup]) if encoded else []
    parts = tuple((group.name, group.min_member) for group in groups)
    return Membership(
        "yunikorn",
        meta.namespace,
        app,
        part=task,
        min_count=sum(count for _, count in parts),
        parts=parts,
        timeout_ms=_placeholder_timeout(meta.annotations.get(f"{YUNIKORN}schedulingPolicyParameters", "")),
        queue=annotations.get(f"{YUNIKORN}queue", ""),
    )


def _annotation(pod: Pod) -> Membership | None:
    annotations = pod.metadata.annotations
    name = annotations.get(ANNOTATION) or pod.metadata.labels.get(ANNOTATION)
    if not name:
        return None
    size, timeout = annotations.get(ANNOTATION_SIZE), annotations.get(ANNOTATION_TIMEOUT)
    return Membership(
        "annotation",
        pod.metadata.namespace,
        name,
        min_count=read_count(size, ANNOTATION_SIZE) if size is not None else 0,
        timeout_ms=parse_duration_ms(timeout) if timeout is not None else None,
        owner=next((one for one in pod.metadata.owner_references if one.controller), None) if size is None else None,
    )


_CONVENTIONS: tuple[Callable[[Pod], Membership | None], ...] = (
    _kubernetes, _workload, _plugins, _volcano, _kueue, _yunikorn, _annotation,
)  # fmt: skip


def _placeholder_timeout(parameters: str) -> int | None:
    for word in parameters.split():
        key, _, value = word.partition("=")
        if key == "placeholderTimeoutInSeconds":
            return read_seconds_ms(value, key)
    return None


def _kubernetes_group(member: Membership, groups: Groups) -> Group | Reason | None:
    found = groups.kubernetes.get((member.namespace, member.name))
    if found is None:
        return _missing(f'waiting for pods\'s pod group "{member.name}" to appear in scheduling queue')
    spec = found.spec
    if spec.parent_composite_pod_group_name:
        field = "PodGroup spec.parentCompositePodGroupName"
        return Reason("gang", "UNSUPPORTED_FEATURE", f"{field} is not supported by this scheduler")
    if spec.scheduling_policy.gang is None:
        return None
    mode = spec.disruption_mode
    all_or_nothing = "all" in mode or "podGroup" in mode if isinstance(mode, dict) else mode in ("All", "PodGroup")
    topology = spec.scheduling_constraints.topology
    return _group(
        member,
        spec.scheduling_policy.gang.min_count,
        topology=topology[0].key if topology else "",
        all_or_nothing=all_or_nothing,
        since=found.metadata.creation_timestamp,
    )


def _workload_group(member: Membership, groups: Groups) -> Group | Reason | None:
    name = member.name.partition("/")[0]
    found = groups.workloads.get((member.namespace, name))
    if found is None:
        return _missing(f'waiting for pods\'s workload "{name}" to appear in scheduling queue')
    policy = next((part.policy for part in found.spec.pod_groups if part.name == member.part), None)
    if policy is None:
        return _missing(f'pod group "{member.part}" doesn\'t exist for a workload "{name}"')
    return (
        None if policy.gang is None else _group(member, policy.gang.min_count, since=found.metadata.creation_timestamp)
    )


def _plugins_group(member: Membership, groups: Groups) -> Group | Reason:
    found = groups.plugins.get((member.namespace, member.name))
    if found is None:
        return _missing(f'waiting for the PodGroup "{member.name}" of {PLUGINS_LABEL} to be created')
    seconds = found.spec.schedule_timeout_seconds
    since = found.metadata.creation_timestamp
    return _group(
        member, found.spec.min_member, timeout_ms=None if seconds is None else seconds_ms(seconds), since=since
    )


def _volcano_group(member: Membership, groups: Groups) -> Group | Reason:
    found = groups.volcano.get((member.namespace, member.name))
    if found is None and not member.min_count:
        return _missing(f'waiting for the PodGroup "{member.name}" of {VOLCANO_GROUP[0]} to be created')
    spec = found.spec if found is not None else MemberGroup().spec
    parts = tuple(sorted(spec.min_task_member.items()))
    since = found.metadata.creation_timestamp if found is not None else None
    return _group(member, spec.min_member or member.min_count, parts=parts, queue=spec.queue, since=since)


def _declared_group(member: Membership, siblings: tuple[Membership, ...], sized_by: Workloads) -> Group | Reason:
    """Conventions without an object: any pod declares the size, or else the workload that creates the pods defines it."""
    members = (member, *(one for one in siblings if one.key == member.key))
    sizes = sorted({one.min_count for one in members if one.min_count})
    if not sizes and member.convention == "annotation":
        size = size_by_owners(member.namespace, member.name, [one.owner for one in members], sized_by)
        if isinstance(size, Reason):
            return size
        sizes = [size]
    if not sizes:
        annotation = KUEUE_TOTAL if member.convention == "kueue" else f"{YUNIKORN}task-groups"
        return Reason(
            "gang", "POD_GROUP_SIZE", f'the size of pod group "{member.name}" is not declared (annotation {annotation})'
        )
    if len(sizes) > 1:
        listed = ", ".join(map(str, sizes))
        return Reason("gang", "POD_GROUP_SIZE", f'the pods of group "{member.name}" declare different sizes: {listed}')
    parts = next((one.parts for one in members if one.parts), ())
    timeouts = [one.timeout_ms for one in members if one.timeout_ms is not None]
    return _group(member, sizes[0], parts=parts, timeout_ms=max(timeouts, default=None))


def _group(
    member: Membership,
    min_count: int,
    *,
    parts: tuple[tuple[str, int], ...] = (),
    timeout_ms: int | None = None,
    queue: str = "",
    topology: str = "",
    all_or_nothing: bool = False,
    since: str | None = None,
) -> Group:
    declared_ms = member.timeout_ms if timeout_ms is None else timeout_ms
    return Group(
        member.key,
        bounded(min_count, 1, MAX_INT32),
        parts,
        DEFAULT_TIMEOUT_MS[member.convention] if declared_ms is None else declared_ms,
        queue or member.queue,
        topology,
        all_or_nothing,
        since or "",
        # Volcano's waiting time is a target for the start, not a timeout.
        declared_ms is not None and member.convention != "volcano",
    )


def _missing(text: str) -> Reason:
    return Reason("gang", "POD_GROUP_MISSING", text)


# Labels that differ for each pod of a set. With them, no two members of a gang would be equal.
_PER_POD = frozenset(
    {
        "apps.kubernetes.io/pod-index",
        "batch.kubernetes.io/job-completion-index",
        "statefulset.kubernetes.io/pod-name",
        "volcano.sh/task-index",
    }
)


class GangAssembly(Struct):
    """Pods that are placed together, or a single pod (`group` is None).

    `pending`: members without a node, in order of arrival; `bound` and `done` count those with a node and those that succeeded;
    `needed`: how many of the pending must be placed together. `reason`: why the gang cannot start yet.
    """

    pending: list[Pod]
    group: Group | None = None
    bound: int = 0
    needed: int = 1
    reason: Reason | None = None
    done: int = 0

    @property
    def lacks_members(self) -> bool:
        """It has started before, and a pending pod replaces a lost member."""
        begun = self.bound + self.done
        return self.group is not None and 0 < begun < self.group.min_count


def assemble(pods: Iterable[Pod], groups: Groups = NO_GROUPS) -> list[GangAssembly]:
    """All schedulable pods as gangs. Pods with scheduling gates are left out; succeeded members count towards the size."""
    active: dict[tuple[str, str, str], list[tuple[Pod, Membership]]] = {}
    ended: dict[tuple[str, str, str], list[tuple[Pod, Membership]]] = {}
    out: list[GangAssembly] = []
    for pod in pods:
        if pod.status.phase == "Succeeded":
            found = membership(pod)
            if isinstance(found, Membership):
                ended.setdefault(found.key, []).append((pod, found))
            continue
        if pod.terminal or pod.terminating or (pod.spec.scheduling_gates and not pod.spec.node_name):
            continue
        found = membership(pod)
        if isinstance(found, Membership):
            active.setdefault(found.key, []).append((pod, found))
        elif not pod.spec.node_name:
            out.append(GangAssembly([pod], reason=found))
    for key, members in active.items():
        out += _assemble_group(members, groups, ended.get(key, []))
    return out


def of_this_gang(ended: Iterable[Pod], members: Iterable[Pod], group: Group) -> list[Pod]:
    """The ended members that belong to the present gang and not to an earlier one of the same name: they share an owner with a
    present member or, without an owner, are not older than the group's object."""
    owners = {_owner(pod) for pod in members} - {""}
    out = []
    for pod in ended:
        owner, created = _owner(pod), pod.metadata.creation_timestamp or ""
        if owner in owners or (not owner and group.since and group.since <= created):
            out.append(pod)
    return out


def _owner(pod: Pod) -> str:
    return next((one.uid for one in pod.metadata.owner_references if one.controller), "")


def _assemble_group(
    members: list[tuple[Pod, Membership]], groups: Groups, ended: list[tuple[Pod, Membership]]
) -> list[GangAssembly]:
    pending = [pod for pod, _ in members if not pod.spec.node_name]
    if not pending:
        return []
    first = members[0][1]
    group = group_of(first, groups, siblings=tuple(one for _, one in members[1:]))
    if group is None:
        return [GangAssembly([pod]) for pod in pending]
    if isinstance(group, Reason):
        return [GangAssembly(pending, reason=group)]
    present: dict[str, int] = {}
    parts = {pod.metadata.uid: one.part for pod, one in ended}
    done = [
        parts[pod.metadata.uid] for pod in of_this_gang([pod for pod, _ in ended], [pod for pod, _ in members], group)
    ]
    for part in (*(one.part for _, one in members), *done):
        present[part] = present.get(part, 0) + 1
    bound = len(members) - len(pending)
    needed = min(len(pending), max(1, group.min_count - bound - len(done)))
    reason = Reason("gang", "GANG_INCOMPLETE", WAITS_FOR_GANG) if missing_count(group, present) else None
    return [GangAssembly(pending, group, bound, needed, reason, len(done))]


def as_job(pods: Sequence[PodInfo], needed: int, group: Group | None = None) -> tuple[JobSpec, list[int]]:
    """The pods as one job, and the pod number of each member. The first `needed` are placed together, the others if capacity is
    left. Equal pods form one task, so they are filtered and scored once; the highest priority counts."""
    tasks: dict[bytes, TaskSpec] = {}
    members: dict[bytes, list[int]] = {}
    needed_of: dict[bytes, int] = {}
    for number, pod in enumerate(pods):
        labels = {key: value for key, value in pod.job.labels.items() if key not in _PER_POD}
        task = structs.replace(pod.job.tasks[0], labels=labels)
        encoded = msgspec.msgpack.encode(task)
        tasks.setdefault(encoded, task)
        members.setdefault(encoded, []).append(number)
        needed_of[encoded] = needed_of.get(encoded, 0) + (number < needed)
    # Optional kinds come last: a task needs at least one member.
    kinds = sorted(tasks, key=lambda encoded: not needed_of[encoded])
    first = pods[0].job
    job = structs.replace(
        first,
        tasks=tuple(
            structs.replace(tasks[kind], name=f"pod-{place}", count=len(members[kind]), min_count=needed_of[kind])
            for place, kind in enumerate(kinds)
            if needed_of[kind]
        ),
        labels={},
        priority=max(pod.job.priority for pod in pods),
        preempts=all(pod.job.preempts for pod in pods),
        estimate_ms=max(pod.job.estimate_ms for pod in pods),
        gang=GangRules(topology=group.topology if group is not None else ""),
    )
    return job, [number for kind in kinds if needed_of[kind] for number in members[kind]]


def size_by_owners(
    namespace: str, group: str, owners: Sequence[OwnerReference | None], sized_by: Workloads
) -> int | Reason:
    """The size that the owners of its pods define; a Reason if it is unknown or ambiguous. Two workloads of one group look like
    one until the second creates pods, so such groups must declare their size."""
    sizes: dict[str, int] = {}
    for owner in dict.fromkeys(owners):
        if owner is None:
            return _size_unknown(group, "one of its pods has no owner")
        found = _size(namespace, owner, sized_by)
        if found is None:
            text = f'waiting for {owner.kind} "{owner.name}" to be read, which defines the size of pod group "{group}"'
            return Reason("gang", "POD_GROUP_MISSING", text)
        if isinstance(found, str):
            return _size_unknown(group, found)
        whose, size = found
        sizes[whose] = max(sizes.get(whose, 0), size)
    if len(sizes) != 1:
        return _size_unknown(group, f"its pods have several owners: {', '.join(sorted(sizes))[:300]}")
    return bounded(next(iter(sizes.values())), 1, MAX_INT32)


def workload_key(namespace: str, owner: OwnerReference) -> WorkloadKey:
    return (namespace, owner.kind, owner.name)


def size_fields(workload: Workload | None) -> tuple[object, ...]:
    if workload is None:
        return ()
    meta = workload.metadata
    return (meta.uid, meta.annotations.get(_DESIRED_REPLICAS), workload.spec, _controller_of(workload))


def _size(namespace: str, owner: OwnerReference, sized_by: Workloads) -> tuple[str, int] | str | None:
    """The top-level workload and how many pods it runs at once, or why that is not certain; None if it is not known yet."""
    name = f"{owner.kind}/{owner.name}"
    if not owner.uid and (planned := sized_by.planned.get(workload_key(namespace, owner))) is not None:
        return planned if isinstance(planned, str) else (name, planned)
    api, allowed = _SIZED_KINDS.get(owner.kind, ("", ""))
    if not api or owner.api_version.partition("/")[0] != api:
        return (
            f"its owner {name} ({owner.api_version or 'of an unknown group'}) is of a kind that does not define a size"
        )
    found = sized_by.find(namespace, owner)
    if found is None:
        return None
    controller = _controller_of(found)
    if controller is not None and controller.kind != allowed:
        return f"{name} belongs to {controller.kind}/{controller.name}, which may create more pods"
    spec = found.spec
    if owner.kind == "Job":
        parallel = 1 if spec.parallelism is None else spec.parallelism
        return name, parallel if spec.completions is None else min(parallel, spec.completions)
    wanted = 1 if spec.replicas is None else spec.replicas
    if owner.kind == "StatefulSet":
        return (name, wanted) if wanted < 2 or spec.pod_management_policy == "Parallel" else creates_one_by_one(name)
    if controller is not None:
        # During a rolling update each replica set has only a part of the pods; this annotation has the total.
        desired = found.metadata.annotations.get(_DESIRED_REPLICAS, "")
        return f"Deployment/{controller.name}", int(desired) if is_integer(desired) else wanted
    return name, wanted


def creates_one_by_one(name: str) -> str:
    return f"{name} creates its pods one after the other (podManagementPolicy is not Parallel)"


def _controller_of(workload: Workload) -> OwnerReference | None:
    return next((one for one in workload.metadata.owner_references if one.controller), None)


def _size_unknown(group: str, why: str) -> Reason:
    text = f'the size of pod group "{group}" is not declared (annotation {ANNOTATION_SIZE}) and cannot be derived from its owner: {why}'
    return Reason("gang", "POD_GROUP_SIZE", text)
