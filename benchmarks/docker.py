"""Containers through Hodei compared with the bare daemon: same image, same parallelism, same run.

The bare baseline does only what a container needs: create, start, wait, read the log, remove. Docker itself takes about
200 ms of CPU for each, so a few dozen are enough; the difference is the cost of Hodei's server.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import resource
import socket
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from benchmarks.server import cpu_seconds, running_server
from hodei.backends.docker.engine import Engine
from hodei.backends.docker.settings import Host
from hodei.client import Client

_DEADLINE_S = 600
_IDLE_S = 5.0


ABOUT = "Containers per second, compared with the bare daemon."
OPTIONS = (
    click.option("--socket", default="/var/run/docker.sock", show_default=True, help="Socket of the daemon."),
    click.option("--image", default="", help="An image of the daemon [default: the smallest]."),
    click.option("--command", default="/bin/true", show_default=True, help="Command in the image."),
    click.option("--jobs", type=int, default=40, show_default=True, help="Number of jobs."),
    click.option("--at-once", type=int, default=4, show_default=True, help="Jobs at the same time."),
)


def measure(given: SimpleNamespace) -> dict[str, Any]:
    try:
        image = given.image or _smallest_image(given.socket)
    except OSError as error:
        return {"skipped": f"there is no Docker daemon at {given.socket} ({error}); next: start it, or give --socket"}
    if not image:
        return {"skipped": "the daemon holds no image; next: docker pull busybox"}
    result: dict[str, Any] = {"jobs": given.jobs, "at_once": given.at_once, "image": image}
    asyncio.run(_bare(given, image, 2))  # warm
    before, machine = _own_cpu_s(), _machine_cpu_s()
    seconds = asyncio.run(_bare(given, image, given.jobs))
    result["bare_jobs_per_s"] = round(given.jobs / seconds, 2)
    result["bare_client_cpu_ms_per_job"] = round((_own_cpu_s() - before) / given.jobs * 1000, 2)
    result["bare_machine_cpu_ms_per_job"] = round((_machine_cpu_s() - machine) / given.jobs * 1000)
    with tempfile.TemporaryDirectory(prefix="hodei-bench-") as home:
        result |= _through_server(given, image, Path(home))
    result["ratio_to_bare"] = round(result["jobs_per_s"] / result["bare_jobs_per_s"], 3)
    # The idle cost of the server is not part of a job's cost.
    idle = result["server_idle_cpu_ms_per_s"] / result["jobs_per_s"]
    result["cpu_ms_per_job_more_than_bare"] = round(
        result["server_cpu_ms_per_job"] - idle - result["bare_client_cpu_ms_per_job"], 2
    )
    return result


async def _bare(given: SimpleNamespace, image: str, jobs: int) -> float:
    engine = Engine(Host(name="docker", url=f"unix://{given.socket}"))
    await engine.open()
    slots = asyncio.Semaphore(given.at_once)
    config: dict[str, Any] = {
        "Image": image,
        "Entrypoint": [given.command],
        "Cmd": [],
        "HostConfig": {"NetworkMode": "none", "Init": True, "PidsLimit": 4096, "LogConfig": {"Type": "json-file"}},
    }

    async def one() -> None:
        async with slots:
            container = f"containers/{(await engine.request_json('POST', 'containers/create', body=config))['Id']}"
            await engine.request("POST", f"{container}/start")
            ended = await engine.request_json("POST", f"{container}/wait")
            await engine.request("GET", f"{container}/logs", params={"stdout": "1", "stderr": "1"})
            await engine.request("DELETE", container, params={"force": "1", "v": "1"})
            if ended["StatusCode"] != 0:
                raise RuntimeError(f"{given.command} in {image} ended with {ended['StatusCode']}")

    began = time.perf_counter()
    try:
        await asyncio.gather(*(one() for _ in range(jobs)))
    finally:
        await engine.close()
    return time.perf_counter() - began


def _through_server(given: SimpleNamespace, image: str, home: Path) -> dict[str, Any]:
    (home / "config.toml").write_text(
        f"""
[scheduling.forecast]
enabled = false
[backends.local]
kind = "local"
enabled = false
[backends.docker]
kind = "docker"
image = "{image}"
network = "none"
starts_at_once = {given.at_once}
hosts = [{{name = "docker", url = "unix://{given.socket}", cpu = 1000, max_containers = {given.at_once}}}]
"""
    )
    with running_server(home) as (pid, client):
        request = {"name": "bench", "command": [given.command], "cpu": "1m", "memory": "8Mi"}
        _run(client, request, 2)  # warm
        idle_cpu = cpu_seconds(pid)
        time.sleep(_IDLE_S)
        idle = (cpu_seconds(pid) - idle_cpu) / _IDLE_S
        cpu, machine, began = cpu_seconds(pid), _machine_cpu_s(), time.perf_counter()
        _run(client, request, given.jobs)
        seconds = time.perf_counter() - began
        return {
            "jobs_per_s": round(given.jobs / seconds, 2),
            "server_cpu_ms_per_job": round((cpu_seconds(pid) - cpu) / given.jobs * 1000, 2),
            "server_idle_cpu_ms_per_s": round(idle * 1000, 2),
            "machine_cpu_ms_per_job": round((_machine_cpu_s() - machine) / given.jobs * 1000),
        }


def _run(client: Client, request: dict[str, Any], jobs: int) -> None:
    """Submit, and wait until all have succeeded."""
    before = client.info().jobs.get("succeeded", 0)
    client.submit_all([request] * jobs)
    deadline = time.perf_counter() + _DEADLINE_S
    while True:
        counts = client.info().jobs
        if counts.get("failed", 0):
            raise RuntimeError(f"{counts['failed']} jobs failed")
        if counts.get("succeeded", 0) >= before + jobs:
            return
        if time.perf_counter() > deadline:
            raise RuntimeError(f"not finished within {_DEADLINE_S} s: {counts}")
        time.sleep(0.3)  # each request costs the server about as much as a job


def _smallest_image(path: str) -> str:
    connection = http.client.HTTPConnection("localhost", timeout=10)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(10)
    try:
        connection.sock.connect(path)
        connection.request("GET", "/images/json")
        images = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    named = [(image["Size"], tag) for image in images for tag in image.get("RepoTags") or () if "<none>" not in tag]
    return min(named)[1] if named else ""


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _machine_cpu_s() -> float:
    """Of all processes: only meaningful on an otherwise idle machine."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    busy = sum(map(int, fields[:8])) - int(fields[3]) - int(fields[4])
    return busy / os.sysconf("SC_CLK_TCK")
