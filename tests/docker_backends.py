"""For tests: the Docker backend over real daemons, with an installation of its own, so that it sees only its own runs."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from docker_hosts import IMAGE, Daemon
from hodei.backends.base import BackendContext
from hodei.backends.docker import DockerBackend, Settings
from hodei.backends.docker.settings import Host
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
