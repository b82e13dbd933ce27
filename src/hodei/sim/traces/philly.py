"""Microsoft's Philly trace of 2017: timestamp,duration,num_gpus,gpu_time,cluster. Gangs of GPUs in virtual clusters."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from hodei.model.resources import GPU
from hodei.sim.traces.source import Reading, Source
from hodei.sim.traces.workload import Arrival, Shapes, Workload, machine

COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")
GPUS_PER_NODE = 8


def read(source: Source, how: Reading) -> Workload:
    """A job of more GPUs than a node has is a gang: members that fill a node, and one for the rest."""
    per_node = how.per_node or GPUS_PER_NODE
    notes = [
        "the trace has no estimates: the real run time is the estimate",
        f"it does not say how jobs lay on nodes: a member has at most {per_node} GPUs",
        "a virtual cluster is a project; users are not named",
    ]
    counts: Counter[str] = Counter()
    jobs = []
    places, rows = source.table(COLUMNS)
    when_at, duration_at, gpus_at, cluster_at = (places[column] for column in COLUMNS)
    for line, row in rows:
        try:
            when = datetime.fromisoformat(row[when_at])
        except ValueError:
            source.wrong(line, f"timestamp is {row[when_at][:40]!r}", "write it like 2017-10-09 07:01:55")
        run_ms = round(source.number(row[duration_at], line, "duration") * 1000)
        gpus = source.whole(row[gpus_at], line, "num_gpus")
        if run_ms <= 0:
            counts["without a run time: dropped"] += 1
        elif gpus <= 0:
            counts["without GPUs: dropped"] += 1
        elif how.procs is not None and gpus > how.procs:
            counts["larger than the machine: dropped"] += 1
        else:
            jobs.append((when.replace(tzinfo=None), line, run_ms, gpus, row[cluster_at]))
    jobs.sort(key=lambda job: job[:2])
    notes.extend(f"{count:,} jobs {what}" for what, count in sorted(counts.items()))
    if how.procs is None:
        notes.append("the trace does not say how large the machine is: give its GPUs as processors, or a cluster")
    shapes = Shapes(GPU, per_node)
    arrivals = [
        Arrival(
            round((when - jobs[0][0]).total_seconds() * 1000),
            id,
            shapes.spec(gpus, name="job", user="", project=cluster or "default", estimate_ms=run_ms),
            run_ms,
        )
        for id, (when, _, run_ms, gpus, cluster) in enumerate(jobs, 1)
    ]
    return Workload(source.name, arrivals, machine(how.procs, GPU, per_node) if how.procs else [], notes)
