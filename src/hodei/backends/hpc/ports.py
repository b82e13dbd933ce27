"""The verbs of a queueing system as its backend needs them, and what goes in and out. Each way to speak to one (commands,
REST) implements `Queue`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from hodei.model.backend import ExecResult
from hodei.model.errors import IN_DOUBT, BackendError
from hodei.model.node import Node
from hodei.model.resources import Resources

Phase = Literal["waiting", "running", "ended"]


class Doubtful(BackendError):
    """It is unknown whether the system has accepted the job: look for its mark before asking again."""

    code = IN_DOUBT


class Submission(Struct, frozen=True):
    """A batch job. `mark` is how it is known again; `node` "" leaves the choice to the system; `minutes` 0: no limit of
    its own. `options` are further ones that were checked, as (name, value) of the system. `script_file`: where the script may
    be put, if the system is to run it from there, with its `claim` as an argument."""

    mark: str
    name: str
    script: str
    line: str
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
    def like(self) -> tuple[object, ...]:
        """The same for those that differ in what they run, and in nothing else."""
        amounts = (self.cpus, self.memory_mib, self.storage_mib, self.gpus, self.gpu_type, self.minutes)
        return (self.name, self.line, self.node, *amounts, tuple(sorted(self.devices.items())), self.options)


class Seen(Struct, frozen=True):
    """A job as the system shows it. `state` is its own word. `code` as for RunObserved; `reason_code` too, with `lost` for
    those that the system took the place away from. Times in seconds since the epoch, 0 if unknown."""

    job: str
    mark: str
    phase: Phase
    state: str
    reason: str = ""
    code: int | None = None
    reason_code: str = ""
    start_s: int = 0
    end_s: int = 0
    submit_s: int = 0
    restarts: int = 0


class Line(Struct, frozen=True):
    """A partition or queue: where jobs line up. `largest`: what its biggest node has, of each resource; `minutes`: the
    longest that a job may take, 0 for no bound. `open`: takes jobs now; `usable`: could ever take ours; `why` it is not one
    of these."""

    name: str
    nodes: tuple[str, ...] = ()
    minutes: int = 0
    default: bool = False
    open: bool = True
    largest: Resources = {}
    usable: bool = True
    why: str = ""


class Cluster(Struct, frozen=True):
    """All that a system offers: its nodes by their own names (backend not yet filled in), and its lines in their order."""

    nodes: tuple[Node, ...]
    lines: tuple[Line, ...]


class Queue(Protocol):
    """BackendError: nothing was done, asking again may help (NOT_REACHED: it did not even arrive); BackendRefused: it never
    will. Where that is unknown, Doubtful."""

    # Whether submissions are processes of their own that may outlive us (see `base.HpcBackend.open`).
    by_commands: bool
    # How many jobs that ask for the same can be handed in as one array; 1: none.
    most_at_once: int
    job_variable: str
    node_variable: str
    # What bash reads as the number of an array's element, as `Seen.job` has it; "" outside of arrays.
    element: str

    def inherit(self, lock: int) -> None:
        """Every command that hands in a job holds this file open until it is over."""
        ...

    async def ping(self) -> str: ...

    async def cluster(self) -> Cluster: ...

    async def submit(self, wanted: Submission) -> str:
        """The job's number. Doubtful if it may have been accepted all the same."""
        ...

    async def submit_many(self, wanted: Sequence[Submission], mark: str) -> list[str]:
        """As `submit`, for equals: all or none. Each is seen with the mark and `#` and its place in this list."""
        ...

    async def look(self, jobs: Collection[str]) -> list[Seen]:
        """How these stand; those that the system does not know are left out."""
        ...

    async def ours(self, prefix: str) -> list[Seen]:
        """All jobs whose mark begins like that, ended ones too as long as the system remembers them."""
        ...

    async def remembered(self, jobs: Collection[str]) -> list[Seen]:
        """What the system's own history has of jobs that its line has forgotten; [] if it keeps none."""
        ...

    async def cancel(self, jobs: Sequence[str]) -> None:
        """End them in the system's own way; unknown and ended ones are ignored."""
        ...

    async def signal(self, jobs: Sequence[str], signal: str) -> None:
        """Signal all processes of running jobs; unknown and ended ones are ignored."""
        ...

    async def expected(self) -> dict[str, int]:
        """When those that wait will begin, by number, in ms since the epoch, as far as the system can tell."""
        ...

    async def execute(self, job: str, words: Sequence[str], timeout_s: float) -> ExecResult:
        """Run these words on the first node of a running job, within its allocation."""
        ...

    async def execute_on(self, node: str, line: str, words: Sequence[str], timeout_s: float) -> ExecResult:
        """Run these words on a node, as a job of their own that starts at once or not at all."""
        ...

    async def usage(self) -> dict[str, Resources]:
        """What is in use on the nodes, by their own names."""
        ...

    async def close(self) -> None: ...
