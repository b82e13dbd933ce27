"""Submits runs: `SubmissionBuilder` turns a run into a batch job, `Submissions` gets it into the batch system exactly once.

If it is unknown whether a submission was accepted, it is unconfirmed, and every order for the run is answered with IN_DOUBT. It
is confirmed when its mark is found. It may be submitted again when the system has sent two complete job lists without the mark,
the second one late enough that requests queued in a hung controller must have been processed. If the system still accepts the
first one later, the claim in the script (`script`) keeps the run from starting twice.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from hodei.backends.base import run_env
from hodei.backends.hpc.nodes import ClusterNodes, ClusterSettings
from hodei.backends.hpc.ports import BatchSystem, JobStatus, OutcomeUnknown, Partition, Submission
from hodei.backends.hpc.script import SCRIPT_LIMIT, batch_script
from hodei.backends.hpc.tracked_run import (
    CHECKPOINT_SUFFIX,
    SCRIPT_SUFFIX,
    JournalEntry,
    Record,
    TrackedRun,
    read_record,
    seal,
)
from hodei.backends.slurm_variables import within_slurm
from hodei.model.effects import Start
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused
from hodei.model.ids import RunId
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, Resources, human_amount

if TYPE_CHECKING:
    from hodei.backends.hpc.backend import HpcBackend

MIB = 1 << 20
# The batch system assigns cores and GPUs by number and sets these itself.
_SET_BY_SYSTEM = ("CUDA_VISIBLE_DEVICES", "HODEI_GPUS", "HODEI_GPU_MILLI", "HODEI_CPUS")
NAME_LIMIT = 100

Options = Callable[[Start, Partition], tuple[tuple[str, str], ...]]


class SubmissionBuilder:
    """Builds the batch job of a run: requests rounded up to the units of the batch system, script, node, partition.

    `options` reads further options from a job and refuses those that break the operator's rules. `can_execute`: whether
    commands can be executed in a run."""

    def __init__(
        self,
        cluster_nodes: ClusterNodes,
        options: Options,
        system: BatchSystem,
        settings: ClusterSettings,
        *,
        system_name: str,
        can_execute: bool,
    ) -> None:
        self._cluster_nodes, self._options, self._system, self._settings = cluster_nodes, options, system, settings
        self._system_name, self._can_execute = system_name, can_execute

    def build(self, order: Start, mark: str, files: str, now_ms: int) -> tuple[JournalEntry, Submission]:
        """BackendRefused if it can never run there."""
        run, spec, task = order.run, order.spec, order.task
        self._require_supported(order)
        partition, node = self._cluster_nodes.resolve(run.node)
        request = task.request
        _require_fit(partition, request)
        # A batch system has one number for request and limit. A limit above the node's capacity is no limit.
        memory_limit = min(task.limits.get(MEMORY, 0), self._cluster_nodes.capacity(partition, node, MEMORY))
        checkpoint_file = spec.checkpoint.file or files + CHECKPOINT_SUFFIX
        workdir = task.workdir or self._settings.workdir
        own = {name: value for name, value in run_env(order).items() if name not in _SET_BY_SYSTEM}
        hidden: tuple[str, ...] = ()
        if self._system_name == "Slurm":
            # Slurm sets variables of the same names, some of which describe its own jobs and not Hodei's.
            own = {name: value for name, value in own.items() if not name.startswith("SLURM")}
            slurm_env, hidden = within_slurm(order)
            own |= slurm_env
        given = {name: value for name, value in task.env.items() if not request.get(GPU) or name not in _SET_BY_SYSTEM}
        claim = secrets.token_hex(8)
        script = batch_script(
            files=files,
            argv=task.command,
            env={**self._settings.env, **given, **own, "HODEI_CHECKPOINT_FILE": checkpoint_file},
            workdir=workdir,
            claim=claim,
            job_variable=self._system.job_variable,
            node_variable=self._system.node_variable,
            element_id=self._system.element_id,
            rerun=self._settings.requeue,
            hidden=hidden,
            memory_bytes=task.limits.get(MEMORY, 0),
        )
        entry = JournalEntry(
            run=run.id,
            mark=mark,
            files=files,
            submitted_ms=now_ms,
            workdir=workdir,
            checkpoint_file=checkpoint_file,
            timeout_ms=spec.timeout_ms,
            grace_ms=spec.grace_ms,
            checkpoint=spec.checkpoint if spec.checkpoint.every_ms else None,
        )
        known = (CPU, MEMORY, GPU, STORAGE)
        return entry, Submission(
            mark=mark,
            name=job_name(spec.name),
            script=script,
            partition=partition.name,
            stdout=f"{files}.out",
            stderr=f"{files}.err",
            node=node,
            cpus=max(1, -(-request.get(CPU, 0) // 1000)),
            memory_mib=max(1, -(-max(request.get(MEMORY, 0), memory_limit) // MIB)),
            storage_mib=-(-request.get(STORAGE, 0) // MIB),
            gpus=request.get(GPU, 0) // 1000,
            gpu_type=task.gpu_type,
            devices={name: amount for name, amount in request.items() if name not in known and amount},
            minutes=self._minutes(spec.timeout_ms, spec.grace_ms, partition),
            options=self._options(order, partition),
            script_file=files + SCRIPT_SUFFIX,
            claim=claim,
        )

    def _minutes(self, timeout_ms: int, grace_ms: int, partition: Partition) -> int:
        """A time limit as a safeguard if the server is down: timeout, grace period and a minute. Without a timeout it is the
        partition's maximum if Hodei chose the node, else the partition's default."""
        if timeout_ms:
            minutes = -(-(timeout_ms + grace_ms) // 60_000) + 1
            return min(minutes, partition.max_minutes) if partition.max_minutes else minutes
        return partition.max_minutes if self._cluster_nodes.mode == "placed" else 0

    def _require_supported(self, order: Start) -> None:
        spec, task, name = order.spec, order.task, self._system_name
        if task.image:
            raise BackendRefused(
                f"{name} cannot run an image", hint="remove `image`, or choose a backend with containers"
            )
        if spec.health.enabled:
            raise BackendRefused(
                f"health checks are not supported on {name}", hint="remove `health`, or choose another backend"
            )
        if spec.checkpoint.command and not self._can_execute:
            raise BackendRefused(
                f"checkpoint commands are not supported on {name} with this configuration",
                hint="checkpoint at a signal, or use Slurm's commands instead of REST",
            )
        if task.request.get(GPU, 0) % 1000:
            raise BackendRefused(f"{name} assigns whole GPUs only", hint="request gpu: 1, or another backend")


def _require_fit(partition: Partition, request: Resources) -> None:
    for resource, amount in request.items():
        largest = partition.largest.get(resource, 0)
        if amount > largest and (resource != STORAGE or largest):
            raise BackendRefused(
                f"{human_amount(resource, amount)} {resource} is more than any node of {partition.name} has "
                f"({human_amount(resource, largest)})",
                hint="request less, or another backend",
            )


def job_name(name: str) -> str:
    """The job's name in the batch system: printable, so that it cannot corrupt lists and logs."""
    shown = "".join(char if char.isascii() and char.isprintable() else "_" for char in name)[:NAME_LIMIT].strip()
    return shown or "hodei"


# How long after the first complete job list an unconfirmed job may still turn up, and how often it is searched for.
CONFIRM_WINDOW_S = 5.0
CONFIRM_EVERY_S = 1.0
START_TIMEOUT_S = 45.0
# Stands for the run in the mark of an array.
ARRAY = "+"

Prepared = tuple[Start, JournalEntry, Submission]
StartErrors = dict[RunId, BackendError | BackendRefused]


class Unconfirmed:
    """A submission that may or may not have been accepted. Job lists requested before `since_s` prove nothing.
    `first_list_s`: when the first complete one was requested. `rejected`: it was not accepted and may be submitted again. Times
    are on the loop's clock: a restarted server starts again."""

    def __init__(self, entry: JournalEntry) -> None:
        self.entry = entry
        self.since_s = asyncio.get_running_loop().time()
        self.first_list_s: float | None = None
        self.rejected = False


class Submissions:
    """Submits the runs of one backend. `tasks`: those in progress."""

    def __init__(self, backend: HpcBackend, builder: SubmissionBuilder) -> None:
        self._backend, self._builder = backend, builder
        self.tasks: dict[RunId, asyncio.Task[None]] = {}
        self.unconfirmed: dict[RunId, Unconfirmed] = {}
        self._confirm_task: asyncio.Task[None] | None = None

    def pending(self, run: RunId) -> bool:
        return run in self.tasks or run in self.unconfirmed

    def all_tasks(self) -> list[asyncio.Task[None]]:
        return [*self.tasks.values(), *([self._confirm_task] if self._confirm_task else [])]

    async def start(self, orders: Sequence[Start]) -> StartErrors:
        errors: StartErrors = {}
        prepared: dict[RunId, Prepared] = {}
        await self._search_rejected([order.run.id for order in orders])
        for order in orders:
            run = order.run.id
            if (tracked := self._backend.tracked.get(run)) is not None:
                if tracked.final is None and not tracked.started_ms:
                    tracked.order = order  # submitted by an earlier server: now it can be submitted again if forgotten
            elif run in self.tasks or run in prepared:
                continue
            elif (unconfirmed := self.unconfirmed.get(run)) is not None and not unconfirmed.rejected:
                errors[run] = _outcome_unknown(run)
            else:
                try:
                    prepared[run] = self._prepare(order)
                except (BackendError, BackendRefused) as refusal:
                    errors[run] = await self._final_error(run, refusal)
        for group in self._groups(list(prepared.values())):
            # A separate task: a caller that stops waiting does not interrupt it half way.
            task = asyncio.create_task(self._submit(group), name=f"{self._backend.name}: submit {len(group)}")
            self.tasks |= {order.run.id: task for order, _, _ in group}
        tasks = {order.run.id: self.tasks[order.run.id] for order in orders if order.run.id in self.tasks}
        if tasks:
            await asyncio.wait(set(tasks.values()), timeout=START_TIMEOUT_S)
        for run, task in tasks.items():
            if not task.done():
                errors[run] = OutcomeUnknown(f"run {run} is still being submitted", hint="retry in a few seconds")
            elif isinstance(error := task.exception(), (BackendError, BackendRefused)):
                errors[run] = error
            elif error is not None:
                raise error
        unreached = [error for error in errors.values() if error.code == NOT_REACHED]
        if unreached and len(unreached) == len({order.run.id for order in orders}):
            raise unreached[0]  # none of them got through: the batch system is unreachable
        return errors

    def _prepare(self, order: Start) -> Prepared:
        backend, run = self._backend, order.run.id
        now_ms = backend.context.clock.now_ms()
        entry, submission = self._builder.build(order, backend.mark(run), backend.files.of(run), now_ms)
        if earlier := self.unconfirmed.get(run):
            marks = tuple(sorted({*earlier.entry.marks} - {entry.mark}))
            entry = structs.replace(entry, other_marks=marks, submissions=earlier.entry.submissions + 1)
        return order, entry, submission

    async def _final_error(self, run: RunId, error: BackendError | BackendRefused) -> BackendError | BackendRefused:
        """`error`, if no earlier submission of the run can start any more; else OutcomeUnknown."""
        unconfirmed = self.unconfirmed.get(run)
        if unconfirmed is None or error.code == NOT_REACHED:
            return error
        if await asyncio.to_thread(seal, unconfirmed.entry.files):
            self._backend.journal.write(structs.replace(unconfirmed.entry, forgotten=True))
            del self.unconfirmed[run]
            return error
        self._set_unconfirmed([unconfirmed.entry])  # it has started, or the folder cannot be read: search for it
        return _outcome_unknown(run)

    def _groups(self, prepared: list[Prepared]) -> list[list[Prepared]]:
        """Group runs that can be submitted as one array."""
        max_size = self._backend.system.max_array_size
        similar: dict[tuple[object, ...], list[Prepared]] = {}
        out = []
        for each in prepared:
            order, _, submission = each
            if max_size < 2 or order.run.id in self.unconfirmed:
                out.append([each])
            else:
                similar.setdefault(submission.array_key, []).append(each)
        for group in similar.values():
            while group:
                script_size = 0
                for count, (_, _, submission) in enumerate(group, 1):
                    script_size += len(submission.script)
                    if count == max_size or script_size > SCRIPT_LIMIT:
                        break
                out.append(group[:count])
                group = group[count:]
        return out

    async def _submit(self, group: list[Prepared]) -> None:
        backend = self._backend
        runs = [order.run.id for order, _, _ in group]
        entries = [entry for _, entry, _ in group]
        mark = f"{backend.prefix}{ARRAY}{runs[0]}"
        if len(group) > 1:
            entries = [structs.replace(entry, mark=f"{mark}#{place}") for place, entry in enumerate(entries)]
        try:
            backend.journal.write(*entries)
            try:
                submissions = [submission for _, _, submission in group]
                if len(group) > 1:
                    jobs = await backend.system.submit_array(submissions, mark)
                else:
                    jobs = [await backend.system.submit(submissions[0])]
            except OutcomeUnknown:
                self._set_unconfirmed(entries)
                if not await self._find(runs):
                    raise
                return
            except (BackendError, BackendRefused) as error:
                if runs[0] in self.unconfirmed:  # then the group is this run alone
                    raise await self._final_error(runs[0], error) from None
                backend.journal.write(*(structs.replace(entry, forgotten=True) for entry in entries))
                raise
            for (order, _, _), entry, job in zip(group, entries, jobs, strict=True):
                self.unconfirmed.pop(entry.run, None)
                backend.track(TrackedRun(structs.replace(entry, job=job), order))
        finally:
            for run in runs:
                self.tasks.pop(run, None)

    def add_unconfirmed(self, entries: Iterable[JournalEntry]) -> None:
        for entry in entries:
            self.unconfirmed[entry.run] = Unconfirmed(entry)

    def _set_unconfirmed(self, entries: Iterable[JournalEntry]) -> None:
        self.add_unconfirmed(entries)
        self.confirm_in_background()

    def confirm_in_background(self) -> None:
        """Search until every unconfirmed submission is found or rejected."""
        if self._confirm_task is None or self._confirm_task.done():
            name = f"{self._backend.name}: confirm submissions"
            self._confirm_task = asyncio.create_task(self._confirm_all(), name=name)

    async def _confirm_all(self) -> None:
        while any(not unconfirmed.rejected for unconfirmed in self.unconfirmed.values()):
            await asyncio.sleep(CONFIRM_EVERY_S)
            try:
                await self._search()
            except (BackendError, OSError):
                continue  # no answer proves nothing

    async def _find(self, runs: Sequence[RunId]) -> bool:
        try:
            await self._search()
        except BackendError:
            return False
        return all(run in self._backend.tracked for run in runs)

    async def _search_rejected(self, runs: Sequence[RunId]) -> None:
        """Search once more right before rejected runs are submitted again. Without an answer they are unconfirmed again."""
        rejected = [
            run for run in runs if run in self.unconfirmed and self.unconfirmed[run].rejected and run not in self.tasks
        ]
        if rejected:
            try:
                await self._search()
            except BackendError:
                self._set_unconfirmed([self.unconfirmed[run].entry for run in rejected if run in self.unconfirmed])

    async def _search(self) -> None:
        asked_s = asyncio.get_running_loop().time()
        await self.confirm(await self._backend.system.marked(self._backend.prefix), asked_s)

    async def confirm(self, found: list[JobStatus], asked_s: float) -> None:
        """Compare unconfirmed submissions with a complete list of this backend's jobs, requested at `asked_s`."""
        pending = [unconfirmed for unconfirmed in self.unconfirmed.values() if unconfirmed.since_s <= asked_s]
        if not pending:
            return
        by_mark: dict[str, list[JobStatus]] = {}
        for status in found:
            by_mark.setdefault(status.mark, []).append(status)
        records = await asyncio.to_thread(lambda: [read_record(unconfirmed.entry.files) for unconfirmed in pending])
        for unconfirmed, record in zip(pending, records, strict=True):
            entry = unconfirmed.entry
            if self.unconfirmed.get(entry.run) is not unconfirmed:
                continue
            same = [status for mark in entry.marks for status in by_mark.get(mark, ())]
            if same or record.started:
                # Without a job it has started, and the batch system has already forgotten it: only the record is left.
                job = choose_job(same, record).job if same else record.job
                del self.unconfirmed[entry.run]
                entry = structs.replace(entry, job=job, submissions=max(entry.submissions, len(same)))
                self._backend.track(TrackedRun(entry))
            elif unconfirmed.first_list_s is None:
                unconfirmed.first_list_s = asked_s
            elif asked_s - unconfirmed.first_list_s >= CONFIRM_WINDOW_S:
                unconfirmed.rejected = True


def choose_job(same: list[JobStatus], record: Record) -> JobStatus:
    """Of several jobs of a run: the one that runs it, else the first live one, else the first."""

    def order(status: JobStatus) -> tuple[bool, bool, int, int, str]:
        return (status.job != record.job, status.phase == "ended", status.submit_s, len(status.job), status.job)

    return min(same, key=order)


def _outcome_unknown(run: RunId) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"run {run} was submitted, and it is not yet known whether it was accepted", hint="retry in a few seconds"
    )
