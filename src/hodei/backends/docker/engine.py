"""The API of one Docker daemon: requests with a time limit, and errors that say whether a retry can help."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import msgspec

from hodei.backends.docker.settings import Host
from hodei.http_client import Connection, Origin, Pool, Reply, Unreached, encode_request
from hodei.model.errors import BackendError

# ---------------------------------------------------------------------------------------------- tunnel
# A Docker host behind ssh: one ssh process forwards a socket in a private directory to the remote socket.


REMOTE_SOCKET = "/var/run/docker.sock"
CONNECT_S = 8


def ssh_command(host: Host, near: Path) -> list[str]:
    url = urlsplit(host.url)
    far = unquote(url.path) if len(url.path) > 1 else REMOTE_SOCKET
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "ConnectTimeout": str(CONNECT_S),
        "ExitOnForwardFailure": "yes",
        "StreamLocalBindMask": "0177",
        "StreamLocalBindUnlink": "yes",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "ControlMaster": "no",
        "ControlPath": "none",
        "PermitLocalCommand": "no",
        "ForwardAgent": "no",
    }
    if host.known_hosts:
        options |= {"UserKnownHostsFile": host.known_hosts, "GlobalKnownHostsFile": "/dev/null"}
    if host.ssh_key:
        options |= {"IdentityFile": host.ssh_key, "IdentitiesOnly": "yes"}
    command = ["ssh", "-N", "-T"]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    command += ["-L", f"{near}:{far}"]
    if url.port:
        command += ["-p", str(url.port)]
    if url.username:
        command += ["-l", unquote(url.username)]
    return [*command, "--", url.hostname or ""]


class Tunnel:
    """`open` creates the local socket; the next `open` restarts an ssh that has died."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._place = ""
        self._ssh: asyncio.subprocess.Process | None = None

    @property
    def socket(self) -> Path:
        if not self._place:
            self._place = tempfile.mkdtemp(prefix="hodei-ssh-")  # 0700, ours alone
        return Path(self._place) / "docker.sock"

    async def open(self) -> None:
        if self._ssh is not None and self._ssh.returncode is None:
            return
        near = self.socket
        with contextlib.suppress(FileNotFoundError):
            near.unlink()
        try:
            self._ssh = await asyncio.create_subprocess_exec(
                *ssh_command(self._host, near),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise BackendError(f"ssh cannot be started: {error.strerror}", hint="install openssh-client") from None
        for _ in range(CONNECT_S * 20 + 20):
            if near.exists():
                return
            if self._ssh.returncode is not None:
                break
            await asyncio.sleep(0.05)
        words = await self._last_words()
        await self._end()
        raise BackendError(
            f"ssh to {self._host.name} failed: {words or 'no answer'}",
            hint=f"see what `ssh {urlsplit(self._host.url).hostname}` says; its host key must be in known_hosts",
        )

    async def _last_words(self) -> str:
        if self._ssh is None or self._ssh.stderr is None or self._ssh.returncode is None:
            return ""
        said = (await self._ssh.stderr.read(4096)).decode(errors="replace").strip().splitlines()
        return "; ".join(said[-2:])[:300]

    async def _end(self) -> None:
        if self._ssh is not None and self._ssh.returncode is None:
            self._ssh.kill()
            await self._ssh.wait()
        self._ssh = None

    async def close(self) -> None:
        await self._end()
        if self._place:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place = ""


# ----------------------------------------------------------------------------------------------------

ANSWER_S = 20.0
# Under load a daemon is slow to create a container; pings detect one that hangs.
WORK_S = 60.0
CONNECTIONS = 64
# Statuses of a proxy whose daemon did not answer.
_GATEWAY = (502, 503, 504)


class DaemonError(BackendError):
    """The daemon refused, with its HTTP status; 0 without an answer. `sent`: the daemon may have received the request."""

    def __init__(self, status: int, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.status, self.sent = status, sent

    @property
    def unknown(self) -> bool:
        """The daemon may have done it, or may do it later."""
        return self.sent and (self.status == 0 or self.status in _GATEWAY)


class Response:
    """The head of an answer; iterate to read its body in pieces."""

    def __init__(self, connection: Connection, reply: Reply) -> None:
        self._connection, self.status = connection, reply.status
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reply.headers.items()}

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunks in self._connection.chunks(quiet_s=0):
            yield b"".join(chunks)

    async def lines(self) -> AsyncIterator[bytes]:
        rest = b""
        async for chunk in self:
            *complete, rest = (rest + chunk).split(b"\n")
            for line in complete:
                yield line
        yield rest


class Engine:
    """One daemon. Every request has a time limit; connections are opened on demand."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._pool: Pool | None = None
        self._tunnel: Tunnel | None = None
        self._version = ""

    async def open(self, within_s: float = ANSWER_S) -> None:
        """Prepare the connection and learn the API version of the daemon; DaemonError or BackendError if that fails."""
        if self._pool is None:
            self._pool = Pool(self._origin(), CONNECTIONS)
        if self._tunnel is not None:
            await self._tunnel.open()
        self._version = ""  # it may be another daemon now
        self._version = str((await self.ask_json("GET", "version", within_s=within_s)).get("ApiVersion", ""))

    def _origin(self) -> Origin:
        url = urlsplit(self.host.url)
        if url.scheme == "unix":
            return Origin(unix=url.path)
        if url.scheme == "ssh":
            self._tunnel = Tunnel(self.host)
            return Origin(unix=str(self._tunnel.socket))
        tls = _trust(Path(self.host.tls)) if self.host.tls else None
        return Origin(url.hostname or "", url.port or (443 if tls else 80), tls)

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._tunnel is not None:
            await self._tunnel.close()
            self._tunnel = None

    def _encode(
        self, method: str, path: str, params: dict[str, str] | None, body: Any, headers: dict[str, str] | None
    ) -> tuple[Pool, bytes]:
        if self._pool is None:
            raise DaemonError(0, f"{self.host.name} is not connected", sent=False)
        target = f"/v{self._version}/{path}" if self._version else f"/{path}"
        if params:
            target = f"{target}?{urlencode(params, quote_via=quote)}"
        headers = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        return self._pool, encode_request(self._pool.origin, method, target, headers, body)

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
    ) -> AsyncIterator[Response]:
        """A response that is read in pieces. `within_s` bounds all of it; None: only its head."""
        pool, data = self._encode(method, path, params, body, headers)
        try:
            async with asyncio.timeout(within_s):
                connection, reply = await pool.stream(data, within_s or ANSWER_S)
                try:
                    response = Response(connection, reply)
                    if reply.status >= 400:
                        reply.body = b"".join([chunk async for chunk in response])
                        raise self._refusal(method, path, reply)
                    yield response
                finally:
                    pool.drop(connection)
        except TimeoutError:
            raise DaemonError(0, f"{self.host.name} did not answer within {within_s or ANSWER_S:g} s") from None
        except Unreached as failure:
            raise self._unreached(failure) from None

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
        """The complete answer."""
        pool, data = self._encode(method, path, params, body, headers)
        try:
            reply = await pool.exchange(method, data, within_s)
        except Unreached as failure:
            raise self._unreached(failure) from None
        if reply.status >= 400:
            raise self._refusal(method, path, reply)
        return reply.body

    async def ask_json(self, method: str, path: str, **how: Any) -> Any:
        return msgspec.json.decode(await self.ask(method, path, **how))

    def _refusal(self, method: str, path: str, reply: Reply) -> DaemonError:
        try:
            message = str(msgspec.json.decode(reply.body)["message"])
        except (msgspec.DecodeError, KeyError, TypeError):
            message = reply.body[:500].decode(errors="replace") or f"{method} {path}: HTTP status {reply.status}"
        return DaemonError(reply.status, f"{self.host.name}: {message.strip()}")

    def _unreached(self, failure: Unreached) -> DaemonError:
        return DaemonError(0, f"{self.host.name} did not answer: {failure.why}", sent=failure.sent)

    async def container(self, name: str) -> dict[str, Any] | None:
        """What `docker inspect` shows; None without such a container."""
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
            async for line in response.lines():
                if line.strip():
                    yield msgspec.json.decode(line)


def _trust(place: Path) -> ssl.SSLContext:
    """Mutual TLS, as Docker requires."""
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(place / "ca.pem"))
        context.load_cert_chain(place / "cert.pem", place / "key.pem")
    except (OSError, ssl.SSLError) as error:
        raise BackendError(
            f"the certificates in {place} cannot be used: {error}", hint="it needs ca.pem, cert.pem and key.pem"
        ) from None
    return context
