"""A real host agent in its own directory, and a recorder of its observations."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from builders import an_order as an_order
from hodei.backends.local import LocalBackend
from hodei.model.effects import Start, Stop
from hodei.model.errors import BackendError
from hodei.model.job import RUN_ENDED
from hodei.model.outcome import StopReason
from hodei.ports import Backend
from hodei.testing.backend import DEADLINE_S, RunRecorder

_numbers = itertools.count(1)


def unique_installation() -> str:
    """A new installation name each time, so that runs of earlier tests are ignored."""
    return f"t{os.getpid()}x{next(_numbers)}"


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Poll `condition` with a deadline; `what` describes it in the error message."""
    ends = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > ends:
            raise AssertionError(f"{what}: not within {DEADLINE_S:g} s")
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


class ReconnectingRecorder(RunRecorder):
    """Reconnects to a local agent that is restarted."""

    def __init__(self, backend: Backend, deadline_s: float = DEADLINE_S) -> None:
        super().__init__(backend, deadline_s)
        self.ordered: dict[str, Start] = {}  # starts that are sent again after an outage

    async def poll(self) -> None:
        try:
            self.observed += await self.backend.observe()
        except BackendError:
            if not isinstance(self.backend, LocalBackend):
                raise
            while not await self._reconciled():
                pass

    async def _reconciled(self) -> bool:
        """As a server does after an outage: send again the starts that the agent does not know and that never ran."""
        try:
            await self.backend.open()
            known = await self.backend.known()
            seen = {observation.run for observation in self.observed} | known.keys()
            await self.backend.start([order for run, order in self.ordered.items() if run not in seen])
        except BackendError:
            return False
        return True


def agent_pid(home: Path) -> int:
    """The process that holds the lock of the agent's home; 0 if none does."""
    lock = (home / "lock").stat()
    # A read of /proc/locks may skip entries while other locks come and go, so one read proves no absence.
    for _ in range(5):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "FLOCK" in fields and "->" not in fields and fields[-3].endswith(f":{lock.st_ino}"):
                return int(fields[-4])
    return 0


async def kill_agent(home: Path) -> None:
    """kill -9; it has exited when this returns."""
    await until(lambda: agent_pid(home) > 1)
    pid = agent_pid(home)
    os.kill(pid, signal.SIGKILL)
    while agent_pid(home) == pid:
        os.sched_yield()


@contextlib.asynccontextmanager
async def local_agent(
    home: Path, *, installation: str = "test", epoch: int = 1, **fields: Any
) -> AsyncIterator[ReconnectingRecorder]:
    """A local backend with a real agent in `home`. Afterwards the agent and all live runs are stopped."""
    backend = LocalBackend("local", home=home, installation=installation, epoch=epoch, linger_s=1, **fields)
    await backend.open()
    try:
        yield ReconnectingRecorder(backend)
    finally:
        with contextlib.suppress(Exception):
            live = [run for run, seen in (await backend.known()).items() if seen.state not in RUN_ENDED]
            reason = StopReason("cancelled", "the test is over")
            await backend.stop([Stop(run, backend.name, 0, reason) for run in live])
        await backend.close()
