"""How to look whether a run is well: a command beside it, an address on this very host, or a heartbeat file. A value,
and the question to an address.

The address is checked here once more, whatever the order says: nobody is to reach other hosts through us.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

STATUS_LINE_LIMIT = 1024


class BadHealth(ValueError):
    """It can never be looked at like this; the message says why."""


@dataclass(frozen=True)
class Health:
    """One of `command`, `http` and `file` is set."""

    command: tuple[str, ...] = ()
    http: str = ""
    file: str = ""
    every_ms: int = 30_000
    timeout_ms: int = 5_000
    after_ms: int = 0
    failures: int = 3

    @classmethod
    def from_order(cls, order: Mapping[str, Any] | None) -> Health | None:
        if not order or not isinstance(order, Mapping):
            return None
        command, http, file = order.get("command") or (), order.get("http") or "", order.get("file") or ""
        if sum(map(bool, (command, http, file))) != 1:
            raise BadHealth("a health check has one of command, http and file")
        if not isinstance(command, list | tuple) or not all(isinstance(w, str) and "\0" not in w for w in command):
            raise BadHealth("the command of the health check is not a list of words")
        if http:
            hosts_of(http)
        if not isinstance(file, str) or "\0" in file:
            raise BadHealth("the file of the health check can not be a file's name")
        numbers = {name: order.get(name, getattr(cls, name)) for name in _NUMBERS}
        if not all(isinstance(value, int) and value >= 0 for value in numbers.values()):
            raise BadHealth("the times of the health check are not whole numbers from 0 on")
        if not numbers["every_ms"] or not numbers["timeout_ms"] or not numbers["failures"]:
            raise BadHealth("a health check needs a time, a timeout and a number of failures above 0")
        return cls(tuple(command), http, file, **numbers)

    def as_order(self) -> dict[str, Any]:
        """What `from_order` reads; also the form in the journal."""
        what: dict[str, Any] = {"command": list(self.command), "http": self.http, "file": self.file}
        return {key: value for key, value in what.items() if value} | {name: getattr(self, name) for name in _NUMBERS}


_NUMBERS = ("every_ms", "timeout_ms", "after_ms", "failures")


# ---------------------------------------------------------------------------------------- an address of this host


def hosts_of(url: str) -> tuple[tuple[str, ...], int, str]:
    """(addresses to try, port, path with query) of a health check. BadHealth unless it is on this very host."""
    import ipaddress  # here, as most agents never need it, and all of them start faster without
    from urllib.parse import urlsplit

    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url or len(url) > 2000:
        raise BadHealth("the address of the health check is not one")
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        raise BadHealth("the address of the health check is not one") from None
    if parts.scheme != "http" or parts.username is not None or parts.password is not None or not parts.hostname:
        raise BadHealth("the address of the health check must be http://HOST:PORT/PATH")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if parts.hostname == "localhost":
        return ("127.0.0.1", "::1"), port, path
    try:
        address = ipaddress.ip_address(parts.hostname)
    except ValueError:
        raise BadHealth("the health check may only go to localhost or an address of this node") from None
    if not address.is_loopback and not _is_ours(address):
        raise BadHealth("the health check may only go to localhost or an address of this node")
    return (str(address),), port, path


def _is_ours(address: IPv4Address | IPv6Address) -> bool:
    """Only an address of this host can be bound to."""
    if address.is_unspecified or address.is_multicast or address.is_reserved or getattr(address, "ipv4_mapped", None):
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
        return True
    except OSError:
        return False


async def get_status(url: str) -> int:
    """The status with which this address answers. OSError or ValueError if it does not. Redirects are not followed."""
    hosts, port, path = hosts_of(url)
    for host in hosts[:-1]:
        try:
            return await _status_from(host, port, path)
        except ConnectionRefusedError:
            continue
    return await _status_from(hosts[-1], port, path)


async def _status_from(host: str, port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection(host, port, limit=STATUS_LINE_LIMIT)
    try:
        name = f"[{host}]" if ":" in host else host
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nUser-Agent: hodei\r\nConnection: close\r\n\r\n".encode()
        )
        words = (await reader.readline()).split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit() or len(words[1]) != 3:
            raise ValueError("that is not HTTP")
        return int(words[1])
    finally:
        writer.close()
