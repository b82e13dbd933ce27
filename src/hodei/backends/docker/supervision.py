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

from hodei.backends.docker.engine import DaemonError, Engine, parse_time_ms
from hodei.backends.docker.logs import execute
from hodei.backends.docker.runs import TrackedRun, total_cpu_ns
from hodei.http_client import Unreached, get_status
from hodei.model.errors import BackendError
from hodei.model.job import Checkpoint, HealthCheck, HealthState
from hodei.supervision import (
    HealthCounter,
    IdleDetector,
    StopPlan,
    checkpoint_signal,
    command_problem,
    idle_reason,
    is_checkpoint_complete,
    no_checkpoint,
    timeout_reason,
)

if TYPE_CHECKING:
    from hodei.backends.docker.host import DockerHost

FILE_POLL_S = 5.0


def begin(host: DockerHost, tracked: TrackedRun, now_ms: int) -> None:
    """Begin what the order of a running run requires, counting from its start."""
    supervision = tracked.supervision
    ran_s = max(0, now_ms - tracked.started_ms) / 1000
    if supervision.timeout_ms:
        host.spawn(tracked, _enforce_timeout(host, tracked, supervision.timeout_ms / 1000 - ran_s))
    if supervision.checkpoint_file:
        host.spawn(tracked, _poll_checkpoint_file(host, tracked))
    if supervision.save is not None and supervision.save.every_ms:
        host.spawn(tracked, _checkpoint_periodically(host, tracked, supervision.save.every_ms / 1000))
    if supervision.health is not None:
        host.spawn(tracked, _check_health(host, tracked, supervision.health, ran_s))
    if supervision.idle_ms:
        host.spawn(tracked, _stop_if_idle(host, tracked, supervision.idle_ms))


async def _enforce_timeout(host: DockerHost, tracked: TrackedRun, left_s: float) -> None:
    await asyncio.sleep(max(left_s, 0))
    host.stop(tracked, "timeout", timeout_reason(tracked.supervision.timeout_ms))


async def _poll_checkpoint_file(host: DockerHost, tracked: TrackedRun) -> None:
    last = ""
    while True:
        await asyncio.sleep(FILE_POLL_S)
        try:
            seen = await host.stops.checkpoint_mtime(tracked)
        except BackendError:
            continue
        if seen and seen != last:
            last = seen
            host.checkpoint_seen(tracked, parse_time_ms(seen, host.skew_ms))


async def _checkpoint_periodically(host: DockerHost, tracked: TrackedRun, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        if tracked.stop is not None:
            return
        if tracked.supervision.save is not None:
            await host.take_checkpoint(tracked, tracked.supervision.save)


async def _check_health(host: DockerHost, tracked: TrackedRun, health: HealthCheck, ran_s: float) -> None:
    """By HTTP or by a heartbeat file."""
    await asyncio.sleep(max(health.after_ms / 1000 - ran_s, 0))
    counter, last_beat = HealthCounter(), ""
    while tracked.stop is None:
        await asyncio.sleep(health.every_ms / 1000)
        try:
            if health.http:
                error = await _http_error(health)
            else:
                beat = await host.stops.mtime(tracked, health.file)
                error = "" if beat and beat != last_beat else f"{health.file} has not changed"
                last_beat = beat
        except BackendError:
            continue  # the host is silent, which says nothing about the run
        state: HealthState = "failing" if error else "ok"
        host.set_health(tracked, state)
        if stop_reason := counter.observe(error, health.failures):
            host.stop(tracked, "unhealthy", stop_reason)
            return


async def _http_error(health: HealthCheck) -> str:
    try:
        status = await get_status(health.http, health.timeout_ms / 1000)
    except (Unreached, ValueError) as error:
        return f"no answer: {error}"
    return "" if 200 <= status <= 399 else f"status {status}"


async def _stop_if_idle(host: DockerHost, tracked: TrackedRun, idle_ms: int) -> None:
    loop, detector = asyncio.get_running_loop(), IdleDetector(idle_ms)
    while tracked.stop is None:
        await asyncio.sleep(detector.step_ms / 1000)
        try:
            cpu_ms = await cpu_ns(host.engine, tracked.container) / 1e6
            output = await last_output_time(host.engine, tracked.container)
        except DaemonError:
            continue
        if detector.observe(round(loop.time() * 1000), cpu_ms, output):
            host.stop(tracked, "idle", idle_reason(idle_ms))
            return


POLL_S = 0.1
KILL_AGAIN_S = 2.0
# The first process of a container ignores signals without a handler, so one that is sent right after the start is lost.
SIGNAL_DELAY_S = 0.3


class Stops:
    """A stop takes a checkpoint, sends TERM, then KILL after the grace period. `on_checkpoint` gets each checkpoint."""

    def __init__(
        self,
        engine: Engine,
        on_checkpoint: Callable[[TrackedRun, int], None],
        now_ms: Callable[[], int],
        skew_ms: Callable[[], int],
    ) -> None:
        self._engine, self._on_checkpoint, self._now_ms, self._skew_ms = engine, on_checkpoint, now_ms, skew_ms

    def order(self, tracked: TrackedRun, code: str, reason: str, grace_ms: int, hook: Checkpoint | None = None) -> bool:
        """Record a stop; True if it must begin now. A later order counts only if it ends the run earlier."""
        if tracked.ended:
            return False
        now = asyncio.get_running_loop().time()
        save_s = hook.timeout_ms / 1000 if hook is not None and hook.has_hook else 0
        if tracked.stop is None:
            tracked.stop = StopPlan.begin(code, reason, now, grace_ms / 1000, save_s)
            return True
        if tracked.stop.shorten(now, grace_ms / 1000, save_s):
            tracked.wake_event.set()
        return False

    async def carry_out(self, tracked: TrackedRun, hook: Checkpoint | None) -> None:
        """Returns when the run has ended; BackendError if the host is silent, and the caller repeats it afterwards."""
        stop = tracked.stop
        if stop is None or tracked.ended or not tracked.container:
            return
        if tracked.started_ms:
            await self._wait(tracked, SIGNAL_DELAY_S - (self._now_ms() - tracked.started_ms) / 1000)
        if stop.saving and hook is not None:
            problem = await self.checkpoint(tracked, hook, lambda: stop.save_until)
            stop.finish_saving(asyncio.get_running_loop().time(), problem and (stop.note or problem))
        await self.signal(tracked, "TERM")
        while not tracked.ended:
            left = stop.kill_at - asyncio.get_running_loop().time()
            if left <= 0:
                break
            await self._wait(tracked, left)
        while not tracked.ended:
            await self.signal(tracked, "KILL")
            await self._wait(tracked, KILL_AGAIN_S)

    async def signal(self, tracked: TrackedRun, name: str) -> None:
        """No error if the container does not run."""
        if tracked.ended:
            return
        try:
            await self._engine.request("POST", f"containers/{tracked.container}/kill", params={"signal": f"SIG{name}"})
        except DaemonError as error:
            if error.status not in (404, 409, 500):
                raise

    async def checkpoint(self, tracked: TrackedRun, hook: Checkpoint, until_s: Callable[[], float]) -> str:
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
                self._on_checkpoint(tracked, self._now_ms())
            return problem
        try:
            name = checkpoint_signal(hook.signal)
        except ValueError as error:
            return str(error)
        before = last = await self.checkpoint_mtime(tracked)
        await self.signal(tracked, name)
        while not tracked.ended and loop.time() < until_s():
            seen = await self.checkpoint_mtime(tracked)
            if is_checkpoint_complete(before, last, seen):
                self._on_checkpoint(tracked, parse_time_ms(seen, self._skew_ms()))
                return ""
            last = seen
            await self._wait(tracked, POLL_S)
        return "" if tracked.ended else no_checkpoint(hook.timeout_ms)

    async def checkpoint_mtime(self, tracked: TrackedRun) -> str:
        return await self.mtime(tracked, tracked.supervision.checkpoint_file)

    async def mtime(self, tracked: TrackedRun, path: str) -> str:
        """Modification time of a file in the container as Docker writes it, "" without such a file."""
        if not path:
            return ""
        try:
            async with self._engine.stream(
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
    async def _wait(tracked: TrackedRun, seconds: float) -> None:
        """Sleep, or until the run has ended or its stop is shortened."""
        if seconds <= 0:
            return
        tracked.wake_event.clear()
        if tracked.ended:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await tracked.wake_event.wait()


async def cpu_ns(engine: Engine, container: str) -> int:
    params = {"stream": "0", "one-shot": "1"}
    return total_cpu_ns(await engine.request_json("GET", f"containers/{container}/stats", params=params))


async def last_output_time(engine: Engine, container: str) -> str:
    """Timestamp of its last output, "" without any."""
    params = {"stdout": "1", "stderr": "1", "timestamps": "1", "tail": "1"}
    frame = await engine.request("GET", f"containers/{container}/logs", params=params)
    return frame[8:60].split(b" ")[0].decode(errors="replace")
