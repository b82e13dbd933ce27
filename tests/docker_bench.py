"""For tests: the Docker backend over real daemons, with an installation of its own so that it sees nobody else's runs."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from docker_hosts import IMAGE, Daemon, Farm
from hodei.backends.base import BackendContext
from hodei.backends.docker import DockerBackend, Settings
from hodei.backends.docker.settings import Host
from hodei.model.effects import Stop
from hodei.model.lifecycle import RUN_ENDED
from hodei.runtime.clock import SystemClock

_numbers = itertools.count(1)


def a_docker(
    home: Path, *daemons: Daemon, installation: str = "", hosts: dict[str, dict[str, Any]] | None = None, **fields: Any
) -> DockerBackend:
    """`hosts`: more keys for the host of that name; `fields` are keys of the backend."""
    more = hosts or {}
    settings = Settings(
        hosts=tuple(Host(daemon.name, **{"url": daemon.url, **more.get(daemon.name, {})}) for daemon in daemons),
        **{"image": IMAGE, "network": "none", "answer_within": "2s", **fields},
    )
    return DockerBackend("docker", settings, BackendContext(installation or a_name(), 1, home, SystemClock(), 1 << 20))


def a_name() -> str:
    return f"test{os.getpid()}x{next(_numbers)}"


@contextlib.asynccontextmanager
async def open_docker(home: Path, system: Farm) -> AsyncIterator[Any]:
    from conformance.backends import DOCKER, Bench

    daemon, installation = system(), a_name()

    def again() -> DockerBackend:
        return a_docker(home, daemon, installation=installation)

    backend = again()
    await backend.open()
    bench = Bench(backend, DOCKER, again)
    try:
        yield bench
    finally:
        with contextlib.suppress(Exception):
            left = [run for run, seen in (await bench.backend.known()).items() if seen.state not in RUN_ENDED]
            await bench.backend.stop([Stop(run, "docker", 0, "the test is over") for run in left])
        await bench.backend.close()
        daemon.clear()
