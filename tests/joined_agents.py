"""For tests: agents as processes that dial out to an application with the agents' routes, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agent_host import agent_pid, until
from hodei.backends.base import BackendContext
from hodei.backends.edge import EdgeBackend
from hodei.backends.hosts import HostsBackend
from hodei.backends.remote.backend import AgentBackend, Patience
from hodei.backends.remote.hub import AgentHub
from hodei.backends.remote.registry import AgentRegistry
from hodei.runtime.clock import SystemClock
from hodei.runtime.metrics import Metrics
from hodei.server.app import make_app
from hodei.server.auth import Tokens
from hodei.server.serving import make_server
from ports import free_port

DEADLINE_S = 60.0


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Waiting(AgentBackend):
    """Is open when every host that has joined is back."""

    async def open(self) -> None:
        await super().open()
        await self.until_ready()

    async def until_ready(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self._hub.registry.nodes) > len([node for node in await self.nodes() if node.ready]):
                await self.nodes_changed()


class WaitingBackend(Waiting, HostsBackend):
    pass


class WaitingEdge(Waiting, EdgeBackend):
    def __init__(self, name: str, context: BackendContext, patience: Patience) -> None:
        super().__init__(name, context, patience, {})


class Agents:
    """A hub that outlives its servers, and the agents that have joined it. `url` is where the agents dial to."""

    def __init__(self, home: Path, *, url: str = "", certificate: Path | None = None, key: Path | None = None) -> None:
        self.home, self.certificate, self.key = home, certificate, key
        self.port = free_port()
        scheme = "https" if certificate else "http"
        self.url = url or f"{scheme}://127.0.0.1:{self.port}"
        self.registry = AgentRegistry(now_ms)
        self.hub = AgentHub(self.registry, now_ms)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.epoch = 0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    def backend(
        self, kind: type[Waiting] = WaitingBackend, *, away_ms: int = 20_000, lost_ms: int = 60_000, name: str = "lab"
    ) -> Waiting:
        self.epoch += 1
        context = BackendContext("test", self.epoch, self.home / "backends", SystemClock(), agents=self.hub)
        return kind(name, context, Patience(away_ms, lost_ms))

    async def serve(self) -> None:
        """Start the HTTP server; sessions of an earlier one are over."""
        for session in list(self.hub.sessions.values()):
            session.close()
        self.hub = AgentHub(self.registry, now_ms, event=lambda kind, detail: self.events.append((kind, detail)))
        service = SimpleNamespace(agents=self.hub, rights=SimpleNamespace(), prometheus=Metrics(), save=self._save)
        app = make_app(service, Tokens())  # type: ignore[arg-type]
        files = {"certificate": str(self.certificate), "key": str(self.key)} if self.certificate else {}
        self._server = make_server(app, port=self.port, **files)
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(100)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        await until(lambda: self._server.started)

    async def _save(self, row: Any) -> None:
        pass

    async def stop_serving(self) -> None:
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._serving = None

    async def join(self, node: str, *options: str) -> None:
        """Start an agent with a fresh token; it is connected when this returns."""
        token, _ = await self.registry.create_token("lab", node=node, ttl_ms=60_000)
        self.start(node, *options, token=token)
        await until(lambda: node in self.hub.sessions, f"{node} is connected")

    def agent_home(self, node: str) -> Path:
        return self.home / f"agent-{node}"

    def start(self, node: str, *options: str, token: str = "", env: dict[str, str] | None = None) -> None:
        """Start the agent of a node that may have joined before."""
        home = self.agent_home(node)
        home.mkdir(parents=True, exist_ok=True)
        words = ["join", self.url, "--home", str(home), *options]
        words += ["--ca", str(self.certificate)] if self.certificate else []
        with (home / "agent.log").open("ab") as log:
            self._processes[node] = subprocess.Popen(
                [sys.executable, "-m", "hodei.agent", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **({"HODEI_ENROL_TOKEN": token} if token else {}), **(env or {})},
            )  # fmt: skip

    def log_of(self, node: str) -> str:
        return (self.agent_home(node) / "agent.log").read_text()

    def pid(self, node: str) -> int:
        return agent_pid(self.agent_home(node))

    def process(self, node: str) -> subprocess.Popen[bytes]:
        return self._processes[node]

    def kill(self, node: str) -> None:
        """kill -9; it has exited when this returns."""
        process = self._processes[node]
        process.kill()
        process.wait(DEADLINE_S)

    async def close(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._processes.values():
            await asyncio.to_thread(process.wait, DEADLINE_S)
        await self.stop_serving()


@contextlib.asynccontextmanager
async def joined_agents(home: Path, *nodes: str, **fields: Any) -> AsyncIterator[Agents]:
    agents = Agents(home, **fields)
    await agents.serve()
    try:
        for node in nodes:
            await agents.join(node)
        yield agents
    finally:
        await agents.close()
