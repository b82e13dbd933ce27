"""Alibaba's openb traces of 2023: a list of GPU nodes and a list of pods that share GPUs.

Nodes: sn,cpu_milli,memory_mib,gpu[,model]. Pods: name,cpu_milli,memory_mib,num_gpu[,gpu_milli][,gpu_spec][,qos],
creation_time,deletion_time[,scheduled_time]; times in seconds, `gpu_spec` a list of models between `|`. Those in brackets
may be missing.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from hodei.model.affinity import NodeTerm, Requirement
from hodei.model.errors import InvalidInput
from hodei.model.job import Affinity, JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, MEMORY, Resources
from hodei.sim.traces.source import Reading, Source
from hodei.sim.traces.workload import BACKEND, WHOLE, Arrival, Workload, ordered

NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu")
POD_COLUMNS = ("name", "cpu_milli", "memory_mib", "num_gpu", "creation_time", "deletion_time")
GPU_MODEL = "gpu-model"
_MIB = 2**20
_PREFIX = "openb_pod_list_"


def read_folder(folder: Path, how: Reading) -> Workload:
    """The folder's nodes and one of its pod lists: `default`, or the one that the option `pods` names."""
    lists = {path.name.removeprefix(_PREFIX).split(".csv")[0]: path for path in sorted(folder.glob(f"{_PREFIX}*.csv*"))}
    if not lists:
        raise InvalidInput(
            f"{folder} is a folder without {_PREFIX}*.csv", hint="name a trace file, or a folder of openb traces"
        )
    wanted = how.options.text("pods", "default" if "default" in lists else next(iter(lists)))
    if wanted not in lists:
        raise InvalidInput(f"{folder} has no pods named {wanted!r}", hint=f"it has {', '.join(lists)}")
    return read(Source(lists[wanted]), how)


def read_pair(paths: list[Path], how: Reading) -> Workload:
    """Two files with a comma between them, nodes and pods in either order."""
    if len(paths) != 2:
        raise InvalidInput(f"{len(paths)} files are given", hint="two can be read together: NODES.csv,PODS.csv")
    first, second = paths
    nodes, pods = (first, second) if "sn" in _columns(first) else (second, first)
    return _workload(Source(nodes), Source(pods), how)


def read(source: Source, how: Reading) -> Workload:
    """A pod list with the node list that lies beside it."""
    if "sn" in _columns(source.path):
        raise InvalidInput(
            f"{source.path} lists nodes, not jobs", hint="give its folder, the pods, or NODES.csv,PODS.csv"
        )
    beside = sorted(source.path.parent.glob("openb_node_list*.csv*"))
    # Of several lists the one of GPU nodes is that of the published figures.
    beside.sort(key=lambda path: "gpu_node" not in path.name)
    return _workload(Source(beside[0]) if beside else None, source, how)


def _columns(path: Path) -> set[str]:
    return {column.strip().lstrip("\ufeff") for column in next(Source(path).lines(), "").split(",")}


def _workload(nodes: Source | None, pods: Source, how: Reading) -> Workload:
    notes = ["the trace has no estimates: the real run time is the estimate"]
    found = _nodes(nodes) if nodes else []
    if not found:
        notes.append("there is no list of nodes beside the pods: give a cluster")
    if how.procs or how.per_node:
        notes.append("processors were given, but this trace runs on nodes of its own: they are not used")
    return Workload(pods.name, ordered(_pods(pods, notes)), found, notes)


def _nodes(source: Source) -> list[Node]:
    places, rows = source.table(NODE_COLUMNS)
    out = []
    for line, row in rows:
        cpu, memory, gpus = (source.whole(row[places[c]], line, c) for c in ("cpu_milli", "memory_mib", "gpu"))
        model = _cell(row, places.get("model"))
        capacity = {CPU: cpu, MEMORY: memory * _MIB} | ({GPU: gpus * WHOLE} if gpus else {})
        labels = {GPU_MODEL: model} if model else {}
        out.append(Node(row[places["sn"]], BACKEND, BACKEND, capacity, labels=labels, gpu_type=model))
    return sorted(out, key=lambda node: node.name)


def _pods(source: Source, notes: list[str]) -> list[Arrival]:
    places, rows = source.table(POD_COLUMNS)
    milli_at, spec_at, qos_at, scheduled_at = (
        places.get(column) for column in ("gpu_milli", "gpu_spec", "qos", "scheduled_time")
    )
    tasks: dict[tuple[int, int, int, str], tuple[TaskSpec, ...]] = {}
    counts: Counter[str] = Counter()
    out, used = [], set[int]()
    for line, row in rows:
        cpu, memory, number, created, deleted = (
            source.whole(row[places[column]], line, column) for column in POD_COLUMNS[1:]
        )
        part = _cell(row, milli_at)
        milli = source.whole(part, line, "gpu_milli") if part else WHOLE
        if number and not part:
            counts["do not say what part of a GPU they ask for: whole ones are taken"] += 1
        if number > 1 and milli not in (0, WHOLE):
            counts["ask for parts of several GPUs: whole ones are taken"] += 1
        gpu = number * WHOLE if number > 1 else number * milli
        models = _cell(row, spec_at)
        shape = (cpu, memory, gpu, models)
        if shape not in tasks:
            tasks[shape] = (_task(*shape),)
        began = _cell(row, scheduled_at)
        if not began:
            counts["were never placed: run from creation to deletion"] += 1
        run_s = deleted - (source.whole(began, line, "scheduled_time") if began else created)
        if run_s <= 0:
            counts["without a run time: one second is taken"] += 1
        qos, name = _cell(row, qos_at), row[places["name"]]
        run_ms = max(run_s, 1) * 1000
        id = _number(name, line, used)
        labels = {"qos": qos} if qos else {}
        spec = JobSpec(name=name, tasks=tasks[shape], labels=labels, estimate_ms=run_ms)
        out.append(Arrival(created * 1000, id, spec, run_ms))
    notes.extend(f"{count:,} of {len(out):,} pods {what}" for what, count in sorted(counts.items()))
    return out


def _cell(row: list[str], place: int | None) -> str:
    return row[place].strip() if place is not None and place < len(row) else ""


def _number(name: str, line: int, used: set[int]) -> int:
    """openb-pod-0017 is job 18: job numbers start at 1. Names that end in no number of their own count by line."""
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
