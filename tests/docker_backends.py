"""The Docker backend over real daemons, each with its own installation, so that it sees only its own runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_host import unique_installation
from docker_hosts import IMAGE, Daemon
from hodei.backends.base import BackendContext
from hodei.backends.docker import DockerBackend, Settings
from hodei.backends.docker.settings import Host
from hodei.runtime.clock import SystemClock


def a_docker(
    home: Path, *daemons: Daemon, installation: str = "", hosts: dict[str, dict[str, Any]] | None = None, **fields: Any
) -> DockerBackend:
    """`hosts`: additional keys by name of the host; `fields` are keys of the backend."""
    more = hosts or {}
    settings = Settings(
        hosts=tuple(Host(daemon.name, **{"url": daemon.url, **more.get(daemon.name, {})}) for daemon in daemons),
        **{"image": IMAGE, "network": "none", "answer_within": "2s", **fields},
    )
    context = BackendContext(installation or unique_installation(), 1, home, SystemClock(), 1 << 20)
    return DockerBackend("docker", settings, context)
