"""The API of one Docker daemon: requests with a timeout, a tunnel over ssh, and a connection that survives outages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import ssl
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import msgspec

from hodei.backends.docker.settings import Host
from hodei.http_client import Connection, Origin, Pool, Reply, Unreached, encode_request
from hodei.model.errors import NOT_REACHED, BackendError

log = logging.getLogger("hodei.docker")

REMOTE_SOCKET = "/var/run/docker.sock"
CONNECT_S = 8


def ssh_command(host: Host, local_socket: Path) -> list[str]:
    url = urlsplit(host.url)
    remote_socket = unquote(url.path) if len(url.path) > 1 else REMOTE_SOCKET
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
    command += ["-L", f"{local_socket}:{remote_socket}"]
    if url.port:
        command += ["-p", str(url.port)]
    if url.username:
        command += ["-l", unquote(url.username)]
    return [*command, "--", url.hostname or ""]


class Tunnel:
    """A Docker host behind ssh, which forwards a socket in a private directory. `open` restarts a dead ssh."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._directory = ""
        self._ssh: asyncio.subprocess.Process | None = None

    @property
    def socket(self) -> Path:
        if not self._directory:
            self._directory = tempfile.mkdtemp(prefix="hodei-ssh-")  # 0700
        return Path(self._directory) / "docker.sock"

    async def open(self) -> None:
        if self._ssh is not None and self._ssh.returncode is None:
            return
        local_socket = self.socket
        local_socket.unlink(missing_ok=True)
        try:
            self._ssh = await asyncio.create_subprocess_exec(
                *ssh_command(self._host, local_socket),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise BackendError(f"ssh cannot be started: {error.strerror}", hint="install openssh-client") from None
        for _ in range(CONNECT_S * 20 + 20):
            if local_socket.exists():
                return
            if self._ssh.returncode is not None:
                break
            await asyncio.sleep(0.05)
        output = await self._error_output()
        await self._kill()
        raise BackendError(
            f"ssh to {self._host.name} failed: {output or 'no answer'}",
            hint=f"try `ssh {urlsplit(self._host.url).hostname}`; its host key must be in known_hosts",
        )

    async def _error_output(self) -> str:
        if self._ssh is None or self._ssh.stderr is None or self._ssh.returncode is None:
            return ""
        lines = (await self._ssh.stderr.read(4096)).decode(errors="replace").strip().splitlines()
        return "; ".join(lines[-2:])[:300]

    async def _kill(self) -> None:
        if self._ssh is not None and self._ssh.returncode is None:
            self._ssh.kill()
            await self._ssh.wait()
        self._ssh = None

    async def close(self) -> None:
        await self._kill()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = ""


REQUEST_TIMEOUT_S = 20.0
# For requests that create or remove a container: slow under load. Pings detect a daemon that hangs.
CHANGE_TIMEOUT_S = 60.0
CONNECTIONS = 64
# Statuses of a proxy whose daemon did not answer.
_GATEWAY = (502, 503, 504)


class DaemonError(BackendError):
    """An error answer with its HTTP status; 0 without an answer. `sent`: the daemon may have received the request."""

    def __init__(self, status: int, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.status, self.sent = status, sent

    @property
    def unknown(self) -> bool:
        """The daemon may have done it, or may do it later."""
        return self.sent and (self.status == 0 or self.status in _GATEWAY)


class Response:
    """The head of an answer; iterate to read its body in chunks."""

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
    """One daemon. Every request has a timeout; connections are opened on demand."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._pool: Pool | None = None
        self._tunnel: Tunnel | None = None
        self._version = ""

    async def open(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Open the tunnel and negotiate the API version; DaemonError or BackendError if that fails."""
        if self._pool is None:
            self._pool = Pool(self._origin(), CONNECTIONS)
        if self._tunnel is not None:
            await self._tunnel.open()
        self._version = ""  # it may be another daemon now
        self._version = str((await self.request_json("GET", "version", timeout_s=timeout_s)).get("ApiVersion", ""))

    def _origin(self) -> Origin:
        url = urlsplit(self.host.url)
        if url.scheme == "unix":
            return Origin(unix=url.path)
        if url.scheme == "ssh":
            self._tunnel = Tunnel(self.host)
            return Origin(unix=str(self._tunnel.socket))
        tls = _tls_context(Path(self.host.tls)) if self.host.tls else None
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
    async def stream(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | None = None,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = REQUEST_TIMEOUT_S,
    ) -> AsyncIterator[Response]:
        """A response that is read in chunks. `timeout_s` bounds all of it; None: only its head."""
        pool, data = self._encode(method, path, params, body, headers)
        try:
            async with asyncio.timeout(timeout_s):
                connection, reply = await pool.stream(data, timeout_s or REQUEST_TIMEOUT_S)
                try:
                    response = Response(connection, reply)
                    if reply.status >= 400:
                        reply.body = b"".join([chunk async for chunk in response])
                        raise self._refusal(method, path, reply)
                    yield response
                finally:
                    pool.drop(connection)
        except TimeoutError:
            raise DaemonError(
                0, f"{self.host.name} did not answer within {timeout_s or REQUEST_TIMEOUT_S:g} s"
            ) from None
        except Unreached as failure:
            raise self._unreached(failure) from None

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | None = None,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> bytes:
        """The body of the answer."""
        pool, data = self._encode(method, path, params, body, headers)
        try:
            reply = await pool.exchange(method, data, timeout_s)
        except Unreached as failure:
            raise self._unreached(failure) from None
        if reply.status >= 400:
            raise self._refusal(method, path, reply)
        return reply.body

    async def request_json(self, method: str, path: str, **how: Any) -> Any:
        return msgspec.json.decode(await self.request(method, path, **how))

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
            found: dict[str, Any] = await self.request_json("GET", f"containers/{name}/json")
        except DaemonError as error:
            if error.status == 404:
                return None
            raise
        return found

    async def json_lines(
        self, path: str, params: dict[str, str], opened: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[Any, None]:
        """The JSON lines of an endless answer; `opened` is called when it has begun."""
        async with self.stream("GET", path, params=params, timeout_s=None) as response:
            opened()
            async for line in response.lines():
                if line.strip():
                    yield msgspec.json.decode(line)


def _tls_context(directory: Path) -> ssl.SSLContext:
    """Mutual TLS, as Docker requires."""
    try:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(directory / "ca.pem"))
        context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    except (OSError, ssl.SSLError) as error:
        raise BackendError(
            f"the certificates in {directory} cannot be used: {error}", hint="it needs ca.pem, cert.pem and key.pem"
        ) from None
    return context


PING_EVERY_S = 2.0
RETRY_MAX_S = 2.0
# A daemon that answers a ping later than this may have been suspended.
LATE_PING_S = 1.0
# For so long afterwards its events may be late.
BEHIND_S = 5.0
# How long a start waits for a silent host, unless the run may have started there.
REACH_TIMEOUT_S = 10.0
# Smaller differences between clocks are ignored.
SKEW_MS = 1000
EVENTS = ["create", "start", "die", "destroy", "health_status", "health_status: healthy", "health_status: unhealthy"]


class DaemonConnection:
    """`up` while the daemon answers; `problem` says why it does not; `tried` once it is known either way.

    `on_event` gets each event of containers with all of `labels`; `resync` is called after every outage, before `up` is set;
    `on_change` when `up` changes.
    """

    def __init__(
        self,
        engine: Engine,
        labels: list[str],
        answer_s: float,
        now_ms: Callable[[], int],
        *,
        on_event: Callable[[dict[str, Any]], None],
        resync: Callable[[], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self._engine, self._labels, self._answer_s, self._now_ms = engine, labels, answer_s, now_ms
        self._on_event, self._resync, self._on_change = on_event, resync, on_change
        self.up, self.tried = asyncio.Event(), asyncio.Event()
        self.ever_up = False
        self.problem = "not connected yet"
        self.info: dict[str, Any] = {}
        self.skew_ms = 0
        self.silent_since_ms = 0
        self._silent_since_s = self._answered_s = self._behind_until_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self._engine.host.name

    def begin(self) -> None:
        if self._task is None:
            self._note_silence()
            self._task = asyncio.create_task(self._run(), name=f"docker host {self.name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self.up.clear()
        self.tried.clear()
        self.problem = "the backend is not open"

    def silent_for_s(self) -> float:
        return 0.0 if self.up.is_set() else asyncio.get_running_loop().time() - self._silent_since_s

    @property
    def is_prompt(self) -> bool:
        """It has answered without a pause, so its events are not late."""
        now = asyncio.get_running_loop().time()
        return self.up.is_set() and now - self._answered_s < PING_EVERY_S + LATE_PING_S and now > self._behind_until_s

    def mark_silent(self, problem: str) -> None:
        """A request got no answer."""
        was_up, last_problem = self.up.is_set(), self.problem
        self.up.clear()
        self.problem = problem
        if was_up:
            self._note_silence()
        if was_up or last_problem != problem:
            log.warning("docker host %s: %s", self.name, problem)
            self._on_change()

    async def wait_reachable(self) -> None:
        """Wait for a silent daemon; BackendError with NOT_REACHED after a while."""
        if self.up.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(self._answer_s * 4, REACH_TIMEOUT_S)):
                await self.up.wait()
                return
        raise BackendError(self.problem, hint="it starts elsewhere, or when the host is back", code=NOT_REACHED)

    async def ping(self) -> str:
        """The daemon's version."""
        if self._task is None:
            raise BackendError("the backend is not open")
        await self._engine.request("GET", "_ping", timeout_s=self._answer_s)
        return str(self.info.get("ServerVersion", ""))

    async def _run(self) -> None:
        pause_s = 0.1
        while True:
            try:
                await self._session()
            except BackendError as error:
                self.mark_silent(error.message)
            except Exception as error:
                log.exception("docker host %s", self.name)
                self.mark_silent(f"{self.name}: {type(error).__name__}: {error}")
            self.tried.set()
            if self.silent_for_s() < 1:
                pause_s = 0.1
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def _session(self) -> None:
        """Runs until the connection breaks, and always raises."""
        await self._engine.open(self._answer_s)
        before = self._now_ms()
        self.info = await self._engine.request_json("GET", "info", timeout_s=self._answer_s)
        self._set_skew(before)
        listening = asyncio.Event()
        events = asyncio.create_task(self._listen(listening), name=f"events of {self.name}")
        opened = asyncio.create_task(listening.wait())
        try:
            # Subscribe before listing, so that no event is missed in between.
            await asyncio.wait({events, opened}, timeout=self._answer_s, return_when=asyncio.FIRST_COMPLETED)
            if events.done():
                events.result()
            if not listening.is_set():
                raise DaemonError(0, f"{self.name} does not send events")
            await self._resync()
            self._mark_up()
            while True:
                await asyncio.wait({events}, timeout=PING_EVERY_S)
                if events.done():
                    events.result()
                    raise DaemonError(0, f"{self.name} closed the stream of events")
                await self._ping()
        finally:
            opened.cancel()
            events.cancel()
            await asyncio.gather(events, opened, return_exceptions=True)

    async def _ping(self) -> None:
        try:
            await self._engine.request("GET", "_ping", timeout_s=self._answer_s)
        except DaemonError as error:
            self.mark_silent(error.message)
            return
        self._note_answer()
        if not self.up.is_set():
            await self._resync()
            self._mark_up()

    async def _listen(self, listening: asyncio.Event) -> None:
        filters = {"type": ["container"], "event": EVENTS, "label": self._labels}
        params = {"filters": msgspec.json.encode(filters).decode()}
        async for event in self._engine.json_lines("events", params, listening.set):
            self._on_event(event)

    def _note_answer(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._answered_s > PING_EVERY_S + LATE_PING_S or not self.up.is_set():
            self._behind_until_s = now + BEHIND_S
        self._answered_s = now

    def _mark_up(self) -> None:
        self._note_answer()
        if not self.up.is_set():
            self.problem, self.ever_up = "", True
            self.up.set()
            self.tried.set()
            self._on_change()

    def _note_silence(self) -> None:
        self._silent_since_s, self.silent_since_ms = asyncio.get_running_loop().time(), self._now_ms()

    def _set_skew(self, requested_ms: int) -> None:
        at = parse_time_ms(str(self.info.get("SystemTime", "")))
        ahead = at - (requested_ms + self._now_ms()) // 2 if at else 0
        self.skew_ms = ahead if abs(ahead) >= SKEW_MS else 0


async def container_stats(engine: Engine, container: str) -> dict[str, Any] | None:
    """None for a container that has just ended."""
    params = {"stream": "0", "one-shot": "1"}
    try:
        stats: dict[str, Any] = await engine.request_json(
            "GET", f"containers/{container}/stats", params=params, timeout_s=8
        )
    except DaemonError as error:
        if error.status:
            return None
        raise
    return stats


def parse_time_ms(text: str, skew_ms: int = 0) -> int:
    """0 for Docker's "never", which is the year 1. `skew_ms`: how far the host's clock is ahead of ours."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return 0
    return 0 if at.year <= 1970 else int(at.timestamp() * 1000) - skew_ms
