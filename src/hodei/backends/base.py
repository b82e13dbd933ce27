"""The basis of every backend: defaults for what its system cannot do, its context, and the parts of an order that all share.

A backend is one module or package here with a subclass of BaseBackend, and two names for the registry
(`hodei.backends.registry`): `Settings`, a Struct with the keys of its table `[backends.NAME]`, and
`make(name, settings, context)`. `make` does no I/O: `open` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import Struct, structs

from hodei.agent.logs import RetentionClock
from hodei.backends.slurm_variables import slurm_variables
from hodei.model.array import array_environment
from hodei.model.backend import Capabilities, ExecResult, Health, NodeUsage
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, NotFound, Unsupported
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.job import NODE_HOST, HealthCheck, qos
from hodei.model.node import Grant, Node
from hodei.model.usage import RunUsage
from hodei.ports import Clock, Stream

if TYPE_CHECKING:
    from hodei.backends.remote.hub import AgentHub

HEALTH_TIMEOUT_S = 10.0
READ_LIMIT = 1 << 20
# Limits of the kernel. Checked here, because a retry cannot help.
COMMAND_LIMIT = 1 << 20
WORD_LIMIT = (128 << 10) - 1
WHOLE_GPU = 1000
LOOPBACK = "127.0.0.1"


class BackendContext(Struct, frozen=True):
    """What the server gives a backend. `installation` never changes and marks what is ours in a system that others use too;
    `epoch` counts its servers. `home`: a directory for the backends' own files, one below it for each by its name, created
    on demand. `agents`: the sessions of agents that dial out, for backends whose nodes they are."""

    installation: str
    epoch: int
    home: Path
    clock: Clock
    log_cap_bytes: int | None = None
    keep_logs_s: float = 7 * 86_400
    agents: AgentHub | None = None


class BaseBackend(ABC):
    """`ports.Backend` with defaults for everything optional."""

    kind = ""
    capabilities = Capabilities()

    def __init__(self, name: str) -> None:
        self.name = name

    async def open(self) -> None:  # noqa: B027 - optional
        """Nothing to connect to."""

    async def close(self) -> None:  # noqa: B027 - optional
        """Nothing to release."""

    @abstractmethod
    async def nodes(self) -> list[Node]: ...

    @abstractmethod
    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]: ...

    @abstractmethod
    async def stop(self, orders: Sequence[Stop]) -> None: ...

    @abstractmethod
    async def observe(self) -> list[RunObserved]: ...

    @abstractmethod
    async def known(self) -> dict[RunId, RunObserved]: ...

    @abstractmethod
    async def forget(self, orders: Sequence[Forget]) -> None: ...

    @abstractmethod
    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]: ...

    async def ping(self) -> str:
        """A cheap request for `health`; returns what answered, or raises BackendError."""
        await self.nodes()
        return ""

    async def health(self) -> Health:
        loop = asyncio.get_running_loop()
        began, ok = loop.time(), False
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                text, ok = await self.ping(), True
        except TimeoutError:
            text = f"no answer within {HEALTH_TIMEOUT_S:g} s"
        except (BackendError, BackendRefused) as error:
            text = error.message
        except OSError as error:
            text = str(error)
        return Health(ok, text, round((loop.time() - began) * 1000))

    async def nodes_changed(self) -> None:
        await asyncio.Event().wait()

    def silent_nodes(self) -> frozenset[NodeName]:
        return frozenset()

    def returned_nodes(self) -> frozenset[NodeName]:
        return frozenset()

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:  # noqa: B027 - optional
        """Runs take no checkpoints."""

    async def log_times(self, run: RunId, stream: Stream) -> list[tuple[int, int]]:
        return []

    async def reserve(self, orders: Sequence[Start]) -> None:
        self.cannot("reserve capacity before a start", "start the runs without it")

    async def unreserve(self, runs: Sequence[RunId]) -> None:  # noqa: B027 - optional
        """Nothing is ever reserved."""

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        self.cannot("run a command inside a run", "read the run's log instead")

    async def execute_on(self, node: NodeName, command: Sequence[str], timeout_ms: int) -> ExecResult:
        self.cannot("run a command on a node", "log in to the node, or run a job there (`node_selector`)")

    async def usage(self) -> dict[NodeName, NodeUsage]:
        self.cannot("measure the usage of its nodes", "see their allocation with `hodei nodes`")

    async def run_usage(self, runs: Collection[RunId]) -> dict[RunId, RunUsage]:
        self.cannot("measure the usage of its runs", "see what they requested with `hodei job show`")

    async def suspend(self, runs: Sequence[RunId]) -> None:
        self.cannot("freeze a run in its place", "`hodei suspend` saves its work and stops it")

    async def resume(self, runs: Sequence[RunId]) -> None:  # noqa: B027 - optional
        """Nothing is ever frozen."""

    async def wanted(self, nodes: Sequence[NodeName]) -> dict[NodeName, BackendError | BackendRefused]:
        self.cannot("start nodes", "start them by its own means")

    async def release(self, nodes: Sequence[NodeName]) -> None:
        self.cannot("stop nodes", "stop them by its own means")

    async def expected(self) -> dict[RunId, int]:
        self.cannot("predict the start of runs", "see the forecast with `hodei why`")

    def cannot(self, what: str, instead: str) -> NoReturn:
        raise Unsupported(f"backend {self.name} ({self.kind}) cannot {what}", hint=instead)


class UnusableBackend(BaseBackend):
    """Stands in for a backend whose code cannot be loaded: not reached, and its health gives the reason."""

    capabilities = Capabilities(commands=False)

    def __init__(self, name: str, kind: str, reason: str) -> None:
        super().__init__(name)
        self.kind, self._reason = kind, reason

    async def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise BackendError(self._reason, code=NOT_REACHED)

    open = nodes = start = stop = observe = known = forget = logs = _refuse


class LogArchive:
    """Logs of ended runs, as files below `home`, or directories of files, by run; removed after `keep_s`."""

    def __init__(self, home: Path, keep_s: float) -> None:
        self.home, self._retention = home, RetentionClock(f"{home}.clock", keep_s)

    def has(self, run: RunId) -> bool:
        return (self.home / run).exists()

    def read_file(self, run: RunId, path: Path, offset: int, limit: int) -> tuple[bytes, int]:
        """From the file at `path` below `home`; NotFound without it."""
        offset = max(offset, 0)
        try:
            with (self.home / path).open("rb") as file:
                file.seek(offset)
                data = file.read(max(0, min(limit, READ_LIMIT)))
        except FileNotFoundError:
            raise NotFound(f"no log is kept of run {run}") from None
        return data, offset + len(data)

    def prune(self) -> None:
        """Remove logs past their retention."""
        before_s = self._retention.cutoff_s()
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.home):
                with contextlib.suppress(OSError):
                    if entry.stat().st_mtime >= before_s:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)


def run_env(order: Start, cpus: tuple[int, ...] = ()) -> dict[str, str]:
    """Environment variables that describe a run to itself, the same on every backend. `cpus`: the cores it is bound to."""
    run, spec = order.run, order.spec
    return {
        "HODEI_JOB_ID": str(run.job),
        "HODEI_RUN_ID": run.id,
        "HODEI_TASK": run.task,
        "HODEI_ATTEMPT": str(run.attempt),
        "HODEI_NODE": run.node,
        "HODEI_PROJECT": spec.project,
        "HODEI_QOS": qos(order.task),
        **_gang_env(order),
        **array_environment(spec),
        **_grant_env(run.grant, cpus),
        **(slurm_variables(order) if spec.annotations else {}),
    }


def _gang_env(order: Start) -> dict[str, str]:
    env = {
        "HODEI_RANK": str(order.run.rank),
        "HODEI_MEMBER": str(order.run.member),
        "HODEI_WORLD_SIZE": str(order.world_size),
        "HODEI_MIN_WORLD_SIZE": str(sum(task.needed for task in order.spec.tasks)),
        "HODEI_MAX_WORLD_SIZE": str(order.spec.size),
    }
    if order.addresses:
        env |= {"HODEI_ADDRESSES": ",".join(order.addresses), "HODEI_MASTER_ADDRESS": order.addresses[0]}
    return env


def _grant_env(grant: Grant | None, cpus: tuple[int, ...]) -> dict[str, str]:
    """The cores and GPUs of a run. A fraction of a GPU is announced, not enforced."""
    env = {}
    if cpus:
        env["HODEI_CPUS"] = ",".join(map(str, cpus))
    if grant is not None and grant.gpus:
        gpus = ",".join(dict.fromkeys(str(gpu) for gpu, _ in grant.gpus))
        env |= {"HODEI_GPUS": gpus, "CUDA_VISIBLE_DEVICES": gpus}
        last_milli = grant.gpus[-1][1]
        if last_milli < WHOLE_GPU:
            env["HODEI_GPU_MILLI"] = str(last_milli)
    return env


def resolve_health_check(health: HealthCheck, address: str) -> HealthCheck:
    """With the host `node` of its URL replaced by the node's address."""
    scheme, slashes, rest = health.http.partition("://")
    if not slashes or not rest.startswith(NODE_HOST) or rest[len(NODE_HOST) :][:1] not in ("", ":", "/", "?"):
        return health
    host = f"[{address}]" if ":" in address else address
    return structs.replace(health, http=f"{scheme}://{host}{rest[len(NODE_HOST) :]}")


def absolute_path(path: str, order: Start) -> str:
    """A path that a job names, in its working directory unless it begins with a slash."""
    return path if path.startswith("/") else f"{order.task.workdir.rstrip('/')}/{path}"


def check_container_command(command: tuple[str, ...], env: dict[str, str], workdir: str) -> None:
    """BackendRefused for what no container can be given."""
    if any("\0" in word for word in command):
        raise BackendRefused("the command holds a NUL character")
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise BackendRefused(f"the environment variable {name[:80]!r} cannot be set")
    if workdir and (not workdir.startswith("/") or "\0" in workdir):
        raise BackendRefused(
            f"the working directory {workdir[:200]!r} is not an absolute path", hint="begin it with a /"
        )
    check_size(command, env)


def check_size(command: tuple[str, ...], env: dict[str, str]) -> None:
    """BackendRefused for a command and environment that the kernel does not accept."""
    sizes = [len(word.encode()) + 1 for word in command]
    sizes += [len(name.encode()) + len(value.encode()) + 2 for name, value in env.items()]
    if sum(sizes) > COMMAND_LIMIT or max(sizes) > WORD_LIMIT:
        raise BackendRefused(
            f"the command and its environment are {sum(sizes)} bytes, the longest word {max(sizes)}; "
            f"the system takes {COMMAND_LIMIT} and {WORD_LIMIT}",
            hint="put the data into a file",
        )
