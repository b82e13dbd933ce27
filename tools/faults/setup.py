"""The setup of one run, drawn from its seed: a small cluster, profiles, possible faults, and jobs.

Half of the kinds of faults are left out of each run (swarm testing): a fault that is always present hides bugs that need
its absence. One run in six is calm: no faults, and estimates hold, so that every start reservation must be kept.
"""

from __future__ import annotations

from random import Random
from typing import Any

from msgspec import Struct

from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.model.job import PRIORITY_CLASSES, BackendChoice, Checkpoint, GangRules, JobSpec, TaskSpec, Toleration
from hodei.model.node import Node, Socket, Taint

GIB = 1 << 30
TAINTS = (Taint("dedicated", "team", "NoSchedule"), Taint("spot", "", "NoExecute"))
# The probability of each, whenever it could happen.
FAULTS = {
    "node lost": 0.02,
    "journal lost with the node": 0.4,
    "node silently back": 0.5,
    "node unready": 0.02,
    "backend away": 0.03,
    "start is slow": 0.15,
    "start is refused": 0.08,
    "start is never answered": 0.05,
    "reply is lost": 0.08,
    "observation twice": 0.2,
    "observation late": 0.25,
    "observations out of order": 0.3,
    "run fails": 0.2,
    "run is lost": 0.04,
    "run stops by itself": 0.03,
    "stop is slow": 0.3,
    "stop comes too late": 0.1,
    "store is taken over": 0.02,
    "store is away": 0.02,
    "store is slow": 0.02,
    "crash before commit": 0.01,
    "crash between commit and act": 0.03,
    "crash between act and observation": 0.03,
    "reconciled with old data": 0.4,
    "clock jumps": 0.02,
    "step comes late": 0.2,
    "operator": 0.05,
    "user": 0.12,
}


class InvariantViolated(Exception):
    pass


class Chance:
    """Whether a fault happens: the only source of randomness of a run, so that the seed determines all of it."""

    def __init__(self, rng: Random, odds: dict[str, float]) -> None:
        self.rng = rng
        self.odds = odds
        self.over = False

    def __call__(self, fault: str) -> bool:
        odds = 0.0 if self.over else self.odds.get(fault, 0.0)
        return odds > 0 and self.rng.random() < odds

    def stop(self) -> None:
        self.over = True


class FaultSetup(Struct):
    nodes: list[Node]
    config: SchedulingConfig
    odds: dict[str, float]
    calm: bool
    jobs: int
    preempts: bool
    min_runtime_ms: int
    max_tries: int
    cloud: list[Node] = []


def draw_setup(rng: Random) -> FaultSetup:
    calm = rng.random() < 1 / 6
    backends = ["east", "west", "south"][: rng.choice((1, 1, 2, 2, 3))]
    nodes = [draw_node(rng, f"n{number}", rng.choice(backends), calm) for number in range(1, rng.randint(1, 6) + 1)]
    backfill = rng.choice(("easy", "easy", "conservative"))
    fill = rng.choice(("queue", "shortest", "largest"))
    order = "fcfs" if calm else rng.choice(("fcfs", "fcfs", "sjf", "wfp3"))
    profiles = {
        "batch": ProfileConfig(queue="batch", options={"batch": {"order": order, "backfill": backfill, "fill": fill}}),
        "fair": ProfileConfig(queue="fair", weights={"red": 3}, worker_selection="round_robin"),
    }
    return FaultSetup(
        nodes=nodes,
        config=SchedulingConfig(profiles=profiles),
        odds={} if calm else {fault: odds for fault, odds in FAULTS.items() if rng.random() < 0.5},
        calm=calm,
        jobs=rng.randint(3, 12),
        preempts=not calm and rng.random() < 0.7,
        min_runtime_ms=rng.choice((0, 0, 5000)),
        max_tries=5000 if calm else rng.choice((5000, 5000, 2)),
    )


def draw_node(rng: Random, name: str, backend: str, calm: bool) -> Node:
    cpus = rng.choice((2, 4, 4, 8))
    fields: dict[str, Any] = {"labels": {"disk": rng.choice(("ssd", "hdd")), "zone": rng.choice(("a", "b"))}}
    capacity = {"cpu": cpus * 1000, "memory": rng.choice((4, 8)) * GIB}
    if not calm and rng.random() < 0.4:
        capacity["gpu"] = rng.choice((1000, 2000))
    if not calm and rng.random() < 0.5:
        gpus, half = tuple(range(capacity.get("gpu", 0) // 1000)), cpus // 2
        fields["sockets"] = (
            Socket(tuple(range(half)), gpus[:1]),
            Socket(tuple(range(half, cpus)), gpus[1:]),
        )
    if not calm and rng.random() < 0.1:
        fields["taints"] = (rng.choice(TAINTS),)
    if not calm and rng.random() < 0.1:
        fields["overcommit_percent"] = {"cpu": 150}
    return Node(name, backend, capacity=capacity, address=rng.choice(("", f"{name}.example")), **fields)


def draw_spec(rng: Random, setup: FaultSetup) -> JobSpec:
    calm = setup.calm
    profile = "batch" if calm else rng.choice(("default", "default", "batch", "batch", "fair"))
    estimate = rng.randint(2, 60) * 1000
    if not calm and rng.random() < 0.3:
        estimate = 0
    tasks = [_draw_task(rng, setup, "first")]
    if rng.random() < 0.15:
        tasks.append(_draw_task(rng, setup, "second"))
    amounts_only = not any(task.request.get("gpu") or task.binding or task.backends for task in tasks)
    return JobSpec(
        name=rng.choice(("sort", "train", "serve")),
        tasks=tuple(tasks),
        project=rng.choice(("red", "blue")),
        labels={"app": rng.choice(("a", "b"))},
        priority=500 if calm else rng.choice(tuple(PRIORITY_CLASSES.values())),
        profile=profile,
        backend=_draw_backend(rng, setup) if amounts_only else BackendChoice(),
        estimate_ms=estimate,
        timeout_ms=0,
        scheduling_timeout_ms=0 if calm or rng.random() < 0.9 else 30_000,
        retries=rng.choice((0, 1, 3)),
        restart=rng.choice(("on_failure",) * 8 + ("never", "always")) if not calm else "on_failure",
        grace_ms=rng.choice((0, 1000, 10_000)),
        gang=_draw_gang(rng, amounts_only, calm),
        checkpoint=Checkpoint(signal="USR1") if rng.random() < 0.2 else Checkpoint(),
    )


def _draw_backend(rng: Random, setup: FaultSetup) -> BackendChoice:
    if setup.calm or rng.random() < 0.85:
        return BackendChoice()
    return BackendChoice(rng.choice(("specific", "preferred")), (rng.choice(setup.nodes).backend,))


def _draw_gang(rng: Random, amounts_only: bool, calm: bool) -> GangRules:
    return GangRules(
        topology="zone" if amounts_only and not calm and rng.random() < 0.2 else "",
        topology_required=rng.random() < 0.7,
        on_failure="repair" if not calm and rng.random() < 0.5 else "restart",
        assembly_timeout_ms=0 if calm else rng.choice((0, 0, 5000, 20_000)),
        elastic=not calm and rng.random() < 0.4,
    )


def _draw_task(rng: Random, setup: FaultSetup, name: str) -> TaskSpec:
    count = rng.choice((1, 1, 1, 2, 3, 4))
    request = {"cpu": rng.choice((500, 1000, 1000, 2000, 3000)), "memory": rng.choice((0, 1, 2, 3)) * GIB}
    fields: dict[str, Any] = {}
    if not setup.calm:
        if rng.random() < 0.15:
            request["gpu"] = rng.choice((300, 500, 1000, 1500))
        if rng.random() < 0.1:
            fields["binding"] = rng.choice(("cores", "numa"))
        if rng.random() < 0.2:
            fields["node_selector"] = {"disk": "ssd"}
        fields["tolerations"] = rng.choice(
            ((), (), (Toleration("spot", "Exists", seconds=10),), (Toleration("", "Exists"),))
        )
    return TaskSpec(
        name=name,
        count=count,
        command=("true",),
        request=request,
        min_count=rng.randint(1, count) if count > 1 and rng.random() < 0.5 else 0,
        **fields,
    )


def draw_duration_ms(rng: Random, spec: JobSpec, calm: bool) -> int:
    """The actual run time; in calm runs never longer than the estimate."""
    if calm or (spec.estimate_ms and rng.random() < 0.5):
        return max(spec.estimate_ms * rng.choice((30, 70, 100)) // 100, 1)
    return rng.randint(1, 90) * 1000
