"""One look at all jobs that have not ended: what is new is told, what is missing is searched for.

A job that is missing is not finished: the system may have forgotten it, crashed and given its number to another, or have
cleaned up. What the run itself wrote down comes first, then the system's history; only then is it given up.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from hodei.backends.hpc.ports import Seen
from hodei.backends.hpc.script import NOT_TRIED
from hodei.backends.hpc.submission import the_one
from hodei.backends.hpc.tracked_run import Record, TrackedRun, end_of, read_record, seal
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.facts import RunObserved

if TYPE_CHECKING:
    from hodei.backends.hpc.base import HpcBackend

# How long a job must be missing before it is handed in again, and before it is said to be lost.
FORGOTTEN_AFTER_MS = 2_000
LOST_AFTER_MS = 30_000
# A shared file system may show late what a node has written.
RECORD_LATE_MS = 5_000
SAME_WITHIN_MS = 60_000


class QueuePoll:
    """Looks at the jobs of one backend, whoever asks for it."""

    def __init__(self, backend: HpcBackend) -> None:
        self._of = backend
        self._late: dict[str, int] = {}
        self._one_at_a_time = asyncio.Lock()

    async def round(self) -> None:
        async with self._one_at_a_time:
            await self._round()

    async def _round(self) -> None:
        open_ones = [ticket for ticket in self._of.tickets.values() if ticket.end is None]
        if not open_ones:
            return
        found = {seen.job: seen for seen in await self._of.queue.look([ticket.job for ticket in open_ones])}
        ended: list[tuple[TrackedRun, Seen]] = []
        missing = []
        for ticket in open_ones:
            seen = found.get(ticket.job)
            if seen is None or seen.mark not in ticket.entry.marks or await self._is_another(ticket, seen):
                missing.append(ticket)
            elif seen.phase == "ended":
                ended.append((ticket, seen))
            else:
                self._alive(ticket, seen)
        if missing:
            ended += await self._search(missing)
        if ended:
            await self._end(ended)

    async def _is_another(self, ticket: TrackedRun, seen: Seen) -> bool:
        """Of a run that was handed in more than once: whether another of its jobs runs it, and this one does nothing."""
        if ticket.entry.times < 2 or seen.phase == "running":
            return False
        record = await asyncio.to_thread(read_record, ticket.files)
        return record.began and record.number != seen.job

    def _alive(self, ticket: TrackedRun, seen: Seen) -> None:
        now_ms = self._of.context.clock.now_ms()
        ticket.missing_since_ms = 0
        ticket.phase, ticket.submit_s = seen.phase, seen.submit_s
        if seen.phase == "running" and not ticket.began_ms:
            self._begin(ticket, min(now_ms, max(seen.start_s * 1000, ticket.entry.at_ms)))
        elif seen.phase == "waiting" and not ticket.began_ms:
            reason = f"{self._of.system}: {seen.reason or seen.state}"
            if ticket.said is None or ticket.said.reason != reason:
                ticket.said = RunObserved(run=ticket.run, state="placed", at_ms=now_ms, reason=reason)
                self._of.tell(ticket.said)
        if seen.phase == "running":
            self._of.watch_over(ticket)

    def _begin(self, ticket: TrackedRun, at_ms: int) -> None:
        ticket.began_ms, ticket.order = at_ms, None
        ticket.said = RunObserved(run=ticket.run, state="running", at_ms=at_ms)
        self._of.tell(ticket.said)

    async def _end(self, ended: list[tuple[TrackedRun, Seen]]) -> None:
        now_ms = self._of.context.clock.now_ms()
        for (ticket, seen), (record, saved_ms) in zip(ended, await self._records(ended), strict=True):
            # The command said 125, or its script did: which of them may be late to be seen. If it has begun, the system has
            # started the job a second time, and the first may still be at it.
            unclear = seen.code == NOT_TRIED and record.exit_code is None and not record.no_workdir
            patience_ms = LOST_AFTER_MS if record.began else RECORD_LATE_MS
            if seen.code == 0 and not record.began and not ticket.stop_code:
                # A controller that crashed may call a job complete that its nodes never saw.
                unclear, patience_ms = True, LOST_AFTER_MS
            if unclear and now_ms - self._late.setdefault(ticket.run, now_ms) < patience_ms:
                continue
            self._late.pop(ticket.run, None)
            if record.began and not ticket.began_ms:
                self._begin(ticket, max(record.began_ms or seen.start_s * 1000, ticket.entry.at_ms))
            end = end_of(ticket, seen, record, now_ms, self._of.system, saved_ms)
            if not record.began and (ticket.entry.times > 1 or end.state == "lost"):
                await asyncio.to_thread(seal, ticket.files)  # before a new attempt can begin
            ticket.finish(end)
            self._of.tell(end)
            if ticket.entry.times > 1:
                with contextlib.suppress(BackendError):
                    await self._of.cancel_others(ticket)

    async def _records(self, ended: list[tuple[TrackedRun, Seen]]) -> list[tuple[Record, int]]:
        def read() -> list[tuple[Record, int]]:
            changed_ms = self._of.files.changed_ms
            return [(read_record(ticket.files), changed_ms(ticket.entry.saved)) for ticket, _ in ended]

        return await asyncio.to_thread(read)

    async def _search(self, missing: list[TrackedRun]) -> list[tuple[TrackedRun, Seen]]:
        """Those of them that are found to have ended."""
        now_ms = self._of.context.clock.now_ms()
        ours = await self._of.queue.ours(self._of.prefix)
        records = await asyncio.to_thread(lambda: [read_record(ticket.files) for ticket in missing])
        out: list[tuple[TrackedRun, Seen]] = []
        gone: list[tuple[TrackedRun, Record]] = []
        for ticket, record in zip(missing, records, strict=True):
            same = [seen for seen in ours if seen.mark in ticket.entry.marks]
            if ticket.entry.times > 1 and record.began:
                same = [seen for seen in same if seen.job == record.number]
            if not same:
                gone.append((ticket, record))
                continue
            seen = the_one(same, record)
            self._of.renumber(ticket, seen.job)
            if seen.phase == "ended":
                out.append((ticket, seen))
            else:
                self._alive(ticket, seen)
        if not gone:
            return out
        history = await self._of.queue.remembered([ticket.job for ticket, _ in gone])
        for ticket, record in gone:
            past = next((seen for seen in history if seen.phase == "ended" and _same(ticket, seen)), None)
            if record.exit_code is not None or record.no_workdir:
                code = NOT_TRIED if record.no_workdir else record.exit_code
                out.append((ticket, Seen(ticket.job, ticket.entry.mark, "ended", "gone from its line", code=code)))
            elif past is not None:
                out.append((ticket, past))
            else:
                await self._give_up_in_time(ticket, record, now_ms)
        return out

    async def _give_up_in_time(self, ticket: TrackedRun, record: Record, now_ms: int) -> None:
        if not ticket.missing_since_ms:
            ticket.missing_since_ms = now_ms
            return
        missing_ms = now_ms - ticket.missing_since_ms
        untouched = not record.began and not ticket.began_ms and not ticket.stop_code
        if untouched and ticket.order is not None and not ticket.handed_in_again:
            if missing_ms >= FORGOTTEN_AFTER_MS:
                try:
                    await self._of.hand_in_again(ticket)
                except BackendError:
                    return  # at the next look
                except BackendRefused as error:
                    await self._lost(ticket, record, now_ms, f"forgot it, and did not take it again: {error.message}")
        elif missing_ms >= LOST_AFTER_MS or ticket.stop_code:
            why = f"no longer knows its job {ticket.job}, and nobody its exit code"
            await self._lost(ticket, record, now_ms, why)

    async def _lost(self, ticket: TrackedRun, record: Record, now_ms: int, why: str) -> None:
        """Another attempt follows: so this one must not begin any more."""
        if not record.began and not await asyncio.to_thread(seal, ticket.files):
            return  # it has begun after all, or the folder is away: at the next look
        at_ms = max(now_ms, ticket.began_ms)
        state = "stopped" if ticket.stop_code == "stop" else "lost"
        code, reason = ("", ticket.stop_reason) if state == "stopped" else ("lost", f"{self._of.system} {why}")
        ticket.finish(RunObserved(run=ticket.run, state=state, at_ms=at_ms, reason_code=code, reason=reason))  # type: ignore[arg-type]
        assert ticket.end is not None
        self._of.tell(ticket.end)


def _same(ticket: TrackedRun, seen: Seen) -> bool:
    """Histories keep no marks, and numbers are given out twice: the time of handing in tells."""
    if seen.job != ticket.job:
        return False
    if ticket.submit_s:
        return seen.submit_s == ticket.submit_s
    return abs(seen.submit_s * 1000 - ticket.entry.at_ms) < SAME_WITHIN_MS
