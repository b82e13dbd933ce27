"""Runs that save their work, before a stop or in between, and files in their containers that tell of it or of their health.

All of it by commands in the container (`beside`): a signal is a `kill` by the container's own shell to its first process,
a file is looked at with its own `stat`. What a kubelet can do by itself is not done here: see `care`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

from hodei.backends.kubernetes.pod_api import Pods
from hodei.backends.kubernetes.runs import Runs
from hodei.backends.kubernetes.states import Ending, RunPod, at_ms
from hodei.backends.kubernetes.streams import execute
from hodei.model.effects import Stop
from hodei.model.errors import BackendError, BackendRefused, NotFound
from hodei.model.ids import RunId
from hodei.model.job import Checkpoint, HealthCheck

log = logging.getLogger("hodei.kubernetes")
SIGNALS = ("ALRM", "CONT", "HUP", "INT", "QUIT", "TERM", "URG", "USR1", "USR2", "VTALRM", "WINCH")
# A file is looked at that often; less often where so many runs ask for it that this would be more than ten looks a second.
FILE_LOOK_MS, LOOK_COST_MS = 15_000, 100
LOOK_S = 10.0
_AT_ONCE = 8
TRY_AGAIN_S = 2.0
# The first process of a container is deaf to signals that it has not set up a handler for yet.
BIRTH_MS = 1000
_NO_SHELL = (126, 127)
_TOO_LATE, _NOBODY = 124, 125
# Sends the signal, and waits until the file has changed and is at rest. It ends by itself: the API could not end it.
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


class _Kept:
    """What is remembered of a run. `stopping`: its stop waits for its work to be saved."""

    __slots__ = ("beat", "failures", "looking", "next_beat_ms", "next_look_ms", "next_save_ms", "saving", "stopping")

    def __init__(self) -> None:
        self.next_save_ms = self.next_look_ms = self.next_beat_ms = self.failures = 0
        self.beat = ""
        self.saving = self.looking = False
        self.stopping: _Stopping | None = None


class _Stopping:
    """Times are of the event loop's clock."""

    def __init__(self, save_until: float, grace_s: float) -> None:
        self.save_until, self.grace_s = save_until, grace_s
        self.hurry = asyncio.Event()

    @property
    def end(self) -> float:
        return self.save_until + self.grace_s


class RunSupervision:
    """`stop(run, ending, grace_s)` carries a stop out, `spawn` runs an errand until the backend is closed."""

    def __init__(
        self,
        runs: Runs,
        now_ms: Callable[[], int],
        stop: Callable[[RunId, Ending, int], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._runs, self._now_ms, self._stop, self._spawn = runs, now_ms, stop, spawn
        self._pods: Pods | None = None
        self._kept: dict[RunId, _Kept] = {}
        self._gate = asyncio.Semaphore(_AT_ONCE)

    def begin(self, pods: Pods | None) -> None:
        """Connected anew; nothing is on its way. None: closed."""
        self._pods = pods
        self._kept.clear()

    # -------------------------------------------------------------------------------------------- stops

    def stop_later(self, order: Stop) -> bool:
        """Whether the stop is carried out here, after the run has saved its work. A second order only ever hastens it."""
        hook = order.checkpoint if order.checkpoint is not None and order.checkpoint.has_hook else None
        kept, now = self._kept.get(order.run), asyncio.get_running_loop().time()
        grace_s = order.grace_ms / 1000
        asked = _Stopping(now + (hook.timeout_ms / 1000 if hook is not None else 0), grace_s)
        if kept is not None and kept.stopping is not None:
            going = kept.stopping
            if asked.end < going.end:
                going.save_until, going.grace_s = min(going.save_until, asked.save_until), grace_s
                going.hurry.set()
            return True
        pod = self._running(order.run)
        if hook is None or pod is None:
            return False
        kept = self._kept.setdefault(order.run, _Kept())
        kept.stopping = asked
        self._spawn(self._bring_down(order.run, kept, asked, order.reason.text, hook))
        return True

    async def _bring_down(self, run: RunId, kept: _Kept, stopping: _Stopping, reason: str, hook: Checkpoint) -> None:
        try:
            note = await self._save_in_time(run, stopping, hook)
            while run in self._runs.pods and run not in self._runs.ends:
                try:
                    await self._stop(run, Ending(reason, note=note), math.ceil(stopping.grace_s))
                    return
                except BackendError as error:
                    log.warning("run %s cannot be stopped yet: %s", run, error)
                    await asyncio.sleep(TRY_AGAIN_S)
        finally:
            kept.stopping = None

    async def _save_in_time(self, run: RunId, stopping: _Stopping, hook: Checkpoint) -> str:
        """What went wrong; "" if its work is saved, or it has ended meanwhile."""
        clock = asyncio.get_running_loop().time
        saving = asyncio.create_task(self._save(run, hook))
        try:
            while not saving.done():
                stopping.hurry.clear()
                left_s = stopping.save_until - clock()
                if left_s <= 0 or self._running(run) is None:
                    break
                hurry = asyncio.create_task(stopping.hurry.wait())
                await asyncio.wait({saving, hurry}, timeout=min(left_s, 1.0), return_when=asyncio.FIRST_COMPLETED)
                hurry.cancel()
            if not saving.done():
                return "saving its work was cut short" if self._running(run) is not None else ""
            problem = saving.result()
        finally:
            saving.cancel()
        if not problem:
            self._runs.saved(run, self._now_ms())
        return problem

    # ------------------------------------------------------------------------------------- saving work

    def save(self, run: RunId, hook: Checkpoint) -> None:
        """Let it save its work, and go on. One that is at it, or does not run, is left alone."""
        if self._running(run) is None:
            return
        kept = self._kept.setdefault(run, _Kept())
        if not kept.saving and kept.stopping is None:
            kept.saving = True
            self._spawn(self._save_and_tell(run, kept, hook))

    async def _save_and_tell(self, run: RunId, kept: _Kept, hook: Checkpoint) -> None:
        try:
            problem = await self._save(run, hook)
        finally:
            kept.saving = False
        if not problem:
            self._runs.saved(run, self._now_ms())
        elif self._running(run) is not None and kept.stopping is None:
            self._runs.not_saved(run, problem)

    async def _save(self, run: RunId, hook: Checkpoint) -> str:
        pods, pod = self._pods, self._running(run)
        if pods is None or pod is None:
            return "it does not run"
        name, seconds = hook.signal.upper().removeprefix("SIG"), f"{hook.timeout_ms / 1000:g}s"
        if not hook.command and name not in SIGNALS:
            return f"the signal {name[:20]} cannot be used; there are {', '.join(SIGNALS)}"
        born_ms = at_ms(pod.container.running.started_at if pod.container.running else None, 0)
        await asyncio.sleep(max(0, min(BIRTH_MS, born_ms + BIRTH_MS - self._now_ms())) / 1000)
        left_s = str(max(1, math.ceil(hook.timeout_ms / 1000)))
        words = hook.command or ("/bin/sh", "-c", _SIGNAL, "hodei", name, "1", pod.care.file, left_s)
        patience_ms = hook.timeout_ms if hook.command else hook.timeout_ms + 2000
        try:
            done = await execute(pods.api, pods.path_of(run), words, patience_ms)
        except (BackendError, BackendRefused, NotFound) as error:
            return f"its checkpoint could not be asked for: {error.message}"
        if hook.command:
            if done.exit_code is None:
                return f"its checkpoint command did not end within {seconds}"
            return f"its checkpoint command failed: exit code {done.exit_code}" if done.exit_code else ""
        if done.exit_code in _NO_SHELL:
            return "its checkpoint could not be asked for: the image has no /bin/sh or no stat"
        if done.exit_code == _NOBODY:
            return f"its checkpoint could not be asked for: {done.stderr[:200].decode(errors='replace').strip()}"
        return f"no checkpoint was seen within {seconds}" if done.exit_code != 0 else ""

    # ------------------------------------------------------------------------------------- now and then

    def look_after(self, run: RunId, pod: RunPod, now_ms: int) -> None:
        """Called every few seconds for each run that goes on: begin what is due."""
        care = pod.care
        if self._running(run) is None or not (care.file or care.health):
            return
        kept = self._kept.setdefault(run, _Kept())
        if kept.stopping is not None:
            return
        if care.probed is not None:
            self._runs.look(run)
        if care.save is not None and care.save.every_ms and _due(kept, "next_save_ms", care.save.every_ms, now_ms):
            self.save(run, care.save)
        if not kept.looking and care.file:
            every_ms = max(FILE_LOOK_MS, LOOK_COST_MS * len(self._kept))
            if _due(kept, "next_look_ms", every_ms, now_ms):
                kept.looking = True
                self._spawn(self._look(run, kept, self._look_at_checkpoint(run, care.file)))
                return
        if not kept.looking and care.health is not None and care.health.file:
            born_ms = at_ms(pod.container.running.started_at if pod.container.running else None, now_ms)
            waited = now_ms >= born_ms + care.health.after_ms
            if waited and _due(kept, "next_beat_ms", care.health.every_ms, now_ms):
                kept.looking = True
                self._spawn(self._look(run, kept, self._look_at_heartbeat(run, kept, care.health, care.grace_ms)))

    def forget(self, run: RunId) -> None:
        self._kept.pop(run, None)

    async def _look(self, run: RunId, kept: _Kept, look: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._gate:
                # The API is away, or the run has just ended: that says nothing of the run.
                with contextlib.suppress(BackendError, NotFound):
                    await look
        except BackendRefused as error:
            log.warning("run %s: its files cannot be looked at: %s", run, error)
        finally:
            kept.looking = False
            look.close()

    async def _changed(self, run: RunId, file: str, form: str, timeout_s: float = LOOK_S) -> tuple[str, str]:
        """When a file was last changed, and why that cannot be told."""
        if self._pods is None:
            raise BackendError("not connected")
        words = ("stat", "-c", form, "--", file)
        done = await execute(self._pods.api, self._pods.path_of(run), words, round(timeout_s * 1000))
        if done.exit_code == 0:
            return done.stdout[:200].decode(errors="replace").strip(), ""
        if done.exit_code in _NO_SHELL:
            return "", f"the image has no stat to look at {file}"
        return "", f"there is no file {file}" if done.exit_code is not None else f"no answer within {timeout_s:g}s"

    async def _look_at_checkpoint(self, run: RunId, file: str) -> None:
        stamp, _ = await self._changed(run, file, "%Y")
        if stamp.isdigit():
            self._runs.saved(run, min(int(stamp) * 1000, self._now_ms()))

    async def _look_at_heartbeat(self, run: RunId, kept: _Kept, check: HealthCheck, grace_ms: int) -> None:
        seen, problem = await self._changed(run, check.file, "%y", check.timeout_ms / 1000)
        if not problem and seen == kept.beat:
            problem = f"{check.file} has not changed for {check.every_ms / 1000:g}s"
        kept.beat = seen
        kept.failures = kept.failures + 1 if problem else 0
        self._runs.found(run, "failing" if problem else "ok")
        if kept.failures >= check.failures and kept.stopping is None and self._running(run) is not None:
            times = f"{kept.failures} times in a row" if kept.failures > 1 else "once"
            ending = Ending(f"its health check failed {times}: {problem}", "unhealthy")
            await self._stop(run, ending, math.ceil(grace_ms / 1000))

    def _running(self, run: RunId) -> RunPod | None:
        pod = self._runs.pods.get(run)
        there = pod is not None and pod.container.running is not None and not pod.leaving
        return pod if there and run not in self._runs.ends else None


def _due(kept: _Kept, what: str, every_ms: int, now_ms: int) -> bool:
    """Every so often, the first time after so long."""
    at = getattr(kept, what)
    if at and now_ms < at:
        return False
    setattr(kept, what, now_ms + every_ms)
    return bool(at)
