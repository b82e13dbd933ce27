"""The kinds of backend that `test_backends.py` is told of, and how each is brought up for one test.

To register a kind: write an async context manager `open(home, system)` that yields a Bench whose backend is open, and add
one line to KINDS:

    Kind("docker", open_docker, DockerBackend.capabilities, system="dockerd", fields={"image": "busybox"}),

- `home` is an empty directory of the test's own; `system` is what the pytest fixture of that name gave (a daemon that
  lives for the whole session, say; define it in `tests/conftest.py` or a plugin of it, and let it skip where the daemon can
  not be had), or None.
- `Bench(backend, kind, again)`: `again` is a function without arguments that makes a new backend for the same system, not
  yet open and with no memory of the one before: what a restarted server has. Bench.restart uses it.
- Each test sees a system without runs: use a new installation (or a new name) per `open`, and end what is left.
- `fields` are put into every order (an image); `shared`: runs see the directories of the test under the same paths.
- `capabilities` decide which tests the kind is in; a test holds it to be what the backend says.
- `deadline_s`: how long a run that ends at once may take until its end is heard.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct, structs

from agent_host import Desk, a_host
from agent_host import an_order as a_plain_order
from builders import a_node
from docker_bench import open_docker
from hodei.backends.docker.backend import CAPABILITIES as DOCKER_CAPABILITIES
from hodei.backends.hpc.pbs import capabilities as pbs_capabilities
from hodei.backends.hpc.slurm import capabilities as slurm_capabilities
from hodei.backends.instant import InstantBackend
from hodei.backends.local import LocalBackend
from hodei.model.backend import Capabilities
from hodei.model.effects import Start
from hodei.ports import Backend
from hpc_bench import open_pbs, open_slurm

Open = Callable[[Path, Any], AbstractAsyncContextManager["Bench"]]
Again = Callable[[], Backend]


class Kind(Struct, frozen=True):
    name: str
    open: Open
    capabilities: Capabilities
    system: str = ""
    fields: dict[str, Any] = {}
    shared: bool = False
    real: bool = True
    deadline_s: float = 20.0

    def tell(self, home: Path, system: Any, story: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            async with self.open(home, system) as bench:
                await story(bench)

        asyncio.run(whole())


class Bench(Desk):
    """A backend of a kind with all that it has said, and a way to lose it and come back."""

    def __init__(self, backend: Backend, kind: Kind, again: Again) -> None:
        super().__init__(backend, kind.deadline_s)
        self.kind, self._again = kind, again
        self._node = ""

    async def order(self, job: int, *command: str, **fields: Any) -> Start:
        """As the controller would give it: for a node that the backend offers."""
        if not self._node:
            self._node = min(node.name for node in await self.backend.nodes() if node.ready)
        order = a_plain_order(job, *command, **{**self.kind.fields, **fields})
        return structs.replace(order, run=structs.replace(order.run, node=self._node, backend=self.backend.name))

    async def restart(self, *, after_s: float = 0) -> None:
        """The server goes, stays away for a while, and another one comes that remembers nothing."""
        await self.backend.close()
        await asyncio.sleep(after_s)
        self.heard.clear()
        self.backend = self._again()
        await self.backend.open()


class Told(Struct, frozen=True):
    """What the fixture `backend_kind` gives to a test."""

    kind: Kind
    system: Any
    home: Path

    def __call__(self, story: Callable[[Bench], Awaitable[None]]) -> None:
        self.kind.tell(self.home, self.system, story)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- our own


@contextlib.asynccontextmanager
async def open_local(home: Path, system: Any) -> AsyncIterator[Bench]:
    epochs = iter(range(2, 100))

    def again() -> Backend:
        return LocalBackend("local", home=home, installation="test", epoch=next(epochs), linger_s=1)

    async with a_host(home) as desk:
        bench = Bench(desk.backend, LOCAL, again)
        yield bench
        if bench.backend is not desk.backend:
            await bench.backend.close()
            desk.backend = again()
            await desk.backend.open()


@contextlib.asynccontextmanager
async def open_instant(home: Path, system: Any) -> AsyncIterator[Bench]:
    backend = InstantBackend("instant", [a_node(backend="instant")])
    await backend.open()
    yield Bench(backend, INSTANT, lambda: backend)
    await backend.close()


LOCAL = Kind("local", open_local, LocalBackend.capabilities, shared=True)
INSTANT = Kind("instant", open_instant, InstantBackend.capabilities, real=False)
DOCKER = Kind(
    "docker", open_docker, structs.replace(DOCKER_CAPABILITIES, bare=True), system="dockerd",
    fields={"image": "busybox:local"}, deadline_s=120,
)  # fmt: skip
SLURM = tuple(
    Kind(
        f"slurm-{mode}-{way}", open_slurm(mode, way), slurm_capabilities(mode, way), system="slurm", shared=True,
        deadline_s=60,
    )
    for mode in ("placed", "delegate")
    for way in ("commands", "rest")
)  # fmt: skip
PBS = tuple(
    Kind(f"pbs-{mode}", open_pbs(mode), pbs_capabilities(mode), shared=True, deadline_s=60)
    for mode in ("placed", "delegate")
)
# Kubernetes is held to the same in tests/real/kubernetes/test_backend.py: kwok, which plays the kubelets there, runs no commands.
KINDS = (
    LOCAL,
    INSTANT,
    DOCKER,
    *SLURM,
    *PBS,
)


def kinds(*needed: str, **but: Any) -> pytest.MarkDecorator:
    """Parametrises `backend_kind` by those kinds that can do all that is named; `shared=True`: and are like that."""
    fit = [
        kind
        for kind in KINDS
        if all(getattr(kind.capabilities, name) for name in needed)
        and all(getattr(kind, name) == value for name, value in but.items())
    ]
    params = [pytest.param(kind, id=kind.name, marks=[pytest.mark.real] if kind.real else []) for kind in fit]
    return pytest.mark.parametrize("backend_kind", params, indirect=True)
