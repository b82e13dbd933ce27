"""Containers through Hodei beside the bare daemon, with the same image, as many at once, in the same run.

Bare is all that a container needs and nothing else: made, started, waited for, its log read, removed. Docker itself takes
some 200 ms of processor for each, so that a few dozen are enough; what Hodei adds is its server's own.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import resource
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from hodei.bench.house import a_server
from hodei.bench.server import _cpu_of
from hodei.client import Client

_DEADLINE_S = 600
_IDLE_S = 5.0


def add_arguments(kinds: Any) -> None:
    parser: argparse.ArgumentParser = kinds.add_parser("docker", help="containers per second beside the bare daemon")
    parser.add_argument("--socket", default="/var/run/docker.sock", help="of the daemon [default: %(default)s]")
    parser.add_argument("--image", default="", help="one that is there [default: the smallest]")
    parser.add_argument("--command", default="/bin/true", help="in the image [default: %(default)s]")
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(measure=measure)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    try:
        import aiodocker  # noqa: F401

        image = given.image or _smallest_image(given.socket)
    except ImportError:
        return {"skipped": "the client library is missing; next: pip install 'hodei[docker]'"}
    except OSError as error:
        return {"skipped": f"no Docker daemon answers at {given.socket} ({error}); next: start it, or give --socket"}
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
    # What the server does anyway, run or no run, is not the job's.
    anyway = result["server_idle_cpu_ms_per_s"] / result["jobs_per_s"]
    result["cpu_ms_per_job_more_than_bare"] = round(
        result["server_cpu_ms_per_job"] - anyway - result["bare_client_cpu_ms_per_job"], 2
    )
    return result


async def _bare(given: argparse.Namespace, image: str, jobs: int) -> float:
    import aiodocker

    client = aiodocker.Docker(url=f"unix://{given.socket}")
    slots = asyncio.Semaphore(given.at_once)
    config: dict[str, Any] = {
        "Image": image,
        "Entrypoint": [given.command],
        "Cmd": [],
        "HostConfig": {"NetworkMode": "none", "Init": True, "PidsLimit": 4096, "LogConfig": {"Type": "json-file"}},
    }

    async def one() -> None:
        async with slots:
            container = await client.containers.create(config)
            await container.start()
            ended = await container.wait()
            await container.log(stdout=True, stderr=True)
            await container.delete(force=True, v=True)
            if ended["StatusCode"] != 0:
                raise RuntimeError(f"{given.command} in {image} ended with {ended['StatusCode']}")

    began = time.perf_counter()
    try:
        await asyncio.gather(*(one() for _ in range(jobs)))
    finally:
        await client.close()
    return time.perf_counter() - began


def _through_server(given: argparse.Namespace, image: str, home: Path) -> dict[str, Any]:
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
    with a_server(home) as (pid, client):
        request = {"name": "bench", "command": [given.command], "cpu": "1m", "memory": "8Mi"}
        _run(client, request, 2)  # warm
        idle_cpu = _cpu_of(pid)
        time.sleep(_IDLE_S)
        idle = (_cpu_of(pid) - idle_cpu) / _IDLE_S
        cpu, machine, began = _cpu_of(pid), _machine_cpu_s(), time.perf_counter()
        _run(client, request, given.jobs)
        seconds = time.perf_counter() - began
        return {
            "jobs_per_s": round(given.jobs / seconds, 2),
            "server_cpu_ms_per_job": round((_cpu_of(pid) - cpu) / given.jobs * 1000, 2),
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
        time.sleep(0.3)  # each question costs the server about as much as a job


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
    """Of all processes together, whosever they are: only of use on a machine that does nothing else."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    busy = sum(map(int, fields[:8])) - int(fields[3]) - int(fields[4])
    return busy / os.sysconf("SC_CLK_TCK")
