"""The socket: uvicorn with its limits set, and those that it lacks.

uvicorn's own parser waits for ever for a request's headers, takes any number of them, and closes politely even on
clients that never read. `Connection` puts a clock and a count on each of these.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import uvicorn
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hodei.model.errors import InvalidInput
from hodei.server.app import App
from hodei.server.errors import Malformed, Refused, TooMany, reply_to
from hodei.server.guard import MAX_HEADER_BYTES, MAX_HEADERS, host_name
from hodei.server.rate_limits import place_of

# ----------------------------------------------------------------------------------------- connections
# The open connections, by the place that they come from. One place has its share and no more; when that is used up,
# its connection that has been idle longest makes room, and only if none is idle is the new one turned away.


class Connected(Protocol):
    @property
    def idle(self) -> bool:
        """Whether no request is being answered on it."""

    def drop(self) -> None:
        """Close it now. It leaves the crowd by itself, a little later."""


class OpenConnections:
    """`each` 0: no limit for one place; the place "" (a Unix socket) has none."""

    def __init__(self, total: int, each: int) -> None:
        self.total, self.each = total, each
        self._of: dict[str, dict[Connected, None]] = {}  # in the order of their latest requests
        self.count = 0

    def enter(self, connection: Connected, place: str) -> bool:
        """False if there is no room for it; it is not in the crowd then."""
        mine = self._of.get(place, {})
        if self.each and place and len(mine) >= self.each and not self._drop_one(place):
            return False
        if self.count >= self.total:
            largest = max(self._of, key=lambda of: len(self._of[of]))
            # A place with fewer connections than the largest has a better claim; one of the largest itself has none.
            if not self._drop_one(largest):
                return False
        self._of.setdefault(place, {})[connection] = None
        self.count += 1
        return True

    def worked(self, connection: Connected, place: str) -> None:
        """A request has come on it: it is the last to make room now."""
        mine = self._of.get(place)
        if mine is not None and connection in mine:
            del mine[connection]
            mine[connection] = None

    def leave(self, connection: Connected, place: str) -> None:
        mine = self._of.get(place)
        if mine is not None and connection in mine:
            del mine[connection]
            self.count -= 1
            if not mine:
                del self._of[place]

    def _drop_one(self, place: str) -> bool:
        for connection in self._of.get(place, ()):
            if connection.idle:
                self.leave(connection, place)
                connection.drop()
                return True
        return False


# ----------------------------------------------------------------------------------------------------

_QUIET = logging.getLogger("hodei.http")
_QUIET.setLevel(logging.ERROR)


class Limits(Struct, frozen=True):
    """`connections_each`: of one address. `headers_s`: for a request's headers to arrive. `flush_s`: for a client to take what
    is left when we close."""

    connections: int = 2048
    connections_each: int = 512
    headers_s: float = 10.0
    keep_alive_s: int = 75
    flush_s: float = 10.0
    shutdown_s: int = 5
    header_count: int = MAX_HEADERS
    header_bytes: int = MAX_HEADER_BYTES


class Connection(HttpToolsProtocol):
    """One client's connection. Subclassed with its limits and the crowd that it is one of by `make_server`."""

    limits = Limits()
    crowd = OpenConnections(limits.connections, limits.connections_each)
    _clock: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _place = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # What is not HTTP is answered, not logged: anyone could fill the disk with it.
        self.logger = _QUIET
        self._place = place_of(self.client)
        if not self.crowd.enter(self, self._place):
            self._turn_away()
            return
        self._start_clock()

    @property
    def idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def drop(self) -> None:
        self.transport.abort()

    def _turn_away(self) -> None:
        self._write(
            429, "Too Many Requests", TooMany("this address has too many connections", hint="close some of them")
        )
        self._abort_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self.crowd.leave(self, self._place)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self.scope["extensions"] = {"hodei": {"abort": self.transport.abort}}
        self._start_clock()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._stop_clock()
        if not self.transport.is_closing():
            self.crowd.worked(self, self._place)
            super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._write(400, "Bad Request", Malformed("this is not an HTTP request that can be read"))

    def _write(self, status: int, phrase: str, error: Refused) -> None:
        """An answer without a request that could have been read, and the end of the connection."""
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
        # Twice the guard's limits: up to there it answers in words, beyond there is nothing to talk about.
        self._header_bytes += size
        if self._header_bytes > 2 * self.limits.header_bytes or len(self.headers) > 2 * self.limits.header_count:
            self.transport.abort()

    def _start_clock(self) -> None:
        if self._clock is None:
            self._clock = self.loop.call_later(self.limits.headers_s, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _abort_later(self) -> None:
        self.loop.call_later(self.limits.flush_s, self.transport.abort)


class Server(uvicorn.Server):
    """Ends waits and streams first when it is told to stop. Signals are left to whoever runs the loop."""

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
    uds: str | None = None,
    certificate: str = "",
    key: str = "",
    insecure: bool = False,
    limits: Limits | None = None,
) -> Server:
    """A server that is ready for `await server.serve(sockets=[...])`. InvalidInput if it would speak in the clear beyond this machine."""
    if uds is None:
        refuse_clear_text(host, tls=bool(certificate), insecure=insecure)
    limits = limits or Limits()
    crowd = OpenConnections(limits.connections, limits.connections_each)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        uds=uds,
        http=type("LimitedConnection", (Connection,), {"limits": limits, "crowd": crowd}),
        loop="auto",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=limits.shutdown_s,
        **_tls(certificate, key),
    )
    return Server(config, app)


def _tls(certificate: str, key: str) -> dict[str, Any]:
    return {"ssl_certfile": certificate, "ssl_keyfile": key or None} if certificate else {}


def refuse_clear_text(host: str, *, tls: bool, insecure: bool) -> None:
    """Tokens and job output must not cross a network unencrypted unless someone said so."""
    if tls or insecure or is_loopback(host):
        return
    raise InvalidInput(
        f"listening on {host!r} without TLS would send tokens over the network in the clear",
        hint="give a certificate and key, listen on 127.0.0.1, or say --insecure if something else encrypts the traffic",
        code="TLS_REQUIRED",
    )


def is_loopback(host: str) -> bool:
    name = host_name(host)
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
