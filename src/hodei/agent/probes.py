"""Health checks as ordered, HTTP probes of this host, and probes of files from a thread.

The agent checks the address again, whatever the order says: it must not be used to reach other hosts. Files that a job
names may be on any disk, also behind a dead network. Their probes then stay unanswered, and everything else continues.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

STATUS_LINE_LIMIT = 1024
# How long a synchronous probe may hold up the event loop.
PROBE_TIMEOUT_S = 0.05

# Modification time in ns, inode and size: different whenever the file has changed. None: there is no such file.
FileStat = tuple[int, int, int]


class BadHealthCheck(ValueError):
    """The health check can never work; the message says why."""


@dataclass(frozen=True)
class HealthCheck:
    """One of `command`, `http` and `file` is set."""

    command: tuple[str, ...] = ()
    http: str = ""
    file: str = ""
    every_ms: int = 30_000
    timeout_ms: int = 5_000
    after_ms: int = 0
    failures: int = 3

    @classmethod
    def from_order(cls, order: Mapping[str, Any] | None) -> HealthCheck | None:
        if not order or not isinstance(order, Mapping):
            return None
        command, http, file = order.get("command") or (), order.get("http") or "", order.get("file") or ""
        if sum(map(bool, (command, http, file))) != 1:
            raise BadHealthCheck("a health check has one of command, http and file")
        if not isinstance(command, list | tuple) or not all(isinstance(w, str) and "\0" not in w for w in command):
            raise BadHealthCheck("the command of the health check is not a list of words")
        if http:
            probe_target(http)
        if not isinstance(file, str) or "\0" in file:
            raise BadHealthCheck("the file of the health check is not a valid path")
        numbers = {name: order.get(name, getattr(cls, name)) for name in _NUMBERS}
        if not all(isinstance(value, int) and value >= 0 for value in numbers.values()):
            raise BadHealthCheck("the times of the health check must be whole numbers from 0")
        if not numbers["every_ms"] or not numbers["timeout_ms"] or not numbers["failures"]:
            raise BadHealthCheck("a health check needs an interval, a timeout and a number of failures above 0")
        return cls(tuple(command), http, file, **numbers)

    def as_order(self) -> dict[str, Any]:
        """What `from_order` reads; also the form in the journal."""
        what: dict[str, Any] = {"command": list(self.command), "http": self.http, "file": self.file}
        return {key: value for key, value in what.items() if value} | {name: getattr(self, name) for name in _NUMBERS}


_NUMBERS = ("every_ms", "timeout_ms", "after_ms", "failures")


def probe_target(url: str) -> tuple[tuple[str, ...], int, str]:
    """(addresses to try, port, path with query) of a health check. BadHealthCheck unless it is on this host."""
    import ipaddress  # here, because most agents never need it and start faster without
    from urllib.parse import urlsplit

    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url or len(url) > 2000:
        raise BadHealthCheck("the address of the health check is not a URL")
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        raise BadHealthCheck("the address of the health check is not a URL") from None
    if parts.scheme != "http" or parts.username is not None or parts.password is not None or not parts.hostname:
        raise BadHealthCheck("the address of the health check must be http://HOST:PORT/PATH")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if parts.hostname == "localhost":
        return ("127.0.0.1", "::1"), port, path
    try:
        address = ipaddress.ip_address(parts.hostname)
    except ValueError:
        raise BadHealthCheck("the health check may only go to localhost or an address of this node") from None
    if not address.is_loopback and not _is_own_address(address):
        raise BadHealthCheck("the health check may only go to localhost or an address of this node")
    return (str(address),), port, path


def _is_own_address(address: IPv4Address | IPv6Address) -> bool:
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
    """The HTTP status of this address; redirects are not followed. OSError or ValueError without an answer."""
    hosts, port, path = probe_target(url)
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


class FileProbes:
    """One thread, started with the first probe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._requests: queue.SimpleQueue[tuple[str, Callable[[FileStat | None], object]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy_since_s = 0.0

    def request(self, path: str, callback: Callable[[FileStat | None], None]) -> None:
        """`callback` is called in the loop, later; never if the disk does not answer."""

        def answer(seen: FileStat | None) -> None:
            try:
                self._loop.call_soon_threadsafe(callback, seen)
            except RuntimeError:
                pass  # the loop is closed

        self._put(path, answer)

    def wait(self, path: str) -> FileStat | None:
        """The answer at once; None also if the disk takes longer than PROBE_TIMEOUT_S."""
        if self._busy_since_s and time.monotonic() - self._busy_since_s > PROBE_TIMEOUT_S:
            return None
        answer: queue.SimpleQueue[FileStat | None] = queue.SimpleQueue()
        self._put(path, answer.put)
        try:
            return answer.get(timeout=PROBE_TIMEOUT_S)
        except queue.Empty:
            return None

    def _put(self, path: str, answer: Callable[[FileStat | None], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="file probes", daemon=True)
            self._thread.start()
        self._requests.put((path, answer))

    def _serve(self) -> None:
        while True:
            path, answer = self._requests.get()
            self._busy_since_s = time.monotonic()
            seen = stat_file(path)
            self._busy_since_s = 0.0
            answer(seen)


def stat_file(path: str) -> FileStat | None:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
