"""One conversation with a host agent: requests with answers, and the news it pushes. Knows nothing of runs' meaning.

The wire is described in `hodei.agent.service`. A link is used until it breaks, and then replaced by a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from hodei.detached_process import DetachedProcess
from hodei.model.errors import BackendError, StaleEpoch
from hodei.model.facts import RunObserved

LINE_LIMIT = 64 << 20


class Heard(msgspec.Struct):
    """One line from the agent: an answer (`id`) or news."""

    id: int | None = None
    ok: msgspec.Raw = msgspec.Raw(b"")
    error: str = ""
    code: str = ""
    news: list[Told] = []


class Told(msgspec.Struct):
    """How a run stands, in the agent's words, which are ours."""

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

    def observed(self) -> RunObserved:
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
        )


class Link(asyncio.Protocol):
    """`on_news` hears of every observation; `closed` is set when the conversation is over; `heard_s`: when the agent last
    said something, on the loop's clock."""

    def __init__(self, on_news: Callable[[list[Told]], None]) -> None:
        self.closed = asyncio.Event()
        self.heard_s = asyncio.get_running_loop().time()
        self._on_news = on_news
        self._transport: asyncio.Transport | None = None
        self._parts = bytearray()
        self._waiting: dict[int, asyncio.Future[Heard]] = {}
        self._last_id = 0
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(Heard).decode

    @classmethod
    async def to(cls, home: Path, on_news: Callable[[list[Told]], None]) -> Link:
        """OSError if nobody is at home."""
        path = str(home / "agent.sock")
        try:
            path = (home / "agent.addr").read_text().strip()
        except FileNotFoundError:
            pass
        _, link = await asyncio.get_running_loop().create_unix_connection(lambda: cls(on_news), path)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(BackendError("the host agent hung up", hint="it is started again by itself"))
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        self.heard_s = asyncio.get_running_loop().time()
        self._parts += data
        if b"\n" not in data:
            if len(self._parts) > LINE_LIMIT:
                self.close()
            return
        *lines, rest = bytes(self._parts).split(b"\n")
        self._parts = bytearray(rest)
        for line in lines:
            try:
                heard = self._decode(line)
            except msgspec.MsgspecError:
                self.close()  # not an agent: whoever it is, this conversation makes no sense
                return
            if heard.news:
                self._on_news(heard.news)
            elif heard.id is not None and (future := self._waiting.pop(heard.id, None)) and not future.done():
                future.set_result(heard)

    async def ask(self, op: str, *, timeout_s: float | None = 60, **fields: Any) -> msgspec.Raw:
        """The agent's answer; without `timeout_s` it is waited for as long as the link holds. StaleEpoch if a newer server has taken over, else BackendError if it said no or hung up."""
        if self._transport is None or self.closed.is_set():
            raise BackendError("the host agent is out of reach")
        self._last_id += 1
        number = self._last_id
        future: asyncio.Future[Heard] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._transport.write(self._encode({"id": number, "op": op, **fields}) + b"\n")
        try:
            heard = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise BackendError(f"the host agent did not answer within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if heard.error:
            if heard.code == "STALE_EPOCH":
                raise StaleEpoch(heard.error)
            raise BackendError(heard.error, code=heard.code)
        return heard.ok

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self.closed.set()


# ------------------------------------------------------------------------------------ agent supervisor
# Keeps one host agent in reach: starts it when none is there, finds it again when it is gone, and notices when it
# hangs.


BIRTH_TIMEOUT_S = 15.0
RECONNECT_MAX_S = 2.0
# The agent is asked for a sign of life so often, and counts as silent when it has said nothing for so long. It answers in
# a millisecond; what takes seconds is a disk that is slow to sync.
BEAT_S = 2.0
SILENCE_S = 6.0
# Time for what has arrived to be read, if it was this process that stood still.
CATCH_UP_S = 0.2


class _Hello(Struct):
    pid: int = 0


class _Known(Struct):
    runs: list[Told]
    more: bool


class AgentSupervisor:
    """`hear` is told of all that the agent says of runs, and of every run that it knows after each new connection; `outage`
    that it is gone or silent, before it is back. `over`: a newer server has taken over, and nothing more will come."""

    def __init__(
        self,
        name: str,
        home: Path,
        installation: str,
        epoch: int,
        lasting: tuple[float, float],
        hear: Callable[[list[Told]], None],
        outage: Callable[[BackendError], None],
    ) -> None:
        """`lasting`: for how many seconds the agent stays without work, and keeps the output of forgotten runs."""
        self._name, self._home, self._installation, self._epoch = name, home, installation, epoch
        self._linger_s, self._keep_logs_s = lasting
        self._hear, self._outage = hear, outage
        self.link: Link | None = None
        self.silence = ""
        self.over: StaleEpoch | None = None
        self._pid = 0
        self._connected = asyncio.Event()
        self._agent: DetachedProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        if self._tasks:
            await self.agent()
            return
        await self._connect()
        self._tasks = [
            asyncio.create_task(self._keep_connected(), name=f"{self._name}: keep the agent in reach"),
            asyncio.create_task(self._listen_for_life(), name=f"{self._name}: does the agent answer?"),
        ]

    async def _connect(self) -> None:
        """Reach the agent, starting it if need be, and hear how everything stands."""
        deadline = asyncio.get_running_loop().time() + BIRTH_TIMEOUT_S
        pause_s = 0.01
        while True:
            try:
                link = await Link.to(self._home, self._hear)
                break
            except OSError as error:
                self._start_agent_unless_running()
                if asyncio.get_running_loop().time() > deadline:
                    raise BackendError(
                        f"the host agent does not come up: {error}{self._last_words()}",
                        hint=f"see {self._home}/agent.log",
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.2)
        try:
            told = await link.ask("hello", timeout_s=SILENCE_S, installation=self._installation, epoch=self._epoch)
            self._pid = msgspec.json.decode(told, type=_Hello).pid
            self._hear(await known_to(link))
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

    def _last_words(self) -> str:
        try:
            lines = (self._home / "agent.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f"; its last words: {lines[-1][:300]}" if lines else ""

    async def _keep_connected(self) -> None:
        pause_s = 0.05
        while True:
            if self.link is not None:
                await self.link.closed.wait()
                self._connected.clear()
                self.link = None
                self._outage(self.error("the host agent is gone; it is being started again"))
            try:
                await self._connect()
                pause_s = 0.05
            except StaleEpoch as error:
                self.over = error
                self._connected.set()
                self._outage(BackendError(error.message))
                return
            except (BackendError, OSError):
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RECONNECT_MAX_S)

    async def _listen_for_life(self) -> None:
        """An agent that hangs keeps its socket open: ask it again and again, and say so when it does not answer. The link is
        kept, so that an agent that goes on finds its orders in their order."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(BEAT_S)
            link = self.link
            if link is None:
                continue
            asked_s, asked = loop.time(), asyncio.ensure_future(link.ask("ping", timeout_s=None))
            try:
                while not asked.done():
                    left_s = max(link.heard_s, asked_s) + SILENCE_S - loop.time()
                    if left_s > 0:
                        await asyncio.wait({asked}, timeout=left_s)
                        continue
                    await asyncio.wait({asked}, timeout=CATCH_UP_S)
                    still = max(link.heard_s, asked_s) + SILENCE_S <= loop.time()
                    if not asked.done() and still and not self.silence:
                        self._connected.clear()
                        self.silence = f"the host agent, process {self._pid}, does not answer"
                        self._outage(self.error(self.silence))
                    await asyncio.wait({asked}, timeout=SILENCE_S)
                asked.exception()  # a refusal is an answer too; the end of the link is the keeper's
            finally:
                asked.cancel()
            self.silence = ""
            if self.link is not None and not self.link.closed.is_set():
                self._connected.set()

    def error(self, text: str) -> BackendError:
        return BackendError(text, hint=f"see {self._home}/agent.log")

    async def agent(self, *, patient: bool = True) -> Link:
        """The agent, waiting for it to come back if it is gone, or silent if that is `patient`."""
        if self.silence and not patient:
            raise self.error(self.silence)
        if not self._tasks:
            raise BackendError("the backend is not open")
        try:
            async with asyncio.timeout(BIRTH_TIMEOUT_S):
                while True:
                    if self.over is not None:
                        raise self.over
                    if self.link is not None and not self.link.closed.is_set() and not self.silence:
                        return self.link
                    self._connected.clear()  # the keeper is about to notice, and brings a new link
                    await self._connected.wait()
        except TimeoutError:
            raise self.error(self.silence or "the host agent is out of reach") from None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks, self.silence = [], ""
        if self.link is not None:
            self.link.close()
            self.link = None
        self._connected.clear()


async def known_to(link: Link) -> list[Told]:
    """How every run that the agent remembers stands."""
    out: list[Told] = []
    more = True
    while more:
        page = msgspec.json.decode(await link.ask("known", after=out[-1].run if out else ""), type=_Known)
        out += page.runs
        more = page.more
    return out
