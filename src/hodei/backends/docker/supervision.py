"""Supervision of a running container: timeout, checkpoints, health and idle time.

Health checks by command are run by the daemon (`health_status` events). A run without any of these has no task.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from hodei.backends.docker.engine import DaemonError, Engine
from hodei.backends.docker.logs import execute
from hodei.backends.docker.node import cpu_ns, last_word
from hodei.backends.docker.run_table import Tracked
from hodei.backends.docker.states import moment_ms
from hodei.http_client import Unreached, get_status
from hodei.model.errors import BackendError
from hodei.model.job import Checkpoint, HealthCheck, HealthState
from hodei.supervision import (
    HealthCounter,
    IdleDetector,
    StopPlan,
    command_problem,
    idle_reason,
    is_checkpoint_complete,
    no_checkpoint,
    timeout_reason,
)

if TYPE_CHECKING:
    from hodei.backends.docker.host import DockerHost

FILE_LOOK_S = 5.0

Stop = Callable[[Tracked, str, str], None]


def begin(host: DockerHost, tracked: Tracked, now_ms: int) -> None:
    """The run is running: begin what its order asks for, counting from its start."""
    care = tracked.care
    ran_s = max(0, now_ms - tracked.started_ms) / 1000
    if care.timeout_ms:
        host.spawn(tracked, _limit(host, tracked, care.timeout_ms / 1000 - ran_s))
    if care.checkpoint_file:
        host.spawn(tracked, _watch_file(host, tracked))
    if care.save is not None and care.save.every_ms:
        host.spawn(tracked, _save_now_and_then(host, tracked, care.save.every_ms / 1000))
    if care.health is not None:
        host.spawn(tracked, _look_after(host, tracked, care.health, ran_s))
    if care.idle_ms:
        host.spawn(tracked, _end_if_idle(host, tracked, care.idle_ms))


async def _limit(host: DockerHost, tracked: Tracked, left_s: float) -> None:
    await asyncio.sleep(max(left_s, 0))
    host.stop(tracked, "timeout", timeout_reason(tracked.care.timeout_ms))


async def _watch_file(host: DockerHost, tracked: Tracked) -> None:
    last = ""
    while True:
        await asyncio.sleep(FILE_LOOK_S)
        try:
            seen = await host.stops.look(tracked)
        except BackendError:
            continue
        if seen and seen != last:
            last = seen
            host.saved(tracked, moment_ms(seen, host.skew_ms))


async def _save_now_and_then(host: DockerHost, tracked: Tracked, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        if tracked.stopping is not None:
            return
        if tracked.care.save is not None:
            await host.save(tracked, tracked.care.save)


async def _look_after(host: DockerHost, tracked: Tracked, health: HealthCheck, ran_s: float) -> None:
    """By an address, or by the heartbeat of a file."""
    await asyncio.sleep(max(health.after_ms / 1000 - ran_s, 0))
    counter, beat = HealthCounter(), ""
    while tracked.stopping is None:
        await asyncio.sleep(health.every_ms / 1000)
        try:
            if health.http:
                error = await _http_error(health)
            else:
                seen = await host.stops.changed(tracked, health.file)
                error = "" if seen and seen != beat else f"{health.file} has not changed"
                beat = seen
        except BackendError:
            continue  # a silent host says nothing about the run
        state: HealthState = "failing" if error else "ok"
        host.health_seen(tracked, state)
        if stop_reason := counter.observe(error, health.failures):
            host.stop(tracked, "unhealthy", stop_reason)
            return


async def _http_error(health: HealthCheck) -> str:
    try:
        status = await get_status(health.http, health.timeout_ms / 1000)
    except (Unreached, ValueError) as error:
        return f"no answer: {error}"
    return "" if 200 <= status <= 399 else f"status {status}"


async def _end_if_idle(host: DockerHost, tracked: Tracked, idle_ms: int) -> None:
    loop, detector = asyncio.get_running_loop(), IdleDetector(idle_ms)
    while tracked.stopping is None:
        await asyncio.sleep(detector.step_ms / 1000)
        try:
            cpu_ms = await cpu_ns(host.engine, tracked.container) / 1e6
            output = await last_word(host.engine, tracked.container)
        except DaemonError:
            continue
        if detector.observe(round(loop.time() * 1000), cpu_ms, output):
            host.stop(tracked, "idle", idle_reason(idle_ms))
            return


# ------------------------------------------------------------------------------------------------ stop
# A stop: checkpoint, TERM, then KILL after the grace period; and checkpoints without a stop.


LOOK_S = 0.1
KILL_AGAIN_S = 2.0
# The first process of a container ignores signals without a handler, so one that is sent right after the start is lost.
DEAF_S = 0.3
SIGNALS = ("ALRM", "CONT", "HUP", "INT", "QUIT", "TERM", "URG", "USR1", "USR2", "VTALRM", "WINCH")


class Stops:
    """`saved(tracked, at_ms)` is called for each checkpoint."""

    def __init__(
        self,
        engine: Engine,
        saved: Callable[[Tracked, int], None],
        now_ms: Callable[[], int],
        skew_ms: Callable[[], int],
    ) -> None:
        self._engine, self._saved, self._now_ms, self._skew_ms = engine, saved, now_ms, skew_ms

    def order(self, tracked: Tracked, code: str, reason: str, grace_ms: int, hook: Checkpoint | None = None) -> bool:
        """Record a stop; True if it must begin now. A later order counts only if it ends the run earlier."""
        if tracked.over:
            return False
        now = asyncio.get_running_loop().time()
        save_s = hook.timeout_ms / 1000 if hook is not None and hook.has_hook else 0
        if tracked.stopping is None:
            tracked.stopping = StopPlan.begin(code, reason, now, grace_ms / 1000, save_s)
            return True
        if tracked.stopping.shorten(now, grace_ms / 1000, save_s):
            tracked.hurry.set()
        return False

    async def carry_out(self, tracked: Tracked, hook: Checkpoint | None) -> None:
        """Returns when the run has ended; BackendError if the host is silent, and the caller repeats it afterwards."""
        stopping = tracked.stopping
        if stopping is None or tracked.over or not tracked.container:
            return
        if tracked.started_ms:
            await self._wait(tracked, DEAF_S - (self._now_ms() - tracked.started_ms) / 1000)
        if stopping.saving and hook is not None:
            note = await self.save(tracked, hook, lambda: stopping.save_until)
            stopping.finish_saving(asyncio.get_running_loop().time(), note and (stopping.note or note))
        await self.signal(tracked, "TERM")
        while not tracked.over:
            left = stopping.kill_at - asyncio.get_running_loop().time()
            if left <= 0:
                break
            await self._wait(tracked, left)
        while not tracked.over:
            await self.signal(tracked, "KILL")
            await self._wait(tracked, KILL_AGAIN_S)

    async def signal(self, tracked: Tracked, name: str) -> None:
        """No error if the container does not run."""
        if tracked.over:
            return
        try:
            await self._engine.ask("POST", f"containers/{tracked.container}/kill", params={"signal": f"SIG{name}"})
        except DaemonError as error:
            if error.status not in (404, 409, 500):
                raise

    # ------------------------------------------------------------------------------------- saving work

    async def save(self, tracked: Tracked, hook: Checkpoint, until_s: Callable[[], float]) -> str:
        """Take a checkpoint; "" on success, else what went wrong."""
        loop = asyncio.get_running_loop()
        if hook.command:
            left_ms = max(1, round((until_s() - loop.time()) * 1000))
            try:
                done = await execute(self._engine, tracked.container, hook.command, left_ms)
            except BackendError as error:
                return f"its checkpoint command could not be started: {error.message}"
            problem = command_problem(done.exit_code, hook.timeout_ms)
            if not problem:
                self._saved(tracked, self._now_ms())
            return problem
        name = hook.signal.upper().removeprefix("SIG")
        if name not in SIGNALS:
            return f"the signal {name[:20]} can not be used; there are {', '.join(SIGNALS)}"
        before = last = await self.look(tracked)
        await self.signal(tracked, name)
        while not tracked.over and loop.time() < until_s():
            seen = await self.look(tracked)
            if is_checkpoint_complete(before, last, seen):
                self._saved(tracked, moment_ms(seen, self._skew_ms()))
                return ""
            last = seen
            await self._wait(tracked, LOOK_S)
        return "" if tracked.over else no_checkpoint(hook.timeout_ms)

    async def look(self, tracked: Tracked) -> str:
        """Modification time of the checkpoint file as Docker writes it, "" without one."""
        return await self.changed(tracked, tracked.care.checkpoint_file)

    async def changed(self, tracked: Tracked, path: str) -> str:
        if not path:
            return ""
        try:
            async with self._engine.answer(
                "HEAD", f"containers/{tracked.container}/archive", params={"path": path}
            ) as response:
                head = response.headers.get("x-docker-container-path-stat", "")
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
        """Sleep, or until the run has ended or its stop is shortened."""
        if seconds <= 0:
            return
        tracked.hurry.clear()
        if tracked.over:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await tracked.hurry.wait()
