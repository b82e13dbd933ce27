"""What a job asks for while it runs, as far as its pod must remember it: how its work is saved, how its health is seen. Pure.

Health by a command or an address is a readiness probe: the kubelet looks, also while no server is there, and `ready` in the
pod's status is the answer. (A liveness probe would have the kubelet end the run, and nothing in the pod would say why.)
Health by a heartbeat file, and all checkpoints, are looked at with commands in the container (`keeping`).
"""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from hodei.model.effects import Start
from hodei.model.errors import BackendRefused
from hodei.model.health import NODE_HOST, HealthCheck
from hodei.model.job import Checkpoint

CHECKPOINT_DIR = "/run/hodei"
CHECKPOINT_FILE = f"{CHECKPOINT_DIR}/checkpoint"
_HERE = ("localhost", "127.0.0.1", "::1", NODE_HOST)


class Care(Struct, frozen=True, omit_defaults=True):
    """Kept on the pod as JSON. `file`: whose time of change says when work was saved. `save`: its hook, if it has one.
    `grace_ms`: between TERM and KILL, for stops that nobody orders."""

    file: str = ""
    save: Checkpoint | None = None
    health: HealthCheck | None = None
    grace_ms: int = 0

    @property
    def probed(self) -> HealthCheck | None:
        """A health check that the kubelet carries out."""
        return self.health if self.health is not None and not self.health.file else None


def care_for(order: Start) -> Care | None:
    """None if the job asks for nothing of this kind."""
    spec, checkpoint = order.spec, order.spec.checkpoint
    asked = checkpoint != Checkpoint()
    if not asked and not spec.health.wanted:
        return None
    health = spec.health
    if health.file:
        health = HealthCheck((), "", _absolute(health.file, order), *_times(health))
    return Care(
        file=(_absolute(checkpoint.file, order) if checkpoint.file else CHECKPOINT_FILE) if asked else "",
        save=checkpoint if checkpoint.hooked else None,
        health=health if health.wanted else None,
        grace_ms=spec.grace_ms,
    )


def probe(health: HealthCheck, command: list[str]) -> dict[str, Any]:
    """As a pod has it. `command`: its words as Kubernetes reads them. BackendRefused for an address of another host."""
    times = {
        "initialDelaySeconds": _seconds(health.after_ms + health.every_ms),
        "periodSeconds": _seconds(health.every_ms),
        "timeoutSeconds": _seconds(health.timeout_ms),
        "failureThreshold": max(1, health.failures),
    }
    if command:
        return {"exec": {"command": command}, **times}
    at = urlsplit(health.http)
    if at.scheme != "http" or at.hostname not in _HERE:
        raise BackendRefused(
            f"a pod's health cannot be seen at {health.http[:200]}",
            hint="write http://localhost:PORT/PATH: the node asks the address of the pod, so listen on all addresses there",
        )
    path = (at.path or "/") + (f"?{at.query}" if at.query else "")
    return {"httpGet": {"path": path, "port": at.port or 80, "scheme": "HTTP"}, **times}


def _times(health: HealthCheck) -> tuple[int, int, int, int]:
    return health.every_ms, health.timeout_ms, health.after_ms, health.failures


def _absolute(path: str, order: Start) -> str:
    return path if path.startswith("/") else f"{order.task.workdir.rstrip('/')}/{path}"


def _seconds(ms: int) -> int:
    return max(1, math.ceil(ms / 1000))
