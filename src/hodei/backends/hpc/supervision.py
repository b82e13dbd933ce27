"""Stops, timeouts, checkpoints and commands of submitted runs.

Each stop is a task: checkpoint, TERM, grace period, KILL. The batch system's own cancel is for jobs that have not started or
that survive a KILL: its time between TERM and KILL is the cluster's, not the job's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import structs

from hodei.backends.hpc.tracked_run import TrackedRun, read_record
from hodei.model.backend import ExecResult
from hodei.model.effects import Stop
from hodei.model.errors import BackendError, BackendRefused, NotFound
from hodei.model.ids import RunId
from hodei.model.job import Checkpoint
from hodei.supervision import command_problem, no_checkpoint, timeout_reason

if TYPE_CHECKING:
    from hodei.backends.hpc.backend import HpcBackend

CHECKPOINT_POLL_S = 0.1
KILL_REPEAT_S = 5.0
RETRY_S = 1.0
# The script of a job may not run yet when the job is first reported as running; a signal would be lost.
SCRIPT_START_S = 2.0
# Enters the directory and environment of a process of the run ($1), and executes the command in the other arguments.
_EXEC_SCRIPT = (
    'cd -- "/proc/$1/cwd" || exit 125; while IFS= read -r -d "" pair; do '
    '[[ "$pair" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] && { export "$pair"; } 2>/dev/null; done <"/proc/$1/environ"; '
    'shift; exec -- "$@"'
)


class RunSupervision:
    """Stops and checkpoints the runs of one backend. `tasks` are those in progress."""

    def __init__(self, backend: HpcBackend) -> None:
        self._backend = backend
        self.tasks: set[asyncio.Task[None]] = set()
        self._early_stops: dict[RunId, Stop] = {}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def stop(self, order: Stop, *, submitting: bool) -> None:
        tracked = self._backend.tracked.get(order.run)
        if tracked is None:
            if submitting:
                self._early_stops[order.run] = order
            return
        if tracked.final is not None:
            return
        checkpoint = order.checkpoint if order.checkpoint is not None and order.checkpoint.has_hook else None
        grace_s = order.grace_ms / 1000
        if not tracked.stop_code:
            tracked.stop_code, tracked.stop_reason, tracked.grace_s = "stop", order.reason.text, grace_s
            self._spawn(self._stop(tracked, checkpoint))
            return
        tracked.skip_checkpoint = tracked.skip_checkpoint or checkpoint is None
        tracked.grace_s = min(tracked.grace_s, grace_s)
        tracked.kill_at_s = min(tracked.kill_at_s, asyncio.get_running_loop().time() + grace_s)

    def apply_early_stop(self, tracked: TrackedRun) -> None:
        """Carry out a stop that was ordered while the run was being submitted."""
        if order := self._early_stops.pop(tracked.run, None):
            self.stop(order, submitting=False)

    async def _stop(self, tracked: TrackedRun, checkpoint: Checkpoint | None) -> None:
        system = self._backend.system
        loop = asyncio.get_running_loop()
        if checkpoint is not None and tracked.phase == "running":
            tracked.checkpoint_before_stop = True
            tracked.checkpoint_problem = await self._checkpoint(tracked, checkpoint)
            tracked.checkpoint_before_stop = False
        signalled = False
        while not tracked.ended.is_set():
            try:
                if not signalled:
                    if await self._script_runs(tracked):
                        await system.signal([tracked.job], "TERM")
                    else:
                        await system.cancel([tracked.job])
                    signalled = True
                    tracked.kill_at_s = loop.time() + tracked.grace_s
                elif loop.time() >= tracked.kill_at_s:
                    await system.signal([tracked.job], "KILL")
                    if await _wait(tracked.ended, KILL_REPEAT_S):
                        return
                    await system.cancel([tracked.job])
                    tracked.kill_at_s = loop.time() + KILL_REPEAT_S
            except (BackendError, BackendRefused):
                await _wait(tracked.ended, RETRY_S)
            else:
                await _wait(tracked.ended, min(max(tracked.kill_at_s - loop.time(), 0), 0.5))

    async def _script_runs(self, tracked: TrackedRun) -> bool:
        """Whether there is a process that receives a signal."""
        if (await asyncio.to_thread(read_record, tracked.files)).pid:
            return True
        if tracked.phase != "running":
            return False
        await _wait(tracked.ended, SCRIPT_START_S)
        return bool((await asyncio.to_thread(read_record, tracked.files)).pid)

    def check(self, tracked: TrackedRun) -> None:
        """Called at every poll of a running run: enforce its timeout, take its periodic checkpoints."""
        entry, now_ms = tracked.entry, self._backend.context.clock.now_ms()
        if tracked.stop_code:
            return
        if entry.timeout_ms and now_ms - tracked.started_ms >= entry.timeout_ms:
            tracked.stop_code = "timeout"
            tracked.stop_reason = timeout_reason(entry.timeout_ms)
            tracked.grace_s = entry.grace_ms / 1000
            self._spawn(self._stop(tracked, None))
        elif entry.checkpoint is not None and entry.checkpoint.has_hook and entry.checkpoint.every_ms:
            if not tracked.next_checkpoint_ms:
                tracked.next_checkpoint_ms = tracked.started_ms + entry.checkpoint.every_ms
            elif now_ms >= tracked.next_checkpoint_ms:
                tracked.next_checkpoint_ms = now_ms + entry.checkpoint.every_ms
                self.take_checkpoint(tracked.run, entry.checkpoint)

    def take_checkpoint(self, run: RunId, checkpoint: Checkpoint) -> None:
        tracked = self._backend.tracked.get(run)
        if tracked is None or tracked.phase != "running" or tracked.final is not None:
            return
        if not tracked.stop_code and not tracked.taking_checkpoint:
            tracked.taking_checkpoint = True
            self._spawn(self._checkpoint_and_report(tracked, checkpoint))

    async def _checkpoint_and_report(self, tracked: TrackedRun, checkpoint: Checkpoint) -> None:
        try:
            problem = await self._checkpoint(tracked, checkpoint)
        finally:
            tracked.taking_checkpoint = False
        if tracked.final is None and tracked.reported is not None and not tracked.stop_code:
            checkpoint_ms = self._backend.files.modified_ms(tracked.entry.checkpoint_file)
            tracked.reported = structs.replace(tracked.reported, checkpoint_ms=checkpoint_ms)
            self._backend.report(structs.replace(tracked.reported, checkpoint_error=problem))

    async def _checkpoint(self, tracked: TrackedRun, checkpoint: Checkpoint) -> str:
        """Returns what went wrong, "" if the checkpoint was taken."""
        if not await self._script_runs(tracked):
            return "it had only just started"
        loop, file = asyncio.get_running_loop(), tracked.entry.checkpoint_file
        before_ms = self._backend.files.modified_ms(file)
        deadline_s = loop.time() + checkpoint.timeout_ms / 1000
        try:
            if checkpoint.command:
                done = await self.execute(tracked, checkpoint.command, checkpoint.timeout_ms)
                return command_problem(done.exit_code, checkpoint.timeout_ms)
            await self._backend.system.signal([tracked.job], checkpoint.signal)
        except (BackendError, BackendRefused, NotFound) as error:
            return f"its checkpoint could not be requested: {error.message}"
        while self._backend.files.modified_ms(file) <= before_ms:
            if tracked.ended.is_set() or tracked.skip_checkpoint:
                return "its checkpoint was not awaited"
            if loop.time() >= deadline_s:
                return no_checkpoint(checkpoint.timeout_ms)
            await _wait(tracked.ended, CHECKPOINT_POLL_S)
        return ""

    async def execute(self, tracked: TrackedRun, command: Sequence[str], timeout_ms: int) -> ExecResult:
        record = await asyncio.to_thread(read_record, tracked.files)
        if not record.pid:
            raise NotFound(f"run {tracked.run} has not started its command yet")
        argv = ("/bin/bash", "-p", "-c", _EXEC_SCRIPT, "hodei", str(record.pid), *command)
        return await self._backend.system.execute(record.raw_job or tracked.job, argv, timeout_ms / 1000)


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
