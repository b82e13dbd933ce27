"""A small HTTP client for one server: JSON requests over a kept connection, TLS with an own CA, proxies by CONNECT."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import os
import ssl
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

CONNECT_TIMEOUT_S = 15.0
HEAD_LIMIT = 64 << 10
BODY_LIMIT = 64 << 20


class BadUrl(ValueError):
    """The address of the server cannot be used; the message says why."""


class Unreachable(Exception):
    """There is no complete answer. `connected`: the connection was established, and then lost."""

    def __init__(self, text: str, *, connected: bool) -> None:
        super().__init__(text)
        self.connected = connected


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]

    @property
    def code(self) -> str:
        return str(self.body.get("code", ""))

    @property
    def message(self) -> str:
        hint = self.body.get("hint")
        return f"{self.body.get('message', f'HTTP {self.status}')}" + (f"; {hint}" if hint else "")


class Address(NamedTuple):
    """Of the server. `context` is None for plain HTTP; `proxy` is (host, port, authorization), or None."""

    host: str
    port: int
    path: str
    context: ssl.SSLContext | None
    proxy: tuple[str, int, str] | None

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.context else 80) else f"{host}:{self.port}"


def server_address(url: str, *, ca: str = "", insecure: bool = False) -> Address:
    """BadUrl for plain HTTP beyond loopback, unless `insecure`. OSError if the CA file cannot be read."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise BadUrl(f"{url!r} is not a URL") from None
    if parts.scheme not in ("http", "https") or not host:
        raise BadUrl(f"{url!r} is not the address of a server; write https://NAME:PORT")
    if parts.scheme == "http" and not insecure and not _is_loopback(host):
        raise BadUrl(
            "plain HTTP would send the credential unencrypted; use https, or --insecure in a protected network"
        )
    context = ssl.create_default_context(cafile=ca or None) if parts.scheme == "https" else None
    port = port or (443 if context else 80)
    return Address(host, port, parts.path.rstrip("/"), context, _proxy(host, port) if context else None)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _proxy(host: str, port: int) -> tuple[str, int, str] | None:
    found = os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY") or ""
    skip = {"no": os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""}
    if not found or proxy_bypass_environment(f"{host}:{port}", skip):
        return None
    parts = urlsplit(found if "://" in found else f"http://{found}")
    if parts.scheme != "http" or not parts.hostname:
        raise BadUrl(f"https_proxy: only proxies of the form http://HOST:PORT are supported, not {parts.scheme}")
    login = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        login = "Basic " + base64.b64encode(pair.encode()).decode("ascii")
    return parts.hostname, parts.port or 3128, login


class HttpConnection:
    """One request at a time. A kept connection that the server has closed meanwhile is opened again once: every request of
    an agent may be repeated."""

    def __init__(self, address: Address, agent: str) -> None:
        self._address, self._agent = address, agent
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: dict[str, Any], secret: str, timeout_s: float) -> Answer:
        kept = self._writer is not None
        try:
            return await self._post(path, body, secret, timeout_s)
        except Unreachable:
            if not kept:
                raise
            return await self._post(path, body, secret, timeout_s)

    async def _post(self, path: str, body: dict[str, Any], secret: str, timeout_s: float) -> Answer:
        connected = False
        try:
            if self._writer is None:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    self._reader, self._writer = await self._connect()
            connected = True
            assert self._reader is not None
            assert self._writer is not None
            async with asyncio.timeout(timeout_s):
                data = json.dumps(body, separators=(",", ":")).encode()
                head = [
                    f"POST {self._address.path}{path} HTTP/1.1",
                    f"Host: {self._address.host_header}",
                    f"User-Agent: {self._agent}",
                    f"Authorization: Bearer {secret}",
                    "Content-Type: application/json",
                    f"Content-Length: {len(data)}",
                ]
                self._writer.write("\r\n".join((*head, "", "")).encode("latin-1") + data)
                await self._writer.drain()
                status, headers, content = await _read_answer(self._reader)
            if headers.get("connection", "").lower() == "close":
                self.close()
            return Answer(status, _decode(content))
        except (OSError, EOFError, TimeoutError, ssl.SSLError, ValueError, asyncio.LimitOverrunError) as error:
            self.close()
            text = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise Unreachable(text, connected=connected) from None
        except BaseException:
            self.close()  # cancelled in the middle of an answer
            raise

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._address
        if address.proxy is None:
            return await asyncio.open_connection(address.host, address.port, ssl=address.context, limit=HEAD_LIMIT)
        host, port, login = address.proxy
        reader, writer = await asyncio.open_connection(host, port, limit=HEAD_LIMIT)
        try:
            target = f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
            head = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
            head += [f"Proxy-Authorization: {login}"] if login else []
            writer.write("\r\n".join((*head, "", "")).encode("latin-1"))
            line = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0]
            if line.split()[1:2] != [b"200"]:
                raise OSError(f"the proxy {host}:{port} refuses: {line.decode('latin-1')[:100]}")
            assert address.context is not None
            await writer.start_tls(address.context, server_hostname=address.host)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    def close(self) -> None:
        writer, self._writer, self._reader = self._writer, None, None
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.transport.abort()


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    while True:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(lines[0].split()[1])
        if status >= 200:
            break
    headers = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return status, headers, await _read_chunks(reader)
    size = int(headers.get("content-length", "0"))
    if not 0 <= size <= BODY_LIMIT:
        raise ValueError("the answer is too long")
    return status, headers, await reader.readexactly(size)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    out = bytearray()
    while True:
        size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
        if size < 0 or len(out) + size > BODY_LIMIT:
            raise ValueError("the answer is too long")
        out += await reader.readexactly(size)
        if size == 0:
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
            return bytes(out)
        await reader.readexactly(2)


def _decode(content: bytes) -> dict[str, Any]:
    found = json.loads(content) if content else {}
    if not isinstance(found, dict):
        raise ValueError("the answer is not an object")
    return found
