"""What a user wants (`JobSpec`), what became of it (`Job`), and each attempt of each member (`Run`).

Every job is a gang: the members of all its tasks are placed together or not at all. Most gangs have one member.
Times are milliseconds since the epoch, durations milliseconds; 0 means "not set" for durations.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.model.array import ArrayPlace
from hodei.model.decision import Decision
from hodei.model.dependency import Dependencies
from hodei.model.escalation import Escalation
from hodei.model.health import HealthCheck, HealthState
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.job_affinity import HostPort, JobAffinity, SpreadRule
from hodei.model.lifecycle import JobState, RunState
from hodei.model.node import Grant, Location, Taint, TaintEffect
from hodei.model.resources import Resources
from hodei.model.selector import Requirement
from hodei.model.terms import NodeTerm as NodeTerm
from hodei.model.volume import Volume

PRIORITY_CLASSES = {"critical": 1000, "high": 750, "medium": 500, "low": 250, "batch": 100, "scavenger": 0}
RestartPolicy = Literal["never", "on_failure", "always"]
Binding = Literal["", "cores", "numa"]


class Toleration(Struct, frozen=True, omit_defaults=True, gc=False):
    """Kubernetes' own rules: an empty key with `Exists` tolerates everything, an empty effect means every effect.
    `Gt` and `Lt` tolerate taints whose value is a whole number above, or below, the toleration's own."""

    key: str = ""
    operator: Literal["Equal", "Exists", "Gt", "Lt"] = "Equal"
    value: str = ""
    effect: TaintEffect | Literal[""] = ""
    seconds: int | None = None

    def tolerates(self, taint: Taint) -> bool:
        if self.effect and self.effect != taint.effect:
            return False
        if self.key and self.key != taint.key:
            return False
        if self.operator == "Exists":
            return True
        if self.operator == "Equal":
            return bool(self.key) and self.value == taint.value
        return Requirement(self.key, self.operator, (self.value,)).matches({taint.key: taint.value})


class PreferredTerm(Struct, frozen=True, gc=False):
    weight: int
    term: NodeTerm


class Affinity(Struct, frozen=True, omit_defaults=True, gc=False):
    """Any one of `required` must hold (none given: no demand); each of `preferred` that holds adds its weight."""

    required: tuple[NodeTerm, ...] = ()
    preferred: tuple[PreferredTerm, ...] = ()


class BackendChoice(Struct, frozen=True, omit_defaults=True, gc=False):
    """`specific`: one of `names` or nowhere. `preferred`: those first, else any; in their order, or by their `weights` (one
    for each). `any`: no opinion. `avoid`: those last, whatever else is said."""

    mode: Literal["any", "preferred", "specific"] = "any"
    names: tuple[str, ...] = ()
    weights: tuple[int, ...] = ()
    avoid: tuple[str, ...] = ()


class LongRunning(Struct, frozen=True, tag="long-running", tag_field="type", omit_defaults=True, gc=False):
    max_duration_ms: int = 0


class Batch(Struct, frozen=True, tag="batch", tag_field="type", omit_defaults=True, gc=False):
    pass


class Serverless(Struct, frozen=True, tag="serverless", tag_field="type", omit_defaults=True, gc=False):
    cold_start_acceptable: bool = True


class DataProcessing(Struct, frozen=True, tag="data-processing", tag_field="type", omit_defaults=True, gc=False):
    input_bytes: int = 0
    output_bytes: int = 0


class Interactive(Struct, frozen=True, tag="interactive", tag_field="type", omit_defaults=True, gc=False):
    idle_timeout_ms: int = 0


Workload = LongRunning | Batch | Serverless | DataProcessing | Interactive


class GangRules(Struct, frozen=True, omit_defaults=True, gc=False):
    """How the members of a job belong together.

    `topology`: a label (or region, zone, rack, host, backend) of which all share one value, a must or else a wish.
    `on_failure`: when a member is lost or fails, start all again, or only that one, in the place that it had.
    `assembly_timeout_ms`: how long after placing all members may take until they run.
    `elastic`: a gang that started with fewer than all takes in more when there is room, and gives them up first.
    `per_node`: it runs once on every node that suits it (`control.lifecycle.per_node`); its members are numbered as they come.
    """

    topology: str = ""
    topology_required: bool = True
    on_failure: Literal["restart", "repair"] = "restart"
    assembly_timeout_ms: int = 0
    elastic: bool = False
    per_node: bool = False


class TransferCost(Struct, frozen=True, gc=False):
    """What it costs to move the data of one member between two backends, either way, in thousandths."""

    between: tuple[str, str]
    cost_milli: int


class Distribution(Struct, frozen=True, omit_defaults=True, gc=False):
    """How the tasks of a job lie over backends.

    `colocated`: all on one. `distributed`: each task on any of its `backends`, the cheapest way by `transfer_costs`
    between every two tasks. `hub_and_spoke`: the same with costs between the task `hub` and each other task alone.
    """

    model: Literal["", "colocated", "distributed", "hub_and_spoke"] = ""
    hub: str = ""
    transfer_costs: tuple[TransferCost, ...] = ()


class Checkpoint(Struct, frozen=True, omit_defaults=True, gc=False):
    """How a run is told to save its work before it is stopped: a signal to it, or a command beside it, and how long
    that may take. `file`: its time of change says when the work was last saved. `every_ms`: also in between, that often."""

    signal: str = ""
    command: tuple[str, ...] = ()
    timeout_ms: int = 30_000
    file: str = ""
    every_ms: int = 0

    @property
    def hooked(self) -> bool:
        return bool(self.signal or self.command)


class TaskSpec(Struct, frozen=True, omit_defaults=True, gc=False):
    """A part of a job: `count` equal members, each with these resources and this command.

    `min_count` of them are enough to start (0: all). `backends` are those that it may run on (none named: any).
    `binding`: whole cores of its own, or such cores and devices that are all of one socket.
    `volumes`: storage that it needs at hand. `images`: those that a node should better hold already.
    `labels`: those of its members, over the job's.
    """

    name: str = "main"
    count: int = 1
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    workdir: str = ""
    image: str = ""
    request: Resources = {}
    limits: Resources = {}
    arch: str = ""
    gpu_type: str = ""
    node_selector: dict[str, str] = {}
    affinity: Affinity = Affinity()
    tolerations: tuple[Toleration, ...] = ()
    job_affinity: JobAffinity = JobAffinity()
    job_anti_affinity: JobAffinity = JobAffinity()
    spread: tuple[SpreadRule, ...] = ()
    ports: tuple[HostPort, ...] = ()
    min_count: int = 0
    backends: tuple[str, ...] = ()
    binding: Binding = ""
    volumes: tuple[Volume, ...] = ()
    images: tuple[str, ...] = ()
    labels: dict[str, str] = {}

    @property
    def needed(self) -> int:
        return self.min_count or self.count


class JobSpec(Struct, frozen=True, omit_defaults=True, gc=False):
    """`preempts`: whether it may take the place of others, if its class does so at all."""

    name: str
    tasks: tuple[TaskSpec, ...]
    project: str = "default"
    user: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    priority: int = PRIORITY_CLASSES["medium"]
    profile: str = "default"
    backend: BackendChoice = BackendChoice()
    near: Location = Location()
    workload: Workload = Batch()
    estimate_ms: int = 0
    timeout_ms: int = 0
    scheduling_timeout_ms: int = 0
    deadline_ms: int = 0
    grace_ms: int = 10_000
    retries: int = 0
    restart: RestartPolicy = "on_failure"
    inputs: tuple[str, ...] = ()
    gang: GangRules = GangRules()
    distribution: Distribution = Distribution()
    checkpoint: Checkpoint = Checkpoint()
    health: HealthCheck = HealthCheck()
    retry_on: tuple[str, ...] = ()
    array: ArrayPlace | None = None
    recovery: Escalation = Escalation()
    routed_by: str = ""
    after: Dependencies = Dependencies()
    preempts: bool = True
    max_queue_time_ms: int = 0
    waits_by: str = ""
    failed_on: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(task.count for task in self.tasks)

    def has_member(self, member: int) -> bool:
        """A job for every node numbers its members as nodes come: there is no last one."""
        return member >= 0 and (self.gang.per_node or member < self.size)

    def task_of(self, member: int) -> TaskSpec:
        if self.gang.per_node:
            return self.tasks[0]
        for task in self.tasks:
            if member < task.count:
                return task
            member -= task.count
        raise IndexError(member)


class Job(Struct, frozen=True, omit_defaults=True, gc=False):
    """A job and where it stands. `reason` is for people, `reason_code` is stable; `version` counts the changes;
    `nodes` names where its latest attempt went (the first twenty, separated by spaces). Attempts are counted through;
    those since `first_attempt` make up the gang that runs now: members that joined or were replaced have later ones.
    `recourse`: what was changed for it while it waited (`model.escalation_state`).
    `failure`: the class of its latest failure (`model.failure`). `move`: until it is placed again it goes "off" the nodes
    named, or "to" one."""

    id: JobId
    spec: JobSpec
    state: JobState
    submitted_ms: int
    changed_ms: int
    reason_code: str = ""
    reason: str = ""
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    preemptions: int = 0
    cancel_requested: bool = False
    requeue_requested: bool = False
    queued_ms: int = 0
    not_before_ms: int = 0
    scheduled_ms: int = 0
    started_ms: int = 0
    finished_ms: int = 0
    exit_code: int | None = None
    nodes: str = ""
    first_attempt: int = 0
    version: int = 1
    failure: str = ""
    suspend_requested: bool = False
    move: str = ""
    recourse: str = ""


class Run(Struct, frozen=True, omit_defaults=True, gc=False):
    """One attempt of one member; it only moves forward. A retry is a new run.

    `rank` is the member's number among those that run together, without gaps when they start. `checkpoint_ms`: when
    it last said that its work was saved. `grant`: which cores and devices of the node are its own. `kind`: how it came to
    start, in a line that promises starts.
    """

    id: RunId
    job: JobId
    task: str
    member: int
    attempt: int
    node: NodeName
    backend: str
    state: RunState
    placed_ms: int
    started_ms: int = 0
    finished_ms: int = 0
    exit_code: int | None = None
    reason_code: str = ""
    reason: str = ""
    stop_requested: str = ""
    decision: Decision | None = None
    rank: int = 0
    checkpoint_ms: int = 0
    grant: Grant | None = None
    kind: Literal["", "head", "backfill", "spill"] = ""
    health: HealthState = ""
