"""The built-in backends pass the public suite.

The Kubernetes backend is tested in tests/real/kubernetes/test_backend.py, because kwok, which simulates the kubelets
there, runs no commands.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec import structs

from agent_host import unique_installation
from builders import a_node
from docker_backends import a_docker
from docker_hosts import DockerDaemons
from hodei.backends.base import BackendContext
from hodei.backends.docker.backend import CAPABILITIES as DOCKER_CAPABILITIES
from hodei.backends.edge import EdgeBackend
from hodei.backends.hpc.pbs import capabilities as pbs_capabilities
from hodei.backends.hpc.slurm import capabilities as slurm_capabilities
from hodei.backends.instant import InstantBackend
from hodei.backends.local import LocalBackend
from hodei.backends.remote.backend import CAPABILITIES as HOSTS_CAPABILITIES
from hodei.ports import Backend
from hodei.runtime.clock import SystemClock
from hodei.testing import BackendConformance
from hodei.testing.backend import Bench
from hpc_backends import PbsStandIn, a_slurm
from joined_agents import Agents, WaitingEdge
from slurm_cluster import SlurmCluster


@pytest.mark.real
class TestLocal(BackendConformance):
    capabilities = LocalBackend.capabilities
    shared_files = True
    secret_names = ("API_TOKEN", "db.password")

    @pytest.fixture(autouse=True)
    def count_epochs(self) -> None:
        self.epochs = itertools.count(1)

    def make_backend(self, home: Path) -> Backend:
        return LocalBackend("local", home=home, installation="test", epoch=next(self.epochs), linger_s=1)


@pytest.mark.real
class TestHosts(BackendConformance):
    capabilities = HOSTS_CAPABILITIES
    shared_files = True
    secret_names = ("API_TOKEN", "db.password")

    @pytest.fixture(autouse=True)
    def have_agents(self, tmp_path: Path) -> None:
        self.agents = Agents(tmp_path / "agents")

    def make_backend(self, home: Path) -> Backend:
        return self.agents.backend()

    @contextlib.asynccontextmanager
    async def open(self, home: Path) -> AsyncIterator[Bench]:
        await self.agents.serve()
        try:
            async with super().open(home) as bench:
                for node in ("node-a", "node-b"):
                    await self.agents.join(node)
                await bench.backend.until_ready()  # type: ignore[attr-defined]
                yield bench
        finally:
            await self.agents.close()


class TestEdge(TestHosts):
    capabilities = EdgeBackend.capabilities

    def make_backend(self, home: Path) -> Backend:
        return self.agents.backend(WaitingEdge)


class TestInstant(BackendConformance):
    capabilities = InstantBackend.capabilities

    def make_backend(self, home: Path) -> Backend:
        return InstantBackend("instant", [a_node(backend="instant")])


@pytest.mark.real
class TestDocker(BackendConformance):
    capabilities = structs.replace(DOCKER_CAPABILITIES, bare=True)
    order_fields = {"image": "busybox:local"}
    deadline_s = 120.0

    @pytest.fixture(autouse=True)
    def choose(self, dockerd: DockerDaemons) -> None:
        self.daemon, self.installation = dockerd(), unique_installation()

    def make_backend(self, home: Path) -> Backend:
        return a_docker(home, self.daemon, installation=self.installation)

    async def clean_up(self) -> None:
        self.daemon.clear()


@pytest.mark.real
class TestSlurm(BackendConformance):
    shared_files = True
    deadline_s = 60.0

    @pytest.fixture(
        autouse=True,
        params=[(mode, transport) for mode in ("placed", "delegate") for transport in ("commands", "rest")],
        ids="-".join,
    )
    def choose(self, request: pytest.FixtureRequest, slurm: SlurmCluster) -> None:
        self.cluster, self.variant = slurm, request.param
        self.capabilities = slurm_capabilities(*self.variant)
        self.installation = unique_installation()

    def make_backend(self, home: Path) -> Backend:
        return a_slurm(self.cluster, home, *self.variant, installation=self.installation)

    async def clean_up(self) -> None:
        self.cluster.clear()


@pytest.mark.real
class TestPbs(BackendConformance):
    shared_files = True
    deadline_s = 60.0

    @pytest.fixture(autouse=True, params=["placed", "delegate"])
    def choose(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.mode = request.param
        self.capabilities = pbs_capabilities(self.mode)
        self.pbs, self.installation = PbsStandIn(tmp_path / "pbs"), unique_installation()

    def make_backend(self, home: Path) -> Backend:
        context = BackendContext(self.installation, 1, home / "backends", SystemClock())
        return self.pbs.backend(context, home / "output", self.mode)

    async def clean_up(self) -> None:
        await self.pbs.clear()
