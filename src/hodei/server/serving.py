"""The HTTP server: uvicorn, with limits that it lacks.

uvicorn waits forever for the headers of a request, accepts any number of them, and waits forever for a client to read
before it closes. `Connection` limits all of these.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import uvicorn
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hodei.model.errors import InvalidInput
from hodei.server.app import App
from hodei.server.errors import BadRequest, HttpError, TooManyRequests, reply_to
from hodei.server.guard import MAX_HEADER_BYTES, MAX_HEADERS, host_name
from hodei.server.rate_limits import client_address

_QUIET = logging.getLogger("hodei.http")
_QUIET.setLevel(logging.ERROR)


class AnyConnection(Protocol):
    @property
    def idle(self) -> bool:
        """Whether no request is in progress on it."""

    def drop(self) -> None:
        """Closes it now."""


class OpenConnections:
    """The open connections by client address, limited in total and to `per_address` (0, or a Unix socket: no limit).

    At the limit the connection that is idle longest is closed; if none is idle, the new one is refused."""

    def __init__(self, total: int, per_address: int) -> None:
        self.total, self.per_address = total, per_address
        self._of: dict[str, dict[AnyConnection, None]] = {}  # by address, least recently used first
        self.count = 0

    def add(self, connection: AnyConnection, address: str) -> bool:
        """False if a limit is reached."""
        mine = self._of.get(address, {})
        if self.per_address and address and len(mine) >= self.per_address and not self._drop_idle(address):
            return False
        if self.count >= self.total:
            largest = max(self._of, key=lambda of: len(self._of[of]))
            if not self._drop_idle(largest):
                return False
        self._of.setdefault(address, {})[connection] = None
        self.count += 1
        return True

    def touch(self, connection: AnyConnection, address: str) -> None:
        """Makes it the most recently used."""
        mine = self._of.get(address)
        if mine is not None and connection in mine:
            del mine[connection]
            mine[connection] = None

    def remove(self, connection: AnyConnection, address: str) -> None:
        mine = self._of.get(address)
        if mine is not None and connection in mine:
            del mine[connection]
            self.count -= 1
            if not mine:
                del self._of[address]

    def _drop_idle(self, address: str) -> bool:
        for connection in self._of.get(address, ()):
            if connection.idle:
                self.remove(connection, address)
                connection.drop()
                return True
        return False


class Limits(Struct, frozen=True):
    """`headers_s`: for the headers of a request to arrive. `flush_s`: for a client to read
    the rest when the connection closes."""

    connections: int = 2048
    connections_per_address: int = 512
    headers_s: float = 10.0
    keep_alive_s: int = 75
    flush_s: float = 10.0
    shutdown_s: int = 5
    header_count: int = MAX_HEADERS
    header_bytes: int = MAX_HEADER_BYTES


class Connection(HttpToolsProtocol):
    """One connection. `make_server` subclasses it with its limits."""

    limits = Limits()
    open_connections = OpenConnections(limits.connections, limits.connections_per_address)
    _headers_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Invalid HTTP is not logged: clients without a token could fill the disk with it.
        self.logger = _QUIET
        self._address = client_address(self.client)
        if not self.open_connections.add(self, self._address):
            error = TooManyRequests("this address has too many connections", hint="close some of them")
            self._write(429, "Too Many Requests", error)
            self._abort_later()
            return
        self._start_timer()

    @property
    def idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def drop(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.open_connections.remove(self, self._address)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self.scope["extensions"] = {"hodei": {"abort": self.transport.abort}}
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._stop_timer()
        if not self.transport.is_closing():
            self.open_connections.touch(self, self._address)
            super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._write(400, "Bad Request", BadRequest("this is not an HTTP request that can be read"))

    def _write(self, status: int, phrase: str, error: HttpError) -> None:
        """Responds without a valid request, and closes the connection."""
        reply = reply_to(error)
        headers = {"content-type": reply.media_type, "content-length": len(reply.body), "connection": "close"}
        lines = [
            f"HTTP/1.1 {status} {phrase}",
            *(f"{name}: {value}" for name, value in (headers | reply.headers).items()),
        ]
        self.transport.write("\r\n".join((*lines, "", "")).encode("ascii") + reply.body)
        self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_later()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._abort_later()

    def _count(self, size: int) -> None:
        # Twice the limits of the guard, which responds with an error up to there.
        self._header_bytes += size
        if self._header_bytes > 2 * self.limits.header_bytes or len(self.headers) > 2 * self.limits.header_count:
            self.transport.abort()

    def _start_timer(self) -> None:
        if self._headers_timer is None:
            self._headers_timer = self.loop.call_later(self.limits.headers_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _abort_later(self) -> None:
        self.loop.call_later(self.limits.flush_s, self.transport.abort)


class Server(uvicorn.Server):
    """Ends waits and streams first when it stops. Leaves signals to the caller."""

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self._hodei = app

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._hodei.close()
        await super().shutdown(sockets)


def make_server(
    app: App,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    certificate: str = "",
    key: str = "",
    insecure: bool = False,
    limits: Limits | None = None,
) -> Server:
    """A server, ready for `await server.serve(sockets=[...])`. InvalidInput if it would listen beyond loopback without TLS."""
    require_tls(host, tls=bool(certificate), insecure=insecure)
    limits = limits or Limits()
    connections = OpenConnections(limits.connections, limits.connections_per_address)
    tls = {"ssl_certfile": certificate, "ssl_keyfile": key or None} if certificate else {}
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=type("LimitedConnection", (Connection,), {"limits": limits, "open_connections": connections}),
        loop="auto",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=limits.shutdown_s,
        **tls,  # type: ignore[arg-type]
    )
    return Server(config, app)


def require_tls(host: str, *, tls: bool, insecure: bool) -> None:
    """Tokens and job output must not cross a network unencrypted, unless `insecure`."""
    if tls or insecure or is_loopback(host):
        return
    raise InvalidInput(
        f"listening on {host!r} without TLS would send tokens over the network unencrypted",
        hint="set a certificate and key, listen on 127.0.0.1, or use --insecure if something else encrypts the traffic",
        code="TLS_REQUIRED",
    )


def is_loopback(host: str) -> bool:
    name = host_name(host)
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
