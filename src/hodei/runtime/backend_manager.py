"""The backends of a running server, by name: watched, asked how they are, barred while they are not well; added, disabled,
enabled and removed while it runs. What was added or disabled is kept in the store and counts after a restart too.

Each has tasks of its own, and no call waits for ever, so that one that hangs holds up nobody else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct, structs

from hodei.model.audit import command_text
from hodei.model.backend import ExecResult, NodeUsage
from hodei.model.effects import SaveValue, Stop
from hodei.model.errors import BackendError, Conflict, InvalidInput, NotFound, did_you_mean
from hodei.model.explanation import Explanation
from hodei.model.facts import EventNoted
from hodei.model.ids import JobId, NodeName, RunId, job_of
from hodei.model.job import RUN_ENDED, Run
from hodei.model.node import Node
from hodei.model.outcome import StopReason
from hodei.model.resources import format_time, scale_of
from hodei.ports import Backend, Store
from hodei.runtime.backend_queries import BackendQueries, StartEstimates, backend_queue
from hodei.runtime.binder import Binder
from hodei.runtime.health_monitor import HealthMonitor, HealthPolicy
from hodei.runtime.watcher import CALL_TIMEOUT_S, DISABLED, UNHEALTHY, Bar, Watcher

if TYPE_CHECKING:
    from hodei.runtime.service import Service

log = logging.getLogger("hodei.fleet")
_NOTE = "backends"
_CLOSE_S = 5.0
_MAX_NAME = 63
Table = Mapping[str, Any]
T = TypeVar("T")


class Remembered(Struct, frozen=True):
    """What the store keeps: the tables of backends that were added, and since when which are disabled."""

    added: dict[str, dict[str, Any]] = {}
    disabled: dict[str, int] = {}


class BackendChanges(Struct, frozen=True):
    """Where backends come from. `make` makes one from its table (InvalidInput if it cannot be); `dress` adds to its nodes
    what the table says of all of them; `tables` are those of the configuration file."""

    make: Callable[[str, Table], Backend]
    dress: Callable[[Table], Callable[[Node], Node]] = lambda table: lambda node: node
    tables: Mapping[str, Table] = {}


class BackendStatus(Struct, frozen=True):
    """`state`: ok, connecting, unhealthy or disabled, since when and why. `source`: file (it cannot be removed) or added."""

    backend: Backend
    state: str
    since_ms: int
    text: str
    source: str
    table: Table
    nodes: int
    runs: int
    took_ms: int = 0


class _Member:
    def __init__(
        self, backend: Backend, table: Table, watcher: Watcher, pulse: HealthMonitor, inquiries: BackendQueries
    ) -> None:
        self.backend, self.table, self.watcher, self.pulse = backend, table, watcher, pulse
        self.inquiries = inquiries
        self.tasks: list[asyncio.Task[None]] = []


def recall(store: Store) -> Remembered:
    text = store.note(_NOTE)
    try:
        return msgspec.json.decode(text, type=Remembered) if text else Remembered()
    except msgspec.MsgspecError as error:
        log.error("which backends were added cannot be read, and is set aside: %s", error)
        store.mark_suspect("note", _NOTE, str(error))
        return Remembered()


class BackendManager:
    def __init__(
        self,
        service: Service,
        backends: Mapping[str, Backend],
        health: HealthPolicy,
        plan: BackendChanges | None = None,
    ) -> None:
        self._service, self._health, self._plan = service, health, plan
        self._one_at_a_time = asyncio.Lock()
        self._owners: dict[str, str] = {}
        self._members: dict[str, _Member] = {}
        self._awake = False
        self.spared: dict[RunId, str] = {}
        self.remembered = recall(service.store)
        if service.store.suspects:
            service.store.repair(service.clock.now_ms())
        self.backends: dict[str, Backend] = {}
        self.binder = Binder(self.backends, service.clock, service.prometheus, service.loop.tell)
        self.binder.on_failure = lambda name, text: self._members[name].pulse.call_failed(text)
        self.binder.on_success = lambda name: self._members[name].pulse.call_went_well()
        for name, backend in backends.items():
            self._take_in(backend, plan.tables.get(name, {}) if plan else {})
        for name, table in self.remembered.added.items() if plan else ():
            self._bring_back(name, table)

    def _bring_back(self, name: str, table: Table) -> None:
        """One that was added in an earlier life."""
        assert self._plan is not None
        if name in self._members:
            log.warning("backend %s is in the configuration file now: what was added by hand does not count", name)
            return
        try:
            self._take_in(self._plan.make(name, table), table)
        except InvalidInput as error:
            log.error("backend %s was added by hand and cannot be made any more: %s", name, error)

    def _take_in(self, backend: Backend, table: Table) -> _Member:
        service, name = self._service, backend.name
        dress = self._plan.dress(table) if self._plan else lambda node: node
        watcher = Watcher(
            backend, service.controller.cluster, service.clock, service.prometheus, service.loop.tell, self.binder.act_again,
            service.loop.quiet, self._owners, dress, partial(self._spare, name),
        )  # fmt: skip
        pulse = HealthMonitor(backend, service.clock, self._health, lambda: self._turned(name))
        watcher.came_back = pulse.look_now
        inquiries = BackendQueries(
            backend,
            service.controller.cluster,
            lambda: watcher.up.is_set() and not watcher.last_error and not pulse.circuit.broken,
        )
        member = self._members[name] = _Member(backend, table, watcher, pulse, inquiries)
        self.backends[name] = backend
        self.binder.add(name)
        self._judge(name)
        return member

    # ------------------------------------------------------------------------------------- damaged records

    async def _spare(self, name: str, strangers: Sequence[RunId]) -> set[RunId]:
        """Runs that a backend has and nobody here knows of belong to attempts that are over, and are stopped. Unless the
        store says otherwise: then it is our records that are wrong, and the run goes on."""
        store, damaged = self._service.store, self._service.controller.cluster.damaged
        spared = set()
        for run in strangers:
            kept = await self._service.read(store.run, run)
            goes_on = kept is not None and kept.state not in RUN_ENDED
            if goes_on or job_of(run) in damaged:
                spared.add(run)
                if run not in self.spared:
                    log.error(
                        "run %s goes on at backend %s although its record is damaged: it is left alone", run, name
                    )
                self.spared[run] = name
            if goes_on and await self._service.read(store.job, job_of(run)) is None:
                store.mark_suspect("job", job_of(run), "a run of it goes on, and the job itself is not there")
        return spared

    def spared_of(self, job: JobId) -> list[RunId]:
        """Runs of it that go on and are not known any more."""
        known = self._service.controller.cluster.runs.get(job, {})
        return [run for run in self.spared if job_of(run) == job and run not in known] if self.spared else []

    def stop_spared(self, job: JobId) -> bool:
        strays = self.spared_of(job)
        self.binder.act([Stop(run, self.spared.pop(run), 10_000, StopReason("cancelled")) for run in strays])
        return bool(strays)

    # --------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        self._awake = True
        for member in self._members.values():
            self._wake(member)

    def _wake(self, member: _Member) -> None:
        name = member.backend.name
        self._spawn(member, self.binder.serve(name))
        self._spawn(member, member.watcher.watch())
        if self._health.every_ms:
            self._spawn(member, member.pulse.run())
        for work in member.inquiries.work():
            self._spawn(member, work)

    @staticmethod
    def _spawn(member: _Member, work: Coroutine[Any, Any, None]) -> None:
        member.tasks.append(asyncio.create_task(work, name=f"backend {member.backend.name}"))

    async def stop(self) -> None:
        await asyncio.gather(*(self._lay_down(member) for member in self._members.values()))

    @staticmethod
    async def _lay_down(member: _Member) -> None:
        for task in member.tasks:
            task.cancel()
        await asyncio.wait(member.tasks, timeout=_CLOSE_S) if member.tasks else None
        try:
            async with asyncio.timeout(_CLOSE_S):
                await member.backend.close()
        except Exception as error:
            log.warning("backend %s does not let go: %s", member.backend.name, str(error) or type(error).__name__)

    async def until_ready(self) -> None:
        """Returns when each has come up or failed to, and one of them is up."""
        watchers = [member.watcher for member in self._members.values()]
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
        """Those that the server is not ready without: all that were not tried yet, and all if none is up."""
        watchers = {name: member.watcher for name, member in self._members.items()}
        if watchers and not any(watcher.up.is_set() for watcher in watchers.values()):
            return list(watchers)
        return [name for name, watcher in watchers.items() if not watcher.tried.is_set()]

    # ------------------------------------------------------------------------------------------- health

    def _turned(self, name: str) -> None:
        member = self._members[name]
        broken = member.pulse.circuit.broken
        detail = {"backend": name, "reason": member.pulse.circuit.text} if broken else {"backend": name}
        self._service.loop.tell([EventNoted("backend.unhealthy" if broken else "backend.healthy", detail=detail)])
        self._judge(name)

    def _judge(self, name: str) -> None:
        member = self._members[name]
        circuit, since_ms = member.pulse.circuit, self.remembered.disabled.get(name)
        bar = None
        if circuit.broken:
            text = f"backend {name} is not well since {format_time(circuit.since_ms)}: {circuit.text[:200]}"
            bar = Bar(UNHEALTHY, text)
        self.binder.bar(name, bar.text if bar else "")
        if since_ms is not None:
            bar = Bar(DISABLED, f"backend {name} is disabled since {format_time(since_ms)}")
        member.watcher.bar_with(bar)

    def well(self) -> dict[str, bool]:
        """Which of them jobs can start on."""
        return {n: m.watcher.up.is_set() and m.watcher.bar is None for n, m in self._members.items()}

    def errors(self) -> dict[str, str]:
        """What is wrong with each, "" if nothing is; what is disabled on purpose is not wrong."""
        return {
            name: member.watcher.last_error or (member.pulse.circuit.text if member.pulse.circuit.broken else "")
            for name, member in self._members.items()
            if name not in self.remembered.disabled
        }

    # ------------------------------------------------------------------------------------------ changes

    def all(self) -> list[BackendStatus]:
        return [self._status(name) for name in sorted(self._members)]

    def status(self, name: str) -> BackendStatus:
        self._known(name)
        return self._status(name)

    def _status(self, name: str) -> BackendStatus:
        member = self._members[name]
        watcher, circuit, last = member.watcher, member.pulse.circuit, member.pulse.last
        disabled_ms = self.remembered.disabled.get(name)
        state, since_ms, text = "ok", 0, last.text if last else ""
        if disabled_ms is not None:
            state, since_ms, text = "disabled", disabled_ms, ""
        elif watcher.last_error:
            state, since_ms, text = "unhealthy", watcher.down_since_ms, watcher.last_error
        elif circuit.broken:
            state, since_ms, text = "unhealthy", circuit.since_ms, circuit.text
        elif not watcher.up.is_set():
            state = "connecting"
        source = "added" if name in self.remembered.added and not self._of_file(name) else "file"
        runs = len(self._live_runs(name))
        took_ms = last.took_ms if last else 0
        return BackendStatus(member.backend, state, since_ms, text, source, member.table, watcher.nodes, runs, took_ms)

    async def add(self, name: str, table: dict[str, Any]) -> BackendStatus:
        if not name or len(name) > _MAX_NAME or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in name):
            raise InvalidInput(f"{name[:80]!r} is no name for a backend", hint="letters, digits, - _ and . only")
        if self._plan is None:
            raise Conflict("this server cannot take in other backends while it runs")
        async with self._one_at_a_time:
            if name in self._members:
                raise Conflict(f"there is a backend {name!r} already", hint="hodei backend list")
            backend = await asyncio.to_thread(self._plan.make, name, table)
            await self._remember(
                structs.replace(self.remembered, added={**self.remembered.added, name: table}), "added", name
            )
            member = self._take_in(backend, table)
            if self._awake:
                self._wake(member)
        return self._status(name)

    async def disable(self, name: str) -> BackendStatus:
        """Nothing more starts there; what runs goes on."""
        async with self._one_at_a_time:
            self._known(name)
            if name not in self.remembered.disabled:
                disabled = {**self.remembered.disabled, name: self._service.clock.now_ms()}
                await self._remember(structs.replace(self.remembered, disabled=disabled), "disabled", name)
                self._judge(name)
        return self._status(name)

    async def enable(self, name: str) -> BackendStatus:
        async with self._one_at_a_time:
            self._known(name)
            if name in self.remembered.disabled:
                disabled = {each: ms for each, ms in self.remembered.disabled.items() if each != name}
                await self._remember(structs.replace(self.remembered, disabled=disabled), "enabled", name)
                self._judge(name)
        return self._status(name)

    async def remove(self, name: str, *, force: bool = False) -> BackendStatus:
        """Its nodes are gone, and with `force` its runs are lost to us (they are not stopped)."""
        async with self._one_at_a_time:
            self._known(name)
            if self._of_file(name):
                raise Conflict(
                    f"backend {name} is the server's own, or of its configuration file",
                    hint=f"take it out there and restart, or: hodei backend disable {name}",
                )
            if (runs := self._live_runs(name)) and not force:
                raise Conflict(
                    f"{len(runs)} runs are on backend {name}, {runs[0].id} among them",
                    hint=f"hodei backend disable {name}, and wait for them; --force gives them up as lost",
                )
            gone = self._status(name)
            added = {each: table for each, table in self.remembered.added.items() if each != name}
            disabled = {each: ms for each, ms in self.remembered.disabled.items() if each != name}
            await self._remember(Remembered(added, disabled), "removed", name)
            member = self._members.pop(name)
            del self.backends[name]
            self.binder.remove(name)
            await self._lay_down(member)
            member.watcher.leave(f"backend {name} was removed")
        return gone

    async def _remember(self, remembered: Remembered, what: str, name: str) -> None:
        note = SaveValue(_NOTE, msgspec.json.encode(remembered).decode())
        await self._service.loop.committed(
            [EventNoted(f"backend.{what}", detail={"backend": name})], [note], patient=True
        )
        self.remembered = remembered

    def _of_file(self, name: str) -> bool:
        return self._plan is None or name in self._plan.tables

    def _known(self, name: str) -> _Member:
        if name not in self._members:
            raise NotFound(
                f"there is no backend {name[:80]!r}{did_you_mean(name, self._members)}", hint="hodei backend list"
            )
        return self._members[name]

    def _live_runs(self, name: str) -> list[Run]:
        cluster = self._service.controller.cluster
        return [
            run
            for runs in cluster.runs.values()
            for run in runs.values()
            if run.backend == name and run.state not in RUN_ENDED
        ]

    # ------------------------------------------------------------------------------------------- asking

    async def logs(self, run: Run, stream: Any, offset: int, limit: int) -> tuple[bytes, int]:
        try:
            return await self._bounded(self._of(run, "the logs").logs(run.id, stream, offset, limit), CALL_TIMEOUT_S)
        except NotFound:
            # Its start may not have come there yet: that is an empty log, to be asked for again.
            if run.state != "placed":
                raise
            return b"", offset

    async def log_times(self, run: Run, stream: Any) -> list[tuple[int, int]]:
        return await self._bounded(self._of(run, "the logs").log_times(run.id, stream), CALL_TIMEOUT_S)

    async def execute(self, run: Run, command: tuple[str, ...], timeout_ms: int) -> ExecResult:
        backend = self._of(run, "the place")
        await self._service.record_before(command_text(command))
        return await self._bounded(backend.execute(run.id, command, timeout_ms), timeout_ms / 1000 + CALL_TIMEOUT_S)

    async def execute_on(self, node: NodeName, command: tuple[str, ...], timeout_ms: int) -> ExecResult:
        known = self._service.controller.cluster.nodes
        if node not in known:
            raise NotFound(f"there is no node {node[:80]!r}{did_you_mean(node, known)}", hint="hodei nodes")
        backend = self._known(known[node].backend).backend
        await self._service.record_before(command_text(command))
        work = backend.execute_on(node, command, timeout_ms)
        return await self._bounded(work, timeout_ms / 1000 + CALL_TIMEOUT_S)

    async def usage(self, name: str) -> dict[str, NodeUsage]:
        return await self._bounded(self._known(name).backend.usage(), CALL_TIMEOUT_S)

    def begins(self) -> dict[RunId, int]:
        """When runs in the own lines of backends will begin, as far as these can tell."""
        return {run: told.start_ms for run, told in self._foretold().items() if told.start_ms}

    def backend_queue(self, job: JobId, answer: Explanation) -> Explanation:
        runs = self._service.controller.cluster.runs.get(job, {}).values()
        return backend_queue(answer, runs, self.backends, self._foretold()) if answer.status == "placed" else answer

    def _foretold(self) -> dict[RunId, StartEstimates]:
        return {run: told for member in self._members.values() for run, told in member.inquiries.line.answer.items()}

    def show_usage(self) -> None:
        """As metrics: what backends that measure their nodes said last."""
        gauge = self._service.prometheus.node_used
        gauge.clear()
        for name, member in self._members.items():
            for node, usage in member.inquiries.look_at_usage().items():
                for resource, amount in usage.used.items():
                    gauge.labels(name, node, resource).set(amount / scale_of(resource))

    def _of(self, run: Run, what: str) -> Backend:
        backend = self.backends.get(run.backend)
        if backend is None:
            raise NotFound(f"{what} of {run.id} is on backend {run.backend!r}, which is not there any more")
        return backend

    @staticmethod
    async def _bounded(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            raise BackendError(
                f"the backend did not answer within {timeout_s:g} s", hint="hodei backend list"
            ) from None
