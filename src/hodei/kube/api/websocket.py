"""A WebSocket client (RFC 6455) for the streams of a command in a container: whole messages in, control frames out.

No compression; messages have a size limit.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
from collections.abc import Sequence

from hodei.http_client import CONNECT_S, Origin, Reply, Unreached, tunnel

MESSAGE_LIMIT = 16 << 20
_HEAD_LIMIT = 64 << 10
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10


class HandshakeRefused(Exception):
    """The server did not accept the WebSocket."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(str(reply.status))
        self.reply = reply


class WebSocket:
    """Created by `connect`, closed by `close`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: str) -> None:
        self._reader, self._writer, self.protocol = reader, writer, protocol

    async def message(self) -> bytes | None:
        """The next message, None after the server's close. Raises Unreached if the connection breaks."""
        message = bytearray()
        while True:
            try:
                final, opcode, payload = await self._frame()
            except (asyncio.IncompleteReadError, OSError) as error:
                raise Unreached(f"the connection broke: {error}", sent=True) from error
            if opcode == _CLOSE:
                return None
            if opcode == _PING:
                self._send(_PONG, payload)
            elif opcode in (_CONTINUED, _TEXT, _BINARY):
                message += payload
                if len(message) > MESSAGE_LIMIT:
                    raise Unreached(f"the server sent a message of more than {MESSAGE_LIMIT} bytes", sent=True)
                if final:
                    return bytes(message)
            elif opcode != _PONG:
                raise Unreached(f"the server sent a frame of unknown type {opcode}", sent=True)

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            self._send(_CLOSE, b"\x03\xe8")  # 1000: normal closure
        self._writer.close()
        try:
            # Wait briefly for the server's close.
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await self._writer.wait_closed()
        finally:
            self._writer.transport.abort()  # without an answer, or when cancelled, the socket would stay open

    async def _frame(self) -> tuple[bool, int, bytes]:
        first, second = await self._reader.readexactly(2)
        length = second & 0x7F
        if length == 126:
            length = int.from_bytes(await self._reader.readexactly(2), "big")
        elif length == 127:
            length = int.from_bytes(await self._reader.readexactly(8), "big")
        if length > MESSAGE_LIMIT or second & 0x80:
            raise Unreached("the server sent an invalid WebSocket frame", sent=True)
        return bool(first & 0x80), first & 0x0F, await self._reader.readexactly(length)

    def _send(self, opcode: int, payload: bytes) -> None:
        """Control frames only: short, and masked as clients must."""
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload[:125]))
        self._writer.write(bytes((0x80 | opcode, 0x80 | len(masked))) + mask + masked)


async def connect(origin: Origin, target: str, head: bytes, protocols: Sequence[str]) -> WebSocket:
    """`head`: the headers of the request. Raises HandshakeRefused, or Unreached (also after `CONNECT_S`)."""
    try:
        async with asyncio.timeout(CONNECT_S):
            return await _connect(origin, target, head, protocols)
    except TimeoutError as error:
        raise Unreached(f"no connection within {CONNECT_S:g} s", sent=True) from error
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise Unreached(str(error) or type(error).__name__, sent=True) from error


async def _connect(origin: Origin, target: str, head: bytes, protocols: Sequence[str]) -> WebSocket:
    name = (origin.server_name or origin.host) if origin.tls is not None else None
    loop = asyncio.get_running_loop()
    if origin.proxy:
        sock = await tunnel(loop, origin.proxy, origin.host, origin.port)
        reader, writer = await asyncio.open_connection(
            sock=sock, ssl=origin.tls, server_hostname=name, limit=_HEAD_LIMIT
        )
    else:
        reader, writer = await asyncio.open_connection(
            origin.host, origin.port, ssl=origin.tls, server_hostname=name, limit=_HEAD_LIMIT
        )
    try:
        key = base64.b64encode(os.urandom(16))
        request = (
            b"GET %b HTTP/1.1\r\n%bUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: %b\r\nSec-WebSocket-Protocol: %b\r\n\r\n"
        )
        writer.write(request % (target.encode(), head, key, ", ".join(protocols).encode()))
        reply = _parse_head(await reader.readuntil(b"\r\n\r\n"))
        if reply.status != 101:
            reply.body = await _read_body(reader, reply)
            raise HandshakeRefused(reply)
        expected = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())
        chosen = reply.headers.get(b"sec-websocket-protocol", b"").decode("latin-1")
        if reply.headers.get(b"sec-websocket-accept") != expected or chosen not in protocols:
            raise Unreached(f"the server speaks none of {', '.join(protocols)}", sent=True)
        return WebSocket(reader, writer, chosen)
    except BaseException:
        writer.close()
        raise


def _parse_head(lines: bytes) -> Reply:
    status, *rest = lines.split(b"\r\n")
    parts = status.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise Unreached("the response is not HTTP", sent=True)
    fields = (line.partition(b":") for line in rest if line)
    return Reply(int(parts[1]), {name.strip().lower(): value.strip() for name, _, value in fields})


async def _read_body(reader: asyncio.StreamReader, reply: Reply) -> bytes:
    """The body of a refusal, a few lines of JSON; the first chunk is enough."""
    length = reply.headers.get(b"content-length", b"")
    try:
        if b"chunked" in reply.headers.get(b"transfer-encoding", b""):
            length = str(int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)).encode()
        if length.isdigit():
            return await reader.readexactly(min(int(length), _HEAD_LIMIT))
        return await reader.read(_HEAD_LIMIT)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, OSError):
        return b""  # the status is enough
