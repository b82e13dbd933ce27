"""`generate:NAME?jobs=10000&seed=1`: invented workloads, always the same for the same words.

| name | what |
|---|---|
| lublin | rigid jobs of a parallel machine, after Lublin and Feitelson |
| ci | pushes that start many small jobs at once |
| gpu | training jobs, single and in gangs |
| mixed | all three on one cluster of which every fourth node has GPUs |
"""

from __future__ import annotations

from collections.abc import Sequence

from hodei.model.errors import InvalidInput
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, MEMORY
from hodei.sim.traces import lublin
from hodei.sim.traces.bursts import CiBursts, GpuGangs
from hodei.sim.traces.source import Reading
from hodei.sim.traces.stream import Model, arrivals, pace_for, with_deadlines
from hodei.sim.traces.workload import BACKEND, WHOLE, Lazy, Shapes, Workload, machine

NAMES = ("lublin", "ci", "gpu", "mixed")
_GIB = 2**30
# The model was fitted to machines of up to some hundred processors; on larger ones jobs do not grow without end.
_LUBLIN_LARGEST = 1024
_USUAL_LOAD = 0.7
# GPU jobs take their part of the cores too.
_MIXED_LOADS = (0.25, 0.25, 0.7)
_ASKED = "user estimates are drawn: accuracy spread evenly, rounded up to figures that people write"


def generate(name: str, how: Reading) -> Workload:
    if name not in NAMES:
        raise InvalidInput(
            f"there is no generator {name!r}", hint=f"there are {', '.join(NAMES)}: generate:lublin?jobs=1000&seed=1"
        )
    options = how.options
    jobs, seed = options.whole("jobs", 10_000, most=1_000_000_000), options.whole("seed", 1, least=0)
    users = options.whole("users", 50, most=100_000)
    load = options.number("load", 0.0, most=100.0)
    in_haste = options.whole("deadline_percent", 0, least=0, most=100)
    if name == "lublin":
        parts, nodes, notes = _lublin(how, users, load, seed)
    elif name == "ci":
        parts, nodes, notes = _ci(how, users, load, seed)
    elif name == "gpu":
        parts, nodes, notes = _gpu(how, users, load, seed)
    else:
        parts, nodes, notes = _mixed(how, users, load, seed)
    if in_haste:
        notes = [*notes, f"{in_haste} % of the jobs have a deadline, 1.2 to 5 times their estimate after submission"]
    return Workload(
        f"{name}-{jobs}-seed{seed}",
        Lazy(jobs, lambda: with_deadlines(arrivals(parts, seed), in_haste, seed)),
        nodes,
        [f"generated, seed {seed}", *notes],
    )


Made = tuple[list[tuple[Model, float]], list[Node], list[str]]


def _paced(models: Sequence[Model], nodes: list[Node], loads: Sequence[float], seed: int) -> list[tuple[Model, float]]:
    return [(model, pace_for(model, nodes, load, seed)) for model, load in zip(models, loads, strict=True)]


def _lublin(how: Reading, users: int, load: float, seed: int) -> Made:
    """One pool of `procs`, or `nodes` of `cpus` each; `types=two` keeps batch and interactive jobs apart."""
    options = how.options
    types = options.choice("types", ("one", "two"))
    count = options.whole("nodes", 0, most=1_000_000)
    cpus = options.whole("cpus", how.per_node or 64, most=100_000) if count else how.per_node
    procs = options.whole("procs", how.procs or 256, most=10_000_000)
    if count:
        procs = count * (cpus or 1)
    largest = min(procs, options.whole("largest", min(procs, _LUBLIN_LARGEST), most=10_000_000))
    shapes = Shapes(per_node=cpus)
    kinds = [("job", lublin.ALL)] if types == "one" else [("batch", lublin.BATCH), ("interactive", lublin.INTERACTIVE)]
    models = [lublin.Lublin(kind, of, largest, users, shapes, how.estimates) for kind, of in kinds]
    nodes = machine(procs, per_node=cpus)
    notes = [f"Lublin-Feitelson model, jobs of up to {largest} of {procs} processors", _ASKED]
    if not load:
        return [(model, 1.0) for model in models], nodes, [*notes, "arrivals at the published rate"]
    # One pace for all, so that the types stay as frequent among each other as they are.
    pace = sum(pace_for(model, nodes, load, seed) for model in models)
    return [(model, pace) for model in models], nodes, [*notes, _about(load)]


def _ci(how: Reading, users: int, load: float, seed: int) -> Made:
    cpus = how.options.whole("cpus", how.per_node or 16, most=100_000)
    count = how.options.whole("nodes", max(1, (how.procs or 320) // cpus), most=1_000_000)
    nodes = machine(count * cpus, per_node=cpus, more={MEMORY: 4 * _GIB})
    notes = ["pushes in office hours (UTC), a dozen jobs each; a job's timeout is its estimate", _about(load)]
    return _paced([CiBursts(users, cpus, how.estimates)], nodes, [load or _USUAL_LOAD], seed), nodes, notes


def _gpu(how: Reading, users: int, load: float, seed: int) -> Made:
    gpus = how.options.whole("gpus", how.per_node or 8, most=64)
    count = how.options.whole("nodes", max(1, (how.procs or 400) // gpus), most=1_000_000)
    shared = how.options.whole("shared_percent", 0, least=0, most=100)
    nodes = machine(count * gpus, GPU, gpus, {CPU: 12 * WHOLE, MEMORY: 96 * _GIB})
    notes = ["sizes and run times like those of the Philly trace", _ASKED, _about(load)]
    model = GpuGangs(users, gpus, count * gpus, shared, how.estimates)
    return _paced([model], nodes, [load or _USUAL_LOAD], seed), nodes, notes


def _mixed(how: Reading, users: int, load: float, seed: int) -> Made:
    cpus = how.options.whole("cpus", how.per_node or 64, least=16, most=100_000)
    count = how.options.whole("nodes", max(4, (how.procs or 1280) // cpus), least=4, most=1_000_000)
    width = len(str(count - 1))
    plain = {CPU: cpus * WHOLE, MEMORY: cpus * 8 * _GIB}
    nodes = [
        Node(f"node-{number:0{width}}", BACKEND, BACKEND, plain | ({GPU: 8 * WHOLE} if number % 4 == 0 else {}))
        for number in range(count)
    ]
    largest = min(count * cpus // 4, _LUBLIN_LARGEST)
    # A GPU brings eight cores with it: gangs of as many GPUs as fit the cores of a node.
    per_node = min(8, cpus // 8)
    models: list[Model] = [
        lublin.Lublin("job", lublin.ALL, largest, users, Shapes(per_node=cpus), how.estimates),
        CiBursts(users, cpus, how.estimates),
        GpuGangs(users, per_node, max(1, (count + 3) // 4 * per_node // 2), 0, how.estimates),
    ]
    share = (load or _USUAL_LOAD) / _USUAL_LOAD
    notes = ["Lublin jobs, CI bursts and GPU gangs; every fourth node has 8 GPUs", _ASKED, _about(load)]
    return _paced(models, nodes, [part * share for part in _MIXED_LOADS], seed), nodes, notes


def _about(load: float) -> str:
    return f"arrivals ask for about {load or _USUAL_LOAD:.0%} of the scarcest resource, by a trial of 10,000 jobs"
