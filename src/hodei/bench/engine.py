"""The engine alone: gangs from the queue through all plugins of a profile to a place on a node, one process, one core."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from typing import Any

from hodei.control.backlog import Line
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.view import View, gang_of
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY
from hodei.plugins.registry import build_profile

_WORKLOADS = ("basic",)


def add_arguments(kinds: Any) -> None:
    parser: argparse.ArgumentParser = kinds.add_parser("engine", help="decisions per second of the engine alone")
    parser.add_argument("--workload", choices=_WORKLOADS, default="basic")
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument(
        "--shapes", type=int, help="how many kinds of jobs (default: measure 1 and then as many as jobs)"
    )
    parser.add_argument("--worker-selection", default="")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(measure=measure)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    shapes = given.shapes or 1
    result = {"workload": given.workload, "nodes": given.nodes, "jobs": given.jobs}
    result |= _one(given, shapes)
    if given.shapes is None:
        different = _one(given, given.jobs)
        result |= {f"all_different_{name}": value for name, value in different.items() if name != "rss_mb"}
    result["rss_mb"] = round(_peak_mb(), 1)
    return result


def _one(given: argparse.Namespace, shapes: int) -> dict[str, Any]:
    """4 cpu, 32Gi and 110 places a node; 100m and 500Mi a job, the memory a little different for each shape."""
    table = Table(
        Node(
            f"node-{i:06}", "bench", capacity={CPU: 4000, MEMORY: 32 << 30, "pods": 110},
            labels={"zone": f"zone-{i % 3}", "name": f"node-{i:06}"},
        )
        for i in range(given.nodes)
    )  # fmt: skip
    table.settle()
    profile = build_profile("default", worker_selection=given.worker_selection)
    engine, line, view = Engine(table, {"default": profile}), Line(profile), View(0)
    began = time.perf_counter()
    for i in range(given.jobs):
        request = {CPU: 100, MEMORY: (500 << 20) + (i % shapes) * 4096, "pods": 1}
        line.add(gang_of(i + 1, JobSpec(f"job-{i}", (TaskSpec(request=request),)), i))
    queued = time.perf_counter()
    took: list[float] = []
    last = queued
    placed = 0
    for gang in line.ready():
        decided = engine.try_gang(gang, view)
        if isinstance(decided, Refusal):
            line.refused(gang, decided)
        else:
            line.started(gang)
            placed += 1
        now = time.perf_counter()
        took.append(now - last)
        last = now
    took.sort()
    return {
        "shapes": shapes,
        "decisions_per_s": round(len(took) / (last - queued)),
        "p50_ms": round(took[len(took) // 2] * 1000, 4),
        "p99_ms": round(took[len(took) * 99 // 100] * 1000, 4),
        "placed": placed,
        "queue_us_per_job": round((queued - began) / given.jobs * 1e6, 1),
    }


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 if sys.platform != "darwin" else peak / 2**20
