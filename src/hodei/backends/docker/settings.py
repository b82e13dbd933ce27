"""The table `[backends.NAME]` of kind docker: the hosts, defaults for runs, and what jobs may request."""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from msgspec import Struct

from hodei.model.errors import InvalidInput
from hodei.model.node import Taint
from hodei.model.resources import CPU, GPU, MEMORY, Resources, parse_duration_ms, parse_resources

PullPolicy = Literal["always", "missing", "never"]
HostNamespace = Literal["network", "pid", "ipc", "uts"]
# A resource that jobs may request; max_containers applies to all jobs.
CONTAINERS = "containers"
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,61}[a-z0-9])?")


class Host(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One Docker host, offered as one node.

    `url`: unix:///path, tcp://host:port, or ssh://user@host[:port][/path/of/the/socket]. `tls` is a directory with ca.pem,
    cert.pem and key.pem; without it TCP works only to this machine, unless `insecure`. `ssh_key` and `known_hosts` are files
    for ssh; by default its own. Resources default to those of the host; configured cpu and memory are bounded by them.
    """

    name: str
    url: str = "unix:///var/run/docker.sock"
    tls: str = ""
    insecure: bool = False
    ssh_key: str = ""
    known_hosts: str = ""
    cpu: str | int | float = ""
    memory: str | int = ""
    gpu: str | int = ""
    resources: dict[str, str | int] = {}
    gpu_type: str = ""
    max_containers: int = 0
    labels: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    region: str = ""
    zone: str = ""
    datacenter: str = ""
    rack: str = ""
    lat: float | None = None
    lng: float | None = None
    address: str = ""
    cost: float = 0.0

    def amounts(self) -> Resources:
        given = {CPU: self.cpu, MEMORY: self.memory, GPU: self.gpu}
        return parse_resources({**{name: amount for name, amount in given.items() if amount != ""}, **self.resources})


class Allow(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What jobs may request beyond an ordinary container; everything else is refused.

    `mounts`: directories of the hosts with everything below them; read-only, or writable with the suffix `:rw`. `networks` by
    name. `users` that runs may use, `*` for any. `devices` by path. `host_namespaces` that a run may share.
    """

    mounts: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    host_namespaces: tuple[HostNamespace, ...] = ()
    privileged: bool = False


class Settings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`image`: default for tasks without one (empty: those are refused). `network`, `user`: defaults (empty: those of the host and
    the image). `init`: Docker's init process runs first in every container, so that signals and exit codes are those of the
    command. `starts_at_once`: concurrent starts per host. `lost_after`: after so long a silent host and its runs count as lost;
    "0s" for never. `registry_auth`: a file like Docker's own config.json, for images that need a login."""

    hosts: tuple[Host, ...] = (Host("docker"),)
    image: str = ""
    pull: PullPolicy = "missing"
    pull_timeout: str = "10m"
    network: str = ""
    user: str = ""
    pids_limit: int = 4096
    init: bool = True
    no_new_privileges: bool = True
    starts_at_once: int = 4
    answer_within: str = "5s"
    lost_after: str = "10m"
    registry_auth: str = ""
    allow: Allow = Allow()


def check(name: str, settings: Settings) -> None:
    """InvalidInput, with the path of the key, for what msgspec cannot check."""
    problems: list[tuple[str, str]] = []

    def wrong(path: str, text: str) -> None:
        problems.append((f"backends.{name}.{path}", text))

    if not settings.hosts:
        wrong("hosts", "is empty; name at least one host")
    seen: set[str] = set()
    for number, host in enumerate(settings.hosts):
        at = f"hosts[{number}]"
        if not _NAME.fullmatch(host.name):
            wrong(f"{at}.name", f"{host.name[:80]!r} is not a valid name; use lower-case letters, digits, - and .")
        if host.name in seen:
            wrong(f"{at}.name", f"{host.name!r} is used twice")
        seen.add(host.name)
        if problem := url_problem(host):
            wrong(f"{at}.url", problem)
        if host.max_containers < 0 or host.cost < 0:
            wrong(at, "max_containers and cost must not be negative")
        try:
            host.amounts()
        except InvalidInput as error:
            wrong(at, error.message)
    for path in ("pull_timeout", "answer_within", "lost_after"):
        try:
            parse_duration_ms(getattr(settings, path))
        except InvalidInput as error:
            wrong(path, error.message)
    for mount in settings.allow.mounts:
        path_only = mount.removesuffix(":rw")
        if not path_only.startswith("/") or path_only == "/" or ".." in Path(path_only).parts:
            wrong(
                "allow.mounts",
                f"{mount[:200]!r} is not a directory; write an absolute path other than /, with :rw for write access",
            )
    if not 1 <= settings.starts_at_once <= 64:
        wrong("starts_at_once", "must be from 1 to 64")
    if settings.pids_limit < 2:
        wrong("pids_limit", "must be at least 2: a container needs a process or two of its own")
    if problems:
        first = problems[0]
        raise InvalidInput(f"{first[0]}: {first[1]}", hint="docs/how-to/docker.md", problems=tuple(problems))


def url_problem(host: Host) -> str:
    """What is wrong with the URL of a host, or ""."""
    try:
        url = urlsplit(host.url)
        port = url.port
    except ValueError as error:
        return f"{host.url[:200]!r}: {error}"
    if url.scheme == "unix":
        return "" if url.path.startswith("/") and not url.netloc else "write unix:///path/of/the/socket"
    if url.password:
        return "a password in a URL ends up in logs; use a key"
    if not url.hostname or url.hostname.startswith("-") or (url.username or "").startswith("-"):
        return f"{host.url[:200]!r} names no host"
    if url.scheme == "ssh":
        return ""
    if url.scheme != "tcp":
        return "write unix:///path, tcp://host:port or ssh://user@host"
    if not port:
        return "write tcp://host:port"
    if not host.tls and not host.insecure and not _is_loopback(url.hostname):
        return (
            "without TLS every client is root on that host; set `tls` to a directory with ca.pem, cert.pem and key.pem"
        )
    return ""


def is_local(host: Host) -> bool:
    """Whether its files can be inspected here."""
    return host.url.startswith("unix://")


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
