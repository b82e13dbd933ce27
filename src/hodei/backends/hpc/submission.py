"""Runs on their way into the system: each is handed in, and when nobody can tell whether that was accepted, it is in doubt.

A doubt ends in two ways. The job is found by its mark; or the system has answered completely, once at first and once more when
whatever was queued up before it (a server that hung works that off) must have come through, and the job was in neither
answer. Then it may be handed in again. Meanwhile every order for it is answered with IN_DOUBT: a run that could be on its way
is never said not to have begun. If the system accepts it late all the same, the claim in the script (`script`) keeps the
second from running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from hodei.backends.hpc.ports import Doubtful, Seen, Submission
from hodei.backends.hpc.script import SCRIPT_LIMIT
from hodei.backends.hpc.tracked_run import Entry, Record, TrackedRun, read_record, seal
from hodei.model.effects import Start
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused
from hodei.model.ids import RunId

if TYPE_CHECKING:
    from hodei.backends.hpc.base import HpcBackend
    from hodei.backends.hpc.request import RequestBuilder

# How long after the first complete answer a job may still turn up, and how often it is looked for.
IN_DOUBT_S = 5.0
LOOK_EVERY_S = 1.0
START_TIMEOUT_S = 45.0
# What the mark of an array has in the place of a run.
ARRAY = "+"

Wanted = tuple[Start, Entry, Submission]
Answer = dict[RunId, BackendError | BackendRefused]


class Doubt:
    """`since_s`: questions before that tell nothing. `heard_s`: when the first was asked that was answered completely. `over`:
    it was not accepted, and may be handed in again. On the loop's clock: a restarted server begins anew."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.since_s = asyncio.get_running_loop().time()
        self.heard_s: float | None = None
        self.over = False


class Submissions:
    """Hands in the runs of one backend. `tasks`: those that are being handed in."""

    def __init__(self, backend: HpcBackend, wants: RequestBuilder) -> None:
        self._of, self._wants = backend, wants
        self.tasks: dict[RunId, asyncio.Task[None]] = {}
        self.doubts: dict[RunId, Doubt] = {}
        self._settling: asyncio.Task[None] | None = None

    def under_way(self, run: RunId) -> bool:
        return run in self.tasks or run in self.doubts

    def all_tasks(self) -> list[asyncio.Task[None]]:
        return [*self.tasks.values(), *([self._settling] if self._settling else [])]

    # ------------------------------------------------------------------------------------------ orders

    async def start(self, orders: Sequence[Start]) -> Answer:
        answer: Answer = {}
        wanted: dict[RunId, Wanted] = {}
        await self._look_once_more([order.run.id for order in orders])
        for order in orders:
            run = order.run.id
            if (ticket := self._of.tickets.get(run)) is not None:
                if ticket.end is None and not ticket.began_ms:
                    ticket.order = order  # an earlier server's: now it can be handed in again, should it be forgotten
            elif run in self.tasks or run in wanted:
                continue
            elif (doubt := self.doubts.get(run)) is not None and not doubt.over:
                answer[run] = _in_doubt(run)
            else:
                try:
                    wanted[run] = self._wanted(order)
                except (BackendError, BackendRefused) as refusal:
                    answer[run] = await self._never(run, refusal)
        for group in self._groups(list(wanted.values())):
            # A task of its own: who gives up waiting for it does not stop it half way.
            task = asyncio.create_task(self._hand_in(group), name=f"{self._of.name}: hand in {len(group)}")
            self.tasks |= {order.run.id: task for order, _, _ in group}
        tasks = {order.run.id: self.tasks[order.run.id] for order in orders if order.run.id in self.tasks}
        if tasks:
            await asyncio.wait(set(tasks.values()), timeout=START_TIMEOUT_S)
        for run, task in tasks.items():
            if not task.done():
                answer[run] = Doubtful(f"run {run} is still being handed in", hint="asking again tells")
            elif isinstance(error := task.exception(), (BackendError, BackendRefused)):
                answer[run] = error
            elif error is not None:
                raise error
        unreached = [error for error in answer.values() if error.code == NOT_REACHED]
        if unreached and len(unreached) == len({order.run.id for order in orders}):
            raise unreached[0]  # not one of them got through: it is the system that is out of reach
        return answer

    def _wanted(self, order: Start) -> Wanted:
        of, run = self._of, order.run.id
        entry, submission = self._wants.submission(order, of.mark(run), of.files.of(run), of.context.clock.now_ms())
        if doubt := self.doubts.get(run):
            marks = {mark for mark in (*doubt.entry.also, doubt.entry.mark) if mark != entry.mark}
            entry = structs.replace(entry, also=tuple(sorted(marks)), times=doubt.entry.times + 1)
        return order, entry, submission

    async def _never(self, run: RunId, error: BackendError | BackendRefused) -> BackendError | BackendRefused:
        """What may be said of a run that is not handed in, or was not taken: the error, if it is certain that nothing of an
        earlier time can begin any more."""
        doubt = self.doubts.get(run)
        if doubt is None or error.code == NOT_REACHED:
            return error
        if await asyncio.to_thread(seal, doubt.entry.files):
            self._of.journal.write(structs.replace(doubt.entry, forgotten=True))
            del self.doubts[run]
            return error
        self._doubt([doubt.entry])  # it has begun, or the folder cannot be read: it is looked for
        return _in_doubt(run)

    def _groups(self, wanted: list[Wanted]) -> list[list[Wanted]]:
        """Those that differ in what they run and in nothing else, together: they are handed in as one array."""
        most = self._of.queue.most_at_once
        alike: dict[tuple[object, ...], list[Wanted]] = {}
        out = []
        for each in wanted:
            order, _, submission = each
            if most < 2 or order.run.id in self.doubts:
                out.append([each])
                continue
            alike.setdefault(submission.like, []).append(each)
        for group in alike.values():
            while group:
                size = 0
                for taken, (_, _, submission) in enumerate(group, 1):
                    size += len(submission.script)
                    if taken == most or size > SCRIPT_LIMIT:
                        break
                out.append(group[:taken])
                group = group[taken:]
        return out

    async def _hand_in(self, group: list[Wanted]) -> None:
        of = self._of
        runs = [order.run.id for order, _, _ in group]
        entries = [entry for _, entry, _ in group]
        mark = f"{of.prefix}{ARRAY}{runs[0]}"
        if len(group) > 1:
            entries = [structs.replace(entry, mark=f"{mark}#{place}") for place, entry in enumerate(entries)]
        try:
            of.journal.write(*entries)
            try:
                submissions = [submission for _, _, submission in group]
                if len(group) > 1:
                    jobs = await of.queue.submit_many(submissions, mark)
                else:
                    jobs = [await of.queue.submit(submissions[0])]
            except Doubtful:
                self._doubt(entries)
                if not await self._found(runs):
                    raise
                return
            except (BackendError, BackendRefused) as error:
                if runs[0] in self.doubts:  # then it is alone
                    raise await self._never(runs[0], error) from None
                of.journal.write(*(structs.replace(entry, forgotten=True) for entry in entries))
                raise
            for (order, _, _), entry, job in zip(group, entries, jobs, strict=True):
                self.doubts.pop(entry.run, None)
                of.take(TrackedRun(structs.replace(entry, job=job), order))
        finally:
            for run in runs:
                self.tasks.pop(run, None)

    # ------------------------------------------------------------------------------------------ doubts

    def remember(self, entries: Iterable[Entry]) -> None:
        """Those that an earlier server was handing in."""
        for entry in entries:
            self.doubts[entry.run] = Doubt(entry)

    def _doubt(self, entries: Iterable[Entry]) -> None:
        self.remember(entries)
        self.settle()

    def settle(self) -> None:
        """Look again and again, until there is no doubt left."""
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._settle(), name=f"{self._of.name}: look for runs in doubt")

    async def _settle(self) -> None:
        while any(not doubt.over for doubt in self.doubts.values()):
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._look()
            except (BackendError, OSError):
                continue  # no answer: as much in doubt as before

    async def _found(self, runs: Sequence[RunId]) -> bool:
        try:
            await self._look()
        except BackendError:
            return False
        return all(run in self._of.tickets for run in runs)

    async def _look_once_more(self, runs: Sequence[RunId]) -> None:
        """Right before these are handed in again. Without an answer they are in doubt anew."""
        again = [run for run in runs if run in self.doubts and self.doubts[run].over and run not in self.tasks]
        if again:
            try:
                await self._look()
            except BackendError:
                self._doubt([self.doubts[run].entry for run in again if run in self.doubts])

    async def _look(self) -> None:
        asked_s = asyncio.get_running_loop().time()
        await self.hear(await self._of.queue.ours(self._of.prefix), asked_s)

    async def hear(self, found: list[Seen], asked_s: float) -> None:
        """All jobs of ours that the system knew when it was asked, then or later."""
        doubts = [doubt for doubt in self.doubts.values() if doubt.since_s <= asked_s]
        if not doubts:
            return
        by_mark: dict[str, list[Seen]] = {}
        for seen in found:
            by_mark.setdefault(seen.mark, []).append(seen)
        records = await asyncio.to_thread(lambda: [read_record(doubt.entry.files) for doubt in doubts])
        for doubt, record in zip(doubts, records, strict=True):
            entry = doubt.entry
            if self.doubts.get(entry.run) is not doubt:
                continue
            same = [seen for mark in entry.marks for seen in by_mark.get(mark, ())]
            if same or record.began:
                # It has begun, and the system has forgotten it already: what is written down is left.
                job = the_one(same, record).job if same else record.number
                del self.doubts[entry.run]
                self._of.take(TrackedRun(structs.replace(entry, job=job, times=max(entry.times, len(same)))))
            elif doubt.heard_s is None:
                doubt.heard_s = asked_s
            elif asked_s - doubt.heard_s >= IN_DOUBT_S:
                doubt.over = True


def the_one(same: list[Seen], record: Record) -> Seen:
    """Which of several jobs of one run counts: the one that runs it, else one that can, the first of them first."""

    def order(seen: Seen) -> tuple[bool, bool, int, int, str]:
        return (seen.job != record.number, seen.phase == "ended", seen.submit_s, len(seen.job), seen.job)

    return min(same, key=order)


def _in_doubt(run: RunId) -> Doubtful:
    return Doubtful(
        f"run {run} was handed in, and whether it was accepted is not yet clear",
        hint="asking again in a few seconds tells",
    )
