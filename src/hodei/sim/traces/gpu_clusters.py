"""Traces of GPU clusters: Alibaba's openb of 2023 and Microsoft's Philly of 2017.

openb has a list of nodes, sn,cpu_milli,memory_mib,gpu[,model], and a list of pods, name,cpu_milli,memory_mib,num_gpu
[,gpu_milli][,gpu_spec][,qos],creation_time,deletion_time[,scheduled_time]; times in seconds, `gpu_spec` a list of models
separated by `|`. Columns in brackets may be missing. Philly has timestamp,duration,num_gpus,gpu_time,cluster: gangs of GPUs in
virtual clusters.
"""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime
from pathlib import Path

from hodei.model.affinity import NodeTerm, Requirement
from hodei.model.errors import InvalidInput
from hodei.model.job import Affinity, JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, MEMORY, Resources
from hodei.sim.traces.workload import (
    BACKEND,
    PROCS_IGNORED,
    WHOLE,
    Arrival,
    JobSizes,
    ReadSettings,
    SpecCache,
    TraceFile,
    Workload,
    sort_arrivals,
    uniform_nodes,
)

NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu")
POD_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "creation_time", "deletion_time")
GPU_MODEL = "gpu-model"
_MIB = 2**20
_POD_LIST = "openb_pod_list_"


def read_openb_folder(folder: Path, settings: ReadSettings) -> Workload:
    """The node list of the folder and one of its pod lists: `default`, or that of the option `pods`."""
    lists = {
        path.name.removeprefix(_POD_LIST).split(".csv")[0]: path for path in sorted(folder.glob(f"{_POD_LIST}*.csv*"))
    }
    if not lists:
        raise InvalidInput(
            f"{folder} is a folder without {_POD_LIST}*.csv", hint="name a trace file, or a folder of openb traces"
        )
    name = settings.options.text("pods", "default" if "default" in lists else next(iter(lists)))
    if name not in lists:
        raise InvalidInput(f"{folder} has no pods named {name!r}", hint=f"it has {', '.join(lists)}")
    return read_openb(TraceFile(lists[name]), settings)


def read_openb_pair(paths: list[Path], settings: ReadSettings) -> Workload:
    """Nodes and pods, in either order."""
    if len(paths) != 2:
        raise InvalidInput(f"{len(paths)} files are given, not 2", hint="give NODES.csv,PODS.csv")
    first, second = paths
    nodes, pods = (first, second) if "sn" in _columns(first) else (second, first)
    return _openb(TraceFile(nodes), TraceFile(pods), settings)


def read_openb(file: TraceFile, settings: ReadSettings) -> Workload:
    """A pod list, with the node list in its folder."""
    if "sn" in _columns(file.path):
        raise InvalidInput(
            f"{file.path} lists nodes, not jobs", hint="give its folder, the pods, or NODES.csv,PODS.csv"
        )
    # The list of GPU nodes first: the published figures are based on it.
    lists = sorted(file.path.parent.glob("openb_node_list*.csv*"), key=lambda path: ("gpu_node" not in path.name, path))
    return _openb(TraceFile(lists[0]) if lists else None, file, settings)


def _columns(path: Path) -> set[str]:
    return {column.strip().lstrip("\ufeff") for column in next(TraceFile(path).lines(), "").split(",")}


def _openb(nodes: TraceFile | None, pods: TraceFile, settings: ReadSettings) -> Workload:
    notes = ["the trace has no estimates: the real run time is the estimate"]
    found = _nodes(nodes) if nodes else []
    if not found:
        notes.append("there is no node list next to the pod list: give a cluster")
    if settings.procs or settings.per_node:
        notes.append(PROCS_IGNORED)
    return Workload(pods.name, sort_arrivals(_pods(pods, notes)), found, notes)


def _nodes(file: TraceFile) -> list[Node]:
    places, rows = file.table(NODE_COLUMNS)
    out = []
    for line, row in rows:
        cpu, memory, gpus = (file.integer(row[places[c]], line, c) for c in ("cpu_milli", "memory_mib", "gpu"))
        model = _cell(row, places.get("model"))
        capacity = {CPU: cpu, MEMORY: memory * _MIB} | ({GPU: gpus * WHOLE} if gpus else {})
        labels = {GPU_MODEL: model} if model else {}
        out.append(Node(row[places["sn"]], BACKEND, BACKEND, capacity, labels=labels, gpu_type=model))
    return sorted(out, key=lambda node: node.name)


def _pods(file: TraceFile, notes: list[str]) -> list[Arrival]:
    places, rows = file.table(POD_COLUMNS)
    milli_at, spec_at, qos_at, scheduled_at = (
        places.get(column) for column in ("gpu_milli", "gpu_spec", "qos", "scheduled_time")
    )
    tasks: dict[tuple[int, int, int, str], tuple[TaskSpec, ...]] = {}
    counts: Counter[str] = Counter()
    out, ids = [], set[int]()
    for line, row in rows:
        cpu, memory, number, created, deleted = (
            file.integer(row[places[column]], line, column) for column in POD_COLUMNS[1:]
        )
        part = _cell(row, milli_at)
        milli = file.integer(part, line, "gpu_milli") if part else WHOLE
        if number and not part:
            counts["do not state which part of a GPU they request: whole ones are used"] += 1
        if number > 1 and milli not in (0, WHOLE):
            counts["request parts of several GPUs: whole ones are used"] += 1
        gpu = number * WHOLE if number > 1 else number * milli
        models = _cell(row, spec_at)
        shape = (cpu, memory, gpu, models)
        if shape not in tasks:
            tasks[shape] = (_task(*shape),)
        scheduled = _cell(row, scheduled_at)
        if not scheduled:
            counts["were never placed: they run from creation to deletion"] += 1
        run_s = deleted - (file.integer(scheduled, line, "scheduled_time") if scheduled else created)
        if run_s <= 0:
            counts["without a run time: one second is used"] += 1
        qos, name = _cell(row, qos_at), row[places["name"]]
        run_ms = max(run_s, 1) * 1000
        id = _job_id(name, line, ids)
        labels = {"qos": qos} if qos else {}
        spec = JobSpec(name=name, tasks=tasks[shape], labels=labels, estimate_ms=run_ms)
        out.append(Arrival(created * 1000, id, spec, run_ms))
    notes.extend(f"{count:,} of {len(out):,} pods {what}" for what, count in sorted(counts.items()))
    return out


def _cell(row: list[str], place: int | None) -> str:
    return row[place].strip() if place is not None and place < len(row) else ""


def _job_id(name: str, line: int, used: set[int]) -> int:
    """openb-pod-0017 is job 18: job ids start at 1. Without a number in the name, the line counts."""
    found = re.search(r"(\d+)$", name)
    id = int(found[1]) + 1 if found else line - 1
    while id in used:
        id += 1_000_000
    used.add(id)
    return id


def _task(cpu: int, memory: int, gpu: int, models: str) -> TaskSpec:
    request: Resources = {CPU: cpu, MEMORY: memory * _MIB} | ({GPU: gpu} if gpu else {})
    allowed = tuple(sorted(model for model in models.split("|") if model))
    if len(allowed) > 1:
        term = NodeTerm((Requirement(GPU_MODEL, "In", allowed),))
        return TaskSpec(request=request, affinity=Affinity(required=(term,)))
    return TaskSpec(request=request, gpu_type=allowed[0] if allowed else "")


PHILLY_COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")
_PHILLY_GPUS_PER_NODE = 8


def read_philly(file: TraceFile, settings: ReadSettings) -> Workload:
    """A job with more GPUs than a node is a gang: members that fill a node, and one for the rest."""
    per_node = settings.per_node or _PHILLY_GPUS_PER_NODE
    notes = [
        "the trace has no estimates: the real run time is the estimate",
        f"the trace does not say how jobs were placed: a member has at most {per_node} GPUs",
        "a virtual cluster is a project; there are no users",
    ]
    counts: Counter[str] = Counter()
    jobs = []
    places, rows = file.table(PHILLY_COLUMNS)
    when_at, duration_at, gpus_at, cluster_at = (places[column] for column in PHILLY_COLUMNS)
    for line, row in rows:
        try:
            when = datetime.fromisoformat(row[when_at])
        except ValueError:
            file.fail(line, f"timestamp is {row[when_at][:40]!r}", "write it like 2017-10-09 07:01:55")
        run_ms = round(file.number(row[duration_at], line, "duration") * 1000)
        gpus = file.integer(row[gpus_at], line, "num_gpus")
        if run_ms <= 0:
            counts["without a run time: dropped"] += 1
        elif gpus <= 0:
            counts["without GPUs: dropped"] += 1
        elif settings.procs is not None and gpus > settings.procs:
            counts["larger than the machine: dropped"] += 1
        else:
            jobs.append((when.replace(tzinfo=None), line, run_ms, gpus, row[cluster_at]))
    jobs.sort(key=lambda job: job[:2])
    notes.extend(f"{count:,} jobs {what}" for what, count in sorted(counts.items()))
    if settings.procs is None:
        notes.append("the trace does not state the size of the machine: give its GPUs as processors, or a cluster")
    sizes, specs = JobSizes(GPU, per_node), SpecCache()
    arrivals = []
    for id, (when, _, run_ms, gpus, cluster) in enumerate(jobs, 1):
        spec = specs.spec(sizes.tasks(gpus), name="job", user="", project=cluster or "default", estimate_ms=run_ms)
        arrivals.append(Arrival(round((when - jobs[0][0]).total_seconds() * 1000), id, spec, run_ms))
    nodes = uniform_nodes(settings.procs, GPU, per_node) if settings.procs else []
    return Workload(file.name, arrivals, nodes, notes)
