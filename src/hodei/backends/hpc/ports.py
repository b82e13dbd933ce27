"""The protocol of a batch system (`BatchSystem`) and its values. Implemented once per transport: commands, REST."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from hodei.model.backend import ExecResult
from hodei.model.errors import IN_DOUBT, BackendError
from hodei.model.node import Node
from hodei.model.resources import Resources

Phase = Literal["pending", "running", "ended"]


class OutcomeUnknown(BackendError):
    """The batch system may or may not have accepted the job: search for its mark before submitting it again."""

    code = IN_DOUBT


class Submission(Struct, frozen=True):
    """A batch job to submit. `mark` identifies it in the batch system; `node` "" lets the system choose; `minutes` 0 sets no
    time limit; `options` are checked (name, value) pairs of the system. `script_file` is where the script may be written if
    the system runs it from a file, with `claim` as its argument."""

    mark: str
    name: str
    script: str
    partition: str
    stdout: str
    stderr: str
    node: str = ""
    cpus: int = 1
    memory_mib: int = 0
    storage_mib: int = 0
    gpus: int = 0
    gpu_type: str = ""
    devices: Resources = {}
    minutes: int = 0
    options: tuple[tuple[str, str], ...] = ()
    script_file: str = ""
    claim: str = ""

    @property
    def array_key(self) -> tuple[object, ...]:
        """Equal for submissions that differ only in their script and files, and so fit into one array."""
        amounts = (self.cpus, self.memory_mib, self.storage_mib, self.gpus, self.gpu_type, self.minutes)
        return (self.name, self.partition, self.node, *amounts, tuple(sorted(self.devices.items())), self.options)


class JobStatus(Struct, frozen=True):
    """A job as the batch system reports it. `state` is the system's own term. `exit_code` and `reason_code` as in RunObserved,
    with `lost` if the system took the node away from the job. Times are seconds since the epoch, 0 if unknown."""

    job: str
    mark: str
    phase: Phase
    state: str
    reason: str = ""
    exit_code: int | None = None
    reason_code: str = ""
    start_s: int = 0
    end_s: int = 0
    submit_s: int = 0


class Partition(Struct, frozen=True):
    """A Slurm partition or a PBS queue. `largest`: the capacity of its largest node, per resource. `max_minutes`: its time
    limit, 0 for none. `open`: accepts jobs now. `usable`: can ever accept jobs of this backend. `reason`: why not."""

    name: str
    nodes: tuple[str, ...] = ()
    max_minutes: int = 0
    default: bool = False
    open: bool = True
    largest: Resources = {}
    usable: bool = True
    reason: str = ""


class Cluster(Struct, frozen=True):
    """Nodes under their own names, with `backend` not set yet, and partitions in the order of the batch system."""

    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]


def largest_capacity(nodes: Sequence[Node]) -> Resources:
    largest: Resources = {}
    for node in nodes:
        for resource, amount in node.capacity.items():
            largest[resource] = max(amount, largest.get(resource, 0))
    return largest


class BatchSystem(Protocol):
    """Errors of all methods: BackendError if nothing was done and a retry may help (NOT_REACHED: the request never arrived),
    BackendRefused if a retry cannot help, OutcomeUnknown if the request may have been carried out."""

    # Submissions are processes that may outlive the server (see `HpcBackend.open`).
    uses_commands: bool
    # How many similar jobs can be submitted as one array; 1: no arrays.
    max_array_size: int
    # Variables of the batch system with the job's id and the node's name.
    job_variable: str
    node_variable: str
    # Bash expression for the id of an array element as in `JobStatus.job`; expands to "" outside of arrays.
    element_id: str

    def inherit(self, lock: int) -> None:
        """Every command that submits a job keeps this file descriptor open until it exits."""
        ...

    async def ping(self) -> str: ...

    async def cluster(self) -> Cluster: ...

    async def submit(self, submission: Submission) -> str:
        """Returns the job's id."""
        ...

    async def submit_array(self, submissions: Sequence[Submission], mark: str) -> list[str]:
        """Submit similar jobs, all or none. The mark of element n is `mark#n`."""
        ...

    async def status(self, jobs: Collection[str]) -> list[JobStatus]:
        """The status of these jobs, without those that the system does not know."""
        ...

    async def marked(self, prefix: str) -> list[JobStatus]:
        """All jobs whose mark begins with `prefix`, and ended ones as long as the system remembers them."""
        ...

    async def history(self, jobs: Collection[str]) -> list[JobStatus]:
        """Jobs from the accounting history, after the queue has forgotten them; [] if there is none."""
        ...

    async def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs as the system does it; unknown and ended ones are ignored."""
        ...

    async def signal(self, jobs: Sequence[str], signal: str) -> None:
        """Signal all processes of running jobs; unknown and ended ones are ignored."""
        ...

    async def expected_starts(self) -> dict[str, int]:
        """Expected start by job, in ms since the epoch, for pending jobs with an estimate."""
        ...

    async def execute(self, job: str, command: Sequence[str], timeout_s: float) -> ExecResult:
        """Run a command on the first node of a running job, within its allocation."""
        ...

    async def execute_on(self, node: str, partition: str, command: Sequence[str], timeout_s: float) -> ExecResult:
        """Run a command on a node as a separate job that starts at once or not at all."""
        ...

    async def usage(self) -> dict[str, Resources]:
        """Measured usage by node."""
        ...

    async def close(self) -> None: ...
