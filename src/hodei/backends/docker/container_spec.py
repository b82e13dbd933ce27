"""A start order as the body of Docker's request for a container. Values go into JSON as they are: no command line, no shell.

What the backend must find again after a restart without us is in the labels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from hodei.backends.docker.annotations import DockerOptions, wishes_of
from hodei.backends.docker.settings import Host, Settings
from hodei.backends.local_order import LOOPBACK, check_size, check_words, health_at, own_env
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused
from hodei.model.health import HealthCheck
from hodei.model.ids import RunId
from hodei.model.job import Checkpoint, Interactive, TaskSpec
from hodei.model.qos import cpu_shares, oom_score_adj
from hodei.model.resources import CPU, MEMORY

INSTALLATION, BACKEND, RUN = "hodei.io/installation", "hodei.io/backend", "hodei.io/run"
CARE = "hodei.io/care"
# Labels that a job gave itself; never without this before them, so that they mean nothing to others on the host.
JOB_LABEL = "job.hodei.io/"
CHECKPOINT_DIR = "/run/hodei"
CHECKPOINT_FILE = f"{CHECKPOINT_DIR}/checkpoint"
LEAST_MEMORY = 6 << 20
NOTHING: Mapping[str, Any] = MappingProxyType({})
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Care(Struct, frozen=True, omit_defaults=True):
    """What is done about a run while it runs; kept as a label, so that whoever adopts it goes on with it."""

    timeout_ms: int = 0
    grace_ms: int = 10_000
    checkpoint_file: str = ""
    save: Checkpoint | None = None
    health: HealthCheck | None = None
    idle_ms: int = 0


class Prepared(Struct, frozen=True):
    """All that a host needs to begin a run."""

    run: RunId
    name: str
    body: dict[str, Any]
    image: str
    wishes: DockerOptions
    care: Care
    start: Start


def container_name(installation: str, run: RunId) -> str:
    if not _RUN_ID.fullmatch(run):
        raise BackendRefused(f"{run[:80]!r} is not the id of a run")
    return f"hodei-{installation}-{run}"


def prepare(
    order: Start,
    settings: Settings,
    host: Host,
    *,
    installation: str,
    backend: str,
    log_cap: int | None,
    info: Mapping[str, Any] = NOTHING,
) -> Prepared:
    """`info`: what the daemon says of its host. BackendRefused if it can never run here."""
    spec, task, run = order.spec, order.task, order.run
    image = task.image or settings.image
    if not image:
        raise BackendRefused(
            "the task names no image, and this backend has none for such tasks",
            hint="give it an `image`, or set backends.NAME.image",
        )
    wishes = wishes_of(spec.annotations, settings, host)
    care = _care(order, host)
    cpus = run.grant.cpus if run.grant is not None else ()
    env = {**task.env, **own_env(order, cpus), "HODEI_CHECKPOINT_FILE": care.checkpoint_file or CHECKPOINT_FILE}
    check_words(task.command, env, task.workdir)
    check_size(task.command, env)
    labels = {
        **{f"{JOB_LABEL}{key}": value for key, value in spec.labels.items()},
        "hodei.io/job": str(run.job),
        "hodei.io/job-name": spec.name,
        "hodei.io/project": spec.project,
        INSTALLATION: installation,
        BACKEND: backend,
        RUN: run.id,
        CARE: msgspec.json.encode(care).decode(),
    }
    body: dict[str, Any] = {
        "Image": image,
        "Env": [f"{name}={value}" for name, value in env.items()],
        "Labels": labels,
        "StopSignal": "SIGTERM",
        "StopTimeout": math.ceil(spec.grace_ms / 1000),
        "Healthcheck": _healthcheck(spec.health),
        "AttachStdin": False,
        "Tty": False,
        "HostConfig": {
            **_host_config(order, settings, wishes, cpus, log_cap),
            "CpuShares": cpu_shares(task),
            "OomScoreAdj": _oom_score_adj(task, info),
        },
    }
    if task.command:
        # An image's own entrypoint would make other words of these.
        body |= {"Entrypoint": [task.command[0]], "Cmd": list(task.command[1:])}
    if task.workdir:
        body["WorkingDir"] = task.workdir
    if wishes.user:
        body["User"] = wishes.user
    return Prepared(run.id, container_name(installation, run.id), body, image, wishes, care, order)


def _host_config(
    order: Start, settings: Settings, wishes: DockerOptions, cpus: tuple[int, ...], log_cap: int | None
) -> dict[str, Any]:
    task, run = order.task, order.run
    config: dict[str, Any] = {
        "Init": settings.init,
        "PidsLimit": settings.pids_limit,
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "Privileged": wishes.privileged,
        "LogConfig": {"Type": "json-file", "Config": _log_config(log_cap)},
    }
    if settings.no_new_privileges and not wishes.privileged:
        config["SecurityOpt"] = ["no-new-privileges"]
    if wishes.network:
        config["NetworkMode"] = wishes.network
    for namespace, key in (("pid", "PidMode"), ("ipc", "IpcMode"), ("uts", "UTSMode")):
        if namespace in wishes.host_namespaces:
            config[key] = "host"
    if memory := task.limits.get(MEMORY, 0):
        if memory < LEAST_MEMORY:
            raise BackendRefused(
                f"a memory limit of {memory} bytes", hint=f"Docker needs {LEAST_MEMORY >> 20}Mi for a container"
            )
        # The same for both: nothing of it may be swapped out.
        config |= {"Memory": memory, "MemorySwap": memory}
    if request := task.request.get(MEMORY, 0):
        config["MemoryReservation"] = max(min(request, memory or request), LEAST_MEMORY)
    if cpu := task.limits.get(CPU, 0):
        config["NanoCpus"] = max(cpu, 10) * 1_000_000
    if cpus:
        config["CpusetCpus"] = ",".join(map(str, cpus))
    if run.grant is not None and run.grant.gpus:
        numbers = list(dict.fromkeys(str(gpu) for gpu, _ in run.grant.gpus))
        config["DeviceRequests"] = [{"Driver": "", "DeviceIDs": numbers, "Capabilities": [["gpu"]]}]
    if wishes.mounts:
        config["Mounts"] = [
            {"Type": "bind", "Source": mount.source, "Target": mount.target, "ReadOnly": not mount.writable,
             "BindOptions": {"Propagation": "rprivate"}}
            for mount in wishes.mounts
        ]  # fmt: skip
    if wishes.devices:
        config["Devices"] = [
            {"PathOnHost": path, "PathInContainer": path, "CgroupPermissions": "rw"} for path in wishes.devices
        ]
    return config


def _oom_score_adj(task: TaskSpec, info: Mapping[str, Any]) -> int:
    """Only root may make it harder to kill something; where the daemon is not, the start would fail."""
    found = oom_score_adj(task, int(info.get("MemTotal", 0) or 0))
    rootless = any("rootless" in str(option) for option in info.get("SecurityOptions") or ())
    return max(found, 0) if rootless else found


def _log_config(log_cap: int | None) -> dict[str, str]:
    """What is kept of a run's output; past it the oldest half goes. JSON takes about a third more than the text."""
    return {"max-size": str(max(log_cap * 2 // 3, 4096)), "max-file": "2"} if log_cap else {}


def _care(order: Start, host: Host) -> Care:
    spec = order.spec
    asked = spec.checkpoint != Checkpoint()
    idle_ms = spec.workload.idle_timeout_ms if type(spec.workload) is Interactive else 0
    file = ""
    if asked:
        file = _absolute(spec.checkpoint.file, order) if spec.checkpoint.file else CHECKPOINT_FILE
    health = health_at(spec.health, address_of(host)) if spec.health.http or spec.health.file else None
    return Care(
        timeout_ms=spec.timeout_ms,
        grace_ms=spec.grace_ms,
        checkpoint_file=file,
        save=spec.checkpoint if spec.checkpoint.hooked else None,
        health=health,
        idle_ms=idle_ms,
    )


def care_of(labels: dict[str, str]) -> Care:
    """What the labels of a container ask for."""
    try:
        return msgspec.json.decode(labels.get(CARE, "{}"), type=Care)
    except msgspec.DecodeError:
        return Care()


def address_of(host: Host) -> str:
    return host.address or urlsplit(host.url).hostname or LOOPBACK


def _absolute(path: str, order: Start) -> str:
    return path if path.startswith("/") else f"{order.task.workdir.rstrip('/')}/{path}"


def _healthcheck(health: HealthCheck) -> dict[str, Any]:
    """A command is looked after by the host itself, also while we are away. The image's own look is not the job's."""
    if not health.command:
        return {"Test": ["NONE"]}
    return {
        "Test": ["CMD", *health.command],
        "Interval": max(health.every_ms, 1) * 1_000_000,
        "Timeout": max(health.timeout_ms, 1) * 1_000_000,
        "StartPeriod": health.after_ms * 1_000_000,
        "Retries": max(health.failures, 1),
    }
