"""What is used on a host now, by all its containers, whosever they are."""

from __future__ import annotations

import asyncio
from typing import Any

from hodei.backends.docker.engine import DaemonError, Engine
from hodei.model.backend import NodeUsage
from hodei.model.resources import CPU, MEMORY

MOST = 500
AT_ONCE = 8


class Meter:
    """Processor time is a rate, so each look is compared with the one before; the first takes two."""

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
    """When it last said something; "" if it never did."""
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
