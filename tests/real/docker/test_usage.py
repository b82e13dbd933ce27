"""The usage of containers, as measured by their daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from agent_host import an_order, unique_installation
from docker_hosts import IMAGE, DockerDaemons
from hodei.backends.base import BackendContext
from hodei.backends.docker import DockerBackend, Settings
from hodei.backends.docker.settings import Host
from hodei.model.effects import Stop
from hodei.model.facts import RunObserved
from hodei.model.job import RUN_ENDED
from hodei.model.outcome import StopReason
from hodei.model.usage import RunUsage
from hodei.runtime.clock import SystemClock

pytestmark = pytest.mark.real


def test_a_running_container_is_measured_and_its_end_has_the_last_measurement(dockerd: DockerDaemons, tmp_path: Path):
    daemon = dockerd()
    settings = Settings(hosts=(Host(daemon.name, url=daemon.url),), image=IMAGE, network="none", answer_within="2s")
    backend = DockerBackend(
        "docker", settings, BackendContext(unique_installation(), 1, tmp_path / "home", SystemClock(), 1 << 20)
    )
    order = an_order(1, "/bin/sh", "-c", "while :; do :; done")
    order = structs.replace(order, run=structs.replace(order.run, node=daemon.name, backend="docker"))

    async def ended() -> RunObserved:
        while True:
            for observed in await backend.observe():
                if observed.state in RUN_ENDED:
                    return observed

    async def scenario() -> None:
        await backend.open()
        try:
            assert await backend.run_usage(["1.0.1"]) == {}
            assert await backend.start([order]) == {}
            async with asyncio.timeout(60):
                live = RunUsage(cpu_ms=0)
                while live.cpu_ms < 300:
                    live = (await backend.run_usage(["1.0.1"])).get("1.0.1", live)
                    await asyncio.sleep(0.1)
                await backend.stop([Stop("1.0.1", "docker", 0, StopReason("cancelled"))])
                end = await ended()
            assert end.usage is not None
            assert end.usage.cpu_ms >= live.cpu_ms >= 300
        finally:
            await backend.close()
            daemon.clear()

    asyncio.run(scenario())
