"""The connection to one daemon: connect, receive events, ping, and reconnect after an outage. Knows nothing of runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from hodei.backends.docker.engine import DaemonError, Engine
from hodei.backends.docker.states import moment_ms
from hodei.model.errors import NOT_REACHED, BackendError

log = logging.getLogger("hodei.docker")

PING_EVERY_S = 2.0
RETRY_MAX_S = 2.0
# A daemon that answers a ping later than this may have been suspended.
HASTE_S = 1.0
# For so long afterwards its events may be late.
BEHIND_S = 5.0
# How long a start waits for a silent host, unless the run may have started there.
PATIENCE_S = 10.0
# Smaller differences between clocks are ignored.
SKEW_MS = 1000
EVENTS = ["create", "start", "die", "destroy", "health_status", "health_status: healthy", "health_status: unhealthy"]


class DaemonConnection:
    """`up` while the daemon answers; `problem` says why it does not; `tried` once it is known either way.

    `hear` receives each event with all of `labels`; `settle` is called after every outage, before `up` is set, to find out
    what happened meanwhile. `changed` is called when `up` changes.
    """

    def __init__(
        self,
        engine: Engine,
        labels: list[str],
        answer_s: float,
        now_ms: Callable[[], int],
        *,
        hear: Callable[[dict[str, Any]], None],
        settle: Callable[[], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self._engine, self._labels, self._answer_s, self._now_ms = engine, labels, answer_s, now_ms
        self._hear, self._settle, self._changed = hear, settle, changed
        self.up, self.tried = asyncio.Event(), asyncio.Event()
        self.ever_up = False
        self.problem = "nobody has spoken to it yet"
        self.info: dict[str, Any] = {}
        self.skew_ms = 0
        self.silent_since_ms = 0
        self._silent_since_s = self._answered_s = self._behind_until_s = 0.0
        self._keeper: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self._engine.host.name

    def begin(self) -> None:
        if self._keeper is None:
            self._note_silence()
            self._keeper = asyncio.create_task(self._keep(), name=f"docker host {self.name}")

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None
        self.up.clear()
        self.tried.clear()
        self.problem = "the backend is not open"

    def silent_for_s(self) -> float:
        return 0.0 if self.up.is_set() else asyncio.get_running_loop().time() - self._silent_since_s

    @property
    def lively(self) -> bool:
        """It has answered without a pause, so its events are not late."""
        now = asyncio.get_running_loop().time()
        return self.up.is_set() and now - self._answered_s < PING_EVERY_S + HASTE_S and now > self._behind_until_s

    def silent(self, problem: str) -> None:
        """A request got no answer."""
        was_up, said = self.up.is_set(), self.problem
        self.up.clear()
        self.problem = problem
        if was_up:
            self._note_silence()
        if was_up or said != problem:
            log.warning("docker host %s: %s", self.name, problem)
            self._changed()

    async def reachable(self) -> None:
        """Wait for a silent daemon; BackendError with NOT_REACHED after a while."""
        if self.up.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(self._answer_s * 4, PATIENCE_S)):
                await self.up.wait()
                return
        raise BackendError(self.problem, hint="it starts elsewhere, or when the host is back", code=NOT_REACHED)

    async def answers(self) -> None:
        """Wait for a silent daemon without a time limit."""
        await self.up.wait()

    async def ping(self) -> str:
        """The daemon's version, if it answers in time."""
        if self._keeper is None:
            raise BackendError("the backend is not open")
        await self._engine.ask("GET", "_ping", within_s=self._answer_s)
        return str(self.info.get("ServerVersion", ""))

    # --------------------------------------------------------------------------------------------- loop

    async def _keep(self) -> None:
        pause_s = 0.1
        while True:
            try:
                await self._converse()
            except BackendError as error:
                self.silent(error.message)
            except Exception as error:
                log.exception("docker host %s", self.name)
                self.silent(f"{self.name}: {type(error).__name__}: {error}")
            self.tried.set()
            if self.silent_for_s() < 1:
                pause_s = 0.1
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def _converse(self) -> None:
        """Runs until the connection breaks: always raises."""
        await self._engine.open(self._answer_s)
        before = self._now_ms()
        self.info = await self._engine.ask_json("GET", "info", within_s=self._answer_s)
        self._set_skew(before)
        listening = asyncio.Event()
        hearing = asyncio.create_task(self._listen(listening), name=f"events of {self.name}")
        opened = asyncio.create_task(listening.wait())
        try:
            # Subscribe before listing, so that no event is missed in between.
            await asyncio.wait({hearing, opened}, timeout=self._answer_s, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done():
                hearing.result()
            if not listening.is_set():
                raise DaemonError(0, f"{self.name} tells no events")
            await self._settle()
            self._came_up()
            while True:
                await asyncio.wait({hearing}, timeout=PING_EVERY_S)
                if hearing.done():
                    hearing.result()
                    raise DaemonError(0, f"{self.name} ended the conversation")
                await self._ask_for_life()
        finally:
            opened.cancel()
            hearing.cancel()
            await asyncio.gather(hearing, opened, return_exceptions=True)

    async def _ask_for_life(self) -> None:
        try:
            await self._engine.ask("GET", "_ping", within_s=self._answer_s)
        except DaemonError as error:
            self.silent(error.message)
            return
        self._answered()
        if not self.up.is_set():
            await self._settle()
            self._came_up()

    async def _listen(self, listening: asyncio.Event) -> None:
        filters = {"type": ["container"], "event": EVENTS, "label": self._labels}
        params = {"filters": msgspec.json.encode(filters).decode()}
        async for event in self._engine.lines("events", params, listening.set):
            self._hear(event)

    def _answered(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._answered_s > PING_EVERY_S + HASTE_S or not self.up.is_set():
            self._behind_until_s = now + BEHIND_S
        self._answered_s = now

    def _came_up(self) -> None:
        self._answered()
        if not self.up.is_set():
            self.problem, self.ever_up = "", True
            self.up.set()
            self.tried.set()
            self._changed()

    def _note_silence(self) -> None:
        self._silent_since_s, self.silent_since_ms = asyncio.get_running_loop().time(), self._now_ms()

    def _set_skew(self, asked_ms: int) -> None:
        at = moment_ms(str(self.info.get("SystemTime", "")))
        ahead = at - (asked_ms + self._now_ms()) // 2 if at else 0
        self.skew_ms = ahead if abs(ahead) >= SKEW_MS else 0
