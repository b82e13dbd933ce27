"""What a job asks of Docker beyond its image, in its annotations `docker.hodei.io/...`, held against what the operator
allows. Whatever is not allowed is refused by name; so is a key that there is not.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping

from msgspec import Struct

from hodei.backends.docker.settings import Allow, Host, PullPolicy, Settings, is_local
from hodei.model.errors import BackendRefused
from hodei.model.text import did_you_mean

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
    network: str = ""
    user: str = ""
    mounts: tuple[Mount, ...] = ()
    pull: PullPolicy = "missing"
    privileged: bool = False
    devices: tuple[str, ...] = ()
    host_namespaces: tuple[str, ...] = ()


def wishes_of(annotations: Mapping[str, str], settings: Settings, host: Host) -> DockerOptions:
    """BackendRefused for what is not allowed, or makes no sense."""
    asked = {key.removeprefix(PREFIX): value for key, value in annotations.items() if key.startswith(PREFIX)}
    if not asked:
        return DockerOptions(settings.network, settings.user, pull=settings.pull)
    for key in sorted(asked):
        if key not in KEYS:
            raise BackendRefused(f"there is no annotation {PREFIX}{key[:60]}{did_you_mean(key, KEYS)}")
    allow = settings.allow
    namespaces = _listed(asked.get("host-namespaces", ""))
    for namespace in namespaces:
        _demand(namespace in allow.host_namespaces, f"sharing the host's {namespace[:40]} namespace")
    network = asked.get("network", settings.network)
    if "network" in asked and network == "host":
        _demand("network" in allow.host_namespaces, "sharing the host's network")
    elif "network" in asked and network not in (settings.network, "none"):
        _demand(bool(_NETWORK.fullmatch(network)) and network in allow.networks, f"the network {network[:80]!r}")
    if "network" in namespaces:
        network = "host"
    user = asked.get("user", settings.user)
    if user != settings.user:
        known = bool(_USER.fullmatch(user)) and (user in allow.users or "*" in allow.users)
        _demand(known, f"running as the user {user[:80]!r}")
    pull = asked.get("pull", settings.pull)
    if pull not in ("always", "missing", "never"):
        raise BackendRefused(f"{PREFIX}pull is always, missing or never, not {pull[:40]!r}")
    privileged = asked.get("privileged", "false")
    if privileged not in ("true", "false"):
        raise BackendRefused(f"{PREFIX}privileged is true or false, not {privileged[:40]!r}")
    _demand(privileged == "false" or allow.privileged, "a privileged container")
    devices = _listed(asked.get("devices", ""))
    for device in devices:
        _demand(device in allow.devices, f"the device {device[:80]!r}")
    mounts = tuple(_mount(text, allow, host) for text in _listed(asked.get("mounts", "")))
    targets = [mount.target for mount in mounts]
    if len(set(targets)) < len(targets):
        raise BackendRefused("two mounts go to the same place")
    return DockerOptions(network, user, mounts, pull, privileged == "true", devices, namespaces)  # type: ignore[arg-type]


def _demand(allowed: bool, what: str) -> None:
    if not allowed:
        raise BackendRefused(f"{what} is not allowed on this backend", hint=_HINT)


def _listed(text: str) -> tuple[str, ...]:
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
    """The path without any link in it if it is in `root`, else "".

    A link below the root could lead anywhere. On this machine we look; on others we can not, so that there only the roots
    themselves can be mounted: those the operator has vouched for.
    """
    if source != root and not source.startswith(f"{root}/"):
        return ""
    if not is_local(host):
        return source if source == root else ""
    real, real_root = os.path.realpath(source), os.path.realpath(root)
    return real if real == real_root or real.startswith(f"{real_root}/") else ""


def _is_path(text: str) -> bool:
    # Only absolute ones: a bare word would be a volume's name, made on the spot.
    return text.startswith("/") and "\0" not in text and len(text) <= 4096 and ".." not in text.split("/")
