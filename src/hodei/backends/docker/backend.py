"""`ports.Backend` over Docker hosts: routes each order to the run's host and merges the answers.

Every call has a time limit; starts and stops return at once and are carried out by tasks of the host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hodei.backends.base import BackendContext, BaseBackend
from hodei.backends.docker.container_spec import prepare
from hodei.backends.docker.engine import DaemonError
from hodei.backends.docker.host import DockerHost
from hodei.backends.docker.logs import Logs, execute
from hodei.backends.docker.node import Meter, node_of
from hodei.backends.docker.run_table import Places, Tracked
from hodei.backends.docker.settings import Settings, check
from hodei.model.backend import Capabilities, ExecResult, NodeUsage
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, NotFound
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Node
from hodei.ports import Stream

FIRST_ANSWER_S = 15.0
PRUNE_EVERY_S = 3600.0

CAPABILITIES = Capabilities(
    images=True,
    bare=False,
    gpus=True,
    gpu_shares=True,
    limits=True,
    checkpoint=True,
    health_checks=True,
    idle_timeouts=True,
    execute=True,
    usage=True,
    suspend=True,
)


class DockerBackend(BaseBackend):
    kind = "docker"

    def __init__(self, name: str, settings: Settings, context: BackendContext) -> None:
        super().__init__(name)
        check(name, settings)
        self.capabilities = Capabilities(**{**_fields(CAPABILITIES), "bare": bool(settings.image)})
        self._settings, self._context = settings, context
        self._home = context.home / name
        self._logs = Logs(self._home / "logs", context.log_cap_bytes, context.keep_logs_s)
        self._news: list[RunObserved] = []
        self._something_new, self._nodes_news = asyncio.Event(), asyncio.Event()
        self._pruner: asyncio.Task[None] | None = None
        self._hosts = {
            host.name: DockerHost(
                host,
                settings,
                backend=name,
                installation=context.installation,
                places=Places(self._home / "runs" / host.name),
                logs=self._logs,
                now_ms=context.clock.now_ms,
                tell=self._hear,
                changed=self._nodes_news.set,
            )
            for host in settings.hosts
        }
        self._meters = {name: Meter(host.engine) for name, host in self._hosts.items()}

    # ---------------------------------------------------------------------------------------- connection

    async def open(self) -> None:
        """Wait for the first answer of every host; one that is up is enough."""
        for host in self._hosts.values():
            host.begin()
        if self._pruner is None:
            self._pruner = asyncio.create_task(self._prune(), name=f"{self.name}: prune logs")
        tries = [asyncio.ensure_future(host.talk.tried.wait()) for host in self._hosts.values()]
        await asyncio.wait(tries, timeout=FIRST_ANSWER_S)
        for waiting in tries:
            waiting.cancel()
        if not any(host.up for host in self._hosts.values()):
            problems = "; ".join(host.talk.problem for host in self._hosts.values())
            raise BackendError(f"no Docker host answers: {problems}"[:1000], hint="see docs/how-to/docker.md")

    async def close(self) -> None:
        if self._pruner is not None:
            self._pruner.cancel()
            await asyncio.gather(self._pruner, return_exceptions=True)
            self._pruner = None
        await asyncio.gather(*(host.close() for host in self._hosts.values()))

    async def _prune(self) -> None:
        while True:
            await asyncio.to_thread(self._logs.prune)
            await asyncio.sleep(PRUNE_EVERY_S)

    async def ping(self) -> str:
        answers = await asyncio.gather(*(host.talk.ping() for host in self._hosts.values()), return_exceptions=True)
        silent, versions = [], set()
        for host, answer in zip(self._hosts.values(), answers, strict=True):
            if isinstance(answer, BackendError):
                silent.append(answer.message)
            elif isinstance(answer, BaseException):
                raise answer
            elif host.up:
                versions.add(answer)
            else:
                silent.append(host.talk.problem)
        if not versions:
            raise BackendError("no Docker host answers: " + "; ".join(silent))
        text = f"Docker {', '.join(sorted(versions))} on {len(answers) - len(silent)} of {len(answers)} hosts"
        return "; ".join([text, *silent])[:500]

    # ------------------------------------------------------------------------------------------- reports

    async def nodes(self) -> list[Node]:
        return [
            node_of(
                host.host,
                host.talk.info,
                host.held_images,
                backend=self.name,
                problem="" if host.up else host.talk.problem or "it does not answer",
            )
            for host in self._hosts.values()
            if not host.lost
        ]

    async def nodes_changed(self) -> None:
        await self._nodes_news.wait()
        self._nodes_news.clear()

    def _hear(self, seen: RunObserved) -> None:
        self._news.append(seen)
        self._something_new.set()

    async def observe(self) -> list[RunObserved]:
        await self._something_new.wait()
        self._something_new.clear()
        news, self._news = self._news, []
        return news

    async def known(self) -> dict[RunId, RunObserved]:
        out: dict[RunId, RunObserved] = {}
        for known in await asyncio.gather(*(host.known() for host in self._hosts.values())):
            out |= known
        return out

    # -------------------------------------------------------------------------------------------- orders

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        answer: dict[RunId, BackendError | BackendRefused] = {}
        for order in orders:
            try:
                self._start(order)
            except (BackendError, BackendRefused) as error:
                answer[order.run.id] = error
        return answer

    def _start(self, order: Start) -> None:
        host = self._hosts.get(order.run.node)
        if host is None:
            raise BackendRefused(f"backend {self.name} has no host {order.run.node} any more")
        if order.run.id in host.runs:
            return
        prepared = prepare(
            order,
            self._settings,
            host.host,
            installation=self._context.installation,
            backend=self.name,
            log_cap=self._context.log_cap_bytes,
            info=host.talk.info,
        )
        if not host.up and not host.sent_before(order.run.id):
            raise BackendError(f"host {host.host.name} does not answer: {host.talk.problem}", code=NOT_REACHED)
        host.start(prepared)

    async def stop(self, orders: Sequence[Stop]) -> None:
        for order in orders:
            if found := self._find(order.run):
                host, tracked = found
                host.stop(tracked, "", order.reason.text, order.grace_ms, order.checkpoint)

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        for order in orders:
            found = self._find(order.run)
            if found and found[1].running and found[1].stopping is None and not found[1].saving:
                host, tracked = found
                host.spawn(tracked, host.save(tracked, order.checkpoint))

    async def forget(self, orders: Sequence[Forget]) -> None:
        for order in orders:
            found = self._find(order.run)
            for host in [found[0]] if found else self._hosts.values():
                host.forget(order.run)

    def _find(self, run: RunId) -> tuple[DockerHost, Tracked] | None:
        for host in self._hosts.values():
            if tracked := host.runs.get(run):
                return host, tracked
        return None

    # --------------------------------------------------------------------------------------- being asked

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        host, container = self._container_of(run)
        if host is None or self._logs.kept(run):
            return await asyncio.to_thread(self._logs.read_kept, run, stream, offset, limit)
        if not container:
            await asyncio.sleep(0)  # a caller that polls must not starve other tasks
            return b"", offset
        try:
            return await self._logs.read(host.engine, container, run, stream, offset, limit)
        except DaemonError as error:
            if error.status in (404, 409) and self._logs.kept(run):  # removed a moment ago
                return await asyncio.to_thread(self._logs.read_kept, run, stream, offset, limit)
            if error.status in (404, 409):
                raise NotFound(f"the log of run {run} is gone with its container") from None
            raise

    def _container_of(self, run: RunId) -> tuple[DockerHost | None, str]:
        if found := self._find(run):
            return found[0], found[1].container
        for host in self._hosts.values():
            if container := host.sweeper.at_work.get(run):
                return host, container
        return None, ""

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        found = self._find(run)
        # Not `running`: the start event may be late. The daemon refuses if the container does not run.
        if found is None or found[1].over or not found[1].container:
            raise NotFound(f"run {run} does not run")
        return await execute(found[0].engine, found[1].container, command, min(timeout_ms, 50_000))

    async def usage(self) -> dict[NodeName, NodeUsage]:
        hosts = [name for name, host in self._hosts.items() if host.up]
        answers = await asyncio.gather(*(self._meters[name].measure() for name in hosts), return_exceptions=True)
        out = {}
        for name, answer in zip(hosts, answers, strict=True):
            if isinstance(answer, NodeUsage):
                out[name] = answer
            elif not isinstance(answer, BackendError):
                raise answer
        return out

    async def suspend(self, runs: Sequence[RunId]) -> None:
        await self._freeze(runs, "pause")

    async def resume(self, runs: Sequence[RunId]) -> None:
        await self._freeze(runs, "unpause")

    async def _freeze(self, runs: Sequence[RunId], verb: str) -> None:
        for run in runs:
            found = self._find(run)
            if found is None or found[1].over or not found[1].container:
                continue
            try:
                await found[0].engine.ask("POST", f"containers/{found[1].container}/{verb}")
            except DaemonError as error:
                # Already paused, not paused, or removed. Older daemons answer 500.
                if error.status not in (404, 409, 500):
                    raise


def _fields(capabilities: Capabilities) -> dict[str, bool]:
    return {name: getattr(capabilities, name) for name in capabilities.__struct_fields__}


def make(name: str, settings: Settings, context: BackendContext) -> DockerBackend:
    return DockerBackend(name, settings, context)
