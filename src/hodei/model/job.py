"""What a user submits (`JobSpec`), its state (`Job`), and each attempt of each member (`Run`).

Every job is a gang: the members of all its tasks are placed together or not at all. Most gangs have one member. Times
are milliseconds since the epoch, durations milliseconds; 0 means "not set" for durations.
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
from hodei.model.usage import RunUsage

# Refusals (`Verdict`) and the record of a placement (`Decision`).


# How a gang of a batch queue was started: as the first in the queue; ahead of a start reservation, to end before it;
# or beside reserved capacity.
StartKind = Literal["head", "backfill", "spill"]


class Reason(Struct, frozen=True, omit_defaults=True):
    """Why a plugin refuses. `code` is stable; `evictable`: preemption could change the answer. `hint`: what the user
    can do, if known. `kind`: refusals that need special treatment: a "quota" (preemption does not help), capacity that
    is reserved for others ("reservation"), a "volume". `resource`: the one of which there is not enough. `taint`: the one
    that is not tolerated."""

    plugin: str
    code: str
    text: str
    evictable: bool = False
    hint: str = ""
    kind: Literal["", "quota", "reservation", "volume"] = ""
    resource: str = ""
    taint: Taint | None = None


class Verdict(Struct, frozen=True, omit_defaults=True):
    """A reason and the nodes it applies to. A verdict without nodes refuses the whole gang before any node is checked."""

    reason: Reason
    count: int = 0
    nodes: tuple[NodeName, ...] = ()


class ScoreTerm(Struct, frozen=True):
    """The part of one plugin: `score` in hundredths of a point (0 to 10,000), times `weight`."""

    plugin: str
    score: int
    weight: int


class Candidate(Struct, frozen=True, omit_defaults=True):
    """A feasible node with its weighted mean score in hundredths of a point."""

    node: NodeName
    score: int
    terms: tuple[ScoreTerm, ...] = ()


class Decision(Struct, frozen=True, omit_defaults=True):
    """Why a run was placed on `chosen`: runners-up and the number of nodes considered. `note`: by a plugin."""

    chosen: Candidate
    runners_up: tuple[Candidate, ...] = ()
    feasible: int = 0
    nodes: int = 0
    profile: str = "default"
    note: str = ""


# Measures that a job allows if it waits too long, and what was done.


RelaxableRule = Literal["spread", "topology", "backend"]
RELAXABLE_RULES: tuple[RelaxableRule, ...] = ("spread", "topology", "backend")


class Escalation(Struct, frozen=True, omit_defaults=True):
    """After `relax_after_ms` of waiting the rules in `relax` become preferences; after every `promote_after_ms` it
    moves up one class, at most to `promote_to`. 0 and empty: as the profile says."""

    relax: tuple[RelaxableRule, ...] = ()
    relax_after_ms: int = 0
    promote_after_ms: int = 0
    promote_to: int = 0


class EscalationState(Struct, frozen=True, omit_defaults=True, gc=False):
    """What was changed, and when; "", 0 and () for nothing. `cause`: why the job moved to another profile."""

    profile: str = ""
    profile_before: str = ""
    moved_ms: int = 0
    cause: str = ""
    priority: int = -1
    priority_before: int = -1
    promoted_ms: int = 0
    rules: tuple[RelaxableRule, ...] = ()
    relaxed_ms: int = 0
    failed_on: tuple[str, ...] = ()
    failed_ms: int = 0


NOT_ESCALATED = EscalationState()


# Health checks of a run: the method, the interval, and the number of failures that stops it.


# A host name in a health check's URL that stands for the node of the run.
NODE_HOST = "node"
HealthState = Literal["", "ok", "failing"]


class HealthCheck(Struct, frozen=True, omit_defaults=True):
    """Exactly one of `command` (exit code 0 is healthy), `http` (status 200 to 399) and `file` (a heartbeat: its
    modification time advances between checks) is set, or none: no check.

    The first check is `after_ms + every_ms` after the start, then every `every_ms`; one that takes longer than
    `timeout_ms` fails. After `failures` failures in a row the run is stopped.
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


# State machines of jobs and runs. Only `control` calls `advance_job` and `advance_run`.


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
    """The transition is not in the table: a bug in the caller."""


def advance_job(state: JobState, to: JobState) -> JobState:
    if to not in JOB_TRANSITIONS[state]:
        raise InvalidTransition(f"a {state} job cannot become {to}")
    return to


def advance_run(state: RunState, to: RunState) -> RunState:
    if to not in RUN_TRANSITIONS[state]:
        raise InvalidTransition(f"a {state} run cannot become {to}")
    return to


PRIORITY_CLASSES = {"critical": 1000, "high": 750, "medium": 500, "low": 250, "batch": 100, "scavenger": 0}
RestartPolicy = Literal["never", "on_failure", "always"]
Binding = Literal["", "cores", "numa"]


class Toleration(Struct, frozen=True, omit_defaults=True, gc=False):
    """Rules of Kubernetes: an empty key with `Exists` tolerates everything, an empty effect means every effect. `Gt`
    and `Lt` tolerate taints whose value is an integer above or below the toleration's own."""

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
    """At least one of `required` must hold (empty: no requirement); each of `preferred` that holds adds its weight."""

    required: tuple[NodeTerm, ...] = ()
    preferred: tuple[PreferredTerm, ...] = ()


class BackendChoice(Struct, frozen=True, omit_defaults=True, gc=False):
    """`specific`: only `names`. `preferred`: `names` first, else any; in their order, or by `weights` (one for each).
    `avoid`: these last in any mode. `offline_ms`: nodes that are normally offline may be used while they are, if they start
    the job within this time (0: they may not)."""

    mode: Literal["any", "preferred", "specific"] = "any"
    names: tuple[str, ...] = ()
    weights: tuple[int, ...] = ()
    avoid: tuple[str, ...] = ()
    offline_ms: int = 0


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

    `topology`: a label (or region, zone, rack, host, backend) of which all members share one value, required or
    preferred. `on_failure`: when a member fails or is lost, restart all, or replace only that one in place.
    `assembly_timeout_ms`: how long after placement all members may take to start. `elastic`: a gang that started with
    fewer members grows when there is capacity, and gives up the extra ones first. `per_node`: one run on every matching
    node (`control.lifecycle.per_node`); members are numbered as nodes join.
    """

    topology: str = ""
    topology_required: bool = True
    on_failure: Literal["restart", "repair"] = "restart"
    assembly_timeout_ms: int = 0
    elastic: bool = False
    per_node: bool = False


class TransferCost(Struct, frozen=True, gc=False):
    """The cost of moving the data of one member between two backends, in either direction, in thousandths."""

    between: tuple[str, str]
    cost_milli: int


class Distribution(Struct, frozen=True, omit_defaults=True, gc=False):
    """How the tasks of a job are spread over backends.

    `colocated`: all on one. `distributed`: each task on any of its `backends`, at the lowest total of `transfer_costs`
    between all pairs of tasks. `hub_and_spoke`: the same, with costs only between the task `hub` and each other task.
    """

    model: Literal["", "colocated", "distributed", "hub_and_spoke"] = ""
    hub: str = ""
    transfer_costs: tuple[TransferCost, ...] = ()


class Checkpoint(Struct, frozen=True, omit_defaults=True, gc=False):
    """How a run saves its work before it is stopped: by a signal to it or a command inside it, and how long that may
    take. `file`: its modification time is the time of the last checkpoint. `every_ms`: also periodically."""

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

    `min_count` of them are enough to start (0: all). `backends`: those it may run on (empty: any). `binding`: cores of
    its own, or cores and devices that are all on one socket. `images`: images that a node should preferably hold.
    `labels`: labels of its members, over those of the job.
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
    """`preempts`: whether it may preempt others, if its class does. `routed_by`: the route that chose its profile.
    `scheduling_timeout_from` and `max_queue_time_from`: where these limits are set, if not by the job itself. `failed_on`:
    backends where it failed, which come last in a fallback chain."""

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
    scheduling_timeout_from: str = ""
    max_queue_time_from: str = ""
    failed_on: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """For messages, before the job has an id."""
        return f"job {self.name!r}" if self.name else "the job"

    @property
    def size(self) -> int:
        return sum(task.count for task in self.tasks)

    def has_member(self, member: int) -> bool:
        """A per-node job numbers its members as nodes join, so it has no last member."""
        return member >= 0 and (self.gang.per_node or member < self.size)

    def task_of(self, member: int) -> TaskSpec:
        if self.gang.per_node:
            return self.tasks[0]
        for task in self.tasks:
            if member < task.count:
                return task
            member -= task.count
        raise IndexError(member)


class Move(Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a migrating job may be placed: on the node `to`, or on any but those in `off`."""

    to: NodeName = ""
    off: tuple[NodeName, ...] = ()

    def __str__(self) -> str:
        return f"to {self.to}" if self.to else f"off {' '.join(self.off)}"


class Job(Struct, frozen=True, omit_defaults=True, gc=False):
    """A job and its state. `reason` is for people, `reason_code` is stable; `version` counts changes. `nodes`: where
    its latest attempt was placed (the first twenty names, separated by spaces). Attempts since `first_attempt` make up
    the current gang: members that joined or were replaced have later ones. `escalation_state`: what was changed while
    it waited (`model.escalation_state`). `failure`: the class of its latest failure (`model.outcome`). `move`: a
    migration, until it is placed again. `last_preemption`: while it waits again after a preemption or reclaim, the text
    of that stop."""

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
    move: Move | None = None
    escalation_state: EscalationState = NOT_ESCALATED
    last_preemption: str = ""

    @property
    def stop_requested(self) -> bool:
        """A user wants its runs to stop."""
        return self.cancel_requested or self.requeue_requested or self.suspend_requested

    @property
    def waiting_since_ms(self) -> int:
        return self.queued_ms or self.submitted_ms


class Run(Struct, frozen=True, omit_defaults=True, gc=False):
    """One attempt of one member; it only moves forward. A retry is a new run.

    `rank` is the member's number among those that run together, without gaps at the start. `checkpoint_ms`: time of its
    last checkpoint. `stop_reason`: why it must stop, or how its gang continues without it. `grant`: its own cores and
    devices. `kind`: how a batch queue started it. `usage`: what it used, once it has ended and if it was measured.
    `cost_milli`: the price of its share of the node per hour, in thousandths.
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
    usage: RunUsage | None = None
    cost_milli: int = 0

    def cost(self, now_ms: int) -> float:
        """What it has cost by now."""
        return self.cost_milli * max((self.finished_ms or now_ms) - self.placed_ms, 0) / 3_600_000_000

    @property
    def since_ms(self) -> int:
        """Since when it holds its capacity, as far as its backend has reported: its start, else its placement."""
        return self.started_ms or self.placed_ms


# Quality of service: the classes of Kubernetes, from requests and limits of cpu and memory.


QoS = Literal["guaranteed", "burstable", "best-effort"]
# Among jobs of equal priority, lower ranks are preempted first.
QOS_RANK: dict[QoS, int] = {"best-effort": 0, "burstable": 1, "guaranteed": 2}
# As in the kubelet: out of memory, the kernel kills best-effort runs first, then runs with small memory requests.
_OOM_GUARANTEED, _OOM_BEST_EFFORT = -997, 1000
_OOM_BURSTABLE = (3, 999)
_LEAST_SHARES, _MOST_SHARES, _SHARES_PER_CORE = 2, 262_144, 1024


def qos(task: TaskSpec) -> QoS:
    """Guaranteed: cpu and memory both have a limit equal to the request. Best-effort: neither has a request or limit.
    An amount of 0 counts as none; a limit without a request implies an equal request."""
    request, limits = task.request, task.limits
    cpu, memory = limits.get(CPU, 0), limits.get(MEMORY, 0)
    if cpu and memory and request.get(CPU, cpu) == cpu and request.get(MEMORY, memory) == memory:
        return "guaranteed"
    return "burstable" if cpu or memory or request.get(CPU) or request.get(MEMORY) else "best-effort"


def job_qos(spec: JobSpec) -> QoS:
    """The lowest class of its tasks."""
    classes = [qos(task) for task in spec.tasks]
    if "best-effort" in classes:
        return "best-effort"
    return "burstable" if "burstable" in classes else "guaranteed"


def oom_score_adj(task: TaskSpec, memory_bytes: int) -> int:
    """The run's `oom_score_adj` on a host with `memory_bytes`."""
    kind = qos(task)
    if kind == "guaranteed":
        return _OOM_GUARANTEED
    if kind == "best-effort":
        return _OOM_BEST_EFFORT
    least, most = _OOM_BURSTABLE
    share = task.request.get(MEMORY, 0) * 1000 // memory_bytes if memory_bytes else 0
    return min(max(1000 - share, least), most)


def cpu_shares(task: TaskSpec) -> int:
    """Weight under contention: 1024 for each requested core, the minimum without a request."""
    requested = task.request.get(CPU, task.limits.get(CPU, 0))
    return min(max(requested * _SHARES_PER_CORE // 1000, _LEAST_SHARES), _MOST_SHARES)
