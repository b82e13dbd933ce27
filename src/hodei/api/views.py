"""Answers of the API as typed values. Field names are stable: they are only ever added."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from hodei.model.config import SchedulingConfig
from hodei.model.effects import Event
from hodei.model.explanation import Explanation
from hodei.model.job import Job


class RunView(Struct, frozen=True):
    """`cpus` are the cores that are its own, `gpus` the share that it has of each GPU by number, `checkpoint_at` when
    it last said that its work was saved, `health` what the latest looks at it found ("": nobody looks)."""

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


class ArrayView(Struct, frozen=True):
    """Which element of which array a job is; in a row that stands for the whole array, how many of its elements are in
    each state (those that are forgotten already are in none). `listed`: its indices, where they are no plain range."""

    first: int
    index: int
    count: int
    at_most: int = 0
    start: int = 0
    step: int = 1
    states: dict[str, int] = {}
    listed: str = ""


class JobView(Struct, frozen=True):
    """A job as people and programs see it. Times are ISO 8601 in UTC, empty when not yet. Runs since `first_attempt`
    make up the gang that runs now. `expected_ms`: how long it is expected to run, until it has ended (0: nobody knows),
    and `expected_by` says where that is from. `start_p50`, `start_p90`: while it waits, when it will have started in one
    of two cases and in nine of ten, if that is known. `failure`: the class of its latest failure, until it succeeds."""

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
    """`damage`: what is to be known of its record, if that was damaged; mostly empty."""

    job: JobView
    spec: dict[str, Any]
    runs: list[RunView]
    damage: str = ""


class JobList(Struct, frozen=True):
    """One page, newest first; ask again with `after=next_after` until that is 0."""

    jobs: list[JobView]
    next_after: int = 0


class SubmitReply(Struct, frozen=True):
    """One id for each document, of an array that of its first element. `counts`: how many jobs each of them stands for,
    if it is not one each. `repeated` is true when the Idempotency-Key had been used before: nothing new was made."""

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
    """A part of a node whose cores and GPUs are near each other."""

    cpus: list[int] = []
    gpus: list[int] = []


class HoldView(Struct, frozen=True):
    """Amounts of a node that are spoken for: `job` is promised them from `start_at` on, or they are reserved for
    `project` under the name `reservation`."""

    start_at: str
    end_at: str
    resources: dict[str, str]
    job: int = 0
    reservation: str = ""
    project: str = ""


class NodeView(Struct, frozen=True):
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


class NodeList(Struct, frozen=True):
    nodes: list[NodeView]


class NodeRunView(Struct, frozen=True):
    """A run that held `resources` of a node from `placed_at` to `finished_at` (empty: it still does)."""

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
    """`busy_ms`: for how long the runs of this page would have held the whole of a resource between `since` and `until`;
    pages add up. `next`: ask for the next page with `after` of it; empty at the end."""

    node: str
    since: str
    until: str
    runs: list[NodeRunView]
    busy_ms: dict[str, int] = {}
    next: str = ""


class NodePatch(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator says of a node. A label set to null is removed; `drain` implies `cordon`."""

    cordon: bool | None = None
    labels: dict[str, str | None] = {}
    add_taints: list[TaintView] = []
    remove_taints: list[TaintView] = []
    drain: bool = False


class LogTimes(Struct, frozen=True):
    """When a run wrote what. `marks`: (place, time in ms), both growing: what is before the place had been written by
    then; none where the backend does not tell. `finished_ms` is 0 while it runs."""

    run: str = ""
    started_ms: int = 0
    finished_ms: int = 0
    marks: list[tuple[int, int]] = []


# Of a job: as large as a store can hold.
Number = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class RequeueRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`jobs` by number, `arrays` by the number of any element. `failed`: only those that have failed, and the jobs that
    gave up waiting for them."""

    jobs: list[Number] = []
    arrays: list[Number] = []
    failed: bool = False


class RequeueReply(Struct, frozen=True):
    """What starts again; `revived`: the jobs that had given up waiting for one of them; `refused`: such jobs of other
    users, which were left as they are."""

    requeued: list[int]
    revived: list[int] = []
    refused: list[int] = []


class CancelRequest(Struct, frozen=True, forbid_unknown_fields=True):
    reason: str = ""


class MigrateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`to`: that node and no other. `force`: also if nobody can take it now."""

    to: str = ""
    force: bool = False


class EventList(Struct, frozen=True):
    events: list[Event]
    last: int


class Check(Struct, frozen=True):
    """One line of `doctor`. `level`: ok | warning | problem."""

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
    """Every error: what (`message`), its stable `code`, what next (`hint`), and each wrong place (`problems`)."""

    code: str
    message: str
    hint: str = ""
    problems: list[tuple[str, str]] = []


# ----------------------------------------------------------------------------------------------- graph
# The graph of what jobs wait for, as the API answers with it: of one job all that it waits for and all that wait for
# it.


MOST_JOBS = 10_000
MOST_EDGES = 100_000


class GraphJob(Struct, frozen=True, omit_defaults=True):
    """`need`: so many of what it waits for are enough; 0: all of it."""

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
    """`truncated`: there is more of it than was asked for, or than is ever answered with."""

    job: int
    jobs: list[GraphJob]
    edges: list[GraphEdge]
    truncated: bool = False


def graph_of(job: int, jobs: list[Job], *, truncated: bool) -> JobGraph:
    """Jobs in order of id, with the edges between them; who is not among them is not drawn."""
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
    return JobGraph(job, views, edges[:MOST_EDGES], truncated or len(edges) > MOST_EDGES)


# ---------------------------------------------------------------------------------------------- whatif
# A question to `POST /whatif`; the answer is `hodei.model.explanation.WhatIf` as it is.


class WhatIfRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be different; any of these, also together. `jobs`: job documents that would be submitted now.
    `policy`: a `scheduling` section in place of the server's own. `add_nodes`: so many more nodes, copies of `like` (or
    of the largest). `remove_nodes`: nodes whose work moves elsewhere and that take no more."""

    jobs: list[dict[str, Any]] = []
    policy: SchedulingConfig | None = None
    add_nodes: int = 0
    like: str = ""
    remove_nodes: list[str] = []


# -------------------------------------------------------------------------------------------- backends
# Backends on the wire: how each is, what it can do, and what it was told; commands beside runs.


class BackendView(Struct, frozen=True):
    """`state`: ok, connecting, unhealthy or disabled; `since` and `reason` say more of the last three. `source`: file (it is
    in the configuration file, and cannot be removed) or added. Secrets in `settings` are masked."""

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
    """`settings`: the keys that its table in the configuration file would have, but for `kind`."""

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
    """A program and its words; no shell reads them. `member`: which of the job's, by number."""

    command: list[str]
    timeout_s: int = 30
    member: int = 0


class ExecutedView(Struct, frozen=True):
    """`exit_code` is null if it was not over in time. What is no text is replaced. `cut`: more was said."""

    run: str
    exit_code: int | None
    stdout: str
    stderr: str
    cut: bool


class NodeExecuteRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A program and its words; no shell reads them."""

    command: list[str]
    timeout_s: int = 30


class NodeExecutedView(Struct, frozen=True):
    """As ExecutedView, of a command on a node."""

    node: str
    exit_code: int | None
    stdout: str
    stderr: str
    cut: bool
