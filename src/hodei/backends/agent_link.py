"""One conversation with a host agent: requests with answers, and the news it pushes. Knows nothing of runs' meaning.

The wire is described in `hodei.agent.service`. A link is used until it breaks, and then replaced by a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

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
