"""Jobs of processor counts and run times (SWF, golden CSV) to a workload, through the filter that published schedules use.

The filter: one of allocated and requested processors stands for the other if that is missing; processors are those
requested; jobs larger than the machine, without run time, without requested time or submitted before the start are
dropped; a run ends when the requested time is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from hodei.sim.traces.source import Reading
from hodei.sim.traces.workload import Arrival, Shapes, Workload, machine, ordered


class Record(NamedTuple):
    """One job as a trace has it; what is missing is -1 or empty."""

    id: int
    submit_ms: int
    run_ms: int
    requested_ms: int
    allocated: int
    requested: int
    user: str
    project: str = "default"
    name: str = "job"


_LARGE = "larger than the machine: dropped"
_NO_PROCESSORS = "without a number of processors: dropped"
_NO_RUN = "without a run time (0 or unknown): dropped"
_NO_REQUEST = "without a requested time, where others have one: dropped"
_EARLY = "submitted before the trace's start: dropped"
_LONG = "ran longer than they had asked for: cut to what they asked for"
_COPIED = "without requested processors: those allocated are taken"
_TWICE = "with the id of another job: a new id is given"
_UNORDERED = "not in order of submission: sorted"


def to_workload(name: str, records: Iterable[Record], how: Reading, procs: int | None, notes: list[str]) -> Workload:
    """`procs` is the machine's size if it is known. Notes get a line for each thing that was changed, with its count."""
    jobs = list(records)
    estimated = any(job.requested_ms > 0 for job in jobs)
    if jobs and not estimated:
        notes.append("no job has a requested time: its real run time is its estimate")
    counts: Counter[str] = Counter()
    shapes = Shapes(per_node=how.per_node)
    actual = how.estimates == "actual" or not estimated
    arrivals: list[Arrival] = []
    last, seen, twice = -1, set[int](), list[int]()
    for job in jobs:
        id, at_ms, run_ms, requested_ms, allocated, units, user, project, title = job
        if units <= 0:
            if allocated <= 0:
                counts[_NO_PROCESSORS] += 1
                continue
            units = allocated
            counts[_COPIED] += 1
        if procs is not None and units > procs:
            counts[_LARGE] += 1
            continue
        if run_ms <= 0:
            counts[_NO_RUN] += 1
            continue
        if estimated:
            if requested_ms <= 0:
                counts[_NO_REQUEST] += 1
                continue
            if run_ms > requested_ms:
                run_ms = requested_ms
                counts[_LONG] += 1
        if at_ms < 0:
            counts[_EARLY] += 1
            continue
        if at_ms < last:
            counts[_UNORDERED] += 1
        last = max(last, at_ms)
        if id in seen:
            twice.append(len(arrivals))
        seen.add(id)
        spec = shapes.spec(
            units, name=title, user=user, project=project, estimate_ms=run_ms if actual else requested_ms
        )
        arrivals.append(Arrival(at_ms, id, spec, run_ms))
    for fresh, place in enumerate(twice, max(seen, default=0) + 1):
        old = arrivals[place]
        arrivals[place] = Arrival(old.at_ms, fresh, old.spec, old.run_ms)
        counts[_TWICE] += 1
    notes.extend(f"{count:,} of {len(jobs):,} jobs {what}" for what, count in sorted(counts.items()))
    if procs is None:
        notes.append("the trace does not say how large the machine is: give its processors or a cluster")
    return Workload(name, ordered(arrivals), machine(procs, per_node=how.per_node) if procs else [], notes)
