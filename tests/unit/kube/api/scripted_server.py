"""A server on loopback that answers each request with the next bytes of a script, over plain HTTP.

It does not prove what a real API server does: how it frames, when it closes, TLS, or whether our requests are valid.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from hodei.kube.api.client import Access, Api

Answer = bytes | Callable[[asyncio.StreamWriter], object]


def answer(status: int, body: bytes = b"{}", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


CLOSE = b""
"""The connection is closed without an answer."""


class Server:
    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.requests: list[bytes] = []
        self.connections = 0
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                self.requests.append(head + await reader.readexactly(length))
                next_answer = self.answers.pop(0)
                if callable(next_answer):
                    pending = next_answer(writer)
                    if asyncio.iscoroutine(pending):
                        await pending
                    continue
                if next_answer == CLOSE:
                    break
                writer.write(next_answer)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def server(*answers: Answer) -> AsyncIterator[Server]:
    scripted = Server(list(answers))
    listener = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.port = listener.sockets[0].getsockname()[1]
    try:
        yield scripted
    finally:
        listener.close()
        for writer in scripted.writers:
            writer.close()


@contextlib.asynccontextmanager
async def connected(scripted: Server, token_file: Path | None = None, path: str = "") -> AsyncIterator[Api]:
    access = Access(server=f"http://127.0.0.1:{scripted.port}{path}", token_file=str(token_file or ""))
    api = await Api.connect(access, probe=False, connections=4)
    try:
        yield api
    finally:
        await api.close()
