"""Plain HTTP with JSON to a slurmrestd, over a unix socket or TCP, on connections that are kept.

The standard library has no asynchronous client, and slurmrestd wants little of one: it must be spoken to with keep-alive
(it garbles the answer to `Connection: close`), and always tells a length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import urlsplit

from hodei.backends.hpc.ports import Doubtful
from hodei.model.errors import NOT_REACHED, BackendError

AT_ONCE = 4
CONNECT_TIMEOUT_S = 5.0
# One that was in use so shortly ago has not been closed for being idle.
FRESH_S = 1.0
_LIMIT = 1 << 16
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RestLink:
    """`address`: unix:/path, http://host:port or https://host:port."""

    def __init__(self, address: str) -> None:
        self._path = address.removeprefix("unix:").removeprefix("//") if address.startswith("unix:") else ""
        url = urlsplit("" if self._path else address)
        self._host, self._tls = url.hostname or "localhost", url.scheme == "https"
        self._port = url.port or (443 if self._tls else 6820)
        self._idle: list[tuple[float, _Connection]] = []
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._address = address

    async def ask(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        timeout_s: float,
        once: bool = False,
    ) -> tuple[int, bytes]:
        """Status and body. BackendError if it is out of reach. `once`: it must not be asked twice, and Doubtful says that
        it may have heard."""
        async with self._slots:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._ask(method, path, headers, body, once)
            except TimeoutError:
                error = f"slurmrestd did not answer within {timeout_s:g} s"
            except (OSError, EOFError, ValueError) as problem:
                error = f"slurmrestd at {self._address}: {problem or type(problem).__name__}"
            if once:
                raise Doubtful(error)
            raise BackendError(error, hint="is slurmrestd up? see docs/how-to/slurm.md")

    async def _ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, once: bool
    ) -> tuple[int, bytes]:
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._host}",
            "Connection: keep-alive",
            "Accept: application/json",
        ]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = "\r\n".join((*lines, "", "")).encode() + body
        # One that was idle may have been closed at the other end: harmless to find out, unless it must not be asked twice.
        while self._idle:
            since_s, connection = self._idle.pop()
            if once and asyncio.get_running_loop().time() - since_s > FRESH_S:
                connection[1].close()
                continue
            try:
                return await self._speak(connection, request)
            except (OSError, EOFError):
                if once:
                    raise
        try:
            connection = await self._connect()
        except (OSError, TimeoutError) as error:
            raise BackendError(
                f"slurmrestd at {self._address} is out of reach: {error or 'no answer'}",
                hint="is slurmrestd up?",
                code=NOT_REACHED,
            ) from None
        return await self._speak(connection, request)

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if self._path:
                return await asyncio.open_unix_connection(self._path, limit=_LIMIT)
            return await asyncio.open_connection(self._host, self._port, ssl=self._tls or None, limit=_LIMIT)

    async def _speak(self, connection: _Connection, request: bytes) -> tuple[int, bytes]:
        reader, writer = connection
        keep = False
        try:
            writer.write(request)
            await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split(" ")[1])
            fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            body = await reader.readexactly(int(fields.get("content-length", "0")))
            keep = fields.get("connection", "").lower() != "close"
            return status, body
        finally:
            if keep and len(self._idle) < AT_ONCE:
                self._idle.append((asyncio.get_running_loop().time(), connection))
            else:
                writer.close()

    async def close(self) -> None:
        while self._idle:
            self._idle.pop()[1][1].close()
