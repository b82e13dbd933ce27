"""A Docker host as a node: the daemon's values, bounded by the operator's."""

from __future__ import annotations

import asyncio
from typing import Any

from hodei.backends.docker.container_spec import address_of
from hodei.backends.docker.engine import DaemonError, Engine
from hodei.backends.docker.settings import CONTAINERS, Host
from hodei.model.backend import NodeUsage
from hodei.model.node import Location, Node
from hodei.model.resources import CPU, MEMORY

_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}


def node_of(host: Host, info: dict[str, Any], images: dict[str, int], *, backend: str, problem: str) -> Node:
    """`problem`: why the node is not ready, or ""."""
    machine = str(info.get("Architecture", ""))
    measured = {CPU: int(info.get("NCPU", 0)) * 1000, MEMORY: int(info.get("MemTotal", 0))}
    said = host.amounts()
    capacity = {**measured, **said}
    for name, amount in measured.items():
        if info and name in said:
            capacity[name] = min(amount, said[name])
    if host.max_containers:
        capacity[CONTAINERS] = host.max_containers
    return Node(
        name=host.name,
        backend=backend,
        kind="docker",
        capacity=capacity,
        labels={
            "hodei.io/hostname": host.name,
            "kubernetes.io/hostname": host.name,
            "kubernetes.io/os": str(info.get("OSType") or "linux"),
            "kubernetes.io/arch": _ARCH.get(machine, machine),
            **_own_labels(info),
            **host.labels,
        },
        taints=host.taints,
        arch=machine,
        gpu_type=host.gpu_type,
        location=Location(host.region, host.zone, host.datacenter, host.rack).with_coordinates(host.lat, host.lng),
        cost_milli=round(host.cost * 1000),
        ready=not problem,
        not_ready_reason=problem,
        version=str(info.get("ServerVersion", "")),
        address=address_of(host),
        images=images,
    )


def _own_labels(info: dict[str, Any]) -> dict[str, str]:
    """Labels of the daemon (`dockerd --label`)."""
    out = {}
    for text in info.get("Labels") or ():
        name, _, value = str(text).partition("=")
        if name:
            out[f"docker.hodei.io/{name}"] = value
    return dict(sorted(out.items()))


# ----------------------------------------------------------------------------------------------- usage
# Usage of a host by all its containers, also those of others.


MOST = 500
AT_ONCE = 8


class Meter:
    """CPU usage is a rate: each sample is compared with the previous one; the first call takes two."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last: dict[str, tuple[float, int]] = {}

    async def measure(self) -> NodeUsage:
        listed = await self._engine.ask_json("GET", "containers/json", params={"limit": str(MOST)})
        ids = [item["Id"] for item in listed if item.get("State") in (None, "running", "paused")]
        if any(id not in self._last for id in ids):
            await self._look(ids)
            await asyncio.sleep(0.2)
        before = self._last
        self._last = {}
        memory = await self._look(ids)
        cpu_milli = 0
        for id, (at_s, used_ns) in self._last.items():
            then_s, then_ns = before.get(id, (at_s, used_ns))
            if at_s > then_s:
                cpu_milli += round((used_ns - then_ns) / 1e6 / (at_s - then_s))
        return NodeUsage({CPU: max(cpu_milli, 0), MEMORY: memory})

    async def _look(self, ids: list[str]) -> int:
        slots = asyncio.Semaphore(AT_ONCE)
        return sum(await asyncio.gather(*(self._one(id, slots) for id in ids)))

    async def _one(self, id: str, slots: asyncio.Semaphore) -> int:
        """Its memory; 0 for one that has just ended."""
        async with slots:
            try:
                stats: dict[str, Any] = await self._engine.ask_json(
                    "GET", f"containers/{id}/stats", params={"stream": "0", "one-shot": "1"}, within_s=8
                )
            except DaemonError as error:
                if error.status:
                    return 0
                raise
        self._last[id] = (asyncio.get_running_loop().time(), cpu_of(stats))
        memory = stats.get("memory_stats") or {}
        cache = int(
            (memory.get("stats") or {}).get("total_inactive_file")
            or (memory.get("stats") or {}).get("inactive_file")
            or 0
        )
        return max(int(memory.get("usage") or 0) - cache, 0)


def cpu_of(stats: dict[str, Any]) -> int:
    return int(((stats.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage") or 0)


async def cpu_ns(engine: Engine, container: str) -> int:
    """The processor time of a container so far."""
    params = {"stream": "0", "one-shot": "1"}
    return cpu_of(await engine.ask_json("GET", f"containers/{container}/stats", params=params))


async def last_word(engine: Engine, container: str) -> str:
    """Timestamp of its last output, "" without any."""
    params = {"stdout": "1", "stderr": "1", "timestamps": "1", "tail": "1"}
    said = await engine.ask("GET", f"containers/{container}/logs", params=params)
    return said[8:60].split(b" ")[0].decode(errors="replace")


async def held_images(engine: Engine) -> dict[str, int]:
    """The images of a host by name, with their bytes."""
    held: dict[str, int] = {}
    for image in await engine.ask_json("GET", "images/json"):
        for name in image.get("RepoTags") or ():
            if name != "<none>:<none>":
                held[name] = int(image.get("Size") or 0)
    return dict(sorted(held.items()))
