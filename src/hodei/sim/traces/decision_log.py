"""A decision log of Hodei as a workload: submitted jobs with their observed run times, and the nodes that joined."""

from __future__ import annotations

from collections import Counter
from statistics import median_low

import msgspec
from msgspec import Struct, structs

from hodei.model.errors import InvalidInput
from hodei.model.facts import AnyFact, JobCancelled, JobRestored, JobSubmitted, NodeJoined, NodeLost, RunObserved
from hodei.model.ids import JobId, NodeName, RunId, parse_run_id
from hodei.model.job import JOB_ENDED, JobSpec
from hodei.model.node import Node
from hodei.runtime.decision_log import CONTINUED, FORMAT
from hodei.sim.replay import open_segment, restore_controller
from hodei.sim.traces.workload import PROCS_IGNORED, Arrival, ReadSettings, TraceFile, Workload, sort_arrivals

FORMATS = (FORMAT, CONTINUED)
_UNKNOWN_RUN_MS = 60_000


class _Header(Struct):
    hodei_decision_log: int


class _Bind(Struct):
    job: JobId


class _Plan(Struct):
    binds: list[_Bind] = []


class _Line(Struct):
    now: int
    facts: list[AnyFact]
    plan: _Plan = msgspec.field(default_factory=_Plan)


class _History:
    """Collects jobs, nodes and run times from the facts of a log."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, tuple[int, JobSpec]] = {}
        self.nodes: dict[NodeName, Node] = {}
        self.counts: Counter[str] = Counter()
        self.run_times: dict[JobId, tuple[int, int]] = {}
        self.cancelled: set[JobId] = set()
        self._started: dict[RunId, int] = {}
        self._placed: dict[JobId, int] = {}

    def apply(self, now: int, fact: AnyFact) -> None:
        match fact:
            case JobSubmitted(job=job):
                self.jobs[job.id] = (now, job.spec)
            case JobRestored(job=job, runs=runs):
                if job.state not in JOB_ENDED:
                    self.jobs[job.id] = (now, job.spec)
                    self.counts["jobs existed before the log: they arrive at its start"] += 1
                for run in runs:
                    if run.started_ms:
                        self._started[run.id] = run.started_ms
            case JobCancelled(job=cancelled):
                self.cancelled.add(cancelled)
            case NodeJoined(node=node):
                # Later changes of a node are not part of the workload.
                self.nodes.setdefault(node.name, node)
            case NodeLost():
                self.counts["nodes were lost: they are kept"] += 1
            case RunObserved(state="running", run=id, at_ms=at_ms):
                self._started.setdefault(id, at_ms)
            case RunObserved(state="succeeded" | "failed", run=id, at_ms=at_ms):
                job_id, _, attempt = parse_run_id(id)
                started_ms = self._started.pop(id, self._placed.get(job_id, at_ms))
                last_attempt, longest_ms = self.run_times.get(job_id, (attempt, 0))
                run_ms = max(at_ms - started_ms, 1)
                self.run_times[job_id] = (attempt, run_ms if attempt > last_attempt else max(longest_ms, run_ms))
            case _:
                pass

    def place(self, now: int, plan: _Plan) -> None:
        for bind in plan.binds:
            self._placed[bind.job] = now


def read(file: TraceFile, settings: ReadSettings) -> Workload:
    """The run time of a job is that of its last attempt, of a gang that of its slowest member."""
    history, start = _history(file)
    known = [run_ms for _, run_ms in history.run_times.values()]
    default_ms = median_low(known) if known else _UNKNOWN_RUN_MS
    arrivals, estimated = [], 0
    for id, (at, spec) in history.jobs.items():
        observed = history.run_times.get(id)
        if observed is None and id in history.cancelled:
            history.counts["jobs were cancelled before they ended: dropped"] += 1
            continue
        if observed is None:
            history.counts["jobs have no end in the log: their estimate, else the median run time, is used"] += 1
        run_ms = observed[1] if observed else spec.estimate_ms or default_ms
        if settings.estimates == "actual":
            spec = structs.replace(spec, estimate_ms=run_ms)
        estimated += bool(spec.estimate_ms)
        arrivals.append(Arrival(at - start, id, spec, run_ms))
    if estimated < len(arrivals):
        history.counts["jobs have no estimate"] = len(arrivals) - estimated
    notes = [f"{count:,} {what}" for what, count in sorted(history.counts.items())]
    if settings.procs or settings.per_node:
        notes.append(PROCS_IGNORED)
    nodes = sorted(history.nodes.values(), key=lambda node: node.name)
    return Workload(file.name, sort_arrivals(arrivals), nodes, notes)


def _history(file: TraceFile) -> tuple[_History, int]:
    lines = enumerate(file.lines(), 1)
    try:
        header = msgspec.json.decode(next(lines)[1], type=_Header)
    except (StopIteration, msgspec.DecodeError) as error:
        raise InvalidInput(f"{file.path} is not a decision log", hint="its first line names its format") from error
    if header.hodei_decision_log not in FORMATS:
        raise InvalidInput(
            f"{file.path} is of format {header.hodei_decision_log}, which this version does not know",
            hint="read it with the version that wrote it, or a newer one",
        )
    decoder, history, start = msgspec.json.Decoder(_Line), _History(), -1
    if header.hodei_decision_log == CONTINUED:
        # It continues an earlier file: the jobs and nodes of that time are in the state next to it.
        cluster = restore_controller(open_segment(file.path)).cluster
        start = state_ms = max((job.changed_ms for job in cluster.jobs.values()), default=-1)
        for node in cluster.nodes.values():
            history.apply(state_ms, NodeJoined(node=node))
        for job in cluster.jobs.values():
            history.apply(state_ms, JobRestored(job=job, runs=tuple(cluster.runs.get(job.id, {}).values())))
    for number, text in lines:
        if not text.endswith("\n"):
            history.counts["line at the end was cut off: skipped"] += 1  # the server was killed while it wrote
            break
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            file.fail(number, str(error), "the file was changed or damaged after it was written")
        start = line.now if start < 0 else start
        for fact in line.facts:
            history.apply(line.now, fact)
        history.place(line.now, line.plan)
    return history, start
