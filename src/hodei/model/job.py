"""What a user wants (`JobSpec`), what became of it (`Job`), and each attempt of each member (`Run`).

Every job is a gang: the members of all its tasks are placed together or not at all. Most gangs have one member.
Times are milliseconds since the epoch, durations milliseconds; 0 means "not set" for durations.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.model.affinity import HostPort, JobAffinity, Requirement, SpreadRule
from hodei.model.affinity import NodeTerm as NodeTerm
from hodei.model.array import ArrayElement
from hodei.model.dependency import Dependencies
from hodei.model.ids import JobId, NodeName, RunId
from hodei.model.node import Grant, Location, Taint, TaintEffect, Volume
from hodei.model.outcome import StopReason
from hodei.model.resources import CPU, MEMORY, Resources

# -------------------------------------------------------------------------------------------- decision
# Why: the values that say no (`Verdict`), and the record of a yes (`Decision`).


# How a gang of a line that promises starts came to its own: first in line; before one that was promised its start, and
# over by then; beside what is promised.
StartKind = Literal["head", "backfill", "spill"]


class Reason(Struct, frozen=True, omit_defaults=True):
    """Why a plugin says no. `code` is stable; `evictable` is true when stopping other work could change the answer.
    `hint`: what a user can do about it, if the plugin knows."""

    plugin: str
    code: str
    text: str
    evictable: bool = False
    hint: str = ""


class Verdict(Struct, frozen=True, omit_defaults=True):
    """A reason and the nodes behind it. A verdict without nodes refuses the whole gang before any node is looked at."""

    reason: Reason
    count: int = 0
    nodes: tuple[NodeName, ...] = ()


class ScoreTerm(Struct, frozen=True):
    """One plugin's part in a score: `score` in hundredths of a point (0 to 10,000), times `weight`."""

    plugin: str
    score: int
    weight: int


class Candidate(Struct, frozen=True, omit_defaults=True):
    """A node that could take the run, with its weighted mean score in hundredths of a point."""

    node: NodeName
    score: int
    terms: tuple[ScoreTerm, ...] = ()


class Decision(Struct, frozen=True, omit_defaults=True):
    """Why a run landed where it did: the chosen node, the runners-up, and how many nodes were in question. `note`: what
    else a plugin says about the choice."""

    chosen: Candidate
    runners_up: tuple[Candidate, ...] = ()
    feasible: int = 0
    nodes: int = 0
    profile: str = "default"
    note: str = ""


# ----------------------------------------------------------------------------------------------------


# ------------------------------------------------------------------------------------------ escalation
# What a job says for the case that it waits too long. What becomes of it: `model.escalation_state`.


RelaxableRule = Literal["spread", "topology", "backend"]
RELAXABLE_RULES: tuple[RelaxableRule, ...] = ("spread", "topology", "backend")


class Escalation(Struct, frozen=True, omit_defaults=True):
    """After `relax_after_ms` of waiting its rules named in `relax` count as wishes; after every `promote_after_ms` it goes
    up one class, as far as `promote_to`. What is 0 or empty is as the profile says."""

    relax: tuple[RelaxableRule, ...] = ()
    relax_after_ms: int = 0
    promote_after_ms: int = 0
    promote_to: int = 0


# ----------------------------------------------------------------------------------------------------


# ---------------------------------------------------------------------------------------------- health
# How it is known that a run which lives is also well: one way to look, how often, and when it is given up.


# A host in a health check's address that stands for the node on which the run is.
NODE_HOST = "node"
HealthState = Literal["", "ok", "failing"]


class HealthCheck(Struct, frozen=True, omit_defaults=True):
    """Exactly one of `command` (exit code 0 is well), `http` (any status from 200 to 399) and `file` (a heartbeat: its
    time of change moves on from look to look) is set; none of them: nobody looks.

    `after_ms` from the start on a look every `every_ms`, the first one `every_ms` later; one that takes longer than
    `timeout_ms` has failed. After so many `failures` in a row the run is stopped.
    """

    command: tuple[str, ...] = ()
    http: str = ""
    file: str = ""
    every_ms: int = 30_000
    timeout_ms: int = 5_000
    after_ms: int = 0
    failures: int = 3

    @property
    def enabled(self) -> bool:
        return bool(self.command or self.http or self.file)


# ----------------------------------------------------------------------------------------------------


# ------------------------------------------------------------------------------------------- lifecycle
# The life of jobs and runs as tables with one door each. Only `control` calls the doors.


JobState = Literal["pending", "held", "scheduled", "running", "succeeded", "failed", "cancelled"]
RunState = Literal["placed", "running", "succeeded", "failed", "stopped", "lost"]

JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    "pending": frozenset({"held", "scheduled", "failed", "cancelled"}),
    "held": frozenset({"pending", "cancelled", "failed"}),
    "scheduled": frozenset({"running", "pending", "held", "succeeded", "failed", "cancelled"}),
    "running": frozenset({"pending", "held", "succeeded", "failed", "cancelled"}),
    "succeeded": frozenset({"pending"}),
    "failed": frozenset({"pending"}),
    "cancelled": frozenset({"pending"}),
}
RUN_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    "placed": frozenset({"running", "succeeded", "failed", "stopped", "lost"}),
    "running": frozenset({"succeeded", "failed", "stopped", "lost"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "stopped": frozenset(),
    "lost": frozenset(),
}
JOB_ENDED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
RUN_ENDED: frozenset[str] = frozenset(state for state, steps in RUN_TRANSITIONS.items() if not steps)


class InvalidTransition(AssertionError):
    """The caller asked for a step that the table does not have."""


def advance_job(state: JobState, to: JobState) -> JobState:
    if to not in JOB_TRANSITIONS[state]:
        raise InvalidTransition(f"a {state} job cannot become {to}")
    return to


def advance_run(state: RunState, to: RunState) -> RunState:
    if to not in RUN_TRANSITIONS[state]:
        raise InvalidTransition(f"a {state} run cannot become {to}")
    return to


# ----------------------------------------------------------------------------------------------------

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
    def has_hook(self) -> bool:
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
    array: ArrayElement | None = None
    escalation: Escalation = Escalation()
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
    `escalation_state`: what was changed for it while it waited (`model.escalation_state`).
    `failure`: the class of its latest failure (`model.outcome`). `move`: until it is placed again it goes "off" the nodes
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
    escalation_state: str = ""


class Run(Struct, frozen=True, omit_defaults=True, gc=False):
    """One attempt of one member; it only moves forward. A retry is a new run.

    `rank` is the member's number among those that run together, without gaps when they start. `checkpoint_ms`: when
    it last said that its work was saved. `stop_reason`: why it has to stop, or how its gang goes on without it. `grant`: which cores and devices of the node are its own. `kind`: how it came to
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
    stop_reason: StopReason | None = None
    decision: Decision | None = None
    rank: int = 0
    checkpoint_ms: int = 0
    grant: Grant | None = None
    kind: Literal["", "head", "backfill", "spill"] = ""
    health: HealthState = ""


# ------------------------------------------------------------------------------------------------- qos
# How firmly a member's resources are promised: Kubernetes' classes, from its requests and limits of cpu and memory.


QoS = Literal["guaranteed", "burstable", "best-effort"]
# Who has to go first, and who last, among jobs of equal priority.
QOS_RANK: dict[QoS, int] = {"best-effort": 0, "burstable": 1, "guaranteed": 2}
# As the kubelet does: the kernel kills best-effort first when memory runs out, then those who asked for little of it.
_OOM_GUARANTEED, _OOM_BEST_EFFORT = -997, 1000
_OOM_BURSTABLE = (3, 999)
_LEAST_SHARES, _MOST_SHARES, _SHARES_PER_CORE = 2, 262_144, 1024


def qos(task: TaskSpec) -> QoS:
    """Guaranteed: cpu and memory both have a limit, equal to the request. Best-effort: neither has request or limit.
    An amount of 0 is as good as none; a limit without a request is a request of the same amount."""
    request, limits = task.request, task.limits
    cpu, memory = limits.get(CPU, 0), limits.get(MEMORY, 0)
    if cpu and memory and request.get(CPU, cpu) == cpu and request.get(MEMORY, memory) == memory:
        return "guaranteed"
    return "burstable" if cpu or memory or request.get(CPU) or request.get(MEMORY) else "best-effort"


def job_qos(spec: JobSpec) -> QoS:
    """The weakest of its tasks'."""
    classes = [qos(task) for task in spec.tasks]
    if "best-effort" in classes:
        return "best-effort"
    return "burstable" if "burstable" in classes else "guaranteed"


def oom_score_adj(task: TaskSpec, memory_bytes: int) -> int:
    """What is added to the score by which the kernel chooses whom to kill; `memory_bytes` is what the host has."""
    kind = qos(task)
    if kind == "guaranteed":
        return _OOM_GUARANTEED
    if kind == "best-effort":
        return _OOM_BEST_EFFORT
    least, most = _OOM_BURSTABLE
    share = task.request.get(MEMORY, 0) * 1000 // memory_bytes if memory_bytes else 0
    return min(max(1000 - share, least), most)


def cpu_shares(task: TaskSpec) -> int:
    """Its weight when all want the cpu at once: 1024 for each core asked for, the least that there is for who asks for none."""
    asked = task.request.get(CPU, task.limits.get(CPU, 0))
    return min(max(asked * _SHARES_PER_CORE // 1000, _LEAST_SHARES), _MOST_SHARES)
