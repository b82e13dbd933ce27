"""How full the GPUs of a cluster get: the published experiment on Alibaba's openb trace, with the real engine.

As in "Beware of Fragmentation" (USENIX ATC 2023): all pods of the list in a random order, then pods drawn from it, until
they request 130 % of the GPUs. No pod ends, and one that does not fit is dropped. Nodes get names in a random order,
because ties go to the smallest. The figure at 100 % is the mean while 99.5 to 100.5 % have arrived.
"""

from __future__ import annotations

import csv
import gc
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import click
from msgspec import Struct

from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.profile import Profile
from hodei.engine.view import View, gang_of
from hodei.model.affinity import NodeTerm, Requirement
from hodei.model.job import Affinity, JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, MEMORY
from hodei.plugins.fragmentation import Shape, typical_workload
from hodei.plugins.registry import build_profile

POLICIES = {
    "random": "gpu_random", "dotprod": "gpu_dotprod", "clustering": "gpu_clustering", "packing": "gpu_packing",
    "bestfit": "gpu_bestfit", "fgd": "fgd", "hodei": "gpu_hodei",
}  # fmt: skip
_NEED_WORKLOAD = ("fgd", "gpu_hodei")
_FIRST_SEED = 42
_MODEL = "gpu-model"


class Pod(Struct, frozen=True):
    task: TaskSpec
    shape: Shape

    @property
    def gpu(self) -> int:
        return self.shape.gpu


class Outcome(Struct):
    """Allocated GPUs in percent, when 100 % and when all pods have arrived."""

    at_100: float
    at_end: float
    placed: int
    dropped: int
    seconds: float


ABOUT = "How full the GPUs of a cluster get, by policy."
OPTIONS = (
    click.option(
        "--nodes", type=click.Path(path_type=Path), required=True, help="openb_node_list_gpu_node.csv of the trace."
    ),
    click.option(
        "--pods", type=click.Path(path_type=Path), required=True, help="openb_pod_list_default.csv of the trace."
    ),
    click.option("--policies", default=",".join(POLICIES), help="Names or plugins, separated by commas."),
    click.option("--seeds", type=int, default=10, show_default=True, help="Number of draws for the mean."),
    click.option("--ratio", type=float, default=1.3, help="Total request, as a part of all GPUs.", show_default=True),
)


def measure(given: SimpleNamespace) -> dict[str, Any]:
    nodes, pods = read_nodes(given.nodes), read_pods(given.pods)
    result: dict[str, Any] = {"nodes": len(nodes), "pods": len(pods), "seeds": given.seeds}
    for policy in given.policies.split(","):
        seeds = range(_FIRST_SEED, _FIRST_SEED + given.seeds)
        each = [run(nodes, pods, policy, seed, given.ratio) for seed in seeds]
        result[policy] = (
            f"{fmean(one.at_100 for one in each):.2f} / {fmean(one.at_end for one in each):.2f}"
            f"  ({fmean(one.seconds for one in each):.1f} s of cpu a seed)"
        )
        for seed, one in zip(seeds, each, strict=True):
            result[f"{policy}, seed {seed}"] = f"{one.at_100:.2f} / {one.at_end:.2f}, {one.dropped} dropped"
    return result


def run(nodes: Sequence[Node], pods: Sequence[Pod], policy: str, seed: int, ratio: float = 1.3) -> Outcome:
    """One order of arrival under one policy."""
    gc.set_threshold(50_000, 20, 50)  # as the server runs
    dice = random.Random(seed)
    table = Table(_renamed(nodes, dice))
    table.settle()
    total = sum(node.capacity[GPU] for node in nodes)
    arriving = list(_arrivals(pods, total, ratio, dice))
    profile = profile_of(policy, pods, seed)
    engine, view = Engine(table, {profile.name: profile}), View(0)
    arrived = used = dropped = 0
    near_100: list[int] = []
    near_end: list[int] = []
    began = time.process_time()
    for number, pod in enumerate(arriving):
        job = JobSpec(name="pod", tasks=(pod.task,), project="openb", profile=profile.name)
        gang = gang_of(number + 1, job, number)
        profile.admit(gang)
        arrived += pod.gpu
        if isinstance(engine.place(gang, view), Refusal):
            dropped += 1
        else:
            used += pod.gpu
        percent = round(arrived * 100 / total)
        if percent == 100:
            near_100.append(used)
        if percent == round(ratio * 100):
            near_end.append(used)
    faults = engine.runner.take_faults()
    if faults:
        raise RuntimeError(f"a plugin failed: {faults[0]}")
    return Outcome(
        fmean(near_100 or [used]) * 100 / total,
        fmean(near_end or [used]) * 100 / total,
        len(arriving) - dropped,
        dropped,
        time.process_time() - began,
    )


def profile_of(policy: str, pods: Sequence[Pod], seed: int) -> Profile:
    """All filters, and the policy as the only score."""
    plugin = POLICIES.get(policy, policy)
    arguments: dict[str, dict[str, Any]] = {}
    if plugin in _NEED_WORKLOAD:
        arguments[plugin] = {"workload": typical_workload(pod.shape for pod in pods)}
    elif plugin == "gpu_random":
        arguments[plugin] = {"seed": seed}
    return build_profile("default", queue="fifo", scores={plugin: 1}, arguments=arguments)


def read_nodes(path: Path) -> list[Node]:
    out = []
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            amounts = {CPU: int(row["cpu_milli"]), MEMORY: int(row["memory_mib"]) << 20, GPU: int(row["gpu"]) * 1000}
            out.append(Node(row["sn"], "openb", capacity=amounts, gpu_type=row["model"], labels={_MODEL: row["model"]}))
    return out


def read_pods(path: Path) -> list[Pod]:
    out = []
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            gpu = int(row["num_gpu"]) * int(row["gpu_milli"])
            request = {CPU: int(row["cpu_milli"]), MEMORY: int(row["memory_mib"]) << 20}
            models = tuple(model for model in row["gpu_spec"].split("|") if model)
            wanted = Affinity((NodeTerm((Requirement(_MODEL, "In", models),)),)) if models else Affinity()
            task = TaskSpec(request=request | ({GPU: gpu} if gpu else {}), affinity=wanted)
            shape = Shape(request[CPU], gpu, tuple(sorted(model.lower() for model in models)))
            out.append(Pod(task, shape))
    return out


def _renamed(nodes: Sequence[Node], dice: random.Random) -> list[Node]:
    numbers = list(range(len(nodes)))
    dice.shuffle(numbers)
    return [
        Node(
            f"{number:04}-{node.name}", node.backend, capacity=node.capacity, gpu_type=node.gpu_type, labels=node.labels
        )
        for number, node in zip(numbers, nodes, strict=True)
    ]


def _arrivals(pods: Sequence[Pod], total: int, ratio: float, dice: random.Random) -> Iterator[Pod]:
    """All pods in a random order, then clones of them while they request less than `ratio` of all GPUs."""
    first = list(pods)
    dice.shuffle(first)
    yield from first
    requested = sum(pod.gpu for pod in pods)
    while requested + (clone := dice.choice(pods)).gpu <= ratio * total:
        requested += clone.gpu
        yield clone
