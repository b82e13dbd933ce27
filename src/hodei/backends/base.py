"""What a new backend begins with: honest defaults for all that its system can not do, and what it is given when it is made.

A backend is one file (or folder) here with a subclass of PlainBackend, and two names for the registry
(`hodei.backends.registry`): `Settings`, a Struct with the keys of its table `[backends.NAME]`, and
`make(name, settings, house)`. Making one does no I/O: `open` does.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

from hodei.model.backend import Capabilities, ExecResult, Health, NodeUsage
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, Unsupported
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Node
from hodei.ports import Clock, Stream

HEALTH_TIMEOUT_S = 10.0


class BackendContext(Struct, frozen=True):
    """Whose backend it is. `installation` is the same for ever and marks what is ours in a system that others use too;
    `epoch` counts the servers that it has had. `home` is a directory for the backends' own files, one below it for each
    by its name, made by whoever needs it."""

    installation: str
    epoch: int
    home: Path
    clock: Clock
    log_cap_bytes: int | None = None
    keep_logs_s: float = 7 * 86_400


class PlainBackend(ABC):
    """`ports.Backend` but for what each must do in its own way."""

    kind = ""
    capabilities = Capabilities()

    def __init__(self, name: str) -> None:
        self.name = name

    async def open(self) -> None:  # noqa: B027 - nothing to do is what it means
        """Nothing to connect to."""

    async def close(self) -> None:  # noqa: B027 - nothing to do is what it means
        """Nothing to let go of."""

    # ------------------------------------------------------------------------------- what all must do

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

    # ---------------------------------------------------------------------------------- signs of life

    async def ping(self) -> str:
        """A cheap question to the other side; a word on what answered, or BackendError. For `health`."""
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

    # -------------------------------------------------------------------------- what not all can do

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:  # noqa: B027 - nothing to do is what it means
        """Nobody is asked to save his work."""

    async def log_times(self, run: RunId, stream: Stream) -> list[tuple[int, int]]:
        return []

    async def reserve(self, orders: Sequence[Start]) -> None:
        self.cannot("set room aside before a start", "start the runs without it")

    async def unreserve(self, runs: Sequence[RunId]) -> None:  # noqa: B027 - nothing to do is what it means
        """Nothing was ever set aside."""

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        self.cannot("run a command beside a run", "read the run's log instead")

    async def execute_on(self, node: NodeName, command: Sequence[str], timeout_ms: int) -> ExecResult:
        self.cannot("run a command on a node", "log in to the node, or run a job there (`node_selector`)")

    async def usage(self) -> dict[NodeName, NodeUsage]:
        self.cannot("measure what is used on its nodes", "see what is promised with `hodei nodes`")

    async def suspend(self, runs: Sequence[RunId]) -> None:
        self.cannot("freeze a run in its place", "`hodei suspend` saves its work and stops it")

    async def resume(self, runs: Sequence[RunId]) -> None:  # noqa: B027 - nothing to do is what it means
        """Nobody was ever frozen."""

    async def expected(self) -> dict[RunId, int]:
        self.cannot("tell when runs will begin", "see the forecast with `hodei why`")

    def cannot(self, what: str, instead: str) -> NoReturn:
        raise Unsupported(f"backend {self.name} ({self.kind}) cannot {what}", hint=instead)


class UnusableBackend(PlainBackend):
    """Stands in for a backend whose code cannot be loaded: out of reach, and its health says why."""

    capabilities = Capabilities(commands=False)

    def __init__(self, name: str, kind: str, reason: str) -> None:
        super().__init__(name)
        self.kind, self._reason = kind, reason

    async def open(self) -> None:
        self._refuse()

    async def nodes(self) -> list[Node]:
        self._refuse()

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        self._refuse()

    async def stop(self, orders: Sequence[Stop]) -> None:
        self._refuse()

    async def observe(self) -> list[RunObserved]:
        self._refuse()

    async def known(self) -> dict[RunId, RunObserved]:
        self._refuse()

    async def forget(self, orders: Sequence[Forget]) -> None:
        self._refuse()

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise BackendError(self._reason, code=NOT_REACHED)
