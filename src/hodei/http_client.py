"""The async HTTP/1.1 client for Kubernetes, Docker and slurmrestd: one server, keep-alive connections over TCP, TLS or a unix
socket, complete or streamed answers.

A pod scheduler posts a thousand bindings a second from one process; a general client costs several times as much. One exchange
at a time per connection; no redirects, cookies or compression.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import cast
from urllib.parse import unquote, urlsplit

import httptools
from msgspec import Struct


async def tunnel(loop: asyncio.AbstractEventLoop, proxy_url: str, host: str, port: int) -> socket.socket:
    """A socket to the server through an HTTP proxy (`proxy-url` of a kubeconfig, or $HTTPS_PROXY). Raises OSError."""
    proxy = urlsplit(proxy_url)
    if proxy.scheme != "http" or not proxy.hostname:
        raise ConnectionError(f"a proxy must be http://HOST:PORT, and this one has the scheme {proxy.scheme!r}")
    addresses = await loop.getaddrinfo(proxy.hostname, proxy.port or 80, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = addresses[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        request = f"CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n"
        if proxy.username:
            pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
            request += f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}\r\n"
        await loop.sock_sendall(sock, f"{request}\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer and len(answer) < 65536:
            got = await loop.sock_recv(sock, 1)  # the byte after the head belongs to TLS
            if not got:
                break
            answer += got
        status = answer.split(b"\r\n", 1)[0].decode("latin-1")
        if " 200" not in status:
            raise ConnectionError(f"the proxy {proxy.hostname} answered {status or 'nothing'!r}")
        return sock
    except BaseException:
        sock.close()
        raise


CONNECT_S = 10.0
# A connection that was idle for longer is not reused: servers close theirs after 60 to 90 s, and a request could get lost.
IDLE_S = 50.0
_HIGH_WATER = 8 << 20
_REPEATABLE = frozenset({"GET", "HEAD", "PUT", "DELETE"})


class Unreached(Exception):
    """No answer. `sent`: whether the server may have got the request."""

    def __init__(self, why: str, *, sent: bool = False) -> None:
        super().__init__(why)
        self.why, self.sent = why, sent


class Origin(Struct, frozen=True):
    """The address of a server. `tls` is None for plain HTTP; `server_name` is the name in its certificate, if not `host`;
    `unix` is the path of a socket, which replaces host and port."""

    host: str = "localhost"
    port: int = 80
    tls: ssl.SSLContext | None = None
    server_name: str = ""
    proxy: str = ""
    unix: str = ""

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.unix else f"{host}:{self.port}"


class Reply(Struct):
    status: int
    headers: dict[bytes, bytes]
    """Names in lower case."""
    body: bytes = b""


def encode_request(
    origin: Origin, method: str, target: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {origin.authority}", "User-Agent: hodei"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body is not None or method in ("POST", "PUT"):
        lines.append(f"Content-Length: {len(body or b'')}")
    if any("\n" in line or "\r" in line for line in lines):
        raise ValueError("a header of an HTTP request cannot hold a line break")
    return "\r\n".join((*lines, "", "")).encode() + (body or b"")


class Connection(asyncio.Protocol):
    """One connection. `send` starts an exchange; `reply` returns the complete answer, or `head` and `chunks` its parts."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reply = Reply(0, {})
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._in_exchange = self._streaming = self._is_head_request = self._paused = False
        self._has_head = self._complete = self._keep_alive = False
        self._failure = ""
        self.received = self._timed_out = False
        self.idle_since = 0.0
        self.used = False

    @property
    def usable(self) -> bool:
        return not self._failure and self._transport is not None and not self._transport.is_closing()

    def send(self, data: bytes, *, streaming: bool = False) -> None:
        """`data` is an encoded request. The answer to HEAD has a length and no body; its connection is not reused."""
        if not self.usable or self._transport is None:
            raise Unreached(self._failure or "the connection is closed")
        self._reply = Reply(0, {})
        self._chunks, self._buffered = [], 0
        self._in_exchange, self._streaming, self._is_head_request = True, streaming, data.startswith(b"HEAD ")
        self.received = self._has_head = self._complete = self._keep_alive = False
        self._transport.write(data)

    async def reply(self, timeout_s: float) -> Reply:
        self._timer = self._loop.call_later(timeout_s, self._give_up, f"no complete answer within {timeout_s:g} s")
        try:
            while not self._complete:
                await self._more()
        except asyncio.CancelledError:
            self.abort("cancelled by the caller")
            raise
        finally:
            self._timer.cancel()
        chunks = self._chunks
        self._reply.body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return self._reply

    async def head(self, timeout_s: float) -> Reply:
        """The status and the headers; `chunks` returns the body."""
        async with self._limit(timeout_s, f"no answer within {timeout_s:g} s"):
            while not self._has_head:
                await self._more()
        return self._reply

    async def chunks(self, quiet_s: float) -> AsyncIterator[list[bytes]]:
        """The body as it arrives. Raises Unreached after a silence of `quiet_s` (0: no limit)."""
        while True:
            if self._chunks:
                ready, self._chunks, self._buffered = self._chunks, [], 0
                self._resume()
                yield ready
            elif self._complete:
                return
            elif not quiet_s:
                await self._more()
            else:
                async with self._limit(quiet_s, f"no data for {quiet_s:g} s"):
                    await self._more()

    def abort(self, why: str = "closed") -> None:
        self._failure = self._failure or why
        if self._transport is not None:
            self._transport.abort()

    @property
    def closed_silently(self) -> bool:
        """The server closed it before it sent anything of the answer."""
        return not self.received and not self._timed_out

    @property
    def reusable(self) -> bool:
        return self._complete and self._keep_alive and self.usable

    async def _more(self) -> None:
        if self._failure:
            raise Unreached(self._failure, sent=True)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @contextlib.asynccontextmanager
    async def _limit(self, seconds: float, why: str) -> AsyncIterator[None]:
        timer = self._loop.call_later(seconds, self._give_up, why)
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, why: str) -> None:
        self._timed_out = True
        self.abort(why)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=1 << 22)

    def data_received(self, data: bytes) -> None:
        if not self._in_exchange:
            self.abort("the server sent data without a request")  # the next request would take it for its answer
            return
        self.received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(f"the answer is not HTTP: {error}")
        if self._complete or self._failure or (self._streaming and self._has_head):
            self._in_exchange = not self._complete
            self._wake()
        if self._streaming and self._buffered > _HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        # An answer without a length lasts until the server closes.
        if self._has_head and not self._complete and not self._framed():
            self._complete = True

    def connection_lost(self, error: Exception | None) -> None:
        self._failure = self._failure or (
            f"the connection broke: {error}" if error else "the server closed the connection"
        )
        self._wake()

    def _framed(self) -> bool:
        headers = self._reply.headers
        return b"content-length" in headers or b"transfer-encoding" in headers

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("a second answer")  # ends parsing and connection; the first answer counts

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        self._has_head = self._reply.status >= 200
        if self._has_head and self._is_head_request:
            self._complete = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._complete = True
            self._keep_alive = not self._is_head_request and bool(
                self._parser.should_keep_alive()
            )  # the parser does not know earlier
        else:
            self._reply.headers.clear()  # 1xx: the answer follows


class Pool:
    """At most `connections` exchanges at a time; further ones wait for a free connection. Streams do not count."""

    def __init__(self, origin: Origin, connections: int = 64) -> None:
        self.origin = origin
        self._loop = asyncio.get_running_loop()
        self._free = connections
        self._queue: deque[asyncio.Future[None]] = deque()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False

    async def exchange(self, method: str, data: bytes, timeout_s: float, *, idle_s: float = IDLE_S) -> Reply:
        """Sends `data` (an encoded request) and returns the answer. Raises Unreached.

        The server may close an idle connection while a request is under way. Without any answer the request is repeated on
        another connection if it was not sent or its method is idempotent. `idle_s`: reuse no connection idle for longer.
        """
        if self._free > 0 and not self._queue:
            self._free -= 1
        else:
            await self._wait_for_slot()
        try:
            while True:
                connection = self._take_idle(idle_s) or await self.open(timeout_s)
                reused = connection.used
                self._busy.add(connection)
                try:
                    connection.send(data)
                    reply = await connection.reply(timeout_s)
                except Unreached as failure:
                    if reused and connection.closed_silently and (method in _REPEATABLE or not failure.sent):
                        continue
                    raise
                finally:
                    self._busy.discard(connection)
                self._release(connection)
                return reply
        finally:
            self._free_slot()

    async def stream(self, data: bytes, timeout_s: float) -> tuple[Connection, Reply]:
        """Sends `data` on a new connection whose answer is read in parts. The caller drops it when done."""
        connection = await self.open(timeout_s)
        self._busy.add(connection)
        try:
            connection.send(data, streaming=True)
            return connection, await connection.head(timeout_s)
        except BaseException:
            self.drop(connection)
            raise

    def drop(self, connection: Connection) -> None:
        self._busy.discard(connection)
        connection.abort()

    def retire(self, origin: Origin) -> None:
        """New connections go to `origin` (new certificates, say); idle ones are closed, busy ones finish first."""
        self.origin = origin
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
        for connection in self._busy:
            connection.used = False
            connection.idle_since = -1.0

    def close(self) -> None:
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.abort("closed by this side")
        self._idle.clear()

    async def open(self, timeout_s: float = CONNECT_S) -> Connection:
        if self._closed:
            raise Unreached("this client was closed")
        timeout_s = min(timeout_s, CONNECT_S)
        try:
            async with asyncio.timeout(timeout_s):
                return await _connect(self._loop, self.origin)
        except TimeoutError as error:
            raise Unreached(f"no connection within {timeout_s:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise Unreached(f"its certificate is not accepted: {error.verify_message}") from error
        except OSError as error:
            raise Unreached(_cause(error)) from error

    def _take_idle(self, idle_s: float) -> Connection | None:
        oldest = self._loop.time() - idle_s
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    def _release(self, connection: Connection) -> None:
        if connection.reusable and connection.idle_since >= 0 and not self._closed:
            connection.used = True
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        else:
            connection.abort()

    async def _wait_for_slot(self) -> None:
        slot: asyncio.Future[None] = self._loop.create_future()
        self._queue.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self._free_slot()
            raise

    def _free_slot(self) -> None:
        while self._queue:
            slot = self._queue.popleft()
            if not slot.done():
                slot.set_result(None)
                return
        self._free += 1


def _cause(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


async def _connect(loop: asyncio.AbstractEventLoop, origin: Origin) -> Connection:
    name = (origin.server_name or origin.host) if origin.tls is not None else None
    if origin.unix:
        _, connection = await loop.create_unix_connection(lambda: Connection(loop), origin.unix)
    elif origin.proxy:
        through = await tunnel(loop, origin.proxy, origin.host, origin.port)
        _, connection = await loop.create_connection(
            lambda: Connection(loop), sock=through, ssl=origin.tls, server_hostname=name
        )
    else:
        transport, connection = await loop.create_connection(
            lambda: Connection(loop), origin.host, origin.port, ssl=origin.tls, server_hostname=name
        )
        _enable_keepalive(transport.get_extra_info("socket"))
    return connection


def _enable_keepalive(sock: socket.socket | None) -> None:
    """The kernel detects within a minute that the other machine is down, even while a watch is silent."""
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 20),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 50_000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


async def get_status(url: str, timeout_s: float) -> int:
    """The status of one GET on a connection of its own. Raises Unreached, and ValueError for a malformed address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an HTTP address: {url[:200]}")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    origin = Origin(parts.hostname, parts.port or (443 if tls else 80), tls)
    pool = Pool(origin, 1)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        async with asyncio.timeout(timeout_s):
            connection, reply = await pool.stream(encode_request(origin, "GET", target), timeout_s)
    except TimeoutError as error:
        raise Unreached(f"no answer within {timeout_s:g} s", sent=True) from error
    pool.drop(connection)
    return reply.status
