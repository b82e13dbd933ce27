"""The server's side of the host agent: one connection (`Link`), and a supervisor that starts the agent and reconnects.

The protocol is described in `hodei.agent.service`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from hodei.model.errors import BackendError, StaleEpoch
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.usage import RunUsage
from hodei.process import DetachedProcess

LINE_LIMIT = 64 << 20


class Observation(Struct):
    """The state of a run as the agent sends it; the fields are those of RunObserved."""

    run: str
    state: str
    at_ms: int
    exit_code: int | None = None
    reason_code: str = ""
    reason: str = ""
    checkpoint_ms: int = 0
    health: str = ""
    checkpoint_error: str = ""
    started_ms: int = 0
    usage: RunUsage | None = None

    def to_fact(self) -> RunObserved:
        return RunObserved(
            self.run,
            self.state,  # type: ignore[arg-type]
            self.at_ms,
            self.exit_code,
            self.reason_code,
            self.reason,
            checkpoint_ms=self.checkpoint_ms,
            health=self.health,  # type: ignore[arg-type]
            checkpoint_error=self.checkpoint_error,
            started_ms=self.started_ms,
            usage=self.usage,
        )


class Message(Struct):
    """One line from the agent: an answer (`id`) or observations."""

    id: int | None = None
    ok: msgspec.Raw = msgspec.Raw(b"")
    error: str = ""
    code: str = ""
    observations: list[Observation] = []


OnObservations = Callable[[list[Observation]], None]


class Link(asyncio.Protocol):
    """One connection, until it breaks (`closed`). `last_message_s`: of the agent's last message, on the loop's clock."""

    def __init__(self, on_observations: OnObservations) -> None:
        self.closed = asyncio.Event()
        self.last_message_s = asyncio.get_running_loop().time()
        self._on_observations = on_observations
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._last_id = 0
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(Message).decode

    @classmethod
    async def connect(cls, home: Path, on_observations: OnObservations) -> Link:
        """OSError if no agent listens."""
        path = str(home / "agent.sock")
        with contextlib.suppress(FileNotFoundError):
            path = (home / "agent.addr").read_text().strip()
        _, link = await asyncio.get_running_loop().create_unix_connection(lambda: cls(on_observations), path)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(
                    BackendError("the host agent closed the connection", hint="it is restarted automatically")
                )
        self._pending.clear()

    def data_received(self, data: bytes) -> None:
        self.last_message_s = asyncio.get_running_loop().time()
        self._buffer += data
        if b"\n" not in data:
            if len(self._buffer) > LINE_LIMIT:
                self.close()
            return
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            try:
                message = self._decode(line)
            except msgspec.MsgspecError:
                self.close()  # the other side does not speak the agent's protocol
                return
            if message.observations:
                self._on_observations(message.observations)
            elif message.id is not None and (future := self._pending.pop(message.id, None)) and not future.done():
                future.set_result(message)

    async def request(self, op: str, *, timeout_s: float | None = 60, **fields: Any) -> msgspec.Raw:
        """The agent's answer; without `timeout_s` for as long as the link holds. StaleEpoch if a newer server has taken
        over, else BackendError if the agent refuses or closes the connection."""
        if self._transport is None or self.closed.is_set():
            raise BackendError("the host agent is out of reach")
        self._last_id += 1
        number = self._last_id
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        self._transport.write(self._encode({"id": number, "op": op, **fields}) + b"\n")
        try:
            message = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise BackendError(f"the host agent did not answer within {timeout_s:g} s") from None
        finally:
            self._pending.pop(number, None)
        if message.error:
            if message.code == "STALE_EPOCH":
                raise StaleEpoch(message.error)
            raise BackendError(message.error, code=message.code)
        return message.ok

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self.closed.set()


START_TIMEOUT_S = 15.0
RECONNECT_MAX_S = 2.0
# The agent answers a ping in a millisecond, unless its disk is slow to sync.
PING_EVERY_S = 2.0
PING_TIMEOUT_S = 6.0
# Time to read what has already arrived, in case this process was suspended and not the agent.
CATCH_UP_S = 0.2


class _Hello(Struct):
    pid: int = 0


class _Page(Struct):
    runs: list[Observation]
    more: bool


class AgentSupervisor:
    """Keeps one host agent reachable: starts it when none runs, reconnects, and notices when it hangs.

    `on_observations` gets everything that the agent sends, and all its runs after each new connection; `on_outage` is called
    when the agent has exited or hangs, before it is back. `superseded`: a newer server has taken over, and nothing more will
    come. The agent exits after `linger_s` seconds without work, and keeps the output of forgotten runs for `keep_logs_s`.
    """

    def __init__(
        self,
        name: str,
        home: Path,
        installation: str,
        epoch: int,
        *,
        linger_s: float,
        keep_logs_s: float,
        on_observations: OnObservations,
        on_outage: Callable[[BackendError], None],
    ) -> None:
        self._name, self._home, self._installation, self._epoch = name, home, installation, epoch
        self._linger_s, self._keep_logs_s = linger_s, keep_logs_s
        self._on_observations, self._on_outage = on_observations, on_outage
        self.link: Link | None = None
        self.superseded: StaleEpoch | None = None
        self._unresponsive = ""
        self._pid = 0
        self._connected = asyncio.Event()
        self._agent: DetachedProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        if self._tasks:
            await self.responsive_link()
            return
        await self._connect()
        self._tasks = [
            asyncio.create_task(self._keep_connected(), name=f"{self._name}: reconnect to the agent"),
            asyncio.create_task(self._ping(), name=f"{self._name}: ping the agent"),
        ]

    async def _connect(self) -> None:
        """Connect to the agent, starting it if necessary, and receive the state of all runs."""
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        pause_s = 0.01
        while True:
            try:
                link = await Link.connect(self._home, self._on_observations)
                break
            except OSError as error:
                self._start_agent_unless_running()
                if asyncio.get_running_loop().time() > deadline:
                    raise self._error(f"the host agent does not start: {error}{self._last_log_line()}") from error
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)
        try:
            answer = await link.request(
                "hello", timeout_s=PING_TIMEOUT_S, installation=self._installation, epoch=self._epoch
            )
            self._pid = msgspec.json.decode(answer, type=_Hello).pid
            self._on_observations(await list_runs(link))
        except (BackendError, StaleEpoch):
            link.close()
            raise
        self.link = link
        self._connected.set()

    def _start_agent_unless_running(self) -> None:
        if self._agent is not None and self._agent.poll() is None:
            return
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        # If another agent already holds this home, the new one exits.
        self._agent = DetachedProcess(
            [
                *(sys.executable, "-m", "hodei.agent", "--home", str(self._home)),
                *("--linger", f"{self._linger_s:g}", "--keep-logs", f"{self._keep_logs_s:g}"),
            ],
            self._home / "agent.log",
        )

    def _last_log_line(self) -> str:
        try:
            lines = (self._home / "agent.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f"; the last line of its log: {lines[-1][:300]}" if lines else ""

    async def _keep_connected(self) -> None:
        pause_s = 0.05
        while True:
            if self.link is not None:
                await self.link.closed.wait()
                self._connected.clear()
                self.link = None
                self._on_outage(self._error("the host agent has exited; it is being restarted"))
            try:
                await self._connect()
                pause_s = 0.05
            except StaleEpoch as error:
                self.superseded = error
                self._connected.set()
                self._on_outage(BackendError(error.message))
                return
            except (BackendError, OSError):
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RECONNECT_MAX_S)

    async def _ping(self) -> None:
        """Detect an agent that hangs. The link is kept, so that an agent that continues gets its orders in order."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PING_EVERY_S)
            link = self.link
            if link is None:
                continue
            sent_s, ping = loop.time(), asyncio.ensure_future(link.request("ping", timeout_s=None))
            try:
                while not ping.done():
                    left_s = max(link.last_message_s, sent_s) + PING_TIMEOUT_S - loop.time()
                    if left_s > 0:
                        await asyncio.wait({ping}, timeout=left_s)
                        continue
                    await asyncio.wait({ping}, timeout=CATCH_UP_S)
                    silent = max(link.last_message_s, sent_s) + PING_TIMEOUT_S <= loop.time()
                    if not ping.done() and silent and not self._unresponsive:
                        self._connected.clear()
                        self._unresponsive = f"the host agent, process {self._pid}, does not answer"
                        self._on_outage(self._error(self._unresponsive))
                    await asyncio.wait({ping}, timeout=PING_TIMEOUT_S)
                ping.exception()  # a refusal is an answer too; `_keep_connected` handles the end of the link
            finally:
                ping.cancel()
            self._unresponsive = ""
            if self.link is not None and not self.link.closed.is_set():
                self._connected.set()

    def _error(self, text: str) -> BackendError:
        return BackendError(text, hint=f"see {self._home}/agent.log")

    async def responsive_link(self, *, wait_if_unresponsive: bool = True) -> Link:
        """The link to an agent that answers. Waits for an agent that restarts, and for one that hangs unless `wait_if_unresponsive` is false."""
        if self._unresponsive and not wait_if_unresponsive:
            raise self._error(self._unresponsive)
        if not self._tasks:
            raise BackendError("the backend is not open")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while True:
                    if self.superseded is not None:
                        raise self.superseded
                    if self.link is not None and not self.link.closed.is_set() and not self._unresponsive:
                        return self.link
                    self._connected.clear()  # `_keep_connected` is about to notice, and connects again
                    await self._connected.wait()
        except TimeoutError:
            raise self._error(self._unresponsive or "the host agent is out of reach") from None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks, self._unresponsive = [], ""
        if self.link is not None:
            self.link.close()
            self.link = None
        self._connected.clear()


class _LiveUsage(Struct):
    runs: dict[str, RunUsage]


async def read_usage(link: Link, runs: Collection[RunId]) -> dict[RunId, RunUsage]:
    """What these runs have used so far; runs that do not run are absent."""
    try:
        answer = await link.request("usage", timeout_s=PING_TIMEOUT_S)
    except BackendError as error:
        if error.code == "UNKNOWN":  # an older agent
            return {}
        raise
    found = msgspec.json.decode(answer, type=_LiveUsage).runs
    return {run: found[run] for run in runs if run in found}


async def list_runs(link: Link) -> list[Observation]:
    """The state of every run that the agent knows."""
    out: list[Observation] = []
    more = True
    while more:
        page = msgspec.json.decode(await link.request("known", after=out[-1].run if out else ""), type=_Page)
        out += page.runs
        more = page.more
    return out
