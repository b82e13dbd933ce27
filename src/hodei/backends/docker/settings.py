"""The table `[backends.NAME]` of kind docker: which hosts, how runs are set up on them, and what jobs may ask for."""

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
# Counted like any other resource by jobs that ask for it; the limit itself holds for all.
CONTAINERS = "containers"
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,61}[a-z0-9])?")


class Host(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One Docker host, offered as one node.

    `url`: unix:///path, tcp://host:port, or ssh://user@host[:port][/path/of/the/socket]. `tls` is a directory with ca.pem,
    cert.pem and key.pem; without it only this machine is spoken to over TCP, unless `insecure`. `ssh_key` and `known_hosts`
    are files for ssh, its own if not said. Amounts that are not said are those of the host; those that are may not
    exceed them for cpu and memory.
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
        """What the operator says that it has."""
        given = {CPU: self.cpu, MEMORY: self.memory, GPU: self.gpu}
        return parse_resources({**{name: amount for name, amount in given.items() if amount != ""}, **self.resources})


class Allow(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What jobs may ask for beyond a plain container; nothing of it unless it is named here.

    `mounts`: directories of the hosts, and what is below them; read-only, or with `:rw` behind them. `networks` by name.
    `users`: as whom runs may be, `*` for anybody. `devices` by path. `host_namespaces`: which a run may share with its host.
    """

    mounts: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    host_namespaces: tuple[HostNamespace, ...] = ()
    privileged: bool = False


class Settings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`image` is for tasks that name none (empty: those are refused). `network`, `user`: what runs have that ask for no
    other (empty: the host's and the image's own). `init`: a small process of Docker's own is the first in every container,
    so that signals and exit codes are those of the command. `starts_at_once`: how many starts a host is asked for at a time.
    `lost_after`: a host that is silent for so long is given up, and its runs with it; "0s" for never. `registry_auth`: a
    file like Docker's own config.json, for images that need a login."""

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
    """InvalidInput, with the place, for what msgspec can not see."""
    problems: list[tuple[str, str]] = []

    def wrong(path: str, text: str) -> None:
        problems.append((f"backends.{name}.{path}", text))

    if not settings.hosts:
        wrong("hosts", "names no host")
    seen: set[str] = set()
    for number, host in enumerate(settings.hosts):
        at = f"hosts[{number}]"
        if not _NAME.fullmatch(host.name):
            wrong(f"{at}.name", f"{host.name[:80]!r} is not a name: use small letters, digits, - and .")
        if host.name in seen:
            wrong(f"{at}.name", f"{host.name!r} is there twice")
        seen.add(host.name)
        if problem := url_problem(host):
            wrong(f"{at}.url", problem)
        if host.max_containers < 0 or host.cost < 0:
            wrong(at, "max_containers and cost start at 0")
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
            wrong("allow.mounts", f"{mount[:200]!r} is not a directory: write its whole path, not /, with :rw to write")
    if not 1 <= settings.starts_at_once <= 64:
        wrong("starts_at_once", "is from 1 to 64")
    if settings.pids_limit < 2:
        wrong("pids_limit", "is from 2 on: a container needs a process or two of its own")
    if problems:
        first = problems[0]
        raise InvalidInput(f"{first[0]}: {first[1]}", hint="docs/how-to/docker.md", problems=tuple(problems))


def url_problem(host: Host) -> str:
    """What is wrong with where it is, or ""."""
    try:
        url = urlsplit(host.url)
        port = url.port
    except ValueError as error:
        return f"{host.url[:200]!r}: {error}"
    if url.scheme == "unix":
        return "" if url.path.startswith("/") and not url.netloc else "write unix:///path/of/the/socket"
    if url.password:
        return "a password in an address ends up in logs; use a key"
    if not url.hostname or url.hostname.startswith("-") or (url.username or "").startswith("-"):
        return f"{host.url[:200]!r} names no host"
    if url.scheme == "ssh":
        return ""
    if url.scheme != "tcp":
        return "write unix:///path, tcp://host:port or ssh://user@host"
    if not port:
        return "write tcp://host:port"
    if not host.tls and not host.insecure and not _is_this_machine(url.hostname):
        return "whoever can speak to it is root there: give it `tls`, a directory with ca.pem, cert.pem and key.pem"
    return ""


def is_local(host: Host) -> bool:
    """Whether its files are ours to look at."""
    return host.url.startswith("unix://")


def _is_this_machine(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
