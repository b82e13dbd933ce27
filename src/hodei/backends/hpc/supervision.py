"""Runs that are to end, to save their work, or to be asked something: what is done to a job while it is in the system.

Each stop is a task of its own: save, TERM, wait, KILL. The system's own way to end a job is for those that have not begun,
and for those that outlive a KILL: its time between TERM and KILL is the cluster's, not the job's.
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
    from hodei.backends.hpc.base import HpcBackend

LOOK_S = 0.1
AGAIN_S = 5.0
TRY_AGAIN_S = 1.0
# A run that was just seen to run may have its script not yet at work; then nobody would hear a signal.
BIRTH_S = 2.0
# Goes into the place and the environment of a process of the run, and becomes the command. The words follow as arguments.
_BESIDE = (
    'cd -- "/proc/$1/cwd" || exit 125; while IFS= read -r -d "" pair; do '
    '[[ "$pair" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] && { export "$pair"; } 2>/dev/null; done <"/proc/$1/environ"; '
    'shift; exec -- "$@"'
)


class RunSupervision:
    """Takes care of the runs of one backend; what it is about is in `tasks`."""

    def __init__(self, backend: HpcBackend) -> None:
        self._of = backend
        self.tasks: set[asyncio.Task[None]] = set()
        self._early: dict[RunId, Stop] = {}

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # ------------------------------------------------------------------------------------------ stops

    def stop(self, order: Stop, *, being_handed_in: bool) -> None:
        ticket = self._of.tickets.get(order.run)
        if ticket is None:
            if being_handed_in:
                self._early[order.run] = order
            return
        if ticket.end is not None:
            return
        hook = order.checkpoint if order.checkpoint is not None and order.checkpoint.has_hook else None
        grace_s = order.grace_ms / 1000
        if not ticket.stop_code:
            ticket.stop_code, ticket.stop_reason, ticket.grace_s = "stop", order.reason.text, grace_s
            self._do(self._bring_down(ticket, hook))
            return
        ticket.in_a_hurry = ticket.in_a_hurry or hook is None
        ticket.grace_s = min(ticket.grace_s, grace_s)
        ticket.kill_at_s = min(ticket.kill_at_s, asyncio.get_running_loop().time() + grace_s)

    def check(self, ticket: TrackedRun) -> None:
        """It has just been handed in: perhaps somebody wants it gone already."""
        if order := self._early.pop(ticket.run, None):
            self.stop(order, being_handed_in=False)

    async def _bring_down(self, ticket: TrackedRun, hook: Checkpoint | None) -> None:
        queue = self._of.queue
        loop = asyncio.get_running_loop()
        if hook is not None and ticket.phase == "running":
            ticket.has_hook = True
            ticket.note = await self._save(ticket, hook)
            ticket.has_hook = False
        told = False
        while not ticket.ended.is_set():
            try:
                if not told:
                    if await self._has_begun(ticket):
                        await queue.signal([ticket.job], "TERM")
                    else:
                        await queue.cancel([ticket.job])
                    told = True
                    ticket.kill_at_s = loop.time() + ticket.grace_s
                elif loop.time() >= ticket.kill_at_s:
                    await queue.signal([ticket.job], "KILL")
                    if await _within(ticket.ended, AGAIN_S):
                        return
                    await queue.cancel([ticket.job])
                    ticket.kill_at_s = loop.time() + AGAIN_S
            except (BackendError, BackendRefused):
                await _within(ticket.ended, TRY_AGAIN_S)
            else:
                await _within(ticket.ended, min(max(ticket.kill_at_s - loop.time(), 0), 0.5))

    async def _has_begun(self, ticket: TrackedRun) -> bool:
        """Whether there is somebody to hear a signal."""
        if (await asyncio.to_thread(read_record, ticket.files)).pid:
            return True
        if ticket.phase != "running":
            return False
        await _within(ticket.ended, BIRTH_S)
        return bool((await asyncio.to_thread(read_record, ticket.files)).pid)

    def look_after(self, ticket: TrackedRun) -> None:
        """At every look at a running run: has it had its time, is it due to save its work?"""
        entry, now_ms = ticket.entry, self._of.context.clock.now_ms()
        if ticket.stop_code:
            return
        if entry.timeout_ms and now_ms - ticket.began_ms >= entry.timeout_ms:
            ticket.stop_code = "timeout"
            ticket.stop_reason = timeout_reason(entry.timeout_ms)
            ticket.grace_s = entry.grace_ms / 1000
            self._do(self._bring_down(ticket, None))
        elif entry.hook is not None and entry.hook.has_hook and entry.hook.every_ms:
            if not ticket.next_save_ms:
                ticket.next_save_ms = ticket.began_ms + entry.hook.every_ms
            elif now_ms >= ticket.next_save_ms:
                ticket.next_save_ms = now_ms + entry.hook.every_ms
                self.save(ticket.run, entry.hook)

    # ------------------------------------------------------------------------------------ saving work

    def save(self, run: RunId, hook: Checkpoint) -> None:
        ticket = self._of.tickets.get(run)
        running = ticket is not None and ticket.phase == "running" and ticket.end is None
        if ticket is not None and running and not ticket.stop_code and not ticket.saving:
            ticket.saving = True
            self._do(self._save_and_tell(ticket, hook))

    async def _save_and_tell(self, ticket: TrackedRun, hook: Checkpoint) -> None:
        try:
            problem = await self._save(ticket, hook)
        finally:
            ticket.saving = False
        if ticket.end is None and ticket.said is not None and not ticket.stop_code:
            saved_ms = self._of.files.changed_ms(ticket.entry.saved)
            ticket.said = structs.replace(ticket.said, checkpoint_ms=saved_ms)
            self._of.tell(structs.replace(ticket.said, checkpoint_error=problem))

    async def _save(self, ticket: TrackedRun, hook: Checkpoint) -> str:
        """What went wrong, "" if its work is saved."""
        if not await self._has_begun(ticket):
            return "it had only just begun"
        loop, saved = asyncio.get_running_loop(), ticket.entry.saved
        before_ms = self._of.files.changed_ms(saved)
        deadline_s = loop.time() + hook.timeout_ms / 1000
        try:
            if hook.command:
                done = await self.beside(ticket, hook.command, hook.timeout_ms)
                return command_problem(done.exit_code, hook.timeout_ms)
            await self._of.queue.signal([ticket.job], hook.signal)
        except (BackendError, BackendRefused, NotFound) as error:
            return f"its checkpoint could not be asked for: {error.message}"
        while self._of.files.changed_ms(saved) <= before_ms:
            if ticket.ended.is_set() or ticket.in_a_hurry:
                return "it was not waited for"
            if loop.time() >= deadline_s:
                return no_checkpoint(hook.timeout_ms)
            await _within(ticket.ended, LOOK_S)
        return ""

    async def beside(self, ticket: TrackedRun, command: Sequence[str], timeout_ms: int) -> ExecResult:
        """A command in the place and with the environment of the run's own."""
        record = await asyncio.to_thread(read_record, ticket.files)
        if not record.pid:
            raise NotFound(f"run {ticket.run} does not run yet")
        words = ("/bin/bash", "-p", "-c", _BESIDE, "hodei", str(record.pid), *command)
        return await self._of.queue.execute(record.job or ticket.job, words, timeout_ms / 1000)


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
