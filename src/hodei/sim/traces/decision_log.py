"""Hodei's own decision log as a workload: what was submitted, on which nodes, and how long it really ran."""

from __future__ import annotations

from collections import Counter
from statistics import median_low

import msgspec
from msgspec import Struct, structs

from hodei.model.errors import InvalidInput
from hodei.model.facts import AnyFact, JobCancelled, JobRestored, JobSubmitted, NodeJoined, NodeLost, RunObserved
from hodei.model.ids import JobId, NodeName, RunId, job_of
from hodei.model.job import JOB_ENDED, JobSpec
from hodei.model.node import Node
from hodei.runtime.decision_log import CONTINUED, FORMAT
from hodei.sim.replay import open_segment, restore_controller
from hodei.sim.traces.source import Reading, Source
from hodei.sim.traces.workload import Arrival, Workload, ordered

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
    """What the facts of a log amount to."""

    def __init__(self) -> None:
        self.jobs: dict[JobId, tuple[int, JobSpec]] = {}
        self.nodes: dict[NodeName, Node] = {}
        self.counts: Counter[str] = Counter()
        self.ran: dict[JobId, tuple[int, int]] = {}
        self.cancelled: set[JobId] = set()
        self._began: dict[RunId, int] = {}
        self._placed: dict[JobId, int] = {}

    def learn(self, now: int, fact: AnyFact) -> None:
        match fact:
            case JobSubmitted(job=job):
                self.jobs[job.id] = (now, job.spec)
            case JobRestored(job=job, runs=runs):
                if job.state not in JOB_ENDED:
                    self.jobs[job.id] = (now, job.spec)
                    self.counts["jobs were there before the log began: they arrive at its start"] += 1
                for run in runs:
                    if run.started_ms:
                        self._began[run.id] = run.started_ms
            case JobCancelled(job=cancelled):
                self.cancelled.add(cancelled)
            case NodeJoined(node=node):
                # As it was first: what became of it later is the log's story, not the workload's.
                self.nodes.setdefault(node.name, node)
            case NodeLost():
                self.counts["nodes were lost: here they stay"] += 1
            case RunObserved(state="running", run=id, at_ms=at_ms):
                self._began.setdefault(id, at_ms)
            case RunObserved(state="succeeded" | "failed", run=id, at_ms=at_ms):
                job_id, attempt = job_of(id), int(id.rsplit(".", 1)[1])
                began = self._began.pop(id, self._placed.get(job_id, at_ms))
                known, longest = self.ran.get(job_id, (attempt, 0))
                took = max(at_ms - began, 1)
                self.ran[job_id] = (attempt, took if attempt > known else max(longest, took))
            case _:
                pass

    def place(self, now: int, plan: _Plan) -> None:
        for bind in plan.binds:
            self._placed[bind.job] = now


def read(source: Source, how: Reading) -> Workload:
    """A job takes as long as its last attempt did, a gang as long as its slowest member."""
    history, start = _history(source)
    known = [took for _, took in history.ran.values()]
    usual = median_low(known) if known else _UNKNOWN_RUN_MS
    arrivals, estimated = [], 0
    for id, (at, spec) in history.jobs.items():
        ran = history.ran.get(id)
        if ran is None and id in history.cancelled:
            history.counts["jobs were cancelled before they ended: dropped"] += 1
            continue
        if ran is None:
            history.counts["jobs have no end in the log: their estimate, else the median run time, is taken"] += 1
        run_ms = ran[1] if ran else spec.estimate_ms or usual
        if how.estimates == "actual":
            spec = structs.replace(spec, estimate_ms=run_ms)
        estimated += bool(spec.estimate_ms)
        arrivals.append(Arrival(at - start, id, spec, run_ms))
    if estimated < len(arrivals):
        history.counts["jobs have no estimate"] = len(arrivals) - estimated
    notes = [f"{count:,} {what}" for what, count in sorted(history.counts.items())]
    if how.procs or how.per_node:
        notes.append("processors were given, but the log names its nodes: they are not used")
    nodes = sorted(history.nodes.values(), key=lambda node: node.name)
    return Workload(source.name, ordered(arrivals), nodes, notes)


def _history(source: Source) -> tuple[_History, int]:
    lines = enumerate(source.lines(), 1)
    try:
        header = msgspec.json.decode(next(lines)[1], type=_Header)
    except (StopIteration, msgspec.DecodeError) as error:
        raise InvalidInput(f"{source.path} is not a decision log", hint="its first line names its format") from error
    if header.hodei_decision_log not in FORMATS:
        raise InvalidInput(
            f"{source.path} is of format {header.hodei_decision_log}, which this version does not know",
            hint="read it with the version that wrote it, or a newer one",
        )
    decoder, history, start = msgspec.json.Decoder(_Line), _History(), -1
    if header.hodei_decision_log == CONTINUED:
        # It goes on from an earlier file: who waited or ran then, and on which nodes, is in the state beside it.
        cluster = restore_controller(open_segment(source.path)).cluster
        start = world_ms = max((job.changed_ms for job in cluster.jobs.values()), default=-1)
        for node in cluster.nodes.values():
            history.learn(world_ms, NodeJoined(node=node))
        for job in cluster.jobs.values():
            history.learn(world_ms, JobRestored(job=job, runs=tuple(cluster.runs.get(job.id, {}).values())))
    for number, text in lines:
        if not text.endswith("\n"):
            history.counts["line at the end was cut off: left out"] += 1  # the last words of a server that was killed
            break
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            source.wrong(number, str(error), "it was changed or damaged after it was written")
        start = line.now if start < 0 else start
        for fact in line.facts:
            history.learn(line.now, fact)
        history.place(line.now, line.plan)
    return history, start
