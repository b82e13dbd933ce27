"""The server: jobs from submission to end, through the real API and the real SQLite store, in its own process.

The instant backend runs nothing, so that the result is Hodei's own cost. With the local backend every job is a real
`/bin/true`; the baseline is a bare asyncio loop that starts as many with the same parallelism, in the same run.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from hodei.client import Client

_IN_FLIGHT = 100
_DEADLINE_S = 600


ABOUT = "Jobs per second from submit to finished."
OPTIONS = (
    click.option("--jobs", type=int, default=20000, show_default=True, help="Number of jobs."),
    click.option(
        "--backend",
        type=click.Choice(("instant", "local")),
        default="instant",
        show_default=True,
        help="Where the jobs run.",
    ),
    click.option("--batch", type=int, default=500, help="Jobs in one request.", show_default=True),
    click.option("--clients", type=int, default=2, help="Connections that submit at the same time.", show_default=True),
    click.option("--waiting", type=int, default=0, help="Pending jobs for a node that does not exist."),
    click.option("--forecast-every", default="1m", metavar="TIME", help="Interval of forecasts, or off [default: 1m]."),
    click.option(
        "--decision-log",
        type=click.Choice(("on", "off")),
        default="on",
        help="Compare both for its cost [default: on].",
    ),
)


@contextmanager
def running_server(home: Path, *options: str) -> Iterator[tuple[int, Client]]:
    """A real server in its own process, configured by HOME/config.toml: its pid and a client."""
    command = [sys.executable, "-m", "hodei.server", "--home", str(home), "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        first = server.stdout.readline()
        if not re.search(r" is up at http", first):
            raise RuntimeError(f"the server did not come up: {first!r}")
        with Client(home=home) as client:
            yield server.pid, client
    finally:
        server.terminate()
        server.wait(30)
        if server.stdout is not None:
            server.stdout.close()


def measure(given: SimpleNamespace) -> dict[str, Any]:
    result: dict[str, Any] = {"backend": given.backend, "jobs": given.jobs, "waiting": given.waiting}
    result["forecast_every"] = given.forecast_every
    bare = None
    if given.backend == "local":
        bare = asyncio.run(_bare_loop(given.jobs))
        result["bare_asyncio_per_s"] = round(bare)
    with tempfile.TemporaryDirectory(prefix="hodei-bench-") as home:
        result |= _through_server(given, Path(home))
    if bare:
        result["ratio_to_bare"] = round(result["jobs_per_s"] / bare, 3)
    return result


def _through_server(given: SimpleNamespace, home: Path) -> dict[str, Any]:
    options = ["--instant"] if given.backend == "instant" else []
    forecast = "enabled = false" if given.forecast_every == "off" else f'every = "{given.forecast_every}"'
    (home / "config.toml").write_text(f"[scheduling.forecast]\n{forecast}\n")
    if given.decision_log == "off":
        options.append("--decision-log=")
    with running_server(home, *options) as (pid, client):
        request = {"name": "bench", "command": ["/bin/true"], "cpu": f"{_cpu_share()}m", "memory": "1Mi"}
        _submit_pending(client, given.waiting)
        parts = [given.batch] * (given.jobs // given.batch) + (
            [given.jobs % given.batch] if given.jobs % given.batch else []
        )
        began = time.perf_counter()
        threads = [
            threading.Thread(target=_submit, args=(home, request, parts[i :: given.clients]))
            for i in range(given.clients)
        ]
        for thread in threads:
            thread.start()
        accepted = None
        while True:
            counts = client.info().jobs
            if accepted is None and not any(thread.is_alive() for thread in threads):
                accepted = time.perf_counter()
            if counts.get("succeeded", 0) + counts.get("failed", 0) >= given.jobs:
                break
            if time.perf_counter() - began > _DEADLINE_S:
                raise RuntimeError(f"not finished within {_DEADLINE_S} s: {counts}")
            time.sleep(0.02)
        ended = time.perf_counter()
        failed = client.info().jobs.get("failed", 0)
        server_cpu = cpu_seconds(pid)
        return {
            "jobs_per_s": round(given.jobs / (ended - began)),
            "submitted_per_s": round(given.jobs / ((accepted or ended) - began)),
            "seconds": round(ended - began, 2),
            "server_cpu_us_per_job": round(server_cpu / given.jobs * 1e6),
            "server_rss_mb": round(_rss_of(pid), 1),
            "failed": failed,
            "client_cpu_s": round(resource.getrusage(resource.RUSAGE_SELF).ru_utime, 2),
        }


def _submit(home: Path, request: dict[str, Any], parts: list[int]) -> None:
    with Client(home=home) as client:
        for size in parts:
            client.submit_all([request] * size)


def _submit_pending(client: Client, jobs: int) -> None:
    """Jobs for a node that does not exist, with an estimate of a minute each."""
    elsewhere = {"cpu": "1m", "memory": "1Mi", "node_selector": {"bench": "elsewhere"}}
    for first in range(0, jobs, 500):
        size = min(500, jobs - first)
        client.submit_all([{"name": "waits", "command": ["/bin/true"], "estimate": "1m", **elsewhere}] * size)


def _cpu_share() -> int:
    """Small enough that about `_IN_FLIGHT` jobs fit on this machine."""
    return max((os.cpu_count() or 1) * 1000 // _IN_FLIGHT, 1)


async def _bare_loop(jobs: int) -> float:
    """Processes per second by asyncio alone: no store, no queue, no limits, no output."""
    slots = asyncio.Semaphore(_IN_FLIGHT)

    async def one() -> None:
        async with slots:
            process = await asyncio.create_subprocess_exec(
                "/bin/true", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
            )
            await process.wait()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(jobs)))
    return jobs / (time.perf_counter() - began)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_of(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
