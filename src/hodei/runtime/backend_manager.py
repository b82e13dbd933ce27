"""Backends of a running server: connect, check health, block and unblock; add, disable, enable and remove at run time.

Added and disabled backends are kept in the store, so they survive a restart. Each backend has its own tasks, and every
call has a timeout: one backend that hangs does not delay the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from msgspec import Struct, structs

from hodei.control.explain.why import StartProgress
from hodei.control.state import ClusterState
from hodei.model.audit import command_text
from hodei.model.backend import ExecResult, NodeUsage
from hodei.model.effects import Act, NodeAct, SaveValue, Stop
from hodei.model.errors import BackendError, Conflict, InvalidInput, NotFound, did_you_mean
from hodei.model.explanation import BackendQueueEntry
from hodei.model.facts import EventNoted
from hodei.model.ids import JobId, NodeName, RunId, job_of
from hodei.model.job import RUN_ENDED, Run
from hodei.model.node import Node
from hodei.model.outcome import StopReason
from hodei.model.resources import format_time, scale_of
from hodei.ports import Backend, Store
from hodei.runtime.binder import Binder
from hodei.runtime.metrics import MAX_NODES
from hodei.runtime.node_orders import NodeOrders
from hodei.runtime.watcher import CALL_TIMEOUT_S, DISABLED, UNHEALTHY, Block, HealthMonitor, HealthPolicy, Watcher

if TYPE_CHECKING:
    from hodei.runtime.service import Service

log = logging.getLogger("hodei.backend_manager")
_NOTE = "backends"
_CLOSE_S = 5.0
# A start is shown as in doubt when its backend has not answered for this long.
_DOUBT_AFTER_MS = 2000
_MAX_NAME = 63
_QUEUE_INTERVAL_S = 30.0
_USAGE_INTERVAL_S = 60.0
_QUERY_TIMEOUT_S = 20.0
# Measuring nodes is expensive on some systems: it stops this long after the last scrape of the metrics.
_USAGE_EXPIRES_S = 600.0
Table = Mapping[str, Any]
T = TypeVar("T")


# Informational calls: expected starts of runs in a backend's own queue, and measured usage of its nodes. A failed query
# leaves its answer empty and says nothing about the health of the backend.


class StartEstimate(Struct, frozen=True):
    """Of a run in a backend's own queue: its expected start (0 if unknown), and why it waits."""

    start_ms: int = 0
    reason: str = ""


class BackendQuery(Generic[T]):
    """Polls one backend. `answer` is empty while the query is not `wanted`, and after a failure."""

    def __init__(
        self, what: str, fetch: Callable[[], Awaitable[dict[str, T]]], wanted: Callable[[], bool], interval_s: float
    ) -> None:
        self._what, self._fetch, self._wanted, self._interval_s = what, fetch, wanted, interval_s
        self._failing = False
        self.answer: dict[str, T] = {}

    async def run(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(self._interval_s)

    async def poll(self) -> None:
        if not self._wanted():
            self.answer = {}
            return
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT_S):
                self.answer = await self._fetch()
            self._failing = False
        except Exception as error:
            self.answer = {}
            if not self._failing:  # one line per outage
                log.warning("%s is unknown for now: %s", self._what, str(error) or type(error).__name__)
            self._failing = True


class BackendQueries:
    """The queries that one backend supports. They are sent only while it is `healthy`."""

    def __init__(self, backend: Backend, cluster: ClusterState, healthy: Callable[[], bool]) -> None:
        self._backend, self._cluster, self._healthy = backend, cluster, healthy
        self._scraped_s = -_USAGE_EXPIRES_S
        self.queue = BackendQuery[StartEstimate](
            f"the start of runs queued on backend {backend.name}", self._fetch_queue, self._has_queue, _QUEUE_INTERVAL_S
        )
        self.usage = BackendQuery[NodeUsage](
            f"the usage of the nodes of backend {backend.name}", backend.usage, self._usage_wanted, _USAGE_INTERVAL_S
        )

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """To be run as tasks until the backend is removed."""
        can = self._backend.capabilities
        queue = [self.queue.run()] if can.delegates and can.expects else []
        return [*queue, self.usage.run()] if can.usage else queue

    def scrape_usage(self) -> dict[NodeName, NodeUsage]:
        """The latest measurement. Keeps the measuring going."""
        self._scraped_s = time.monotonic()
        return self.usage.answer if len(self.usage.answer) <= MAX_NODES else {}

    def _has_queue(self) -> bool:
        if not self._healthy():
            return False
        runs = (run for of_job in self._cluster.runs.values() for run in of_job.values())
        return any(run.state == "placed" and run.backend == self._backend.name for run in runs)

    def _usage_wanted(self) -> bool:
        recent = time.monotonic() - self._scraped_s < _USAGE_EXPIRES_S
        return recent and len(self._cluster.nodes) <= MAX_NODES and self._healthy()

    async def _fetch_queue(self) -> dict[RunId, StartEstimate]:
        starts, known = await self._backend.expected(), await self._backend.known()
        reasons = {run: seen.reason for run, seen in known.items() if seen.state == "placed"}
        return {run: StartEstimate(starts.get(run, 0), reasons.get(run, "")) for run in starts.keys() | reasons.keys()}


class StoredBackends(Struct, frozen=True):
    """Kept in the store: the settings of added backends, and since when backends are disabled."""

    added: dict[str, dict[str, Any]] = {}
    disabled: dict[str, int] = {}


class BackendFactory(Struct, frozen=True):
    """`make` builds a backend from its table (InvalidInput if it cannot); `node_settings` returns the function that applies
    the table to each of its nodes; `tables` are those of the configuration file."""

    make: Callable[[str, Table], Backend]
    node_settings: Callable[[Table], Callable[[Node], Node]] = lambda table: lambda node: node
    tables: Mapping[str, Table] = {}


class BackendStatus(Struct, frozen=True):
    """`state`: ok, connecting, unhealthy or disabled, since when and why. `source`: file (cannot be removed) or added."""

    backend: Backend
    state: str
    since_ms: int
    text: str
    source: str
    table: Table
    nodes: int
    runs: int
    took_ms: int = 0


class _ManagedBackend:
    def __init__(
        self,
        backend: Backend,
        table: Table,
        watcher: Watcher,
        health: HealthMonitor,
        queries: BackendQueries,
        node_orders: NodeOrders,
    ) -> None:
        self.backend, self.table, self.watcher, self.health = backend, table, watcher, health
        self.queries = queries
        self.node_orders = node_orders
        self.tasks: list[asyncio.Task[None]] = []


def load_stored_backends(store: Store) -> StoredBackends:
    text = store.note(_NOTE)
    try:
        return msgspec.json.decode(text, type=StoredBackends) if text else StoredBackends()
    except msgspec.MsgspecError as error:
        log.error("the record of added and disabled backends is damaged and set aside: %s", error)
        store.mark_suspect("note", _NOTE, str(error))
        return StoredBackends()


class BackendManager:
    def __init__(
        self,
        service: Service,
        backends: Mapping[str, Backend],
        health: HealthPolicy,
        factory: BackendFactory | None = None,
    ) -> None:
        self._service, self._health, self._factory = service, health, factory
        self._change_lock = asyncio.Lock()
        self._node_owners: dict[str, str] = {}
        self._managed: dict[str, _ManagedBackend] = {}
        self._started = False
        # Runs that continue on a backend although their records are damaged, and that backend.
        self.orphans: dict[RunId, str] = {}
        self.stored = load_stored_backends(service.store)
        if service.store.suspects:
            service.store.repair(service.clock.now_ms())
        self.backends: dict[str, Backend] = {}
        self.binder = Binder(
            self.backends,
            service.clock,
            service.prometheus,
            service.loop.enqueue,
            on_failure=lambda name, text: self._managed[name].health.call_failed(text),
            on_success=lambda name: self._managed[name].health.call_succeeded(),
        )
        for name, backend in backends.items():
            self._manage(backend, factory.tables.get(name, {}) if factory else {})
        for name, table in self.stored.added.items() if factory else ():
            self._restore(name, table)

    def _restore(self, name: str, table: Table) -> None:
        """A backend that was added before the restart."""
        assert self._factory is not None
        if name in self._managed:
            log.warning("backend %s is now in the configuration file, which wins over the one added by hand", name)
            return
        try:
            self._manage(self._factory.make(name, table), table)
        except InvalidInput as error:
            log.error("backend %s, added by hand, cannot be created any more: %s", name, error)

    def _manage(self, backend: Backend, table: Table) -> _ManagedBackend:
        service, name = self._service, backend.name
        health = HealthMonitor(backend, service.clock, self._health, lambda: self._health_changed(name))
        watcher = Watcher(
            backend,
            service.controller.cluster,
            service.clock,
            service.prometheus,
            service.loop.enqueue,
            self.binder.act_again,
            service.loop.step_lock,
            self._node_owners,
            self._factory.node_settings(table) if self._factory else lambda node: node,
            partial(self._find_orphans, name),
            on_recovered=health.check_now,
        )
        queries = BackendQueries(
            backend,
            service.controller.cluster,
            lambda: watcher.up.is_set() and not watcher.last_error and not health.circuit.broken,
        )
        node_orders = NodeOrders(backend, service.loop.enqueue, watcher.up)
        managed = self._managed[name] = _ManagedBackend(backend, table, watcher, health, queries, node_orders)
        self.backends[name] = backend
        self.binder.add(name)
        self._update_block(name)
        return managed

    async def _find_orphans(self, name: str, unknown: Sequence[RunId]) -> set[RunId]:
        """Runs on a backend that the controller does not know belong to finished attempts and are stopped, except those
        whose records are active or damaged in the store: these continue."""
        store, damaged = self._service.store, self._service.controller.cluster.damaged
        orphans = set()
        for run in unknown:
            stored = await self._service.read(store.run, run)
            active = stored is not None and stored.state not in RUN_ENDED
            if active or job_of(run) in damaged:
                orphans.add(run)
                if run not in self.orphans:
                    log.error("run %s continues on backend %s although its record is damaged", run, name)
                self.orphans[run] = name
            if active and await self._service.read(store.job, job_of(run)) is None:
                store.mark_suspect("job", job_of(run), "a run of the job is active, but the job itself is missing")
        return orphans

    def orphans_of(self, job: JobId) -> list[RunId]:
        known = self._service.controller.cluster.runs.get(job, {})
        return [run for run in self.orphans if job_of(run) == job and run not in known] if self.orphans else []

    def stop_orphans(self, job: JobId) -> None:
        self.binder.act(
            [Stop(run, self.orphans.pop(run), 10_000, StopReason("cancelled")) for run in self.orphans_of(job)]
        )

    def act(self, acts: Sequence[Act]) -> None:
        """What the controller orders."""
        for act in acts:
            if isinstance(act, NodeAct) and act.backend in self._managed:
                self._managed[act.backend].node_orders.act(act)
        self.binder.act([act for act in acts if not isinstance(act, NodeAct)])

    def start(self) -> None:
        self._started = True
        for managed in self._managed.values():
            self._start(managed)

    def _start(self, managed: _ManagedBackend) -> None:
        name = managed.backend.name
        loops = [self.binder.serve(name), managed.watcher.run()]
        if self._health.every_ms:
            loops.append(managed.health.run())
        if managed.backend.capabilities.scales:
            loops.append(managed.node_orders.serve())
        for loop in (*loops, *managed.queries.loops()):
            managed.tasks.append(asyncio.create_task(loop, name=f"backend {name}"))

    async def stop(self) -> None:
        await asyncio.gather(*(self._stop(managed) for managed in self._managed.values()))

    @staticmethod
    async def _stop(managed: _ManagedBackend) -> None:
        for task in managed.tasks:
            task.cancel()
        await asyncio.wait(managed.tasks, timeout=_CLOSE_S) if managed.tasks else None
        try:
            async with asyncio.timeout(_CLOSE_S):
                await managed.backend.close()
        except Exception as error:
            log.warning("backend %s cannot be closed: %s", managed.backend.name, str(error) or type(error).__name__)

    async def until_ready(self) -> None:
        """Returns when every backend has connected or failed to, and at least one is connected."""
        watchers = [managed.watcher for managed in self._managed.values()]
        await asyncio.gather(*(watcher.tried.wait() for watcher in watchers))
        ups = [asyncio.ensure_future(watcher.up.wait()) for watcher in watchers]
        try:
            if ups:
                await asyncio.wait(ups, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for up in ups:
                up.cancel()

    @property
    def missing(self) -> list[str]:
        """Backends that keep the server from being ready: those not tried yet, and all of them while none is connected."""
        watchers = {name: managed.watcher for name, managed in self._managed.items()}
        if watchers and not any(watcher.up.is_set() for watcher in watchers.values()):
            return list(watchers)
        return [name for name, watcher in watchers.items() if not watcher.tried.is_set()]

    def _health_changed(self, name: str) -> None:
        circuit = self._managed[name].health.circuit
        detail = {"backend": name, "reason": circuit.text} if circuit.broken else {"backend": name}
        self._service.loop.enqueue(
            [EventNoted("backend.unhealthy" if circuit.broken else "backend.healthy", detail=detail)]
        )
        self._update_block(name)

    def _update_block(self, name: str) -> None:
        managed = self._managed[name]
        circuit, since_ms = managed.health.circuit, self.stored.disabled.get(name)
        block = None
        if circuit.broken:
            text = f"backend {name} is unhealthy since {format_time(circuit.since_ms)}: {circuit.text[:200]}"
            block = Block(UNHEALTHY, text)
        self.binder.block(name, block.text if block else "")
        if since_ms is not None:
            block = Block(DISABLED, f"backend {name} is disabled since {format_time(since_ms)}")
        managed.watcher.set_block(block)

    def healthy(self) -> dict[str, bool]:
        """By name: whether jobs can start there."""
        return {n: m.watcher.up.is_set() and m.watcher.block is None for n, m in self._managed.items()}

    def errors(self) -> dict[str, str]:
        """By name: what is wrong, "" if nothing is. Disabled backends are left out."""
        return {
            name: managed.watcher.last_error or (managed.health.circuit.text if managed.health.circuit.broken else "")
            for name, managed in self._managed.items()
            if name not in self.stored.disabled
        }

    def statuses(self) -> list[BackendStatus]:
        return [self.status(name) for name in sorted(self._managed)]

    def status(self, name: str) -> BackendStatus:
        managed = self._get(name)
        watcher, circuit, last = managed.watcher, managed.health.circuit, managed.health.last
        disabled_ms = self.stored.disabled.get(name)
        state, since_ms, text = "ok", 0, last.text if last else ""
        if disabled_ms is not None:
            state, since_ms, text = "disabled", disabled_ms, ""
        elif watcher.last_error:
            state, since_ms, text = "unhealthy", watcher.down_since_ms, watcher.last_error
        elif circuit.broken:
            state, since_ms, text = "unhealthy", circuit.since_ms, circuit.text
        elif not watcher.up.is_set():
            state = "connecting"
        source = "added" if name in self.stored.added and not self._is_of_file(name) else "file"
        runs = len(self._live_runs(name))
        took_ms = last.took_ms if last else 0
        return BackendStatus(
            managed.backend, state, since_ms, text, source, managed.table, watcher.nodes, runs, took_ms
        )

    async def add(self, name: str, table: dict[str, Any]) -> BackendStatus:
        if not name or len(name) > _MAX_NAME or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in name):
            raise InvalidInput(
                f"{name[:80]!r} is not a valid name for a backend",
                hint=f"use letters, digits, - _ and . only, at most {_MAX_NAME}",
            )
        if self._factory is None:
            raise Conflict("this server cannot add backends while it runs")
        async with self._change_lock:
            if name in self._managed:
                raise Conflict(f"backend {name!r} already exists", hint="hodei backend list")
            backend = await asyncio.to_thread(self._factory.make, name, table)
            await self._save(structs.replace(self.stored, added={**self.stored.added, name: table}), "added", name)
            managed = self._manage(backend, table)
            if self._started:
                self._start(managed)
        return self.status(name)

    async def disable(self, name: str) -> BackendStatus:
        """Starts nothing more there; runs continue."""
        return await self._set_disabled(name, True)

    async def enable(self, name: str) -> BackendStatus:
        return await self._set_disabled(name, False)

    async def _set_disabled(self, name: str, disable: bool) -> BackendStatus:
        async with self._change_lock:
            self._get(name)
            disabled = self.stored.disabled
            if disable != (name in disabled):
                changed = {**disabled, name: self._service.clock.now_ms()} if disable else _without(disabled, name)
                stored = structs.replace(self.stored, disabled=changed)
                await self._save(stored, "disabled" if disable else "enabled", name)
                self._update_block(name)
        return self.status(name)

    async def remove(self, name: str, *, force: bool = False) -> BackendStatus:
        """Removes its nodes. With `force` its runs count as lost; they are not stopped."""
        async with self._change_lock:
            status = self.status(name)
            if self._is_of_file(name):
                raise Conflict(
                    f"backend {name} is built in or set in the configuration file",
                    hint=f"remove it from the file and restart, or: hodei backend disable {name}",
                )
            if (runs := self._live_runs(name)) and not force:
                raise Conflict(
                    f"backend {name} has {len(runs)} active runs, such as {runs[0].id}",
                    hint=f"hodei backend disable {name}, and wait for them to end; --force counts them as lost",
                )
            stored = StoredBackends(_without(self.stored.added, name), _without(self.stored.disabled, name))
            await self._save(stored, "removed", name)
            managed = self._managed.pop(name)
            del self.backends[name]
            self.binder.remove(name)
            await self._stop(managed)
            managed.watcher.remove_nodes(f"backend {name} was removed")
        return status

    async def _save(self, stored: StoredBackends, change: str, name: str) -> None:
        note = SaveValue(_NOTE, msgspec.json.encode(stored).decode())
        event = EventNoted(f"backend.{change}", detail={"backend": name})
        await self._service.loop.commit([event], [note], wait_for_store=True)
        self.stored = stored

    def _is_of_file(self, name: str) -> bool:
        return self._factory is None or name in self._factory.tables

    def _get(self, name: str) -> _ManagedBackend:
        if name not in self._managed:
            raise NotFound(
                f"there is no backend {name[:80]!r}{did_you_mean(name, self._managed)}", hint="hodei backend list"
            )
        return self._managed[name]

    def _live_runs(self, name: str) -> list[Run]:
        cluster = self._service.controller.cluster
        return [
            run
            for runs in cluster.runs.values()
            for run in runs.values()
            if run.backend == name and run.state not in RUN_ENDED
        ]

    async def logs(self, run: Run, stream: Any, offset: int, limit: int) -> tuple[bytes, int]:
        try:
            return await _bounded(self._backend_of(run).logs(run.id, stream, offset, limit), CALL_TIMEOUT_S)
        except NotFound:
            # The start may not have reached the backend yet: the log is empty so far.
            if run.state != "placed":
                raise
            return b"", offset

    async def log_times(self, run: Run, stream: Any) -> list[tuple[int, int]]:
        return await _bounded(self._backend_of(run).log_times(run.id, stream), CALL_TIMEOUT_S)

    async def execute(self, run: Run, command: tuple[str, ...], timeout_ms: int) -> ExecResult:
        backend = self._backend_of(run)
        await self._service.audit_before(command_text(command))
        return await _bounded(backend.execute(run.id, command, timeout_ms), timeout_ms / 1000 + CALL_TIMEOUT_S)

    async def execute_on(self, node: NodeName, command: tuple[str, ...], timeout_ms: int) -> ExecResult:
        nodes = self._service.controller.cluster.nodes
        if node not in nodes:
            raise NotFound(f"there is no node {node[:80]!r}{did_you_mean(node, nodes)}", hint="hodei nodes")
        backend = self._get(nodes[node].backend).backend
        await self._service.audit_before(command_text(command))
        return await _bounded(backend.execute_on(node, command, timeout_ms), timeout_ms / 1000 + CALL_TIMEOUT_S)

    async def usage(self, name: str) -> dict[str, NodeUsage]:
        return await _bounded(self._get(name).backend.usage(), CALL_TIMEOUT_S)

    def expected_starts(self) -> dict[RunId, int]:
        """Expected starts of runs in the backends' own queues, where known."""
        return {run: estimate.start_ms for run, estimate in self._start_estimates().items() if estimate.start_ms}

    def start_progress(self, job: JobId) -> StartProgress:
        """Of a placed job. A gang starts when its last waiting run does."""
        placed = [run for run in self._service.controller.cluster.live_runs(job) if run.state == "placed"]
        since_ms = self._service.clock.now_ms() - _DOUBT_AFTER_MS
        in_doubt = {run.backend for run in placed if run.placed_ms <= since_ms and self.binder.is_in_doubt(run.id)}
        waiting = [run for run in placed if run.backend in self.backends]
        waiting = [run for run in waiting if self.backends[run.backend].capabilities.delegates]
        if not waiting:
            return StartProgress(tuple(sorted(in_doubt)))
        estimates = self._start_estimates()
        of_run = {run.id: estimates.get(run.id, StartEstimate()) for run in waiting}
        # Runs without an estimate sort last.
        last = max(waiting, key=lambda run: (not of_run[run.id].start_ms, of_run[run.id].start_ms, run.id))
        entry = BackendQueueEntry(last.backend, of_run[last.id].start_ms, of_run[last.id].reason)
        return StartProgress(tuple(sorted(in_doubt)), entry)

    def _start_estimates(self) -> dict[RunId, StartEstimate]:
        return {run: each for managed in self._managed.values() for run, each in managed.queries.queue.answer.items()}

    def export_usage(self) -> None:
        """Sets the metrics of measured node usage."""
        gauge = self._service.prometheus.node_used
        gauge.clear()
        for name, managed in self._managed.items():
            for node, usage in managed.queries.scrape_usage().items():
                for resource, amount in usage.used.items():
                    gauge.labels(name, node, resource).set(amount / scale_of(resource))

    def _backend_of(self, run: Run) -> Backend:
        backend = self.backends.get(run.backend)
        if backend is None:
            raise NotFound(f"run {run.id} is on backend {run.backend!r}, which was removed", hint="hodei backend list")
        return backend


def _without(table: Mapping[str, T], name: str) -> dict[str, T]:
    return {key: value for key, value in table.items() if key != name}


async def _bounded(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except TimeoutError:
        raise BackendError(f"the backend did not answer within {timeout_s:g} s", hint="hodei backend list") from None
