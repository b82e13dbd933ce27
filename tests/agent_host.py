"""For tests: a real host agent in a directory of its own, and a server's side of it that remembers what it heard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from builders import a_job_spec, a_run
from hodei.backends.local import LocalBackend
from hodei.model.effects import Start, Stop
from hodei.model.errors import BackendError
from hodei.model.facts import RunObserved
from hodei.model.lifecycle import RUN_ENDED
from hodei.ports import Backend, Stream

DEADLINE_S = 120.0  # only how long a test that fails takes


def an_order(job: int, *command: str, **fields: Any) -> Start:
    spec = a_job_spec(f"job-{job}", command=command or ("/bin/true",), **fields)
    return Start(run=a_run(job), spec=spec, task=spec.tasks[0])


async def until(true: Callable[[], object], what: str = "the condition") -> None:
    """Poll, with a deadline: tests wait for what happens, never for time to pass."""
    ends = time.monotonic() + DEADLINE_S
    while not true():
        if time.monotonic() > ends:
            raise AssertionError(f"{what} did not come true within {DEADLINE_S:g} s")
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


class Desk:
    """A backend and everything that it has observed so far."""

    def __init__(self, backend: Backend, deadline_s: float = DEADLINE_S) -> None:
        self.backend = backend
        self.heard: list[RunObserved] = []
        self.ordered: dict[str, Start] = {}  # what is ordered again after an outage
        self._deadline_s = deadline_s

    async def run(self, *orders: Start) -> list[RunObserved]:
        """Start these, and wait for their ends, in the same order."""
        assert await self.backend.start(orders) == {}
        return [await self.end_of(order.run.id) for order in orders]

    async def hear(self) -> None:
        try:
            self.heard += await self.backend.observe()
        except BackendError:
            if not isinstance(self.backend, LocalBackend):
                raise
            while not await self._made_peace():
                pass

    async def _made_peace(self) -> bool:
        """What a server does when the other side was gone: order again what it does not know of and was not seen running."""
        try:
            await self.backend.open()
            known = await self.backend.known()
            seen = {observation.run for observation in self.heard} | known.keys()
            await self.backend.start([order for run, order in self.ordered.items() if run not in seen])
        except BackendError:
            return False
        return True

    async def first(self, run: str, states: frozenset[str]) -> RunObserved:
        async with asyncio.timeout(self._deadline_s):
            while True:
                for observation in self.heard:
                    if observation.run == run and observation.state in states:
                        return observation
                await self.hear()

    async def end_of(self, run: str) -> RunObserved:
        return await self.first(run, RUN_ENDED)

    async def running(self, run: str) -> RunObserved:
        return await self.first(run, frozenset({"running"}))

    async def stop(self, run: str, grace_ms: int = 10_000, reason: str = "asked to") -> None:
        await self.backend.stop([Stop(run, self.backend.name, grace_ms, reason)])

    async def log(self, run: str, stream: Stream = "stdout") -> bytes:
        out, offset = b"", 0
        while True:
            data, offset = await self.backend.logs(run, stream, offset, 1 << 20)
            if not data:
                return out
            out += data

    async def log_has(self, run: str, text: bytes) -> bytes:
        """Wait until the run has said it."""
        for _ in range(int(self._deadline_s / 0.01)):
            if text in (said := await self.log(run)):
                return said
            await asyncio.sleep(0.01)
        raise AssertionError(f"{run} did not say {text!r}")


def agent_pid(home: Path) -> int:
    """The process that holds the lock of the agent's home; 0 if none does."""
    lock = (home / "lock").stat()
    with open("/proc/locks") as locks:
        for line in locks:
            fields = line.split()
            if "FLOCK" in fields and fields[-3].endswith(f":{lock.st_ino}"):
                return int(fields[-4])
    return 0


async def kill_agent(home: Path) -> None:
    """kill -9, and gone when this returns."""
    await until(lambda: agent_pid(home) > 1)
    pid = agent_pid(home)
    os.kill(pid, signal.SIGKILL)
    while agent_pid(home) == pid:
        os.sched_yield()


@contextlib.asynccontextmanager
async def a_host(home: Path, *, installation: str = "test", epoch: int = 1, **fields: Any) -> AsyncIterator[Desk]:
    """A backend with a real agent below `home`; runs that are still alive at the end are stopped, the agent too."""
    backend = LocalBackend("local", home=home, installation=installation, epoch=epoch, linger_s=1, **fields)
    await backend.open()
    try:
        yield Desk(backend)
    finally:
        with contextlib.suppress(Exception):
            left = [run for run, seen in (await backend.known()).items() if seen.state not in RUN_ENDED]
            await backend.stop([Stop(run, backend.name, 0, "the test is over") for run in left])
        await backend.close()
