"""`HpcBackend`: runs as jobs of a batch system, submitted once, polled together, and reported in Hodei's terms.

What differs between batch systems is behind `ports.BatchSystem`. `submission` submits runs, `poll` observes them, `supervision`
stops and checkpoints them. A job is identified by its mark, never by its id alone: a system that crashed may reuse an id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from hodei.agent.logs import RetentionClock
from hodei.backends.base import BackendContext, BaseBackend
from hodei.backends.hpc.nodes import ClusterNodes, ClusterSettings
from hodei.backends.hpc.poll import JobPoll
from hodei.backends.hpc.ports import BatchSystem, JobStatus, OutcomeUnknown
from hodei.backends.hpc.submission import ARRAY, Options, SubmissionBuilder, Submissions
from hodei.backends.hpc.supervision import RunSupervision
from hodei.backends.hpc.tracked_run import CHECKPOINT_SUFFIX, Files, Journal, JournalEntry, TrackedRun
from hodei.model.backend import Capabilities, ExecResult, NodeUsage
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendError, BackendRefused, NotFound
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Node
from hodei.model.resources import parse_duration_ms
from hodei.ports import Stream
from hodei.process import cancel_tasks

LOCK_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 2.0
SWEEP_EVERY_S = 3600.0


class HpcBackend(BaseBackend):
    """`ports.Backend` for a batch system. `partitions`: those to use, in order of preference; empty for all."""

    def __init__(
        self,
        name: str,
        kind: str,
        system_name: str,
        settings: ClusterSettings,
        context: BackendContext,
        system: BatchSystem,
        partitions: Sequence[str],
        options: Options,
        capabilities: Capabilities,
    ) -> None:
        super().__init__(name)
        self.kind, self.system_name, self.capabilities = kind, system_name, capabilities
        self.context, self.system = context, system
        self.cluster_nodes = ClusterNodes(name, kind, system, settings, partitions)
        self._builder = SubmissionBuilder(
            self.cluster_nodes, options, system, settings, system_name=system_name, can_execute=capabilities.execute
        )
        self.files = Files(Path(settings.output) / context.installation / name)
        self.journal = Journal(context.home / name)
        self._retention = RetentionClock(str(context.home / name / "clock"), context.keep_logs_s)
        self.prefix = f"hodei:{context.installation}:{name}:"
        self.tracked: dict[RunId, TrackedRun] = {}
        self._poll_s = parse_duration_ms(settings.poll) / 1000
        self.submissions = Submissions(self, self._builder)
        self.supervision, self.poll = RunSupervision(self), JobPoll(self)
        self._open = False
        self._poll_task: asyncio.Task[None] | None = None
        self._run_added = asyncio.Event()
        self._observations: list[RunObserved] = []
        self._observed = asyncio.Event()
        self._poll_error: BackendError | None = None

    async def open(self) -> None:
        if self.journal.lock is None:
            await self._open_journal()
        await asyncio.to_thread(self.files.check)
        await self.cluster_nodes.refresh()
        asked_s = asyncio.get_running_loop().time()
        await self._adopt(await self.system.marked(self.prefix), asked_s)
        self.submissions.confirm_in_background()
        await self.poll.poll()
        self._poll_error, self._open = None, True
        for tracked in self.tracked.values():
            if tracked.final is not None and tracked.final not in self._observations:
                self.report(tracked.final)
        if self._poll_task is None:
            self._poll_task = asyncio.create_task(self._poll_forever(), name=f"{self.name}: poll jobs")

    async def _open_journal(self) -> None:
        deadline = asyncio.get_running_loop().time() + LOCK_TIMEOUT_S
        while True:
            try:
                entries = await asyncio.to_thread(self.journal.open)
                break
            except BlockingIOError:
                if asyncio.get_running_loop().time() > deadline:
                    raise BackendError(
                        "jobs that an earlier server submitted are still on their way",
                        hint=f"check that {self.system_name} responds; Hodei retries",
                    ) from None
            except OSError as error:
                raise BackendError(f"the journal cannot be opened: {error}") from None
            await asyncio.sleep(0.1)
        if self.system.uses_commands and self.journal.lock is not None:
            self.system.inherit(self.journal.lock)
        self.tracked = {run: TrackedRun(entry) for run, entry in entries.items() if entry.job}
        self.submissions.add_unconfirmed(entry for entry in entries.values() if not entry.job)

    async def _adopt(self, found: list[JobStatus], asked_s: float) -> None:
        """Track jobs with the marks of this backend: those whose id is unknown, and live ones missing from the journal."""
        await self.submissions.confirm(found, asked_s)
        known = {mark for tracked in self.tracked.values() for mark in tracked.entry.marks}
        known |= {mark for each in self.submissions.unconfirmed.values() for mark in each.entry.marks}
        for status in sorted(found, key=lambda status: (status.submit_s, len(status.job), status.job)):
            run = status.mark.removeprefix(self.prefix)
            # Which runs the elements of an array are, only the journal knows.
            if status.phase == "ended" or status.mark in known or run.startswith(ARRAY):
                continue
            if run not in self.tracked and not self.submissions.pending(run):
                files = self.files.of(run)
                entry = JournalEntry(
                    run, status.mark, files, status.submit_s * 1000, status.job, checkpoint_file=files + CHECKPOINT_SUFFIX,
                    submissions=2,  # there may have been more than one
                )  # fmt: skip
                self.track(TrackedRun(entry))

    def track(self, tracked: TrackedRun) -> None:
        self.tracked[tracked.run] = tracked
        self.supervision.apply_early_stop(tracked)
        self.journal.write(tracked.entry)
        self._run_added.set()

    async def close(self) -> None:
        self._open = False
        if self.submissions.tasks:
            await asyncio.wait(self.submissions.tasks.values(), timeout=CLOSE_TIMEOUT_S)
        tasks = [
            *self.submissions.all_tasks(),
            *self.supervision.tasks,
            *([self._poll_task] if self._poll_task else []),
        ]
        await cancel_tasks(tasks)
        self._poll_task = None
        await self.system.close()
        self.journal.close()

    def mark(self, run: RunId) -> str:
        return f"{self.prefix}{run}"

    def _require_open(self) -> None:
        if not self._open:
            raise BackendError(f"backend {self.name} is not open")

    async def ping(self) -> str:
        self._require_open()
        return await self.system.ping()

    async def nodes(self) -> list[Node]:
        return await self.cluster_nodes.refresh()

    async def usage(self) -> dict[NodeName, NodeUsage]:
        if not self.capabilities.usage:
            return await super().usage()
        return await self.cluster_nodes.usage()

    async def expected(self) -> dict[RunId, int]:
        if not self.capabilities.expects:
            return await super().expected()
        runs = {tracked.job: run for run, tracked in self.tracked.items() if tracked.phase == "pending"}
        return {runs[job]: at_ms for job, at_ms in (await self.system.expected_starts()).items() if job in runs}

    async def observe(self) -> list[RunObserved]:
        await self._observed.wait()
        self._observed.clear()
        if self._poll_error is not None:
            raise self._poll_error
        observations, self._observations = self._observations, []
        return observations

    async def known(self) -> dict[RunId, RunObserved]:
        self._require_open()
        return {run: tracked.reported for run, tracked in self.tracked.items() if tracked.reported is not None}

    def report(self, observation: RunObserved) -> None:
        self._observations.append(observation)
        self._observed.set()

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        return await asyncio.to_thread(self.files.read, run, stream, offset, limit, run in self.tracked)

    async def _poll_forever(self) -> None:
        pause_s, swept_s = self._poll_s, -SWEEP_EVERY_S
        loop = asyncio.get_running_loop()
        while True:
            if not any(tracked.final is None for tracked in self.tracked.values()):
                self._run_added.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SWEEP_EVERY_S):
                        await self._run_added.wait()
            if loop.time() - swept_s >= SWEEP_EVERY_S:
                swept_s = loop.time()
                live = {tracked.files for tracked in self.tracked.values()}
                cutoff_s = await asyncio.to_thread(self._retention.cutoff_s)
                await asyncio.to_thread(self.files.sweep, cutoff_s, live)
            try:
                await self.poll.poll()
                self._poll_error, pause_s = None, self._poll_s
            except BackendError as error:
                if self._poll_error is None:
                    self._poll_error = error
                    self._observed.set()
                pause_s = min(pause_s * 2, max(5.0, self._poll_s))
            await asyncio.sleep(pause_s)

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        self._require_open()
        return await self.submissions.start(orders)

    async def resubmit(self, tracked: TrackedRun) -> None:
        """Submit a run again whose job the batch system has forgotten before it started."""
        assert tracked.order is not None
        mark = self.mark(tracked.run)
        _, submission = self._builder.build(tracked.order, mark, tracked.files, self.context.clock.now_ms())
        entry, marks = tracked.entry, tuple(sorted({*tracked.entry.marks} - {mark}))
        tracked.entry = structs.replace(entry, mark=mark, other_marks=marks, submissions=entry.submissions + 1)
        self.journal.write(tracked.entry)
        tracked.resubmitted = True
        try:
            job = await self.system.submit(submission)
        except OutcomeUnknown:
            tracked.missing_since_ms = 0  # it may appear late: search for it from the start
            return
        except BackendError:
            tracked.resubmitted = False
            raise
        tracked.missing_since_ms = 0
        self.set_job(tracked, job)

    async def cancel_duplicates(self, tracked: TrackedRun) -> None:
        """Cancel the other jobs of an ended run that was submitted more than once."""
        marked = [status for status in await self.system.marked(self.prefix) if status.mark in tracked.entry.marks]
        await self.system.cancel([status.job for status in marked if status.phase != "ended"])

    def set_job(self, tracked: TrackedRun, job: str) -> None:
        tracked.job, tracked.entry = job, structs.replace(tracked.entry, job=job)
        self.journal.write(tracked.entry)

    async def stop(self, orders: Sequence[Stop]) -> None:
        self._require_open()
        for order in orders:
            self.supervision.stop(order, submitting=self.submissions.pending(order.run))

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        await self._running_jobs([order.run for order in orders])
        for order in orders:
            self.supervision.take_checkpoint(order.run, order.checkpoint)

    async def suspend(self, runs: Sequence[RunId]) -> None:
        if jobs := await self._running_jobs(runs):
            await self.system.signal(jobs, "STOP")

    async def resume(self, runs: Sequence[RunId]) -> None:
        if jobs := await self._running_jobs(runs):
            await self.system.signal(jobs, "CONT")

    async def _running_jobs(self, runs: Sequence[RunId]) -> list[str]:
        """The jobs of the running runs. Polls first if a pending one may have started since the last poll."""
        self._require_open()
        known = [self.tracked[run] for run in runs if run in self.tracked]
        if any(tracked.final is None and tracked.phase == "pending" for tracked in known):
            await self.poll.poll()
        return [tracked.job for tracked in known if tracked.final is None and tracked.phase == "running"]

    async def forget(self, orders: Sequence[Forget]) -> None:
        removed = [self.tracked.pop(order.run) for order in orders if order.run in self.tracked]
        if removed:
            self.journal.write(*(structs.replace(tracked.entry, forgotten=True) for tracked in removed))
            await asyncio.to_thread(lambda: [self.files.drop(tracked.files) for tracked in removed])

    async def execute_on(self, node: NodeName, command: Sequence[str], timeout_ms: int) -> ExecResult:
        if not self.capabilities.node_execute:
            return await super().execute_on(node, command, timeout_ms)
        self._require_open()
        if node not in {f"{self.name}-{name}" for each in self.cluster_nodes.partitions() for name in each.nodes}:
            raise NotFound(f"there is no node {node} in backend {self.name}", hint="see `hodei nodes`")
        partition, inner = self.cluster_nodes.resolve(node)
        return await self.system.execute_on(inner, partition.name, command, timeout_ms / 1000)

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        if not self.capabilities.execute:
            return await super().execute(run, command, timeout_ms)
        if not await self._running_jobs([run]):
            raise NotFound(f"run {run} is not running")
        return await self.supervision.execute(self.tracked[run], command, timeout_ms)
