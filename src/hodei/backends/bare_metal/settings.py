"""The table of a backend of kind `bare_metal`. Passwords are only ever referred to, by a file or a variable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from msgspec import Struct, structs

from hodei.backends.remote.registry import check_node_name
from hodei.model.config import Duration, Span
from hodei.model.errors import BackendError, InvalidInput
from hodei.model.resources import (
    CPU,
    GPU,
    MEMORY,
    STORAGE,
    Resources,
    parse_duration_ms,
    parse_quantity,
    parse_resources,
    scale_of,
)

Protocol = Literal["redfish", "ipmi"]
IPMI_PORT = 623
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_MACHINES = 2_000


class MachineSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """One machine. `address`: of its BMC. `system`: its id there, if the BMC manages several. Values that are not set are
    those of the backend. Without `cpu` and `memory`, the agent's values count, and until it has joined those of Redfish."""

    name: str
    address: str
    enabled: bool = True
    protocol: Protocol | None = None
    user: str | None = None
    password_file: str | None = None
    password_env: str | None = None
    ca: str | None = None
    insecure_tls: bool | None = None
    system: str = ""
    group: str | None = None
    startup: str | None = None
    shutdown_timeout: str | None = None
    region: str = ""
    zone: str = ""
    datacenter: str = ""
    rack: str = ""
    price: float = 0.0
    cpu: str | int | float = 0
    memory: str | int = 0
    storage: str | int = 0
    gpu: str | int = 0
    resources: dict[str, str | int] = {}
    gpu_type: str = ""
    arch: str = ""
    labels: dict[str, str] = {}


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """`timeout`: of one request to a BMC. `shutdown_timeout`: a machine whose operating system has not shut down by then is
    switched off. `startup`: from the order until the agent has connected, as long as it has not been measured."""

    machines: tuple[MachineSettings, ...] = ()
    protocol: Protocol = "redfish"
    user: str = ""
    password_file: str = ""
    password_env: str = ""
    ca: str = ""
    insecure_tls: bool = False
    group: str = "machines"
    startup: Duration = "5m"
    shutdown_timeout: Span = "3m"
    timeout: Span = "10s"
    away_after: Span = "60s"
    lost_after: Duration = "10m"


_SHARED = (
    "protocol", "user", "password_file", "password_env", "ca", "insecure_tls", "group", "startup", "shutdown_timeout",
)  # fmt: skip


def machines_of(name: str, settings: Settings) -> list[MachineSettings]:
    """The enabled machines, complete with the values of the backend. InvalidInput for what cannot work."""
    if len(settings.machines) > MAX_MACHINES:
        raise InvalidInput(f"backends.{name}.machines: at most {MAX_MACHINES} machines")
    out: list[MachineSettings] = []
    for number, machine in enumerate(settings.machines):
        path = f"backends.{name}.machines.{number}"
        try:
            check_node_name(machine.name)
        except InvalidInput as error:
            raise InvalidInput(f"{path}.name: {error.message}", hint=error.hint) from None
        if any(machine.name == other.name for other in settings.machines[:number]):
            raise InvalidInput(f"{path}.name: there are two machines {machine.name}")
        shared = {key: getattr(settings, key) for key in _SHARED if getattr(machine, key) is None}
        if machine.password_file or machine.password_env:
            # Its own reference replaces the backend's, of either form.
            shared |= {"password_file": machine.password_file or "", "password_env": machine.password_env or ""}
        complete = structs.replace(machine, **shared)
        _check(path, complete)
        if machine.enabled:
            out.append(complete)
    return out


def _check(path: str, machine: MachineSettings) -> None:
    if machine.protocol == "redfish":
        url = urlsplit(redfish_url(machine.address))
        if url.scheme not in ("http", "https") or not url.hostname or url.username or url.password:
            raise InvalidInput(
                f"{path}.address: {machine.address[:80]!r} is not the address of a BMC", hint="https://10.0.8.11"
            )
        if url.scheme == "http" and url.hostname not in _LOOPBACK and not machine.insecure_tls:
            raise InvalidInput(
                f"{path}.address: the password would be sent unencrypted", hint="use https, or set insecure_tls = true"
            )
    else:
        ipmi_address(machine.address, path)
    if machine.password_file and machine.password_env:
        raise InvalidInput(f"{path}: set password_file or password_env, not both")
    if not 0 <= machine.price <= 1e6:
        raise InvalidInput(f"{path}.price: the price of an hour is from 0 to 1,000,000")
    parse_duration_ms(str(machine.startup))
    parse_duration_ms(str(machine.shutdown_timeout))
    capacity_of(machine)


def redfish_url(address: str) -> str:
    return address.rstrip("/") if "://" in address else f"https://{address}"


def ipmi_address(address: str, path: str) -> tuple[str, int]:
    try:
        found = urlsplit(f"//{address}")
        host, port = found.hostname, found.port or IPMI_PORT
    except ValueError:
        host, port = None, 0
    if not host or "/" in address or "@" in address:
        raise InvalidInput(f"{path}.address: {address[:80]!r} is not host or host:port")
    return host, port


def capacity_of(machine: MachineSettings) -> Resources:
    amounts = {CPU: machine.cpu, MEMORY: machine.memory, STORAGE: machine.storage, GPU: machine.gpu}
    capacity = {name: parse_quantity(amount, scale=scale_of(name)) for name, amount in amounts.items() if amount}
    return capacity | parse_resources(machine.resources)


def password_of(machine: MachineSettings) -> str:
    """Read anew each time, so that it can be changed while the server runs. BackendError if it cannot be read."""
    if machine.password_env:
        found = os.environ.get(machine.password_env)
        if found is None:
            raise BackendError(f"the variable {machine.password_env} with the password of its BMC is not set")
        return found
    if machine.password_file:
        try:
            return Path(machine.password_file).read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise BackendError(f"the password of its BMC cannot be read: {machine.password_file}: {reason}") from None
    return ""
