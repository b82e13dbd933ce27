"""The conversation with one Docker daemon: a question with a bound, an answer or an error that says whether asking again
can help. The only file that knows the client library.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiodocker
import aiohttp
import msgspec

from hodei.backends.docker.settings import Host
from hodei.backends.docker.tunnel import Tunnel
from hodei.model.errors import BackendError

ANSWER_S = 20.0
# Under load a daemon takes its time to make a container; a hanging one is noticed by other means.
WORK_S = 60.0
CONNECTIONS = 64
# What the library says when there was no answer at all.
_NOT_REACHED = 900


# What a proxy before a daemon says that does not answer in time, or not at all.
_GATEWAY = (502, 503, 504)


class DaemonError(BackendError):
    """The daemon's own no, with its HTTP status; 0 if nobody answered. `sent`: the daemon may have got the request."""

    def __init__(self, status: int, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.status, self.sent = status, sent

    @property
    def unknown(self) -> bool:
        """Whether the daemon may have done it, or may do it later."""
        return self.sent and (self.status == 0 or self.status in _GATEWAY)


class Engine:
    """One daemon. Every call ends within its bound; connections are made when they are needed."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._client: aiodocker.Docker | None = None
        self._tunnel: Tunnel | None = None

    async def open(self) -> None:
        """Have all that the first question needs; DaemonError or BackendError if that can not be had."""
        if self._tunnel is not None:
            await self._tunnel.open()
        if self._client is not None:
            return
        url = urlsplit(self.host.url)
        connector: aiohttp.BaseConnector
        if url.scheme == "unix":
            connector, base = aiohttp.UnixConnector(url.path, limit=CONNECTIONS), "unix://localhost"
        elif url.scheme == "ssh":
            self._tunnel = Tunnel(self.host)
            await self._tunnel.open()
            connector = aiohttp.UnixConnector(str(self._tunnel.socket), limit=CONNECTIONS)
            base = "unix://localhost"
        else:
            trust = _trust(Path(self.host.tls)) if self.host.tls else None
            connector = aiohttp.TCPConnector(ssl=trust if trust is not None else True, limit=CONNECTIONS)
            base = f"{'https' if trust else 'http'}://{url.netloc}"
        session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=ANSWER_S))
        self._client = aiodocker.Docker(url=base, connector=connector, session=session)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.session.close()
            await self._client.close()
            self._client = None
        if self._tunnel is not None:
            await self._tunnel.close()
            self._tunnel = None

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | None = None,
        body: Any = None,
        headers: dict[str, str] | None = None,
        within_s: float | None = ANSWER_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response, for those who read it bit by bit. `within_s` None: however long it takes."""
        if self._client is None:
            raise DaemonError(0, f"{self.host.name} is not connected", sent=False)
        data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        bound = aiohttp.ClientTimeout(total=within_s, connect=min(within_s or ANSWER_S, ANSWER_S))
        try:
            query = self._client._query(path, method, params=params, data=data, headers=headers, timeout=bound)
            async with asyncio.timeout(within_s):  # before its first question the library asks one of its own
                response = await query.__aenter__()
            try:
                yield response
            finally:
                response.close()  # one that was read to its end has given its connection back already
        except aiodocker.DockerError as error:
            status = 0 if error.status == _NOT_REACHED else error.status
            sent = not isinstance(error.__context__, aiohttp.ClientConnectorError)
            raise DaemonError(status, f"{self.host.name}: {error.message.strip()}", sent=sent) from None
        except json.JSONDecodeError:
            # The library wants to read the text of an error, and the answer to HEAD has none.
            raise DaemonError(400, f"{self.host.name}: {method} {path} was refused") from None
        except TimeoutError as error:
            sent = not isinstance(error, aiohttp.ConnectionTimeoutError)
            raise DaemonError(0, f"{self.host.name} did not answer within {within_s:g} s", sent=sent) from None
        except (aiohttp.ClientError, OSError) as error:
            raise DaemonError(0, f"{self.host.name} is out of reach: {error}") from None

    async def ask(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | None = None,
        body: Any = None,
        headers: dict[str, str] | None = None,
        within_s: float = ANSWER_S,
    ) -> bytes:
        """The whole answer."""
        async with self.answer(method, path, params=params, body=body, headers=headers, within_s=within_s) as response:
            return await response.read()

    async def ask_json(self, method: str, path: str, **how: Any) -> Any:
        return msgspec.json.decode(await self.ask(method, path, **how))

    async def container(self, name: str) -> dict[str, Any] | None:
        """All that is known of it; None if it is not there."""
        try:
            found: dict[str, Any] = await self.ask_json("GET", f"containers/{name}/json")
        except DaemonError as error:
            if error.status == 404:
                return None
            raise
        return found

    async def lines(
        self, path: str, params: dict[str, str], opened: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[Any, None]:
        """Each JSON line of an endless answer; `opened` is called when it has begun."""
        async with self.answer("GET", path, params=params, within_s=None) as response:
            opened()
            rest = b""
            async for chunk in response.content.iter_any():
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    if line.strip():
                        yield msgspec.json.decode(line)


def _trust(place: Path) -> ssl.SSLContext:
    """Both sides show who they are, as Docker wants it."""
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(place / "ca.pem"))
        context.load_cert_chain(place / "cert.pem", place / "key.pem")
    except (OSError, ssl.SSLError) as error:
        raise BackendError(
            f"the certificates in {place} cannot be used: {error}", hint="it needs ca.pem, cert.pem and key.pem"
        ) from None
    return context
