"""Slurm through Hodei compared with bare `sbatch`: the same number of empty jobs on the same cluster, in the same run.

The cluster is that of SLURM_CONF. Wall time is from the first submission to the last end. CPU time is that of the submitting
process with its commands (sbatch, squeue): the server for Hodei, this program for the baseline. Slurm's own daemons are
not included.
"""

from __future__ import annotations

import asyncio
import os
import resource
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from benchmarks.server import running_server

_DEADLINE_S = 900
_AT_ONCE = 4


ABOUT = "Jobs per second on Slurm, compared with bare sbatch."
OPTIONS = (
    click.option("--jobs", type=int, default=200, show_default=True, help="Number of jobs."),
    click.option("--partition", default="main", show_default=True, help="Partition of Slurm."),
    click.option(
        "--mode",
        type=click.Choice(("placed", "delegate")),
        default="delegate",
        show_default=True,
        help="The `mode` setting.",
    ),
    click.option(
        "--transport",
        type=click.Choice(("commands", "rest")),
        default="commands",
        show_default=True,
        help="The `transport` setting.",
    ),
    click.option(
        "--rest", default=os.environ.get("HODEI_SLURM_REST", ""), help="Address of slurmrestd [env: HODEI_SLURM_REST]."
    ),
    click.option(
        "--ahead", type=float, default=100.0, help="The `ahead` setting, with --mode delegate.", show_default=True
    ),
)


def measure(given: SimpleNamespace) -> dict[str, Any]:
    result: dict[str, Any] = {"mode": given.mode, "transport": given.transport, "jobs": given.jobs}
    with tempfile.TemporaryDirectory(prefix="hodei-bench-") as place:
        bare_s, bare_cpu_s = asyncio.run(_bare(given, Path(place)))
        hodei_s, hodei_cpu_s = _through_server(given, Path(place))
    result["bare_jobs_per_s"] = round(given.jobs / bare_s, 1)
    result["hodei_jobs_per_s"] = round(given.jobs / hodei_s, 1)
    result["wall_ratio"] = round(hodei_s / bare_s, 3)
    result["bare_cpu_ms_per_job"] = round(bare_cpu_s / given.jobs * 1000, 2)
    result["hodei_cpu_ms_per_job"] = round(hodei_cpu_s / given.jobs * 1000, 2)
    result["added_cpu_ms_per_job"] = round((hodei_cpu_s - bare_cpu_s) / given.jobs * 1000, 2)
    return result


async def _bare(given: SimpleNamespace, place: Path) -> tuple[float, float]:
    """A loop around sbatch, then squeue every half second until all jobs have ended."""
    script = place / "bare.sh"
    script.write_text("#!/bin/sh\nexec /bin/true\n")
    name = f"bare-{os.getpid()}"
    command = (
        "sbatch",
        "--parsable",
        f"--job-name={name}",
        f"--partition={given.partition}",
        "--cpus-per-task=1",
        "--mem=1M",
    )
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one() -> None:
        async with slots:
            process = await asyncio.create_subprocess_exec(
                *command, "--output=/dev/null", str(script), stdout=asyncio.subprocess.DEVNULL
            )
            if await process.wait():
                raise RuntimeError("sbatch failed: is SLURM_CONF set, and does the partition exist?")

    began, cpu_began = time.perf_counter(), _own_cpu_s()
    await asyncio.gather(*(one() for _ in range(given.jobs)))
    while True:
        squeue = await asyncio.create_subprocess_exec(
            "squeue", "--noheader", "--format=%i", f"--name={name}", stdout=asyncio.subprocess.PIPE
        )
        left, _ = await squeue.communicate()
        if squeue.returncode == 0 and not left.strip():
            break
        if time.perf_counter() - began > _DEADLINE_S:
            raise RuntimeError(f"not finished within {_DEADLINE_S} s")
        await asyncio.sleep(0.5)
    return time.perf_counter() - began, _own_cpu_s() - cpu_began


def _through_server(given: SimpleNamespace, place: Path) -> tuple[float, float]:
    home = place / "home"
    home.mkdir()
    lines = [
        "[backends.hpc]",
        'kind = "slurm"',
        f'mode = "{given.mode}"',
        f'transport = "{given.transport}"',
        f'output = "{place}/output"',
        f'partitions = ["{given.partition}"]',
        'poll = "500ms"',
        f'conf = "{os.environ.get("SLURM_CONF", "")}"',
        f'rest = "{given.rest}"',
        f"ahead = {given.ahead if given.mode == 'delegate' else 1.0}",
    ]
    (home / "config.toml").write_text("\n".join((*lines, "")))
    with running_server(home) as (pid, client):
        _wait(lambda: any(node.backend == "hpc" for node in client.nodes()), "the cluster's nodes")
        job = {"name": "bench", "command": ["/bin/true"], "cpu": 1, "memory": "1Mi", "backend": "hpc"}
        cpu_began, began = _cpu_of(pid), time.perf_counter()
        client.submit_all([job] * given.jobs)

        def ended() -> bool:
            counts = client.info().jobs
            return bool(counts.get("succeeded", 0) + counts.get("failed", 0) >= given.jobs)

        _wait(ended, "the end of all jobs")
        wall_s = time.perf_counter() - began
        if failed := client.info().jobs.get("failed", 0):
            raise RuntimeError(f"{failed} jobs failed")
        return wall_s, _cpu_of(pid) - cpu_began


def _wait(condition: Any, what: str) -> None:
    deadline = time.perf_counter() + _DEADLINE_S
    while not condition():
        if time.perf_counter() > deadline:
            raise RuntimeError(f"no sign of {what} within {_DEADLINE_S} s")
        time.sleep(0.05)


def _own_cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _cpu_of(pid: int) -> float:
    """Of the process and of all children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
