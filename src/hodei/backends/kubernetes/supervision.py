"""Supervision inside containers: checkpoints, before a stop or in between, and heartbeat files.

All by commands in the container: a checkpoint signal is a `kill` by the container's own shell to its first process, a file is
checked with its own `stat`. Timeouts and other health checks are left to the kubelet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

from hodei.backends.kubernetes.pod_api import Pods, execute
from hodei.backends.kubernetes.runs import RunPod, Runs, StopCause, parse_time_ms
from hodei.model.effects import Stop
from hodei.model.errors import BackendError, BackendRefused, NotFound
from hodei.model.ids import RunId
from hodei.model.job import Checkpoint, HealthCheck
from hodei.supervision import (
    CUT_SHORT,
    HealthCounter,
    StopPlan,
    checkpoint_signal,
    command_problem,
    no_checkpoint,
)

log = logging.getLogger("hodei.kubernetes")
# A checkpoint file is polled this often; less often if that would be more than ten polls a second over all runs.
FILE_POLL_MS, POLL_COST_MS = 15_000, 100
STAT_TIMEOUT_S = 10.0
_AT_ONCE = 8
RETRY_S = 2.0
# The first process of a container ignores signals until it has set up a handler.
SIGNAL_DELAY_MS = 1000
_NO_SHELL = (126, 127)
_NOT_SENT = 125
# Sends the signal, and waits until the file has changed and is complete. It ends by itself: the API could not kill it.
_SIGNAL = """sig=$1 pid=$2 file=$3 left=$4
command -v stat >/dev/null || exit 127
seen() { stat -c '%y %s' -- "$file" 2>/dev/null || :; }
before=$(seen) last=$before end=$(( $(date +%s) + left ))
kill -s "$sig" "$pid" || exit 125
while [ "$(date +%s)" -le "$end" ]; do
  now=$(seen)
  [ -n "$now" ] && [ "$now" != "$before" ] && [ "$now" = "$last" ] && exit 0
  last=$now
  sleep 0.2 2>/dev/null || sleep 1
done
exit 124"""


class _RunState:
    """`stop`: its stop waits for a checkpoint, in seconds of the loop's clock; `wake` is set when the stop is shortened."""

    __slots__ = ("beat", "health", "next_beat_ms", "next_poll_ms", "next_save_ms", "probing", "saving", "stop", "wake")

    def __init__(self) -> None:
        self.next_save_ms = self.next_poll_ms = self.next_beat_ms = 0
        self.beat, self.health = "", HealthCounter()
        self.saving = self.probing = False
        self.stop: StopPlan | None = None
        self.wake = asyncio.Event()


class RunSupervision:
    """`stop(run, cause, grace_s)` carries out a stop; `spawn` runs a task until the backend is closed."""

    def __init__(
        self,
        runs: Runs,
        now_ms: Callable[[], int],
        stop: Callable[[RunId, StopCause, int], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._runs, self._now_ms, self._stop, self._spawn = runs, now_ms, stop, spawn
        self._pods: Pods | None = None
        self._states: dict[RunId, _RunState] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def reset(self, pods: Pods | None) -> None:
        """After a new connection, when no task runs. None: closed."""
        self._pods = pods
        self._states.clear()

    def stop_after_checkpoint(self, order: Stop) -> bool:
        """True if the stop is carried out here, after a checkpoint. A second order only ever shortens it."""
        hook = order.checkpoint if order.checkpoint is not None and order.checkpoint.has_hook else None
        state, now = self._states.get(order.run), asyncio.get_running_loop().time()
        grace_s, save_s = order.grace_ms / 1000, hook.timeout_ms / 1000 if hook is not None else 0
        if state is not None and state.stop is not None:
            if state.stop.shorten(now, grace_s, save_s):
                state.wake.set()
            return True
        if hook is None or self._running(order.run) is None:
            return False
        state = self._states.setdefault(order.run, _RunState())
        state.stop = StopPlan.begin("", order.reason.text, now, grace_s, save_s)
        self._spawn(self._checkpoint_and_stop(order.run, state, state.stop, hook))
        return True

    async def _checkpoint_and_stop(self, run: RunId, state: _RunState, stop: StopPlan, hook: Checkpoint) -> None:
        try:
            note = await self._save_in_time(run, state, stop, hook)
            while run in self._runs.pods and run not in self._runs.ends:
                try:
                    await self._stop(run, StopCause(stop.reason, note=note), math.ceil(stop.grace))
                    return
                except BackendError as error:
                    log.warning("run %s cannot be stopped yet: %s", run, error)
                    await asyncio.sleep(RETRY_S)
        finally:
            state.stop = None

    async def _save_in_time(self, run: RunId, state: _RunState, stop: StopPlan, hook: Checkpoint) -> str:
        """What went wrong; "" if the checkpoint was taken, or the run has ended meanwhile."""
        clock = asyncio.get_running_loop().time
        saving = asyncio.create_task(self._save(run, hook))
        try:
            while not saving.done():
                state.wake.clear()
                left_s = stop.save_until - clock()
                if left_s <= 0 or self._running(run) is None:
                    break
                woken = asyncio.create_task(state.wake.wait())
                await asyncio.wait({saving, woken}, timeout=min(left_s, 1.0), return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
            if not saving.done():
                return CUT_SHORT if self._running(run) is not None else ""
            problem = saving.result()
        finally:
            saving.cancel()
        if not problem:
            self._runs.checkpoint_taken(run, self._now_ms())
        return problem

    def checkpoint(self, run: RunId, hook: Checkpoint) -> None:
        """Take a checkpoint of a running run, unless one is under way; the run continues."""
        if self._running(run) is None:
            return
        state = self._states.setdefault(run, _RunState())
        if not state.saving and state.stop is None:
            state.saving = True
            self._spawn(self._save_and_report(run, state, hook))

    async def _save_and_report(self, run: RunId, state: _RunState, hook: Checkpoint) -> None:
        try:
            problem = await self._save(run, hook)
        finally:
            state.saving = False
        if not problem:
            self._runs.checkpoint_taken(run, self._now_ms())
        elif self._running(run) is not None and state.stop is None:
            self._runs.checkpoint_failed(run, problem)

    async def _save(self, run: RunId, hook: Checkpoint) -> str:
        """What went wrong, "" if its work is saved."""
        pods, pod = self._pods, self._running(run)
        if pods is None or pod is None:
            return "it does not run"
        try:
            name = "" if hook.command else checkpoint_signal(hook.signal)
        except ValueError as error:
            return str(error)
        started_ms = parse_time_ms(pod.container.running.started_at if pod.container.running else None, 0)
        delay_ms = max(0, min(SIGNAL_DELAY_MS, started_ms + SIGNAL_DELAY_MS - self._now_ms()))
        await asyncio.sleep(delay_ms / 1000)
        left_s = str(max(1, math.ceil(hook.timeout_ms / 1000)))
        command = hook.command or ("/bin/sh", "-c", _SIGNAL, "hodei", name, "1", pod.supervision.file, left_s)
        timeout_ms = hook.timeout_ms if hook.command else hook.timeout_ms + 2000
        try:
            done = await execute(pods.api, pods.path_of(run), command, timeout_ms)
        except (BackendError, BackendRefused, NotFound) as error:
            return f"its checkpoint could not be requested: {error.message}"
        if hook.command:
            return command_problem(done.exit_code, hook.timeout_ms)
        if done.exit_code in _NO_SHELL:
            return "its checkpoint could not be requested: the image has no /bin/sh or no stat"
        if done.exit_code == _NOT_SENT:
            return f"its checkpoint could not be requested: {done.stderr[:200].decode(errors='replace').strip()}"
        return no_checkpoint(hook.timeout_ms) if done.exit_code != 0 else ""

    def check(self, run: RunId, pod: RunPod, now_ms: int) -> None:
        """Called every few seconds for each live run: begin what is due."""
        supervision = pod.supervision
        if self._running(run) is None or not (supervision.file or supervision.health):
            return
        state = self._states.setdefault(run, _RunState())
        if state.stop is not None:
            return
        if supervision.probed is not None:
            self._runs.refresh(run)
        save, health = supervision.save, supervision.health
        if save is not None and save.every_ms and _is_due(state, "next_save_ms", save.every_ms, now_ms):
            self.checkpoint(run, save)
        if not state.probing and supervision.file:
            every_ms = max(FILE_POLL_MS, POLL_COST_MS * len(self._states))
            if _is_due(state, "next_poll_ms", every_ms, now_ms):
                state.probing = True
                self._spawn(self._probe(run, state, self._probe_checkpoint(run, supervision.file)))
                return
        if not state.probing and health is not None and health.file:
            started_ms = parse_time_ms(pod.container.running.started_at if pod.container.running else None, now_ms)
            if now_ms >= started_ms + health.after_ms and _is_due(state, "next_beat_ms", health.every_ms, now_ms):
                state.probing = True
                self._spawn(self._probe(run, state, self._probe_heartbeat(run, state, health, supervision.grace_ms)))

    def forget(self, run: RunId) -> None:
        self._states.pop(run, None)

    async def _probe(self, run: RunId, state: _RunState, probe: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._slots:
                # The API is away, or the run has just ended: that says nothing about the run.
                with contextlib.suppress(BackendError, NotFound):
                    await probe
        except BackendRefused as error:
            log.warning("run %s: its files cannot be checked: %s", run, error)
        finally:
            state.probing = False
            probe.close()

    async def _stat(self, run: RunId, file: str, form: str, timeout_s: float = STAT_TIMEOUT_S) -> tuple[str, str]:
        """The modification time of a file, and why it is not known."""
        if self._pods is None:
            raise BackendError("not connected")
        command = ("stat", "-c", form, "--", file)
        done = await execute(self._pods.api, self._pods.path_of(run), command, round(timeout_s * 1000))
        if done.exit_code == 0:
            return done.stdout[:200].decode(errors="replace").strip(), ""
        if done.exit_code in _NO_SHELL:
            return "", f"the image has no stat to check {file}"
        return "", f"there is no file {file}" if done.exit_code is not None else f"no answer within {timeout_s:g}s"

    async def _probe_checkpoint(self, run: RunId, file: str) -> None:
        stamp, _ = await self._stat(run, file, "%Y")
        if stamp.isdigit():
            self._runs.checkpoint_taken(run, min(int(stamp) * 1000, self._now_ms()))

    async def _probe_heartbeat(self, run: RunId, state: _RunState, check: HealthCheck, grace_ms: int) -> None:
        seen, problem = await self._stat(run, check.file, "%y", check.timeout_ms / 1000)
        if not problem and seen == state.beat:
            problem = f"{check.file} has not changed for {check.every_ms / 1000:g}s"
        state.beat = seen
        stop_reason = state.health.observe(problem, check.failures)
        self._runs.set_health(run, "failing" if problem else "ok")
        if stop_reason and state.stop is None and self._running(run) is not None:
            await self._stop(run, StopCause(stop_reason, "unhealthy"), math.ceil(grace_ms / 1000))

    def _running(self, run: RunId) -> RunPod | None:
        pod = self._runs.pods.get(run)
        running = pod is not None and pod.container.running is not None and not pod.deleting
        return pod if running and run not in self._runs.ends else None


def _is_due(state: _RunState, timer: str, every_ms: int, now_ms: int) -> bool:
    """Every `every_ms`; the first call starts the timer."""
    at = getattr(state, timer)
    if at and now_ms < at:
        return False
    setattr(state, timer, now_ms + every_ms)
    return bool(at)
