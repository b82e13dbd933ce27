"""The life of a run in a queueing system: handed in once, looked at together with all others, ended in our words.

What differs between systems is behind `queue.Queue`; what a run asks for becomes a Submission in `wanted`; how it gets into
the system is in `handing_in`; stops and checkpoints are in `care`. A job is known again by its mark, never by its number alone: systems that crash give a number
out twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from hodei.agent.logs import RetentionClock
from hodei.backends.base import BackendContext, BaseBackend
from hodei.backends.hpc.nodes import ClusterNodes
from hodei.backends.hpc.poll import QueuePoll
from hodei.backends.hpc.ports import Doubtful, Queue, Seen
from hodei.backends.hpc.request import Files, RequestBuilder
from hodei.backends.hpc.submission import ARRAY, Submissions
from hodei.backends.hpc.supervision import RunSupervision
from hodei.backends.hpc.tracked_run import Entry, TrackedRun
from hodei.model.backend import Capabilities, ExecResult, NodeUsage
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendError, BackendRefused, NotFound
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Node
from hodei.ports import Stream

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode


class Journal:
    """`lock` is a file that we, and every command which hands in a job, hold open: as long as anybody of an earlier server
    does, a job of his may still be on its way."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._path = home / "journal"
        self._file: int | None = None
        self.lock: int | None = None

    def open(self) -> dict[str, Entry]:
        """The runs in it that are not forgotten. BlockingIOError: an earlier server's commands
        are still under way. Blocks for the time of reading a file."""
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._home / "handing-in.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        self.lock = lock
        entries: dict[str, Entry] = {}
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                with contextlib.suppress(msgspec.MsgspecError):  # a torn line
                    entry = _decode(line)
                    entries.pop(entry.run, None)
                    if not entry.forgotten:
                        entries[entry.run] = entry
        fresh = self._path.with_suffix(".new")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(_encode(entry) + b"\n" for entry in entries.values())
        fresh.rename(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        return entries

    def write(self, *entries: Entry) -> None:
        assert self._file is not None
        os.write(self._file, b"".join(_encode(entry) + b"\n" for entry in entries))

    def close(self) -> None:
        for fd in (self._file, self.lock):
            if fd is not None:
                os.close(fd)
        self._file = self.lock = None


LOCK_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 2.0
SWEEP_EVERY_S = 3600.0


class HpcBackend(BaseBackend):
    """`ports.Backend` for a queueing system. `poll_s`: how often all jobs are looked at, in one question."""

    def __init__(
        self,
        name: str,
        context: BackendContext,
        queue: Queue,
        wants: RequestBuilder,
        offers: ClusterNodes,
        *,
        kind: str,
        system: str,
        output: Path,
        poll_s: float,
        capabilities: Capabilities,
    ) -> None:
        super().__init__(name)
        self.kind, self.system, self.capabilities = kind, system, capabilities
        self.context, self.queue, self.offers = context, queue, offers
        self.files = Files(output / context.installation / name)
        self.journal = Journal(context.home / name)
        self._retention = RetentionClock(str(context.home / name / "clock"), context.keep_logs_s)
        self.prefix = f"hodei:{context.installation}:{name}:"
        self.tickets: dict[RunId, TrackedRun] = {}
        self._wants, self._poll_s = wants, poll_s
        self._handing_in = Submissions(self, wants)
        self._care, self._looking = RunSupervision(self), QueuePoll(self)
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
        asked_s = asyncio.get_running_loop().time()
        await self._adopt(await self.queue.ours(self.prefix), asked_s)
        self._handing_in.settle()
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
                entries = await asyncio.to_thread(self.journal.open)
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
        if self.queue.by_commands and self.journal.lock is not None:
            self.queue.inherit(self.journal.lock)
        self.tickets = {run: TrackedRun(entry) for run, entry in entries.items() if entry.job}
        self._handing_in.remember(entry for entry in entries.values() if not entry.job)

    async def _adopt(self, found: list[Seen], asked_s: float) -> None:
        """Jobs with our mark whose number we never heard, and all that are not over and that our memory has lost."""
        await self._handing_in.hear(found, asked_s)
        known = {mark for ticket in self.tickets.values() for mark in ticket.entry.marks}
        known |= {mark for doubt in self._handing_in.doubts.values() for mark in doubt.entry.marks}
        for seen in sorted(found, key=lambda seen: (seen.submit_s, len(seen.job), seen.job)):
            run = seen.mark.removeprefix(self.prefix)
            # Which runs the elements of an array are was in the journal alone.
            if seen.phase == "ended" or seen.mark in known or run.startswith(ARRAY):
                continue
            if run not in self.tickets and not self._handing_in.under_way(run):
                files = self.files.of(run)
                at_ms, saved = seen.submit_s * 1000, f"{files}.saved"
                # There may have been more than one.
                self.take(TrackedRun(Entry(run, seen.mark, files, at_ms, seen.job, saved=saved, times=2)))

    def take(self, ticket: TrackedRun) -> None:
        """It is in the system, and ours."""
        self.tickets[ticket.run] = ticket
        self._care.check(ticket)
        self.journal.write(ticket.entry)
        self._something_to_see.set()

    async def close(self) -> None:
        self._open = False
        if self._handing_in.tasks:
            await asyncio.wait(self._handing_in.tasks.values(), timeout=CLOSE_TIMEOUT_S)
        tasks = [*self._handing_in.all_tasks(), *self._care.tasks, *([self._watcher] if self._watcher else [])]
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
                cutoff_s = await asyncio.to_thread(self._retention.cutoff_s)
                await asyncio.to_thread(self.files.sweep, cutoff_s, alive)
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
        return await self._handing_in.start(orders)

    async def hand_in_again(self, ticket: TrackedRun) -> None:
        """The system has forgotten a job that had not begun."""
        order = ticket.order
        assert order is not None
        mark = self.mark(ticket.run)
        _, submission = self._wants.submission(order, mark, ticket.files, self.context.clock.now_ms())
        also = tuple(sorted({*ticket.entry.marks} - {mark}))
        ticket.entry = structs.replace(ticket.entry, mark=mark, also=also, times=ticket.entry.times + 1)
        self.journal.write(ticket.entry)
        ticket.handed_in_again = True
        try:
            job = await self.queue.submit(submission)
        except Doubtful:
            ticket.missing_since_ms = 0  # it may turn up late: it is looked for all over again
            return
        except BackendError:
            ticket.handed_in_again = False
            raise
        ticket.missing_since_ms = 0
        self.renumber(ticket, job)

    async def cancel_others(self, ticket: TrackedRun) -> None:
        """A run that was handed in more than once is over: what is left of it in the system has nothing to do any more."""
        marked = [seen for seen in await self.queue.ours(self.prefix) if seen.mark in ticket.entry.marks]
        await self.queue.cancel([seen.job for seen in marked if seen.phase != "ended"])

    def renumber(self, ticket: TrackedRun, job: str) -> None:
        ticket.job, ticket.entry = job, structs.replace(ticket.entry, job=job)
        self.journal.write(ticket.entry)

    async def stop(self, orders: Sequence[Stop]) -> None:
        self.must_be_open()
        for order in orders:
            self._care.stop(order, being_handed_in=self._handing_in.under_way(order.run))

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        await self._running([order.run for order in orders])
        for order in orders:
            self._care.save(order.run, order.checkpoint)

    def watch_over(self, ticket: TrackedRun) -> None:
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
            await asyncio.to_thread(lambda: [self.files.drop(ticket.files) for ticket in gone])

    async def execute_on(self, node: NodeName, command: Sequence[str], timeout_ms: int) -> ExecResult:
        if not self.capabilities.node_execute:
            return await super().execute_on(node, command, timeout_ms)
        self.must_be_open()
        if node not in {f"{self.name}-{name}" for line in self.offers.lines() for name in line.nodes}:
            raise NotFound(f"there is no node {node} in backend {self.name}", hint="see `hodei nodes`")
        line, inner = self.offers.place(node)
        return await self.queue.execute_on(inner, line.name, command, timeout_ms / 1000)

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        if not self.capabilities.execute:
            return await super().execute(run, command, timeout_ms)
        if not await self._running([run]):
            raise NotFound(f"run {run} does not run")
        return await self._care.beside(self.tickets[run], command, timeout_ms)
