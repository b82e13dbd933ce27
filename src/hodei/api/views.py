"""Request and response types of the REST API. Field names are stable: fields are only ever added."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from hodei.model.config import SchedulingConfig
from hodei.model.effects import Event
from hodei.model.explanation import Explanation
from hodei.model.job import Job
from hodei.model.usage import Efficiency, RunUsage


class RunView(Struct, frozen=True):
    """`cpus`: its own cores. `gpus`: its share of each GPU, by number. `checkpoint_at`: time of the last checkpoint.
    `health`: result of the latest health checks, empty without a check. `usage`: what it used, also while it runs; null
    if it was not measured."""

    id: str
    job: int
    task: str
    member: int
    attempt: int
    node: str
    backend: str
    state: str
    exit_code: int | None
    reason_code: str
    reason: str
    placed_at: str
    started_at: str
    finished_at: str
    rank: int = 0
    cpus: list[int] = []
    gpus: dict[str, float] = {}
    checkpoint_at: str = ""
    health: str = ""
    usage: RunUsage | None = None


class ArrayView(Struct, frozen=True):
    """The array of a job and its index. In a row that stands for the whole array, `states` counts its elements by state
    (deleted elements are not counted). `listed`: its indices, if they are not a range."""

    first: int
    index: int
    count: int
    at_most: int = 0
    start: int = 0
    step: int = 1
    states: dict[str, int] = {}
    listed: str = ""


class JobView(Struct, frozen=True):
    """Times are ISO 8601 in UTC, empty if not reached. Runs since `first_attempt` belong to the current gang.
    `expected_ms`: expected run time, 0 if unknown or ended; `expected_by`: its source. `start_p50`, `start_p90`: forecast
    of the start of a pending job, if known. `failure`: the class of the latest failure, until it succeeds."""

    id: int
    name: str
    project: str
    user: str
    state: str
    reason_code: str
    reason: str
    priority: int
    profile: str
    labels: dict[str, str]
    tasks: int
    members: int
    attempt: int
    cancel_requested: bool
    exit_code: int | None
    submitted_at: str
    scheduled_at: str
    started_at: str
    finished_at: str
    version: int
    nodes: list[str] = []
    qos: str = ""
    first_attempt: int = 0
    expected_ms: int = 0
    expected_by: str = ""
    start_p50: str = ""
    start_p90: str = ""
    array: ArrayView | None = None
    failure: str = ""
    suspend_requested: bool = False


class JobDetail(Struct, frozen=True):
    """`damage`: a note if the stored record was damaged, else empty. `efficiency`: what the runs of the current gang used
    of their requests, null if none was measured. `cost`: of all its runs by now, by the prices of their nodes."""

    job: JobView
    spec: dict[str, Any]
    runs: list[RunView]
    damage: str = ""
    efficiency: Efficiency | None = None
    cost: float = 0.0


class JobList(Struct, frozen=True):
    """One page, newest first. The next page has `after=next_after`; 0 at the end."""

    jobs: list[JobView]
    next_after: int = 0


class SubmitReply(Struct, frozen=True):
    """One id for each document; for an array, the id of its first element. `counts`: the number of jobs of each document,
    empty if all are 1. `repeated`: the Idempotency-Key was used before, so nothing was created."""

    ids: list[int]
    repeated: bool = False
    counts: list[int] = []


class PlanReply(Struct, frozen=True):
    plans: list[Explanation]


class TaintView(Struct, frozen=True):
    key: str
    value: str = ""
    effect: str = "NoSchedule"


class SocketView(Struct, frozen=True):
    """A part of a node whose cores and GPUs are close to each other."""

    cpus: list[int] = []
    gpus: list[int] = []


class HoldView(Struct, frozen=True):
    """Reserved amounts of a node: by the start reservation of `job` from `start_at` on, or by `reservation` of
    `project`."""

    start_at: str
    end_at: str
    resources: dict[str, str]
    job: int = 0
    reservation: str = ""
    project: str = ""


class NodeView(Struct, frozen=True):
    """`state`: ready, not-ready or cordoned; of nodes that are ordered and released also potential, starting, draining and
    stopping. `cost`: price per hour. `startup_s`: from the order until it is ready."""

    name: str
    backend: str
    kind: str
    state: str
    reason: str
    arch: str
    gpu_type: str
    capacity: dict[str, str]
    used: dict[str, str]
    labels: dict[str, str]
    taints: list[TaintView]
    location: dict[str, Any]
    runs: int
    version: str
    data: list[str] = []
    cost: float = 0.0
    overcommit: dict[str, float] = {}
    sockets: list[SocketView] = []
    address: str = ""
    holds: list[HoldView] = []
    group: str = ""
    startup_s: float = 0.0
    spot: bool = False
    last_seen_at: str = ""


class NodeList(Struct, frozen=True):
    nodes: list[NodeView]


class NodeRunView(Struct, frozen=True):
    """A run that held `resources` of a node from `placed_at` to `finished_at` (empty: still)."""

    run: str
    job: int
    name: str
    project: str
    user: str
    state: str
    placed_at: str
    started_at: str
    finished_at: str
    resources: dict[str, str]
    exit_code: int | None = None
    reason_code: str = ""


class NodeHistoryView(Struct, frozen=True):
    """`busy_ms`: time weighted by the share of each resource that the runs of this page held between `since` and `until`;
    add up the pages. `next`: the `after` of the next page, empty at the end."""

    node: str
    since: str
    until: str
    runs: list[NodeRunView]
    busy_ms: dict[str, int] = {}
    next: str = ""


class NodePatch(Struct, frozen=True, forbid_unknown_fields=True):
    """Node overrides by an operator. A label set to null is removed; `drain` implies `cordon`."""

    cordon: bool | None = None
    labels: dict[str, str | None] = {}
    add_taints: list[TaintView] = []
    remove_taints: list[TaintView] = []
    drain: bool = False


class LogTimes(Struct, frozen=True):
    """When a run wrote its output. `marks`: (offset, time in ms), both ascending: the bytes before the offset had been
    written by then; empty if the backend does not record it. `finished_ms` is 0 while it runs."""

    run: str = ""
    started_ms: int = 0
    finished_ms: int = 0
    marks: list[tuple[int, int]] = []


# The range that a store can hold.
JobId = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class RequeueRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`arrays`: the id of any element. `failed`: only failed jobs, and the jobs that failed because they depended on
    them. `permitted`: only those that the caller may requeue; without it, one that they may not requeue refuses all."""

    jobs: list[JobId] = []
    arrays: list[JobId] = []
    failed: bool = False
    permitted: bool = False


class RefusedJob(Struct, frozen=True):
    """A job that the caller may not requeue. `code` and `reason` say why."""

    id: int
    code: str
    reason: str


class RequeueReply(Struct, frozen=True):
    """`revived`: jobs that had failed because they depended on a requeued one, and are pending again. `refused`: jobs that
    the caller may not requeue, which are unchanged."""

    requeued: list[int]
    revived: list[int] = []
    refused: list[RefusedJob] = []


class CancelRequest(Struct, frozen=True, forbid_unknown_fields=True):
    reason: str = ""


class MigrateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`to`: only to that node. `force`: even if no other node can take it now."""

    to: str = ""
    force: bool = False


class EventList(Struct, frozen=True):
    events: list[Event]
    last: int


class Check(Struct, frozen=True):
    """One row of `hodei doctor`. `level`: ok, warning or problem."""

    name: str
    level: str
    found: str
    fix: str = ""


class CheckList(Struct, frozen=True):
    checks: list[Check]


class Info(Struct, frozen=True):
    version: str
    api: str
    installation: str
    address: str
    epoch: int
    started_at: str
    ready: bool
    profiles: list[str]
    backends: list[str]
    jobs: dict[str, int]


class Problem(Struct, frozen=True):
    """An error: what is wrong (`message`), a stable `code`, what to do next (`hint`), and each wrong path (`problems`)."""

    code: str
    message: str
    hint: str = ""
    problems: list[tuple[str, str]] = []


MAX_GRAPH_JOBS = 10_000
MAX_GRAPH_EDGES = 100_000


class GraphJob(Struct, frozen=True, omit_defaults=True):
    """`need`: how many of its dependencies are enough; 0: all."""

    id: int
    name: str
    state: str
    project: str = ""
    reason_code: str = ""
    reason: str = ""
    need: int = 0


class GraphEdge(Struct, frozen=True, omit_defaults=True):
    """`job` waits for `awaited`, or (with `on: exists`) for the data `what`."""

    job: int
    on: str
    awaited: int = 0
    what: str = ""


class JobGraph(Struct, frozen=True):
    """`truncated`: the graph is larger than the limit."""

    job: int
    jobs: list[GraphJob]
    edges: list[GraphEdge]
    truncated: bool = False


def graph_of(job: int, jobs: list[Job], *, truncated: bool) -> JobGraph:
    """Jobs by id, with the edges between them."""
    known = {each.id for each in jobs}
    jobs = sorted(jobs, key=lambda each: each.id)
    edges = [
        GraphEdge(each.id, one.on, one.job, one.what)
        for each in jobs
        for one in each.spec.after.of
        if one.on == "exists" or one.job in known
    ]
    views = [
        GraphJob(
            each.id, each.spec.name, each.state, each.spec.project, each.reason_code, each.reason, each.spec.after.need
        )
        for each in jobs
    ]
    return JobGraph(job, views, edges[:MAX_GRAPH_EDGES], truncated or len(edges) > MAX_GRAPH_EDGES)


class WhatIfRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The assumed changes of `POST /whatif`, in any combination; the response is `hodei.model.explanation.WhatIf`.
    `jobs`: job documents submitted now. `policy`: replaces the server's `scheduling` section. `add_nodes`: number of
    copies of `like` (or of the largest node). `remove_nodes`: nodes that are drained."""

    jobs: list[dict[str, Any]] = []
    policy: SchedulingConfig | None = None
    add_nodes: int = 0
    like: str = ""
    remove_nodes: list[str] = []


class BackendView(Struct, frozen=True):
    """`state`: ok, connecting, unhealthy or disabled; `since` and `reason` describe the last three. `source`: file (in the
    configuration file, cannot be deleted) or added. Secrets in `settings` are masked."""

    name: str
    kind: str
    state: str
    since: str
    reason: str
    source: str
    nodes: int
    runs: int
    took_ms: int
    capabilities: list[str]
    settings: dict[str, Any]


class BackendList(Struct, frozen=True):
    backends: list[BackendView]


class BackendRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`settings`: the keys of its table in the configuration file, without `kind`."""

    name: str
    kind: str
    settings: dict[str, Any] = {}


class NodeUsageView(Struct, frozen=True):
    """Measured amounts: cpu in thousandths of a core, memory in bytes."""

    node: str
    used: dict[str, int]


class UsageList(Struct, frozen=True):
    nodes: list[NodeUsageView]


class ExecuteRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A program and its arguments, run without a shell. `member`: the number of the job's member."""

    command: list[str]
    timeout_s: int = 30
    member: int = 0


class ExecutedView(Struct, frozen=True):
    """`exit_code` is null after a timeout. Bytes that are not UTF-8 are replaced. `cut`: the output was truncated."""

    run: str
    exit_code: int | None
    stdout: str
    stderr: str
    cut: bool


class NodeExecuteRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A program and its arguments, run without a shell."""

    command: list[str]
    timeout_s: int = 30


class NodeExecutedView(Struct, frozen=True):
    """As ExecutedView, for a command on a node."""

    node: str
    exit_code: int | None
    stdout: str
    stderr: str
    cut: bool
