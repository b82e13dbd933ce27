"""One Docker host: its connection, its events and its runs.

A silent host delays only its own runs. After an outage the containers are compared with the tracked runs, which finds
exit codes and removed containers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from msgspec import structs

from hodei.backends.docker import supervision
from hodei.backends.docker.container_spec import BACKEND, INSTALLATION, RUN, ContainerSpec, read_supervision
from hodei.backends.docker.engine import SKEW_MS, DaemonConnection, DaemonError, Engine, container_stats
from hodei.backends.docker.logs import Logs
from hodei.backends.docker.runs import (
    UNHEALTHY,
    Cleanup,
    ContainerSlots,
    RunMarkers,
    State,
    TrackedRun,
    end_of,
    lost,
    never_ran,
    state_of,
    usage_of,
)
from hodei.backends.docker.settings import Host, Settings
from hodei.backends.docker.start import ContainerStarts, Images
from hodei.backends.docker.supervision import Stops
from hodei.model.errors import BackendError
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.job import Checkpoint, HealthState
from hodei.model.resources import parse_duration_ms
from hodei.model.usage import RunUsage
from hodei.process import cancel_tasks

log = logging.getLogger("hodei.docker")

# A container that was created and not started is removed after this time, unless its run is ordered again.
STRAY_S = 60
# `docker rm -f` kills a container just before it removes it.
LINGER_S = 0.4


class DockerHost:
    """`report` gets every observation; `on_change` is called when the node may have changed."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        *,
        backend: str,
        installation: str,
        markers: RunMarkers,
        logs: Logs,
        now_ms: Callable[[], int],
        report: Callable[[RunObserved], None],
        on_change: Callable[[], None],
    ) -> None:
        self.host, self.settings, self.engine = host, settings, Engine(host)
        self._now_ms = now_ms
        self._report, self._markers = report, markers
        self._labels = [f"{INSTALLATION}={installation}", f"{BACKEND}={backend}"]
        self.connection = DaemonConnection(
            self.engine,
            self._labels,
            parse_duration_ms(settings.answer_within) / 1000,
            now_ms,
            on_event=self._on_event,
            resync=self._resync,
            on_change=on_change,
        )
        self._lost_after_s = parse_duration_ms(settings.lost_after) / 1000
        self.images = Images(self.engine, parse_duration_ms(settings.pull_timeout) / 1000, settings.registry_auth)
        self._starting = ContainerStarts(
            self.engine,
            self.images,
            installation,
            settings.starts_at_once,
            self.connection.wait_reachable,
            self.connection.up.wait,
            now_ms,
            lambda: self.skew_ms,
        )
        self.stops = Stops(self.engine, self.checkpoint_seen, now_ms, lambda: self.skew_ms)
        self.runs: dict[RunId, TrackedRun] = {}
        self.cleanup = Cleanup(self.engine, logs, markers, self.connection.up, self.spawn_host_task)
        self.held_images: dict[str, int] = {}
        self._reported_unverified = self._was_lost = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = ContainerSlots(host.max_containers)
        # Forgotten runs whose container may still be created; and such containers while they are being removed.
        self._forgotten_in_doubt: set[RunId] = set()
        self._strays: set[str] = set()

    def begin(self) -> None:
        self.connection.begin()

    async def close(self) -> None:
        tasks = [*self._tasks, *(task for tracked in self.runs.values() for task in tracked.tasks)]
        await cancel_tasks(tasks)
        await self.connection.close()
        await self.images.close()
        await self.engine.close()
        # The next `begin` finds the runs again.
        self.runs.clear()
        self.cleanup.pending.clear()
        self._slots = ContainerSlots(self.host.max_containers)

    @property
    def up(self) -> bool:
        return self.connection.up.is_set()

    @property
    def skew_ms(self) -> int:
        return self.connection.skew_ms

    @property
    def lost(self) -> bool:
        """Silent for longer than `lost_after`."""
        if self._lost_after_s and self.connection.silent_for_s() > self._lost_after_s:
            self._was_lost = True
        return self._was_lost

    async def _resync(self) -> None:
        await self.reconcile()
        self.held_images = await self.images.held()
        if self._was_lost:
            # These were reported lost, so the scheduler may have started them elsewhere.
            self._was_lost = False
            for tracked in list(self.runs.values()):
                self.stop(tracked, "lost", "its host was silent for longer than lost_after")

    def _on_event(self, event: dict[str, Any]) -> None:
        actor = event.get("Actor") or {}
        attributes = actor.get("Attributes") or {}
        tracked = self.runs.get(attributes.get(RUN, ""))
        action = str(event.get("Action") or event.get("status") or "")
        if action == "create":
            self._container_created(attributes.get(RUN, ""), actor.get("ID") or "")
            return
        if tracked is None and action == "start":
            self.spawn_host_task(self._reconcile_unknown())
        if tracked is None or tracked.ended:
            return
        at_ms = int(event.get("timeNano") or 0) // 1_000_000 - self.skew_ms
        if action == "start":
            tracked.container = actor.get("ID") or tracked.container
            self.mark_started(tracked, at_ms)
        elif action == "die":
            code = int(attributes.get("exitCode") or attributes.get("containerExitCode") or 0)
            tracked.container = actor.get("ID") or tracked.container
            # A daemon that was suspended stamps events when it resumes, not when they happened.
            if self.connection.is_prompt and (code == 0 or tracked.stop is not None):
                state = State("exited", code, started_ms=tracked.started_ms, finished_ms=at_ms)
                self._ended(tracked, state)
            else:
                self.spawn(tracked, self._classify_exit(tracked))
        elif action == "destroy" and actor.get("ID") != tracked.discarded:
            self._finish(tracked, lost(tracked.run, at_ms, f"its container was removed from {self.host.name}"))
        elif action.endswith("unhealthy"):
            self.set_health(tracked, "failing")
            self.stop(tracked, "unhealthy", UNHEALTHY)
        elif action.endswith("healthy"):
            self.set_health(tracked, "ok")

    async def _reconcile_unknown(self) -> None:
        """An unknown container was started, perhaps by a request of an earlier server."""
        with contextlib.suppress(BackendError):  # `_resync` does it when the host is back
            await self.reconcile()

    def _container_created(self, run: RunId, container: str) -> None:
        """Remove a container without a run: at once if the run is forgotten, else after STRAY_S."""
        tracked = self.runs.get(run)
        if tracked is not None and tracked.ended and not tracked.container:
            tracked.container = container  # removed with the run
        elif tracked is None and container not in self._strays:
            self._strays.add(container)
            self.spawn_host_task(self._remove_stray(run, container, 0 if run in self._forgotten_in_doubt else STRAY_S))

    async def _remove_stray(self, run: RunId, container: str, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
            await self.connection.up.wait()
            found = await self.engine.container(container)
            if run not in self.runs and found is not None and never_ran(found):
                await self.cleanup.remove(container, force=False)
        finally:
            self._strays.discard(container)

    async def _classify_exit(self, tracked: TrackedRun) -> None:
        """Classify a failed end. A container that is removed right after it was killed is lost."""
        container = tracked.container
        try:
            state = await self._inspect(tracked)
            if state is not None and state.code in (137, 143) and not state.oom and state.health != "unhealthy":
                await asyncio.sleep(LINGER_S)
                state = await self._inspect(tracked)
        except BackendError:
            return  # an outage: `reconcile` finds out afterwards
        if tracked.ended:
            return
        if state is None or state.status == "removing":
            if tracked.discarded == container:
                return  # removed by us: ContainerStarts determines its end
            self._finish(tracked, lost(tracked.run, self._now_ms(), f"its container was removed from {self.host.name}"))
        elif self.up or state.code == 0 or tracked.stop is not None:
            self._ended(tracked, state)

    async def _inspect(self, tracked: TrackedRun) -> State | None:
        found = await self.engine.container(tracked.container)
        return state_of(found, self.skew_ms) if found is not None else None

    async def reconcile(self) -> None:
        """Compare the containers on the host with the tracked runs. Ends are reported again until they are forgotten."""
        params = {"all": "1", "filters": msgspec.json.encode({"label": self._labels}).decode()}
        # Only a run that had a container before the request can have lost it.
        with_container = [tracked for tracked in self.runs.values() if tracked.container and tracked.spec is None]
        listed = await self.engine.request_json("GET", "containers/json", params=params)
        containers = {(item.get("Labels") or {}).get(RUN, ""): item for item in listed}
        missing = f"its container is no longer on {self.host.name}"
        self.cleanup.resume({run: item["Id"] for run, item in containers.items()})
        for run, item in containers.items():
            if run and run not in self.cleanup.pending:
                await self._reconcile_one(run, item)
        for tracked in with_container:
            if tracked.run not in containers and self.runs.get(tracked.run) is tracked:
                if tracked.ended:
                    self._report_again(tracked)
                else:
                    self._finish(tracked, lost(tracked.run, self._now_ms(), missing))
        if self._reported_unverified:
            # `known` reported these as placed while the host could not be checked.
            self._reported_unverified = False
            for run in self._markers.all():
                if run not in self.runs:
                    self._report(lost(run, self._now_ms(), missing))

    async def _reconcile_one(self, run: RunId, item: dict[str, Any]) -> None:
        status = "exited" if item.get("State") == "stopped" else item.get("State", "")
        tracked = self.runs.get(run)
        if status in ("created", "configured", "initialized"):
            self._container_created(run, item["Id"])
            if tracked is not None and tracked.ended:
                self._report_again(tracked)
            return
        if tracked is not None and tracked.ended:
            self._report_again(tracked)
            return
        if tracked is None:
            tracked = self.runs[run] = TrackedRun(run, read_supervision(item.get("Labels") or {}))
            self._slots.take(tracked)
            self._markers.add(run)
        tracked.container = item["Id"]
        if status in ("running", "paused") and tracked.running:
            return
        found = await self.engine.container(item["Id"])
        if found is not None:
            self.adopt(tracked, found)

    def adopt(self, tracked: TrackedRun, found: dict[str, Any]) -> None:
        """Take over a container as the daemon describes it."""
        state = state_of(found, self.skew_ms)
        tracked.spec = None
        tracked.container = found["Id"]
        tracked.memory = int((found.get("HostConfig") or {}).get("Memory") or 0)
        if state.running:
            self.mark_started(tracked, state.started_ms or self._now_ms())
            if state.health == "unhealthy":
                self.stop(tracked, "unhealthy", UNHEALTHY)
        elif state.ended:
            tracked.started_ms = state.started_ms
            restarted = self.connection.ever_up and not self.up and not self.connection.info.get("LiveRestoreEnabled")
            during_outage = state.finished_ms >= self.connection.silent_since_ms - SKEW_MS
            self._ended(tracked, state, daemon_restarted=restarted and during_outage)
        elif state.error:
            self._finish(
                tracked, RunObserved(tracked.run, "failed", self._now_ms(), state.code or None, "error", state.error)
            )

    def start(self, spec: ContainerSpec) -> None:
        """Accept an order; its outcome is reported later. A second order for the same run changes nothing."""
        if spec.run in self.runs or spec.run in self.cleanup.pending:
            return
        tracked = self.runs[spec.run] = TrackedRun(spec.run, spec.supervision, spec)
        tracked.memory = int(spec.body["HostConfig"].get("Memory") or 0)
        tracked.in_doubt = tracked.create_in_doubt = self.sent_before(spec.run)
        self._forgotten_in_doubt.discard(spec.run)
        self._markers.add(spec.run)
        self.spawn(tracked, self._begin(tracked, spec))

    def sent_before(self, run: RunId) -> bool:
        """An earlier server may have requested its start."""
        return self._markers.has(run)

    async def _begin(self, tracked: TrackedRun, spec: ContainerSpec) -> None:
        await self._slots.acquire(tracked)
        outcome = await self._starting.begin(tracked, spec)
        tracked.spec = None
        if isinstance(outcome, RunObserved):
            self._finish(tracked, outcome)
        elif outcome is not None:
            self.adopt(tracked, outcome)
        if tracked.stop is not None:
            await self._stop(tracked, tracked.supervision.save)

    def mark_started(self, tracked: TrackedRun, at_ms: int) -> None:
        if tracked.running or tracked.ended:
            return
        tracked.started_ms = at_ms
        tracked.observed = RunObserved(tracked.run, "running", at_ms)
        self._report(tracked.observed)
        supervision.begin(self, tracked, self._now_ms())

    def _ended(self, tracked: TrackedRun, state: State, *, daemon_restarted: bool = False) -> None:
        self._finish(
            tracked,
            end_of(
                tracked.run,
                state,
                tracked.stop,
                timeout_ms=tracked.supervision.timeout_ms,
                memory=tracked.memory,
                daemon_restarted=daemon_restarted,
            ),
        )

    def _finish(self, tracked: TrackedRun, end: RunObserved) -> None:
        if tracked.ended:
            return
        if tracked.observed is not None and tracked.observed.checkpoint_ms:
            end = structs.replace(end, checkpoint_ms=tracked.observed.checkpoint_ms)
        if tracked.started_ms:
            end = structs.replace(end, started_ms=tracked.started_ms, usage=tracked.usage)
        if end.reason_code == "lost" and tracked.stop is not None and tracked.stop.code == "":
            end = structs.replace(end, state="stopped", reason_code="", reason=tracked.stop.reason)
        tracked.end(end)
        self._report(end)
        mine = asyncio.current_task()
        for task in tracked.tasks:
            if task is not mine:
                task.cancel()
        self._slots.release(tracked)

    def _report_again(self, tracked: TrackedRun) -> None:
        if tracked.observed is not None and not self.up:
            self._report(tracked.observed)

    def stop(
        self, tracked: TrackedRun, code: str, reason: str, grace_ms: int | None = None, hook: Checkpoint | None = None
    ) -> None:
        grace_ms = tracked.supervision.grace_ms if grace_ms is None else grace_ms
        if not self.stops.order(tracked, code, reason, grace_ms, hook):
            return
        if tracked.container and tracked.spec is None:
            self.spawn(tracked, self._stop(tracked, hook))
        else:
            self._slots.wake()

    async def _stop(self, tracked: TrackedRun, hook: Checkpoint | None) -> None:
        while not tracked.ended:
            try:
                await self.stops.carry_out(tracked, hook)
            except BackendError:
                await asyncio.sleep(0.2)
                await self.connection.up.wait()

    async def take_checkpoint(self, tracked: TrackedRun, hook: Checkpoint) -> None:
        """The run continues afterwards."""
        if tracked.saving:
            return
        tracked.saving = True
        until = asyncio.get_running_loop().time() + hook.timeout_ms / 1000
        try:
            problem = await self.stops.checkpoint(tracked, hook, lambda: until)
        except BackendError as error:
            problem = error.message
        finally:
            tracked.saving = False
        if problem and tracked.observed is not None and not tracked.ended:
            self._report(structs.replace(tracked.observed, checkpoint_error=problem))

    def checkpoint_seen(self, tracked: TrackedRun, at_ms: int) -> None:
        at_ms = min(at_ms, self._now_ms())
        if (
            tracked.observed is None
            or tracked.ended
            or at_ms <= tracked.observed.checkpoint_ms
            or at_ms < tracked.started_ms
        ):
            return
        tracked.observed = structs.replace(tracked.observed, checkpoint_ms=at_ms)
        self._report(tracked.observed)

    def set_health(self, tracked: TrackedRun, state: HealthState) -> None:
        if tracked.observed is not None and not tracked.ended and tracked.observed.health != state:
            tracked.observed = structs.replace(tracked.observed, health=state)
            self._report(tracked.observed)

    async def measure(self, tracked: TrackedRun) -> RunUsage | None:
        """What a running run has used so far, also kept for its end; None if its container does not run any more."""
        stats = await container_stats(self.engine, tracked.container)
        if stats is not None and (usage := usage_of(stats)) is not None:
            tracked.usage = usage.merge(tracked.usage)
        return tracked.usage

    async def known(self) -> dict[RunId, RunObserved]:
        """While the host is silent, every run that was sent to it counts as placed: absent means unknown."""
        if self.up:
            try:
                await self.reconcile()
            except DaemonError as error:
                self.connection.mark_silent(error.message)
        out = {}
        for run, tracked in self.runs.items():
            reason = "it is unknown whether it has started until its host answers" if tracked.in_doubt else ""
            out[run] = tracked.observed or RunObserved(run, "placed", self._now_ms(), reason=reason)
        if not self.connection.ever_up:
            self._reported_unverified = True
            reason = f"its host {self.host.name} does not answer"
            for run in self._markers.all():
                out.setdefault(run, RunObserved(run, "placed", self._now_ms(), reason=reason))
        return out

    def forget(self, run: RunId) -> None:
        tracked = self.runs.pop(run, None)
        if tracked is not None:
            self._slots.release(tracked)
            if tracked.create_in_doubt:
                self._forgotten_in_doubt.add(run)
        self.cleanup.forget(run, tracked.container if tracked is not None else "")

    def spawn(self, tracked: TrackedRun, work: Coroutine[Any, Any, None]) -> None:
        """A task of one run; cancelled when the run ends."""
        self._spawn(tracked.tasks, work)

    def spawn_host_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._spawn(self._tasks, work)

    def _spawn(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(lambda done: self._done(tasks, done))

    def _done(self, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("docker host %s: %s", self.host.name, error, exc_info=not isinstance(error, BackendError))
