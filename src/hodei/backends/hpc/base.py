"""The life of a run in a queueing system: handed in once, looked at together with all others, ended in our words.

What differs between systems is behind `queue.Queue`; what a run asks for becomes a Submission in `wanted`; stops and
checkpoints are in `care`. A job is known again by its mark, never by its number alone: systems that crash give a number
out twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from hodei.backends.base import House, PlainBackend
from hodei.backends.hpc.care import Care
from hodei.backends.hpc.files import Files
from hodei.backends.hpc.journal import Journal
from hodei.backends.hpc.looking import Looking
from hodei.backends.hpc.offers import Offers
from hodei.backends.hpc.queue import Doubtful, Queue, Seen, Submission
from hodei.backends.hpc.script import SCRIPT_LIMIT
from hodei.backends.hpc.ticket import Entry, Ticket
from hodei.backends.hpc.wanted import Wants
from hodei.model.backend import Capabilities, Executed, NodeUsage
from hodei.model.effects import Forget, SaveWork, Start, Stop
from hodei.model.errors import BackendError, BackendRefused, NotFound
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Node
from hodei.ports import Stream

# A job whose acceptance is in doubt may still be on its way for this long.
IN_DOUBT_MS = 5_000
START_TIMEOUT_S = 45.0
LOCK_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 2.0
SWEEP_EVERY_S = 3600.0
# What the mark of an array has in the place of a run.
ARRAY = "+"

Wanted = tuple[Start, Entry, Submission]


class HpcBackend(PlainBackend):
    """`ports.Backend` for a queueing system. `poll_s`: how often all jobs are looked at, in one question."""

    def __init__(
        self,
        name: str,
        house: House,
        queue: Queue,
        wants: Wants,
        offers: Offers,
        *,
        kind: str,
        system: str,
        output: Path,
        poll_s: float,
        capabilities: Capabilities,
    ) -> None:
        super().__init__(name)
        self.kind, self.system, self.capabilities = kind, system, capabilities
        self.house, self.queue, self.offers = house, queue, offers
        self.files = Files(output / house.installation / name)
        self.journal = Journal(house.home / name)
        self.prefix = f"hodei:{house.installation}:{name}:"
        self.tickets: dict[RunId, Ticket] = {}
        self._wants, self._poll_s = wants, poll_s
        self._handing_in: dict[RunId, asyncio.Task[None]] = {}
        self._in_doubt: dict[RunId, Entry] = {}
        self._lost_journal = False
        self._care, self._looking = Care(self), Looking(self)
        self._open = False
        self._watcher: asyncio.Task[None] | None = None
        self._something_to_see = asyncio.Event()
        self._news: list[RunObserved] = []
        self._something_new = asyncio.Event()
        self._trouble: BackendError | None = None

    # ------------------------------------------------------------------------------------- connection

    async def open(self) -> None:
        if self.journal.lock is None:
            await self._open_journal()
        await asyncio.to_thread(self.files.check)
        await self.offers.refresh()
        await self._adopt(await self.queue.ours(self.prefix))
        await self._looking.round()
        self._trouble, self._open = None, True
        for ticket in self.tickets.values():
            if ticket.end is not None and ticket.end not in self._news:
                self.tell(ticket.end)
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name=f"{self.name}: look at all jobs")

    async def _open_journal(self) -> None:
        deadline = asyncio.get_running_loop().time() + LOCK_TIMEOUT_S
        while True:
            try:
                there, entries = await asyncio.to_thread(self.journal.open)
                break
            except BlockingIOError:
                if asyncio.get_running_loop().time() > deadline:
                    raise BackendError(
                        "jobs that an earlier server was handing in are still on their way",
                        hint="is the system's server down? asking again helps when it is back",
                    ) from None
            except OSError as error:
                raise BackendError(f"the journal cannot be opened: {error}") from None
            await asyncio.sleep(0.1)
        self._lost_journal = not there
        if self.queue.by_commands and self.journal.lock is not None:
            self.queue.inherit(self.journal.lock)
        self.tickets = {run: Ticket(entry) for run, entry in entries.items() if entry.job}
        self._in_doubt = {run: entry for run, entry in entries.items() if not entry.job}

    async def _adopt(self, found: list[Seen]) -> None:
        """Jobs with our mark whose number we never heard, or all that are not over if our memory is gone."""
        by_mark = {seen.mark: seen for seen in reversed(found)}  # the first of a mark counts
        for entry in [entry for entry in self._in_doubt.values() if entry.mark in by_mark]:
            self._take(entry.run, by_mark[entry.mark])
        if self._lost_journal:
            for mark, seen in by_mark.items():
                run = mark.removeprefix(self.prefix)
                # Which runs the elements of an array are was in the journal alone.
                if seen.phase != "ended" and run not in self.tickets and not run.startswith(ARRAY):
                    self._take(run, seen)
            self._lost_journal = False

    def _take(self, run: RunId, seen: Seen) -> None:
        files = self.files.of(run)
        nothing = Entry(run, seen.mark, files, seen.submit_s * 1000, saved=f"{files}.saved")
        entry = structs.replace(self._in_doubt.pop(run, nothing), job=seen.job)
        self.journal.write(entry)
        self.tickets[run] = Ticket(entry)

    async def close(self) -> None:
        self._open = False
        if self._handing_in:
            await asyncio.wait(self._handing_in.values(), timeout=CLOSE_TIMEOUT_S)
        tasks = [*self._handing_in.values(), *self._care.tasks, *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watcher = None
        await self.queue.close()
        self.journal.close()

    def mark(self, run: RunId) -> str:
        return f"{self.prefix}{run}"

    def must_be_open(self) -> None:
        if not self._open:
            raise BackendError(f"backend {self.name} is not open")

    async def ping(self) -> str:
        self.must_be_open()
        return await self.queue.ping()

    # ---------------------------------------------------------------------------------------- reports

    async def nodes(self) -> list[Node]:
        return await self.offers.refresh()

    async def usage(self) -> dict[NodeName, NodeUsage]:
        if not self.capabilities.usage:
            return await super().usage()
        return await self.offers.usage()

    async def expected(self) -> dict[RunId, int]:
        if not self.capabilities.expects:
            return await super().expected()
        runs = {ticket.job: run for run, ticket in self.tickets.items() if ticket.phase == "waiting"}
        return {runs[job]: at_ms for job, at_ms in (await self.queue.expected()).items() if job in runs}

    async def observe(self) -> list[RunObserved]:
        await self._something_new.wait()
        self._something_new.clear()
        if self._trouble is not None:
            raise self._trouble
        news, self._news = self._news, []
        return news

    async def known(self) -> dict[RunId, RunObserved]:
        self.must_be_open()
        return {run: ticket.said for run, ticket in self.tickets.items() if ticket.said is not None}

    def tell(self, observed: RunObserved) -> None:
        self._news.append(observed)
        self._something_new.set()

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        return await asyncio.to_thread(self.files.read, run, stream, offset, limit, run in self.tickets)

    async def _watch(self) -> None:
        pause_s, swept_s = self._poll_s, -SWEEP_EVERY_S
        loop = asyncio.get_running_loop()
        while True:
            if not any(ticket.end is None for ticket in self.tickets.values()):
                self._something_to_see.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SWEEP_EVERY_S):
                        await self._something_to_see.wait()
            if loop.time() - swept_s >= SWEEP_EVERY_S:
                swept_s = loop.time()
                alive = {ticket.files for ticket in self.tickets.values()}
                await asyncio.to_thread(self.files.sweep, self.house.keep_logs_s, alive)
            try:
                await self._looking.round()
                self._trouble, pause_s = None, self._poll_s
            except BackendError as error:
                if self._trouble is None:
                    self._trouble = error
                    self._something_new.set()
                pause_s = min(pause_s * 2, max(5.0, self._poll_s))
            await asyncio.sleep(pause_s)

    # ----------------------------------------------------------------------------------------- orders

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        self.must_be_open()
        answer: dict[RunId, BackendError | BackendRefused] = {}
        wanted: dict[RunId, Wanted] = {}
        for order in orders:
            run = order.run.id
            if (ticket := self.tickets.get(run)) is not None and ticket.end is None and not ticket.began_ms:
                ticket.order = order  # an earlier server's: now it can be handed in again, should it be forgotten
            if ticket is None and run not in self._handing_in and run not in wanted:
                try:
                    now_ms = self.house.clock.now_ms()
                    wanted[run] = (order, *self._wants.submission(order, self.mark(run), self.files.of(run), now_ms))
                except (BackendError, BackendRefused) as refusal:
                    answer[run] = refusal
        for group in self._groups(list(wanted.values())):
            # A task of its own: who gives up waiting for it does not stop it half way.
            task = asyncio.create_task(self._hand_in(group), name=f"{self.name}: hand in {len(group)}")
            self._handing_in |= {order.run.id: task for order, _, _ in group}
        tasks = {order.run.id: self._handing_in[order.run.id] for order in orders if order.run.id in self._handing_in}
        if tasks:
            await asyncio.wait(set(tasks.values()), timeout=START_TIMEOUT_S)
        for run, task in tasks.items():
            if not task.done():
                raise BackendError("not all were handed in in time", hint="asking again goes on from there")
            error = task.exception()
            if isinstance(error, Doubtful):
                raise error
            if isinstance(error, (BackendError, BackendRefused)):
                answer[run] = error
            elif error is not None:
                raise error
        return answer

    def _groups(self, wanted: list[Wanted]) -> list[list[Wanted]]:
        """Those that differ in what they run and in nothing else, together: they are handed in as one array."""
        most = self.queue.most_at_once
        alike: dict[tuple[object, ...], list[Wanted]] = {}
        out = []
        for each in wanted:
            order, _, submission = each
            if most < 2 or order.run.id in self._in_doubt:
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
        runs = [order.run.id for order, _, _ in group]
        entries = [entry for _, entry, _ in group]
        mark = f"{self.prefix}{ARRAY}{runs[0]}"
        if len(group) > 1:
            entries = [structs.replace(entry, mark=f"{mark}#{place}") for place, entry in enumerate(entries)]
        try:
            if runs[0] in self._in_doubt and await self._was_accepted(runs[0]):
                return
            self.journal.write(*entries)
            try:
                submissions = [submission for _, _, submission in group]
                if len(group) > 1:
                    jobs = await self.queue.submit_many(submissions, mark)
                else:
                    jobs = [await self.queue.submit(submissions[0])]
            except Doubtful as doubt:
                now_ms = self.house.clock.now_ms()
                self._in_doubt |= {entry.run: structs.replace(entry, at_ms=now_ms) for entry in entries}
                with contextlib.suppress(BackendError):
                    if all([await self._was_accepted(run, at_once=True) for run in runs]):
                        return
                raise doubt from None
            except (BackendError, BackendRefused):
                self.journal.write(*(structs.replace(entry, forgotten=True) for entry in entries))
                raise
            for (order, _, _), entry, job in zip(group, entries, jobs, strict=True):
                ticket = Ticket(structs.replace(entry, job=job), order)
                self._in_doubt.pop(ticket.run, None)
                self.tickets[ticket.run] = ticket
                self._care.check(ticket)
            self.journal.write(*(self.tickets[run].entry for run in runs))
            self._something_to_see.set()
        finally:
            for run in runs:
                self._handing_in.pop(run, None)

    async def _was_accepted(self, run: RunId, *, at_once: bool = False) -> bool:
        """Look for the mark of a run whose acceptance is in doubt. BackendError as long as it may still be on its way."""
        entry = self._in_doubt[run]
        found = [seen for seen in await self.queue.ours(self.prefix) if seen.mark == entry.mark]
        if found:
            first = min(found, key=lambda seen: (seen.submit_s, len(seen.job), seen.job))
            self._take(run, first)
            await self.queue.cancel([seen.job for seen in found if seen is not first and seen.phase != "ended"])
            self._something_to_see.set()
            return True
        if not at_once and self.house.clock.now_ms() - entry.at_ms < IN_DOUBT_MS:
            raise Doubtful(
                f"run {run} was handed in moments ago, and whether it was accepted is not yet clear",
                hint="asking again in a few seconds tells",
            )
        return False

    async def hand_in_again(self, ticket: Ticket) -> None:
        """The system has forgotten a job that had not begun."""
        order = ticket.order
        assert order is not None
        _, submission = self._wants.submission(order, ticket.entry.mark, ticket.files, self.house.clock.now_ms())
        ticket.handed_in_again = True
        try:
            job = await self.queue.submit(submission)
        except Doubtful:
            return  # if it was accepted, it is found by its mark
        except BackendError:
            ticket.handed_in_again = False
            raise
        ticket.missing_since_ms = 0
        self.renumber(ticket, job)

    def renumber(self, ticket: Ticket, job: str) -> None:
        ticket.job, ticket.entry = job, structs.replace(ticket.entry, job=job)
        self.journal.write(ticket.entry)

    async def stop(self, orders: Sequence[Stop]) -> None:
        self.must_be_open()
        for order in orders:
            self._care.stop(order, being_handed_in=order.run in self._handing_in)

    async def checkpoint(self, orders: Sequence[SaveWork]) -> None:
        await self._running([order.run for order in orders])
        for order in orders:
            self._care.save(order.run, order.checkpoint)

    def watch_over(self, ticket: Ticket) -> None:
        """It runs: its time and its saves are looked after."""
        self._care.look_after(ticket)

    async def suspend(self, runs: Sequence[RunId]) -> None:
        if jobs := await self._running(runs):
            await self.queue.signal(jobs, "STOP")

    async def resume(self, runs: Sequence[RunId]) -> None:
        if jobs := await self._running(runs):
            await self.queue.signal(jobs, "CONT")

    async def _running(self, runs: Sequence[RunId]) -> list[str]:
        """The jobs of those that run; one may have begun since the last look."""
        self.must_be_open()
        known = [self.tickets[run] for run in runs if run in self.tickets]
        if any(ticket.end is None and ticket.phase == "waiting" for ticket in known):
            await self._looking.round()
        return [ticket.job for ticket in known if ticket.end is None and ticket.phase == "running"]

    async def forget(self, orders: Sequence[Forget]) -> None:
        gone = [self.tickets.pop(order.run) for order in orders if order.run in self.tickets]
        if gone:
            self.journal.write(*(structs.replace(ticket.entry, forgotten=True) for ticket in gone))
            await asyncio.to_thread(lambda: [self.files.drop_record(ticket.files) for ticket in gone])

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> Executed:
        if not self.capabilities.execute:
            return await super().execute(run, command, timeout_ms)
        if not await self._running([run]):
            raise NotFound(f"run {run} does not run")
        return await self._care.beside(self.tickets[run], command, timeout_ms)
