"""`ports.Backend` over Docker hosts: routes each order to the run's host and merges the answers.

Every call has a time limit; starts and stops return at once and are carried out by tasks of the host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from msgspec import structs

from hodei.backends.base import BackendContext, BaseBackend
from hodei.backends.docker.container_spec import address_of, build_spec
from hodei.backends.docker.engine import DaemonError, Engine, container_stats
from hodei.backends.docker.host import DockerHost
from hodei.backends.docker.logs import Logs, execute
from hodei.backends.docker.runs import RunMarkers, TrackedRun, memory_used, total_cpu_ns
from hodei.backends.docker.settings import CONTAINERS, Host, Settings, check
from hodei.model.backend import Capabilities, ExecResult, NodeUsage
from hodei.model.effects import Forget, Start, Stop, TakeCheckpoint
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, NotFound
from hodei.model.facts import RunObserved
from hodei.model.ids import NodeName, RunId
from hodei.model.node import Location, Node, architecture
from hodei.model.resources import CPU, MEMORY
from hodei.model.usage import RunUsage
from hodei.ports import Stream
from hodei.process import cancel_tasks

CONNECT_TIMEOUT_S = 15.0
PRUNE_EVERY_S = 3600.0
MEASURE_EVERY_S = 15.0

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
    run_usage=True,
    suspend=True,
)


class DockerBackend(BaseBackend):
    kind = "docker"

    def __init__(self, name: str, settings: Settings, context: BackendContext) -> None:
        super().__init__(name)
        check(name, settings)
        self.capabilities = structs.replace(CAPABILITIES, bare=bool(settings.image))
        self._settings, self._context = settings, context
        self._home = context.home / name
        self._logs = Logs(self._home / "logs", context.log_cap_bytes, context.keep_logs_s)
        self._observations: list[RunObserved] = []
        self._changed, self._nodes_changed = asyncio.Event(), asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._hosts = {
            host.name: DockerHost(
                host,
                settings,
                backend=name,
                installation=context.installation,
                markers=RunMarkers(self._home / "runs" / host.name),
                logs=self._logs,
                now_ms=context.clock.now_ms,
                report=self._add_observation,
                on_change=self._nodes_changed.set,
            )
            for host in settings.hosts
        }
        self._meters = {name: UsageMeter(host.engine) for name, host in self._hosts.items()}

    async def open(self) -> None:
        """Connect to every host; one that answers is enough."""
        for host in self._hosts.values():
            host.begin()
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._prune(), name=f"{self.name}: prune logs"),
                asyncio.create_task(self._measure_runs(), name=f"{self.name}: measure runs"),
            ]
        tries = [asyncio.ensure_future(host.connection.tried.wait()) for host in self._hosts.values()]
        await asyncio.wait(tries, timeout=CONNECT_TIMEOUT_S)
        for waiting in tries:
            waiting.cancel()
        if not any(host.up for host in self._hosts.values()):
            problems = "; ".join(host.connection.problem for host in self._hosts.values())
            raise BackendError(f"no Docker host answers: {problems}"[:1000], hint="see docs/how-to/docker.md")

    async def close(self) -> None:
        await cancel_tasks(self._tasks)
        self._tasks = []
        await asyncio.gather(*(host.close() for host in self._hosts.values()))

    async def _prune(self) -> None:
        while True:
            await asyncio.to_thread(self._logs.prune)
            await asyncio.sleep(PRUNE_EVERY_S)

    async def ping(self) -> str:
        answers = await asyncio.gather(
            *(host.connection.ping() for host in self._hosts.values()), return_exceptions=True
        )
        silent, versions = [], set()
        for host, answer in zip(self._hosts.values(), answers, strict=True):
            if isinstance(answer, BackendError):
                silent.append(answer.message)
            elif isinstance(answer, BaseException):
                raise answer
            elif host.up:
                versions.add(answer)
            else:
                silent.append(host.connection.problem)
        if not versions:
            raise BackendError("no Docker host answers: " + "; ".join(silent))
        text = f"Docker {', '.join(sorted(versions))} on {len(answers) - len(silent)} of {len(answers)} hosts"
        return "; ".join([text, *silent])[:500]

    async def nodes(self) -> list[Node]:
        return [
            node_of(
                host.host,
                host.connection.info,
                host.held_images,
                backend=self.name,
                problem="" if host.up else host.connection.problem or "it does not answer",
            )
            for host in self._hosts.values()
            if not host.lost
        ]

    async def nodes_changed(self) -> None:
        await self._nodes_changed.wait()
        self._nodes_changed.clear()

    def _add_observation(self, seen: RunObserved) -> None:
        self._observations.append(seen)
        self._changed.set()

    async def observe(self) -> list[RunObserved]:
        await self._changed.wait()
        self._changed.clear()
        seen, self._observations = self._observations, []
        return seen

    async def known(self) -> dict[RunId, RunObserved]:
        out: dict[RunId, RunObserved] = {}
        for known in await asyncio.gather(*(host.known() for host in self._hosts.values())):
            out |= known
        return out

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
            raise BackendRefused(f"backend {self.name} no longer has a host {order.run.node}")
        if order.run.id in host.runs:
            return
        spec = build_spec(
            order,
            self._settings,
            host.host,
            installation=self._context.installation,
            backend=self.name,
            log_cap=self._context.log_cap_bytes,
            info=host.connection.info,
        )
        if not host.up and not host.sent_before(order.run.id):
            raise BackendError(f"host {host.host.name} does not answer: {host.connection.problem}", code=NOT_REACHED)
        host.start(spec)

    async def stop(self, orders: Sequence[Stop]) -> None:
        for order in orders:
            if found := self._find(order.run):
                host, tracked = found
                host.stop(tracked, "", order.reason.text, order.grace_ms, order.checkpoint)

    async def checkpoint(self, orders: Sequence[TakeCheckpoint]) -> None:
        for order in orders:
            found = self._find(order.run)
            if found and found[1].running and found[1].stop is None and not found[1].saving:
                host, tracked = found
                host.spawn(tracked, host.take_checkpoint(tracked, order.checkpoint))

    async def forget(self, orders: Sequence[Forget]) -> None:
        for order in orders:
            found = self._find(order.run)
            for host in [found[0]] if found else self._hosts.values():
                host.forget(order.run)

    def _find(self, run: RunId) -> tuple[DockerHost, TrackedRun] | None:
        for host in self._hosts.values():
            if tracked := host.runs.get(run):
                return host, tracked
        return None

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        host, container = self._container_of(run)
        if host is None or self._logs.has(run):
            return await asyncio.to_thread(self._logs.read_archived, run, stream, offset, limit)
        if not container:
            await asyncio.sleep(0)  # a caller that polls must not starve other tasks
            return b"", offset
        try:
            return await self._logs.read(host.engine, container, run, stream, offset, limit)
        except DaemonError as error:
            if error.status in (404, 409) and self._logs.has(run):  # removed a moment ago
                return await asyncio.to_thread(self._logs.read_archived, run, stream, offset, limit)
            if error.status in (404, 409):
                raise NotFound(f"the log of run {run} was removed with its container") from None
            raise

    def _container_of(self, run: RunId) -> tuple[DockerHost | None, str]:
        if found := self._find(run):
            return found[0], found[1].container
        for host in self._hosts.values():
            if container := host.cleanup.pending.get(run):
                return host, container
        return None, ""

    async def execute(self, run: RunId, command: Sequence[str], timeout_ms: int) -> ExecResult:
        found = self._find(run)
        # Not `running`: the start event may be late. The daemon refuses if the container does not run.
        if found is None or found[1].ended or not found[1].container:
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

    async def run_usage(self, runs: Collection[RunId]) -> dict[RunId, RunUsage]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def measure(run: RunId) -> RunUsage | None:
            found = self._find(run)
            if found is None or not found[1].running or not found[0].up:
                return None
            async with slots:
                return await found[0].measure(found[1])

        answers = await asyncio.gather(*map(measure, runs), return_exceptions=True)
        out = {}
        for run, answer in zip(runs, answers, strict=True):
            if isinstance(answer, RunUsage):
                out[run] = answer
            elif answer is not None and not isinstance(answer, BackendError):
                raise answer
        return out

    async def _measure_runs(self) -> None:
        """Regularly: a daemon forgets the usage of a container when it ends, so the last measurement stands for it."""
        while True:
            await asyncio.sleep(MEASURE_EVERY_S)
            running = [run for host in self._hosts.values() for run, tracked in host.runs.items() if tracked.running]
            if len(running) <= MAX_CONTAINERS:
                await self.run_usage(running)

    async def suspend(self, runs: Sequence[RunId]) -> None:
        await self._freeze(runs, "pause")

    async def resume(self, runs: Sequence[RunId]) -> None:
        await self._freeze(runs, "unpause")

    async def _freeze(self, runs: Sequence[RunId], verb: str) -> None:
        for run in runs:
            found = self._find(run)
            if found is None or found[1].ended or not found[1].container:
                continue
            try:
                await found[0].engine.request("POST", f"containers/{found[1].container}/{verb}")
            except DaemonError as error:
                # Already paused, not paused, or removed. Older daemons answer 500.
                if error.status not in (404, 409, 500):
                    raise


make = DockerBackend


def node_of(host: Host, info: dict[str, Any], images: dict[str, int], *, backend: str, problem: str) -> Node:
    """The host as a node: the daemon's values, bounded by the configured ones. `problem`: why it is not ready, or ""."""
    machine = architecture(str(info.get("Architecture", "")))
    measured = {CPU: int(info.get("NCPU", 0)) * 1000, MEMORY: int(info.get("MemTotal", 0))}
    configured = host.amounts()
    capacity = {**measured, **configured}
    for name, amount in measured.items():
        if info and name in configured:
            capacity[name] = min(amount, configured[name])
    if host.max_containers:
        capacity[CONTAINERS] = host.max_containers
    return Node(
        name=host.name,
        backend=backend,
        kind="docker",
        capacity=capacity,
        labels={
            "hodei.io/hostname": host.name,
            "kubernetes.io/hostname": host.name,
            "kubernetes.io/os": str(info.get("OSType") or "linux"),
            "kubernetes.io/arch": machine,
            **_daemon_labels(info),
            **host.labels,
        },
        taints=host.taints,
        arch=machine,
        gpu_type=host.gpu_type,
        location=Location(host.region, host.zone, host.datacenter, host.rack).with_coordinates(host.lat, host.lng),
        cost_milli=round(host.cost * 1000),
        ready=not problem,
        not_ready_reason=problem,
        version=str(info.get("ServerVersion", "")),
        address=address_of(host),
        images=images,
    )


def _daemon_labels(info: dict[str, Any]) -> dict[str, str]:
    """Labels of the daemon (`dockerd --label`)."""
    out = {}
    for text in info.get("Labels") or ():
        name, _, value = str(text).partition("=")
        if name:
            out[f"docker.hodei.io/{name}"] = value
    return dict(sorted(out.items()))


MAX_CONTAINERS = 500
AT_ONCE = 8


class UsageMeter:
    """Usage of a host by all its containers. CPU usage is a rate between samples; the first call takes two."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last: dict[str, tuple[float, int]] = {}

    async def measure(self) -> NodeUsage:
        listed = await self._engine.request_json("GET", "containers/json", params={"limit": str(MAX_CONTAINERS)})
        ids = [item["Id"] for item in listed if item.get("State") in (None, "running", "paused")]
        if any(id not in self._last for id in ids):
            await self._sample(ids)
            await asyncio.sleep(0.2)
        before = self._last
        self._last = {}
        memory = await self._sample(ids)
        cpu_milli = 0
        for id, (at_s, used_ns) in self._last.items():
            last_s, last_ns = before.get(id, (at_s, used_ns))
            if at_s > last_s:
                cpu_milli += round((used_ns - last_ns) / 1e6 / (at_s - last_s))
        return NodeUsage({CPU: max(cpu_milli, 0), MEMORY: memory})

    async def _sample(self, ids: list[str]) -> int:
        slots = asyncio.Semaphore(AT_ONCE)
        return sum(await asyncio.gather(*(self._sample_one(id, slots) for id in ids)))

    async def _sample_one(self, id: str, slots: asyncio.Semaphore) -> int:
        """Its memory; 0 for a container that has just ended."""
        async with slots:
            stats = await container_stats(self._engine, id)
        if stats is None:
            return 0
        self._last[id] = (asyncio.get_running_loop().time(), total_cpu_ns(stats))
        return memory_used(stats)
