"""A start order as the body of Docker's create request: JSON values, no command line, no shell.

The labels hold what a restarted server needs.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from hodei.backends.base import LOOPBACK, absolute_path, check_container_command, resolve_health_check, run_env
from hodei.backends.docker.settings import Allow, Host, PullPolicy, Settings, is_local
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused, did_you_mean
from hodei.model.ids import RunId
from hodei.model.job import Checkpoint, HealthCheck, Interactive, TaskSpec, cpu_shares, oom_score_adj
from hodei.model.resources import CPU, MEMORY

PREFIX = "docker.hodei.io/"
KEYS = ("network", "user", "mounts", "pull", "privileged", "devices", "host-namespaces")
_NETWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?")
_HINT = "ask the operator to allow it in [backends.NAME.allow], see docs/how-to/docker.md"


class Mount(Struct, frozen=True):
    source: str
    target: str
    writable: bool = False


class DockerOptions(Struct, frozen=True):
    """Options of a job, from its annotations `docker.hodei.io/...`."""

    network: str = ""
    user: str = ""
    mounts: tuple[Mount, ...] = ()
    pull: PullPolicy = "missing"
    privileged: bool = False
    devices: tuple[str, ...] = ()
    host_namespaces: tuple[str, ...] = ()


def parse_options(annotations: Mapping[str, str], settings: Settings, host: Host) -> DockerOptions:
    """BackendRefused for unknown keys, bad values, and what the operator does not allow."""
    given = {key.removeprefix(PREFIX): value for key, value in annotations.items() if key.startswith(PREFIX)}
    if not given:
        return DockerOptions(settings.network, settings.user, pull=settings.pull)
    for key in sorted(given):
        if key not in KEYS:
            raise BackendRefused(f"there is no annotation {PREFIX}{key[:60]}{did_you_mean(key, KEYS)}")
    allow = settings.allow
    namespaces = _split_list(given.get("host-namespaces", ""))
    for namespace in namespaces:
        _require(namespace in allow.host_namespaces, f"sharing the host's {namespace[:40]} namespace")
    network = given.get("network", settings.network)
    if "network" in given and network == "host":
        _require("network" in allow.host_namespaces, "sharing the host's network")
    elif "network" in given and network not in (settings.network, "none"):
        _require(bool(_NETWORK.fullmatch(network)) and network in allow.networks, f"the network {network[:80]!r}")
    if "network" in namespaces:
        network = "host"
    user = given.get("user", settings.user)
    if user != settings.user:
        known = bool(_USER.fullmatch(user)) and (user in allow.users or "*" in allow.users)
        _require(known, f"running as the user {user[:80]!r}")
    pull = given.get("pull", settings.pull)
    if pull not in ("always", "missing", "never"):
        raise BackendRefused(f"{PREFIX}pull is always, missing or never, not {pull[:40]!r}")
    privileged = given.get("privileged", "false")
    if privileged not in ("true", "false"):
        raise BackendRefused(f"{PREFIX}privileged is true or false, not {privileged[:40]!r}")
    _require(privileged == "false" or allow.privileged, "a privileged container")
    devices = _split_list(given.get("devices", ""))
    for device in devices:
        _require(device in allow.devices, f"the device {device[:80]!r}")
    mounts = tuple(_mount(text, allow, host) for text in _split_list(given.get("mounts", "")))
    targets = [mount.target for mount in mounts]
    if len(set(targets)) < len(targets):
        raise BackendRefused("two mounts go to the same place")
    return DockerOptions(network, user, mounts, pull, privileged == "true", devices, namespaces)  # type: ignore[arg-type]


def _require(allowed: bool, what: str) -> None:
    if not allowed:
        raise BackendRefused(f"{what} is not allowed on this backend", hint=_HINT)


def _split_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _mount(text: str, allow: Allow, host: Host) -> Mount:
    """`/host/path:/container/path[:ro|rw]`."""
    parts = text.split(":")
    mode = parts.pop() if len(parts) == 3 and parts[2] in ("ro", "rw") else "ro"
    writable = mode == "rw"
    if len(parts) != 2 or not all(_is_path(part) for part in parts) or posixpath.normpath(parts[1]) == "/":
        raise BackendRefused(f"{text[:200]!r} is not a mount", hint="write /path/on/the/host:/path/inside[:rw]")
    source, target = posixpath.normpath(parts[0]), posixpath.normpath(parts[1])
    for allowed in allow.mounts:
        root = posixpath.normpath(allowed.removesuffix(":rw"))
        if (found := _inside(source, root, host)) and (not writable or allowed.endswith(":rw")):
            return Mount(found, target, writable)
    how = "to write to it" if writable else "to read it"
    raise BackendRefused(f"mounting {source[:200]!r} {how} is not allowed on host {host.name}", hint=_HINT)


def _inside(source: str, root: str, host: Host) -> str:
    """The path with links resolved if it is inside `root`, else "".

    A link below the root could lead anywhere. On this machine links are resolved; on other hosts that is not possible, so only
    the configured roots themselves can be mounted there.
    """
    if source != root and not source.startswith(f"{root}/"):
        return ""
    if not is_local(host):
        return source if source == root else ""
    real, real_root = os.path.realpath(source), os.path.realpath(root)
    return real if real == real_root or real.startswith(f"{real_root}/") else ""


def _is_path(text: str) -> bool:
    # Absolute paths only: Docker reads a bare word as the name of a volume, and creates it.
    return text.startswith("/") and "\0" not in text and len(text) <= 4096 and ".." not in text.split("/")


INSTALLATION, BACKEND, RUN = "hodei.io/installation", "hodei.io/backend", "hodei.io/run"
SUPERVISION = "hodei.io/supervision"
# Prefix for the labels of a job, so that they mean nothing to other tools on the host.
JOB_LABEL = "job.hodei.io/"
CHECKPOINT_DIR = "/run/hodei"
CHECKPOINT_FILE = f"{CHECKPOINT_DIR}/checkpoint"
MIN_MEMORY = 6 << 20
NO_INFO: Mapping[str, Any] = MappingProxyType({})
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Supervision(Struct, frozen=True, omit_defaults=True):
    """What to supervise in a run, kept as a label so that a restarted server continues it."""

    timeout_ms: int = 0
    grace_ms: int = 10_000
    checkpoint_file: str = ""
    save: Checkpoint | None = None
    health: HealthCheck | None = None
    idle_ms: int = 0


class ContainerSpec(Struct, frozen=True):
    """Everything a host needs to start a run."""

    run: RunId
    name: str
    body: dict[str, Any]
    image: str
    options: DockerOptions
    supervision: Supervision
    start: Start


def container_name(installation: str, run: RunId) -> str:
    if not _RUN_ID.fullmatch(run):
        raise BackendRefused(f"{run[:80]!r} is not a valid run id")
    return f"hodei-{installation}-{run}"


def build_spec(
    order: Start,
    settings: Settings,
    host: Host,
    *,
    installation: str,
    backend: str,
    log_cap: int | None,
    info: Mapping[str, Any] = NO_INFO,
) -> ContainerSpec:
    """`info`: the daemon's description of its host. BackendRefused if the run can never start there."""
    spec, task, run = order.spec, order.task, order.run
    image = task.image or settings.image
    if not image:
        raise BackendRefused(
            "the task names no image, and this backend has none for such tasks",
            hint="give it an `image`, or set backends.NAME.image",
        )
    options = parse_options(spec.annotations, settings, host)
    supervision = _supervision(order, host)
    cpus = run.grant.cpus if run.grant is not None else ()
    env = {**task.env, **run_env(order, cpus), "HODEI_CHECKPOINT_FILE": supervision.checkpoint_file or CHECKPOINT_FILE}
    check_container_command(task.command, env, task.workdir)
    labels = {
        **{f"{JOB_LABEL}{key}": value for key, value in spec.labels.items()},
        "hodei.io/job": str(run.job),
        "hodei.io/job-name": spec.name,
        "hodei.io/project": spec.project,
        INSTALLATION: installation,
        BACKEND: backend,
        RUN: run.id,
        SUPERVISION: msgspec.json.encode(supervision).decode(),
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
            **_host_config(order, settings, options, cpus, log_cap),
            "CpuShares": cpu_shares(task),
            "OomScoreAdj": _oom_score_adj(task, info),
        },
    }
    if task.command:
        # Replaces the image's own entrypoint, which would change the command.
        body |= {"Entrypoint": [task.command[0]], "Cmd": list(task.command[1:])}
    if task.workdir:
        body["WorkingDir"] = task.workdir
    if options.user:
        body["User"] = options.user
    return ContainerSpec(run.id, container_name(installation, run.id), body, image, options, supervision, order)


def _host_config(
    order: Start, settings: Settings, options: DockerOptions, cpus: tuple[int, ...], log_cap: int | None
) -> dict[str, Any]:
    task, run = order.task, order.run
    config: dict[str, Any] = {
        "Init": settings.init,
        "PidsLimit": settings.pids_limit,
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "Privileged": options.privileged,
        "LogConfig": {"Type": "json-file", "Config": _log_config(log_cap)},
    }
    if settings.no_new_privileges and not options.privileged:
        config["SecurityOpt"] = ["no-new-privileges"]
    if options.network:
        config["NetworkMode"] = options.network
    for namespace, key in (("pid", "PidMode"), ("ipc", "IpcMode"), ("uts", "UTSMode")):
        if namespace in options.host_namespaces:
            config[key] = "host"
    if memory := task.limits.get(MEMORY, 0):
        if memory < MIN_MEMORY:
            raise BackendRefused(
                f"a memory limit of {memory} bytes", hint=f"Docker needs {MIN_MEMORY >> 20}Mi for a container"
            )
        # The same value for both: no swap.
        config |= {"Memory": memory, "MemorySwap": memory}
    if request := task.request.get(MEMORY, 0):
        config["MemoryReservation"] = max(min(request, memory or request), MIN_MEMORY)
    if cpu := task.limits.get(CPU, 0):
        config["NanoCpus"] = max(cpu, 10) * 1_000_000
    if cpus:
        config["CpusetCpus"] = ",".join(map(str, cpus))
    if run.grant is not None and run.grant.gpus:
        numbers = list(dict.fromkeys(str(gpu) for gpu, _ in run.grant.gpus))
        config["DeviceRequests"] = [{"Driver": "", "DeviceIDs": numbers, "Capabilities": [["gpu"]]}]
    if options.mounts:
        config["Mounts"] = [
            {"Type": "bind", "Source": mount.source, "Target": mount.target, "ReadOnly": not mount.writable,
             "BindOptions": {"Propagation": "rprivate"}}
            for mount in options.mounts
        ]  # fmt: skip
    if options.devices:
        config["Devices"] = [
            {"PathOnHost": path, "PathInContainer": path, "CgroupPermissions": "rw"} for path in options.devices
        ]
    return config


def _oom_score_adj(task: TaskSpec, info: Mapping[str, Any]) -> int:
    """Only root may lower an OOM score; under a rootless daemon the start would fail."""
    found = oom_score_adj(task, int(info.get("MemTotal", 0) or 0))
    rootless = any("rootless" in str(option) for option in info.get("SecurityOptions") or ())
    return max(found, 0) if rootless else found


def _log_config(log_cap: int | None) -> dict[str, str]:
    """The cap of a run's output; past it Docker drops the oldest half. JSON takes about a third more than the text."""
    return {"max-size": str(max(log_cap * 2 // 3, 4096)), "max-file": "2"} if log_cap else {}


def _supervision(order: Start, host: Host) -> Supervision:
    spec = order.spec
    takes_checkpoints = spec.checkpoint != Checkpoint()
    idle_ms = spec.workload.idle_timeout_ms if type(spec.workload) is Interactive else 0
    file = ""
    if takes_checkpoints:
        file = absolute_path(spec.checkpoint.file, order) if spec.checkpoint.file else CHECKPOINT_FILE
    health = resolve_health_check(spec.health, address_of(host)) if spec.health.http or spec.health.file else None
    return Supervision(
        timeout_ms=spec.timeout_ms,
        grace_ms=spec.grace_ms,
        checkpoint_file=file,
        save=spec.checkpoint if spec.checkpoint.has_hook else None,
        health=health,
        idle_ms=idle_ms,
    )


def read_supervision(labels: dict[str, str]) -> Supervision:
    """From the labels of a container."""
    try:
        return msgspec.json.decode(labels.get(SUPERVISION, "{}"), type=Supervision)
    except msgspec.DecodeError:
        return Supervision()


def address_of(host: Host) -> str:
    return host.address or urlsplit(host.url).hostname or LOOPBACK


def _healthcheck(health: HealthCheck) -> dict[str, Any]:
    """The daemon runs a health command itself, also without a server. The image's own check is switched off."""
    if not health.command:
        return {"Test": ["NONE"]}
    return {
        "Test": ["CMD", *health.command],
        "Interval": max(health.every_ms, 1) * 1_000_000,
        "Timeout": max(health.timeout_ms, 1) * 1_000_000,
        "StartPeriod": health.after_ms * 1_000_000,
        "Retries": max(health.failures, 1),
    }
