"""Everybody's objects for groups of pods, as far as scheduling reads them. Versions of these APIs come and go: only fields
that stayed are read, and a group of any version decodes."""

from __future__ import annotations

from hodei.kube.api.objects import Meta, Slim


class GangPolicy(Slim, frozen=True):
    min_count: int = 1


class Policy(Slim, frozen=True):
    """Kubernetes' own: a group is a gang, or (basic) its pods go one by one."""

    gang: GangPolicy | None = None


class TopologyConstraint(Slim, frozen=True):
    key: str = ""


class Constraints(Slim, frozen=True):
    topology: tuple[TopologyConstraint, ...] = ()


class GroupSpec(Slim, frozen=True):
    scheduling_policy: Policy = Policy()
    scheduling_constraints: Constraints = Constraints()
    disruption_mode: dict[str, object] | str | None = None
    priority_class_name: str = ""
    parent_composite_pod_group_name: str | None = None


class GroupCondition(Slim, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class PodGroup(Slim, frozen=True):
    """`scheduling.k8s.io` PodGroup, from 1.36 on."""

    class Status(Slim, frozen=True):
        conditions: tuple[GroupCondition, ...] = ()

    metadata: Meta = Meta()
    spec: GroupSpec = GroupSpec()
    status: Status = Status()


class PartOfWorkload(Slim, frozen=True):
    name: str = ""
    policy: Policy = Policy()


class WorkloadSpec(Slim, frozen=True):
    pod_groups: tuple[PartOfWorkload, ...] = ()


class GroupedWorkload(Slim, frozen=True):
    """`scheduling.k8s.io` Workload, as in 1.35: groups by name inside it."""

    metadata: Meta = Meta()
    spec: WorkloadSpec = WorkloadSpec()


class MemberSpec(Slim, frozen=True):
    min_member: int = 0
    schedule_timeout_seconds: int | None = None
    min_task_member: dict[str, int] = {}
    queue: str = ""
    priority_class_name: str = ""


class MemberStatus(Slim, frozen=True):
    phase: str = ""
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    schedule_start_time: str | None = None
    conditions: tuple[GroupCondition, ...] = ()


class MemberGroup(Slim, frozen=True):
    """The PodGroup of scheduler-plugins (`scheduling.x-k8s.io`) or of Volcano (`scheduling.volcano.sh`)."""

    metadata: Meta = Meta()
    spec: MemberSpec = MemberSpec()
    status: MemberStatus = MemberStatus()


class TaskGroup(Slim, frozen=True):
    """One of YuniKorn's, as written in a pod's annotation."""

    name: str = ""
    min_member: int = 0
