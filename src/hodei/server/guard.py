"""ASGI middleware that checks every request before routing.

Against DNS rebinding: the Host must be one of the server's names. Against cross-site requests: what a browser sends from
another origin is refused. Against floods: limits on headers, bodies and time. Limits on concurrency and rate are in
`rate_limits`; limits on connections and slow headers, before a request is complete, in `serving`.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hodei.server.errors import (
    BadRequest,
    Forbidden,
    HeadersTooLarge,
    HttpError,
    MisdirectedRequest,
    PayloadTooLarge,
    RequestTimeout,
    reply_to,
)
from hodei.server.route import KIB, MIB

# The depth of a JSON text without parsing it: linear in its size, in C, with bounded memory.

_KEEP = b'[]{}"'
_DROP = bytes(byte for byte in range(256) if byte not in _KEEP)
_STEP = np.zeros(256, np.int8)
_STEP[[ord("["), ord("{")]] = 1
_STEP[[ord("]"), ord("}")]] = -1
_PIECE = 1 << 20


def deeper_than(raw: bytes, limit: int) -> bool:
    """Whether brackets outside of strings are open more than `limit` deep anywhere in `raw`."""
    if raw.count(b"[") + raw.count(b"{") <= limit:
        return False
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = raw.translate(None, _DROP)
    depth, quotes = 0, 0
    for start in range(0, len(marks), _PIECE):
        piece = np.frombuffer(marks, np.uint8, min(_PIECE, len(marks) - start), start)
        quoted = (np.cumsum(piece == ord('"'), dtype=np.int32) + quotes) & 1
        steps = np.where(quoted == 0, _STEP[piece], 0)
        heights = np.cumsum(steps, dtype=np.int32) + depth
        if int(heights.max()) > limit:
            return True
        depth, quotes = int(heights[-1]), int(quoted[-1])
    return False


MAX_DEPTH = 64
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * KIB
# How much of an unread body is discarded before the response. A client that still sends when the connection closes would
# see a reset instead of the response.
DRAIN_BYTES = 64 * MIB
DRAIN_S = 1.0
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Guard:
    """`hosts`: the names and addresses of the server, besides loopback."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self.app = app
        self.hosts = frozenset(host_name(host) for host in (*LOOPBACK_NAMES, *hosts)) - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = _Request(scope, receive, send)
        try:
            self.check(scope)
        except HttpError as error:
            await reply_to(error)(scope, request.receive, request.send)
            return
        await self.app(scope, request.receive, request.send)

    def check(self, scope: Scope) -> None:
        hosts, origin, site, size = [], None, None, 0
        headers = scope["headers"]
        for name, value in headers:
            size += len(name) + len(value)
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise HeadersTooLarge(f"more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them")
        if len(hosts) != 1:
            raise BadRequest("a request needs exactly one Host header")
        host = hosts[0].decode("latin-1")
        if len(host) > 300 or host_name(host) not in self.hosts:
            raise MisdirectedRequest(
                f"{host[:80]!r} is not a name of this server",
                hint="use its configured address, or add this name to server.names "
                "(names are checked because a web page can point its own name at a private server)",
            )
        if site is not None and site not in (b"same-origin", b"none"):
            raise Forbidden("web pages of other sites may not call this server", code="CROSS_SITE")
        # Including the port: two servers on one host are different origins.
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host.lower():
            raise Forbidden(f"web pages of {origin[:80].decode('latin-1')} may not call this server", code="CROSS_SITE")


@lru_cache(maxsize=256)
def host_name(host: str) -> str:
    """The name in a Host header or a configured address, without the port: `[::1]:8080` -> `::1`."""
    host = host.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    host = host.removesuffix(".")
    try:
        return ipaddress.ip_address(host).compressed
    except ValueError:
        return host


class _Request:
    """Adds the security headers to the response, and closes the connection if part of the request was not read."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._unread = any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 "))
            for name, value in scope["headers"]
        )

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self._unread = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            names = {name for name, _ in headers}
            headers += [pair for pair in _SECURITY_HEADERS if pair[0] not in names]
            if self._unread:
                headers.append((b"connection", b"close"))
                await self._drain()
            message = {**message, "headers": headers}
        await self._send(message)

    async def _drain(self) -> None:
        left = DRAIN_BYTES
        try:
            async with asyncio.timeout(DRAIN_S):
                while self._unread and left > 0:
                    left -= len((await self.receive()).get("body", b""))
        except TimeoutError:
            pass


async def read_body(
    scope: Scope, receive: Receive, *, limit: int, timeout_s: float, take: Callable[[int], None] | None = None
) -> bytes:
    """PayloadTooLarge beyond `limit`, RequestTimeout after `timeout_s`. `take` may refuse each part by its size."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if not declared.isdigit() or len(declared) > 18:
        raise BadRequest("the Content-Length header is not a number")
    if int(declared) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise BadRequest("the connection ended before the body did")
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                if take is not None:
                    take(len(part))
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {timeout_s:g} s") from None


def _too_large(limit: int) -> PayloadTooLarge:
    size = f"{limit // MIB} MiB" if limit >= MIB else f"{limit} bytes"
    return PayloadTooLarge(f"the body is larger than {size}", hint="send it in several requests")


def check_depth(raw: bytes) -> None:
    if deeper_than(raw, MAX_DEPTH):
        raise BadRequest(
            f"the body is nested more than {MAX_DEPTH} deep", hint="job documents need fewer than 10 levels"
        )
