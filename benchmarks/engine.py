"""The engine alone: gangs from the queue through all plugins of a profile to a node, in one process on one core.

The workloads are those of kube-scheduler's own performance tests, at their sizes (nodes, members placed before, members
measured): nodes with 4 cpu, 32Gi and 110 pods; members with 100m and 500Mi.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import click
from msgspec import Struct

from hodei.control.queue.base import SchedulingQueue
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.preemption.search import Preemptions, Victim
from hodei.engine.preemption.victims import Place, VictimCandidate, VictimIndex
from hodei.engine.view import Gang, View, gang_of
from hodei.model.affinity import JobAffinity, JobTerm, NodeTerm, Requirement, SpreadRule
from hodei.model.job import Affinity, JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY
from hodei.plugins.registry import build_profile

_GREEN = (Requirement("color", "In", ("green",)),)
_ZONES = Requirement("zone", "In", ("zone-0", "zone-1"))


class Workload(Struct, frozen=True):
    """`nodes`, `before` and `jobs` are defaults; `task` makes the i-th measured job; `floor` is upstream's threshold."""

    nodes: int
    before: int
    jobs: int
    task: Callable[[int], dict[str, Any]]
    earlier: Callable[[int], dict[str, Any]] | None = None
    priority: int = 500
    floor: int = 0


def _nothing(i: int) -> dict[str, Any]:
    return {}


def _anti(i: int) -> dict[str, Any]:
    return {"job_anti_affinity": JobAffinity(required=(JobTerm("name", _GREEN, ("a", "b")),))}


WORKLOADS = {
    "basic": Workload(5000, 1000, 10_000, _nothing, floor=680),
    "node-affinity": Workload(
        5000, 5000, 10_000, lambda i: {"affinity": Affinity(required=(NodeTerm((_ZONES,)),))}, floor=540
    ),
    "pod-affinity": Workload(
        5000, 5000, 5000, lambda i: {"job_affinity": JobAffinity(required=(JobTerm("zone", _GREEN),))}, floor=70
    ),
    "pod-anti-affinity": Workload(5000, 1000, 2000, _anti, _anti, floor=180),
    "spread": Workload(5000, 5000, 5000, lambda i: {"spread": (SpreadRule("zone", 5, True, _GREEN),)}, floor=460),
    "preemption": Workload(
        5000, 20_000, 5000, lambda i: {"cpu": 3000}, lambda i: {"cpu": 900}, priority=1000, floor=570
    ),
    "unschedulable": Workload(5000, 100, 10_000, lambda i: {"cpu": 9000 if i % 10 == 0 else 100}, floor=590),
    "gang": Workload(5000, 0, 3000, lambda i: {"count": 3}),
}


ABOUT = "Decisions per second of the engine alone."
OPTIONS = (
    click.option(
        "--workload",
        type=click.Choice(sorted(WORKLOADS)),
        default="basic",
        show_default=True,
        help="What the jobs ask for.",
    ),
    click.option("--nodes", type=int, help="Number of nodes [default: as upstream]."),
    click.option("--jobs", type=int, help="Number of jobs [default: as upstream]."),
    click.option("--shapes", type=int, help="Number of different jobs [default: measure 1, then all different]."),
    click.option("--worker-selection", default="", help="Instead of the default of the profile."),
)


def measure(given: SimpleNamespace) -> dict[str, Any]:
    workload = WORKLOADS[given.workload]
    nodes, jobs = given.nodes or workload.nodes, given.jobs or workload.jobs
    result: dict[str, Any] = {"workload": given.workload, "nodes": nodes, "jobs": jobs, "before": workload.before}
    result |= _one(workload, nodes, jobs, given.shapes or 1, given.worker_selection)
    if given.shapes is None and given.workload == "basic":
        different = _one(workload, nodes, jobs, jobs, given.worker_selection)
        result |= {f"all_different_{name}": value for name, value in different.items()}
    if not result["placed"]:
        full = f"the {workload.before:,} members placed before fill the nodes"
        why = full if workload.before else "no node has room for one"
        result["note"] = f"nothing was placed, so there is no rate: {why}; increase --nodes"
    elif workload.floor:
        # Upstream's figure includes a real API server and six cores: for orientation, not a comparison.
        result["kube_scheduler_floor"] = workload.floor
    result["rss_mb"] = round(_peak_mb(), 1)
    return result


def _one(workload: Workload, nodes: int, jobs: int, shapes: int, strategy: str) -> dict[str, Any]:
    gc.set_threshold(50_000, 20, 50)  # as the server runs
    table = Table(_node(i) for i in range(nodes))
    table.settle()
    profile = build_profile("default", worker_selection=strategy)
    engine, queue, view = Engine(table, {"default": profile}), SchedulingQueue(profile), View(10_000_000)
    victim_index = VictimIndex(table)
    preemptions = Preemptions(engine, victim_index)
    for i in range(workload.before):
        gang = _gang(i + 1, 1, workload.earlier or _nothing, 100)
        profile.admit(gang)
        placed = engine.place(gang, view)
        if not isinstance(placed, Refusal):
            places = tuple(Place(each.node.name, each.member, each.grant) for each in placed)
            victim_index.put(
                gang.id, [VictimCandidate(gang.id, gang.job, places, since_ms=i, unsaved_ms=(i,) * len(places))]
            )
    began = time.perf_counter()
    for i in range(jobs):
        queue.add(_gang(workload.before + i + 1, shapes, workload.task, workload.priority))
    queued = last = time.perf_counter()
    took: list[float] = []
    members = evicted = 0
    for gang in queue.ready():
        decided = engine.try_gang(gang, view)
        if isinstance(decided, Refusal):
            found = preemptions.find(gang, view) if workload.priority > 500 else None
            if found is None:
                queue.refused(gang, decided)
            else:
                evicted += len(found.victims)
                _take(engine, victim_index, gang, found.victims, view)
                queue.started(gang)
                members += gang.size
        else:
            queue.started(gang)
            members += len(decided)
        now = time.perf_counter()
        took.append(now - last)
        last = now
    took.sort()
    out = {
        "shapes": shapes,
        "decisions_per_s": round(max(members, len(took)) / (last - queued)),
        "p50_ms": round(took[len(took) // 2] * 1000, 4),
        "p99_ms": round(took[len(took) * 99 // 100] * 1000, 4),
        "placed": members,
        "queue_us_per_job": round((queued - began) / jobs * 1e6, 1),
    }
    if not members:
        # The rate of refusals is not comparable to a rate of placements.
        out = {name: value for name, value in out.items() if name in ("shapes", "placed")}
    return out | ({"evicted": evicted} if evicted else {})


def _take(engine: Engine, victim_index: VictimIndex, gang: Gang, victims: list[Victim], view: View) -> None:
    """Remove the victims and place the gang at once, without a grace period."""
    for victim in victims:
        places = [place for tenant in victim_index.of_job[victim.id] for place in tenant.places]
        victim_index.remove(victim.id)
        for place in places:
            engine.table.release_by_name(*place)
    placed = engine.place(gang, view)
    assert not isinstance(placed, Refusal), "the trial placement fitted"
    places = [Place(each.node.name, each.member, each.grant) for each in placed]
    victim_index.put(gang.id, [VictimCandidate(gang.id, gang.job, tuple(places), since_ms=view.now_ms)])


def _node(i: int) -> Node:
    name = f"node-{i:06}"
    capacity = {CPU: 4000, MEMORY: 32 << 30, "pods": 110}
    return Node(name, "bench", capacity=capacity, labels={"zone": f"zone-{i % 3}", "name": name})


def _gang(id: int, shapes: int, make: Callable[[int], dict[str, Any]], priority: int) -> Gang:
    fields = make(id)
    request = {CPU: fields.pop("cpu", 100), MEMORY: (500 << 20) + (id % shapes) * 4096, "pods": 1}
    job = JobSpec(
        name=f"job-{id}",
        tasks=(TaskSpec(request=request, **fields),),
        project="a",
        labels={"color": "green"},
        priority=priority,
    )
    return gang_of(id, job, id)


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 if sys.platform != "darwin" else peak / 2**20
