"""HTTP/1.1 to one server over keep-alive connections: bytes in, bytes out, a small price per request.

A pod scheduler posts a thousand bindings a second from one process; a general client costs several times what this does.
Nothing here knows Kubernetes. One exchange at a time per connection; no redirects, cookies or compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import cast

import httptools
from msgspec import Struct

from hodei.kube.api.proxy import tunnel

CONNECT_S = 10.0
IDLE_S = 50.0
"""A connection that rested longer is not used again: servers close theirs after 60 to 90 s, and a request must not meet that."""
_HIGH_WATER = 8 << 20
_REPEATABLE = frozenset({"GET", "HEAD", "PUT", "DELETE"})


class Unreached(Exception):
    """No answer. `sent`: whether the server may have got the request."""

    def __init__(self, why: str, *, sent: bool = False) -> None:
        super().__init__(why)
        self.why, self.sent = why, sent


class Origin(Struct, frozen=True):
    """Who is called. `tls` is None for plain HTTP; `server_name` is what its certificate must say, if not `host`."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    server_name: str = ""
    proxy: str = ""


class Reply(Struct):
    status: int
    headers: dict[bytes, bytes]
    """Names in lower case."""
    body: bytes = b""


class Connection(asyncio.Protocol):
    """One connection. `send` starts an exchange; then `reply` gives the whole answer, or `head` and `chunks` its parts."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reply = Reply(0, {})
        self._chunks: list[bytes] = []
        self._held = 0
        self._asked = self._streaming = self._headed = self._whole = self._lasting = self._paused = False
        self._why = ""
        self.heard = False
        self.rested_at = 0.0
        self.used = False

    # ------------------------------------------------------------------------------------ called by whoever asks

    @property
    def usable(self) -> bool:
        return not self._why and self._transport is not None and not self._transport.is_closing()

    def send(self, data: bytes, *, streaming: bool = False) -> None:
        if not self.usable or self._transport is None:
            raise Unreached(self._why or "the connection is closed")
        self._reply = Reply(0, {})
        self._chunks, self._held = [], 0
        self._asked, self._streaming = True, streaming
        self.heard = self._headed = self._whole = self._lasting = False
        self._transport.write(data)

    async def reply(self, timeout_s: float) -> Reply:
        """The whole answer, by when `timeout_s` is over."""
        self._timer = self._loop.call_later(timeout_s, self._give_up, f"no whole answer within {timeout_s:g} s")
        try:
            while not self._whole:
                await self._more()
        except asyncio.CancelledError:
            self.abort("given up by the caller")
            raise
        finally:
            self._timer.cancel()
        chunks = self._chunks
        self._reply.body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return self._reply

    async def head(self, timeout_s: float) -> Reply:
        """The status and the headers; the body follows by `chunks`."""
        async with self._limit(timeout_s, f"no answer within {timeout_s:g} s"):
            while not self._headed:
                await self._more()
        return self._reply

    async def chunks(self, quiet_s: float) -> AsyncIterator[list[bytes]]:
        """The body as it comes, until it ends; `quiet_s` is the longest silence that is borne."""
        while True:
            if self._chunks:
                ready, self._chunks, self._held = self._chunks, [], 0
                self._resume()
                yield ready
            elif self._whole:
                return
            else:
                async with self._limit(quiet_s, f"nothing heard for {quiet_s:g} s"):
                    await self._more()

    def abort(self, why: str = "closed") -> None:
        self._why = self._why or why
        if self._transport is not None:
            self._transport.abort()

    @property
    def reusable(self) -> bool:
        return self._whole and self._lasting and self.usable

    async def _more(self) -> None:
        if self._why:
            raise Unreached(self._why, sent=True)
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
        self.abort(why)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    # ------------------------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=1 << 22)

    def data_received(self, data: bytes) -> None:
        if not self._asked:
            self.abort("it spoke without being asked")  # or the next request would take this for its answer
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(f"what came is not HTTP: {error}")
        if self._whole or self._why or (self._streaming and self._headed):
            self._asked = not self._whole
            self._wake()
        if self._streaming and self._held > _HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        # An answer without a length lasts until the server closes.
        if self._headed and not self._whole and not self._framed():
            self._whole = True

    def connection_lost(self, error: Exception | None) -> None:
        self._why = self._why or (f"the connection broke: {error}" if error else "the server closed the connection")
        self._wake()

    def _framed(self) -> bool:
        headers = self._reply.headers
        return b"content-length" in headers or b"transfer-encoding" in headers

    # ------------------------------------------------------------------------------------ called by the parser

    def on_message_begin(self) -> None:
        if self._whole:
            raise ValueError("it answered twice")  # ends the parsing and the connection; the first answer holds

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        self._headed = self._reply.status >= 200

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._held += len(body)

    def on_message_complete(self) -> None:
        if self._headed:
            self._whole = True
            self._lasting = bool(self._parser.should_keep_alive())  # the parser knows it only now
        else:
            self._reply.headers.clear()  # 1xx: the answer is still to come


class Pool:
    """At most `connections` exchanges at a time; whoever comes next waits for a free one. Streams do not count."""

    def __init__(self, origin: Origin, connections: int = 64) -> None:
        self.origin = origin
        self._loop = asyncio.get_running_loop()
        self._free = connections
        self._queue: deque[asyncio.Future[None]] = deque()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False

    async def exchange(self, method: str, data: bytes, timeout_s: float) -> Reply:
        """Sends `data` (a whole request) and gives the answer. Raises Unreached.

        A rested connection may have been closed by the server while the request was on its way: if nothing was heard it
        is sent once more, provided that it was not sent at all or that twice is the same as once.
        """
        if self._free > 0 and not self._queue:
            self._free -= 1
        else:
            await self._turn()
        try:
            while True:
                connection = self._rested() or await self.open()
                again = connection.used
                self._busy.add(connection)
                try:
                    connection.send(data)
                    reply = await connection.reply(timeout_s)
                except Unreached as failure:
                    silent = "no whole answer" not in failure.why and not connection.heard
                    if again and silent and (method in _REPEATABLE or not failure.sent):
                        continue
                    raise
                finally:
                    self._busy.discard(connection)
                self._rest(connection)
                return reply
        finally:
            self._pass_on()

    async def stream(self, data: bytes, timeout_s: float) -> tuple[Connection, Reply]:
        """A connection of its own whose answer is read in parts. The caller aborts it when done."""
        connection = await self.open()
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
        """New connections go to `origin` (new certificates, say); rested ones are closed, busy ones finish first."""
        self.origin = origin
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
        for connection in self._busy:
            connection.used = False
            connection.rested_at = -1.0

    def close(self) -> None:
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.abort("closed by this side")
        self._idle.clear()

    async def open(self) -> Connection:
        if self._closed:
            raise Unreached("this client was closed")
        origin = self.origin
        try:
            async with asyncio.timeout(CONNECT_S):
                return await _connect(self._loop, origin)
        except TimeoutError as error:
            raise Unreached(f"no connection within {CONNECT_S:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise Unreached(f"its certificate is not accepted: {error.verify_message}") from error
        except OSError as error:
            raise Unreached(_cause(error)) from error

    def _rested(self) -> Connection | None:
        oldest = self._loop.time() - IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.rested_at > oldest:
                return connection
            connection.abort()
        return None

    def _rest(self, connection: Connection) -> None:
        if connection.reusable and connection.rested_at >= 0 and not self._closed:
            connection.used = True
            connection.rested_at = self._loop.time()
            self._idle.append(connection)
        else:
            connection.abort()

    async def _turn(self) -> None:
        turn: asyncio.Future[None] = self._loop.create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def _cause(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


async def _connect(loop: asyncio.AbstractEventLoop, origin: Origin) -> Connection:
    name = (origin.server_name or origin.host) if origin.tls is not None else None
    if origin.proxy:
        through = await tunnel(loop, origin.proxy, origin.host, origin.port)
        _, connection = await loop.create_connection(
            lambda: Connection(loop), sock=through, ssl=origin.tls, server_hostname=name
        )
    else:
        transport, connection = await loop.create_connection(
            lambda: Connection(loop), origin.host, origin.port, ssl=origin.tls, server_hostname=name
        )
        _keep_watch(transport.get_extra_info("socket"))
    return connection


def _keep_watch(sock: socket.socket | None) -> None:
    """The kernel notices within a minute that the other machine is gone, also while a watch is silent."""
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
