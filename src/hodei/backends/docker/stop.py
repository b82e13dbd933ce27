"""How a run is stopped: it may save its work, then TERM, then KILL when its time has come. And how it saves its work
without being stopped.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable

import msgspec

from hodei.backends.docker.engine import DaemonError, Engine
from hodei.backends.docker.exec import execute
from hodei.backends.docker.run_table import Tracked
from hodei.backends.docker.states import Stopping, moment_ms
from hodei.model.errors import BackendError
from hodei.model.job import Checkpoint

LOOK_S = 0.1
KILL_AGAIN_S = 2.0
# A command that was born a moment ago may not hear a signal yet: the first process of a container is deaf to those that
# it has no ear for, and they are lost.
DEAF_S = 0.3
SIGNALS = ("ALRM", "CONT", "HUP", "INT", "QUIT", "TERM", "URG", "USR1", "USR2", "VTALRM", "WINCH")


class Stops:
    """`saved(tracked, at_ms)` hears of saved work, `now_ms` is our clock, `age_s` says how long a run has been running."""

    def __init__(
        self,
        engine: Engine,
        saved: Callable[[Tracked, int], None],
        now_ms: Callable[[], int],
        skew_ms: Callable[[], int],
    ) -> None:
        self._engine, self._saved, self._now_ms, self._skew_ms = engine, saved, now_ms, skew_ms

    def order(self, tracked: Tracked, code: str, reason: str, grace_ms: int, hook: Checkpoint | None = None) -> bool:
        """Note that it is to be stopped; True if that has to begin now. A later order counts only if it ends earlier."""
        if tracked.over:
            return False
        now = asyncio.get_running_loop().time()
        hooked = hook is not None and hook.hooked
        save_until = now + (hook.timeout_ms / 1000 if hook is not None and hooked else 0)
        kill_at = save_until + grace_ms / 1000
        stopping = tracked.stopping
        if stopping is None:
            tracked.stopping = Stopping(code, reason, kill_at, save_until, grace_ms / 1000, saving=hooked)
            return True
        if kill_at < stopping.kill_at_s:
            stopping.kill_at_s, stopping.grace_s = kill_at, grace_ms / 1000
            if stopping.saving and save_until < stopping.save_until_s:
                stopping.save_until_s, stopping.note = save_until, "saving its work was cut short"
            tracked.hurry.set()
        return False

    async def carry_out(self, tracked: Tracked, hook: Checkpoint | None) -> None:
        """Until it has ended, or the host is gone; then it is begun anew when the host is back."""
        stopping = tracked.stopping
        if stopping is None or tracked.over or not tracked.container:
            return
        if tracked.started_ms:
            await self._wait(tracked, DEAF_S - (self._now_ms() - tracked.started_ms) / 1000)
        if stopping.saving and hook is not None:
            note = await self.save(tracked, hook, lambda: stopping.save_until_s)
            stopping.note = stopping.note or note
            now = asyncio.get_running_loop().time()
            stopping.saving, stopping.kill_at_s = False, min(stopping.kill_at_s, now + stopping.grace_s)
        await self.signal(tracked, "TERM")
        while not tracked.over:
            left = stopping.kill_at_s - asyncio.get_running_loop().time()
            if left <= 0:
                break
            await self._wait(tracked, left)
        while not tracked.over:
            await self.signal(tracked, "KILL")
            await self._wait(tracked, KILL_AGAIN_S)

    async def signal(self, tracked: Tracked, name: str) -> None:
        """Those that are gone, or not there yet, hear nothing."""
        if tracked.over:
            return
        try:
            await self._engine.ask("POST", f"containers/{tracked.container}/kill", params={"signal": f"SIG{name}"})
        except DaemonError as error:
            if error.status not in (404, 409, 500):
                raise

    # ------------------------------------------------------------------------------------- saving work

    async def save(self, tracked: Tracked, hook: Checkpoint, until_s: Callable[[], float]) -> str:
        """Let it save its work; "" if it did, else what went wrong."""
        loop = asyncio.get_running_loop()
        if hook.command:
            left_ms = max(1, round((until_s() - loop.time()) * 1000))
            try:
                done = await execute(self._engine, tracked.container, hook.command, left_ms)
            except BackendError as error:
                return f"its checkpoint command could not be started: {error.message}"
            if done.exit_code is None:
                return f"its checkpoint command did not end within {hook.timeout_ms / 1000:g}s"
            if done.exit_code:
                return f"its checkpoint command failed: exit code {done.exit_code}"
            self._saved(tracked, self._now_ms())
            return ""
        name = hook.signal.upper().removeprefix("SIG")
        if name not in SIGNALS:
            return f"the signal {name[:20]} can not be used; there are {', '.join(SIGNALS)}"
        before = last = await self.look(tracked)
        await self.signal(tracked, name)
        while not tracked.over and loop.time() < until_s():
            seen = await self.look(tracked)
            if seen and seen != before and seen == last:  # twice the same: nobody is writing it just now
                self._saved(tracked, moment_ms(seen, self._skew_ms()))
                return ""
            last = seen
            await self._wait(tracked, LOOK_S)
        return "" if tracked.over else f"no checkpoint was seen within {hook.timeout_ms / 1000:g}s"

    async def look(self, tracked: Tracked) -> str:
        """When the file that tells of saved work was last changed, in Docker's words; "" if there is none."""
        return await self.changed(tracked, tracked.care.checkpoint_file)

    async def changed(self, tracked: Tracked, path: str) -> str:
        if not path:
            return ""
        try:
            async with self._engine.answer(
                "HEAD", f"containers/{tracked.container}/archive", params={"path": path}
            ) as response:
                head = response.headers.get("X-Docker-Container-Path-Stat", "")
        except DaemonError as error:
            if error.status:
                return ""
            raise
        try:
            return str(msgspec.json.decode(base64.b64decode(head)).get("mtime", ""))
        except (ValueError, msgspec.DecodeError, AttributeError):
            return ""

    @staticmethod
    async def _wait(tracked: Tracked, seconds: float) -> None:
        """For so long, or until it has ended or is to go sooner."""
        if seconds <= 0:
            return
        tracked.hurry.clear()
        if tracked.over:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await tracked.hurry.wait()
