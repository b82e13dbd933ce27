"""What a run asks for, as a submission: amounts rounded up to what the system counts in, its script, its place.

What the system can not give is refused here, with what to do instead.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Collection
from pathlib import Path

from hodei.backends.base import run_env
from hodei.backends.hpc.nodes import ClusterNodes
from hodei.backends.hpc.ports import Line, Submission
from hodei.backends.hpc.script import batch_script
from hodei.backends.hpc.tracked_run import Entry
from hodei.backends.slurm_variables import within_slurm
from hodei.model.effects import Start
from hodei.model.errors import BackendError, BackendRefused, NotFound
from hodei.model.ids import RunId, job_of
from hodei.model.job import Checkpoint
from hodei.model.resources import CPU, GPU, MEMORY, STORAGE, Resources, human_amount
from hodei.ports import Stream

# ----------------------------------------------------------------------------------------------- files
# Where the output of runs is: below a folder that the server and the nodes see under the same path.


JOBS_PER_FOLDER = 1000
SAVED, SCRIPT = ".saved", ".sh"
_ENDINGS: dict[Stream, str] = {"stdout": ".out", "stderr": ".err"}


class Files:
    """`root` is the installation's own folder, for its account alone. All methods block."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: set[Path] = set()

    def check(self) -> None:
        """BackendError if nothing can be written there."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self.root / ".probe"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise BackendError(
                f"the output folder {self.root} cannot be written: {error.strerror}",
                hint="set `output` to a folder that the server and all nodes share",
            ) from None

    def of(self, run: RunId) -> str:
        """What the paths of a run's files begin with; their folder is there."""
        folder = self.root / str(job_of(run) // JOBS_PER_FOLDER)
        if folder not in self._made:
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise BackendError(f"the folder {folder} cannot be made: {error.strerror}") from None
            self._made.add(folder)
        return str(folder / run)

    @staticmethod
    def stream(files: str, stream: Stream) -> str:
        return files + _ENDINGS[stream]

    def read(self, run: RunId, stream: Stream, offset: int, limit: int, known: bool) -> tuple[bytes, int]:
        try:
            path = self.root / str(job_of(run) // JOBS_PER_FOLDER) / run
            fd = os.open(self.stream(str(path), stream), os.O_RDONLY | os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            if known and isinstance(error, FileNotFoundError):
                return b"", offset
            raise NotFound(f"there is no output of run {run}", hint="it may be gone by its age") from None
        with os.fdopen(fd, "rb") as file:
            data = os.pread(file.fileno(), limit, offset)
        return data, offset + len(data)

    @staticmethod
    def changed_ms(path: str) -> int:
        """0 if it is not there."""
        try:
            return os.stat(path).st_mtime_ns // 1_000_000
        except OSError:
            return 0

    @staticmethod
    def drop(files: str) -> None:
        """What is of no use any more. The record stays until it is old: a system that crashes may start the job again."""
        for ending in (SAVED, SCRIPT):
            with contextlib.suppress(OSError):
                os.unlink(files + ending)

    def sweep(self, oldest_s: float, but: Collection[str]) -> int:
        """Away with the output of runs that nobody has written to since; how many files."""
        gone = 0
        for folder in self.root.glob("[0-9]*"):
            for path in folder.iterdir():
                with contextlib.suppress(OSError):
                    if str(path.with_suffix("")) not in but and path.stat().st_mtime < oldest_s:
                        path.unlink()
                        gone += 1
        return gone


# ----------------------------------------------------------------------------------------------------

MIB = 1 << 20
# The grants name cores and GPUs by number; here the system hands them out, and tells the run itself.
_THE_SYSTEMS_OWN = ("CUDA_VISIBLE_DEVICES", "HODEI_GPUS", "HODEI_GPU_MILLI", "HODEI_CPUS")
NAME_LIMIT = 100

Options = Callable[[Start, Line], tuple[tuple[str, str], ...]]


class RequestBuilder:
    """`options` reads further options out of a job and refuses what would escape the operator's rules. `beside`: whether a
    command can be run beside a run. `rerun`: whether the system may start a job again by itself."""

    def __init__(
        self,
        offers: ClusterNodes,
        options: Options,
        *,
        job_variable: str,
        node_variable: str,
        element: str,
        system: str,
        beside: bool,
        rerun: bool = False,
        workdir: str = "",
        env: dict[str, str] | None = None,
    ) -> None:
        self._offers, self._options = offers, options
        self._job_variable, self._node_variable, self._element = job_variable, node_variable, element
        self._system, self._beside = system, beside
        self._rerun, self._workdir, self._env = rerun, workdir, env or {}

    def submission(self, order: Start, mark: str, files: str, now_ms: int) -> tuple[Entry, Submission]:
        """BackendRefused if it can never run there."""
        run, spec, task = order.run, order.spec, order.task
        self._refuse_what_cannot_be(order)
        line, node = self._offers.place(run.node)
        request = task.request
        _refuse_what_is_too_big(line, request)
        # The system knows one number for both: what it sets aside is what the run may use. More than the node has is no limit.
        limit = min(task.limits.get(MEMORY, 0), self._offers.most(line, node, MEMORY))
        saved = spec.checkpoint.file or f"{files}.saved"
        workdir = task.workdir or self._workdir
        own = {name: value for name, value in run_env(order).items() if name not in _THE_SYSTEMS_OWN}
        hidden: tuple[str, ...] = ()
        if self._system == "Slurm":
            # Slurm sets variables of the same names, some of which mean its own jobs and not Hodei's.
            own = {name: value for name, value in own.items() if not name.startswith("SLURM")}
            ours, hidden = within_slurm(order)
            own |= ours
        given = {
            name: value for name, value in task.env.items() if not request.get(GPU) or name not in _THE_SYSTEMS_OWN
        }
        claim = secrets.token_hex(8)
        script = batch_script(
            files=files,
            argv=task.command,
            env={**self._env, **given, **own, "HODEI_CHECKPOINT_FILE": saved},
            workdir=workdir,
            claim=claim,
            job_variable=self._job_variable,
            node_variable=self._node_variable,
            element=self._element,
            rerun=self._rerun,
            hidden=hidden,
            memory_bytes=task.limits.get(MEMORY, 0),
        )
        entry = Entry(
            run=run.id,
            mark=mark,
            files=files,
            at_ms=now_ms,
            workdir=workdir,
            saved=saved,
            timeout_ms=spec.timeout_ms,
            grace_ms=spec.grace_ms,
            hook=spec.checkpoint if spec.checkpoint.every_ms else None,
        )
        known = (CPU, MEMORY, GPU, STORAGE)
        return entry, Submission(
            mark=mark,
            name=job_name(spec.name),
            script=script,
            line=line.name,
            stdout=f"{files}.out",
            stderr=f"{files}.err",
            node=node,
            cpus=max(1, -(-request.get(CPU, 0) // 1000)),
            memory_mib=max(1, -(-max(request.get(MEMORY, 0), limit) // MIB)),
            storage_mib=-(-request.get(STORAGE, 0) // MIB),
            gpus=request.get(GPU, 0) // 1000,
            gpu_type=task.gpu_type,
            devices={name: amount for name, amount in request.items() if name not in known and amount},
            minutes=self._minutes(spec.timeout_ms, spec.grace_ms, line),
            options=self._options(order, line),
            script_file=f"{files}{SCRIPT}",
            claim=claim,
        )

    def _minutes(self, timeout_ms: int, grace_ms: int, line: Line) -> int:
        """A bound by which the system ends it even if we are gone: its timeout and grace, and a minute for us. Without a
        timeout, the longest that its line allows if Hodei chose the place; else the line's own default."""
        if timeout_ms:
            minutes = -(-(timeout_ms + grace_ms) // 60_000) + 1
            return min(minutes, line.minutes) if line.minutes else minutes
        return line.minutes if self._offers.mode == "placed" else 0

    def _refuse_what_cannot_be(self, order: Start) -> None:
        spec, task = order.spec, order.task
        if task.image:
            raise BackendRefused(
                f"{self._system} cannot run an image", hint="leave out `image`, or choose a backend with containers"
            )
        if spec.health.enabled:
            raise BackendRefused(
                f"nobody looks at the health of runs in {self._system}",
                hint="leave out `health`, or choose another backend",
            )
        if spec.checkpoint != Checkpoint() and spec.checkpoint.command and not self._beside:
            raise BackendRefused(
                f"a checkpoint command cannot be run beside a run in {self._system} as it is set up here",
                hint="save the work at a signal, or with Slurm's commands instead of REST",
            )
        if task.request.get(GPU, 0) % 1000:
            raise BackendRefused(
                f"{self._system} hands out whole GPUs only", hint="ask for gpu: 1, or for another backend"
            )


def _refuse_what_is_too_big(line: Line, request: Resources) -> None:
    for resource, amount in request.items():
        most = line.largest.get(resource, 0)
        if amount > most and (resource != STORAGE or most):
            raise BackendRefused(
                f"{human_amount(resource, amount)} {resource} is more than any node of {line.name} has "
                f"({human_amount(resource, most)})",
                hint="ask for less, or for another backend",
            )


def job_name(name: str) -> str:
    """The job's name as the system's users see it: printable, so that it cannot spoil their lists and logs."""
    shown = "".join(char if char.isascii() and char.isprintable() else "_" for char in name)[:NAME_LIMIT].strip()
    return shown or "hodei"
