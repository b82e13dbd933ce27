"""One Docker host: its connection, its events and its runs.

A silent host delays its own runs only. After an outage the list of containers is compared with the tracked runs, which
finds exit codes and removed containers.
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
from hodei.backends.docker.connection import SKEW_MS, DaemonConnection
from hodei.backends.docker.container_spec import BACKEND, INSTALLATION, RUN, Prepared, care_of
from hodei.backends.docker.engine import DaemonError, Engine
from hodei.backends.docker.logs import Logs
from hodei.backends.docker.node import held_images
from hodei.backends.docker.run_table import Cleanup, ContainerSlots, Places, Tracked
from hodei.backends.docker.settings import Host, Settings
from hodei.backends.docker.start import ContainerStarts, Images
from hodei.backends.docker.states import State, end_of, gone, never_ran, state_of
from hodei.backends.docker.supervision import Stops
from hodei.model.errors import BackendError
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.job import Checkpoint, HealthState
from hodei.model.resources import parse_duration_ms

log = logging.getLogger("hodei.docker")

# A container that was created and not started is removed after this time, unless its run is ordered again.
STRAY_S = 60
# `docker rm -f` kills a container just before it removes it.
LINGER_S = 0.4


class DockerHost:
    """`tell` receives observations; `changed` is called when the node may have changed."""

    def __init__(
        self,
        host: Host,
        settings: Settings,
        *,
        backend: str,
        installation: str,
        places: Places,
        logs: Logs,
        now_ms: Callable[[], int],
        tell: Callable[[RunObserved], None],
        changed: Callable[[], None],
    ) -> None:
        self.host, self.settings, self.engine = host, settings, Engine(host)
        self._now_ms = now_ms
        self._tell, self._places = tell, places
        self._ours = [f"{INSTALLATION}={installation}", f"{BACKEND}={backend}"]
        self.talk = DaemonConnection(
            self.engine,
            self._ours,
            parse_duration_ms(settings.answer_within) / 1000,
            now_ms,
            hear=self._heard,
            settle=self._settle,
            changed=changed,
        )
        self._lost_after_s = parse_duration_ms(settings.lost_after) / 1000
        self.images = Images(self.engine, parse_duration_ms(settings.pull_timeout) / 1000, settings.registry_auth)
        self._starting = ContainerStarts(
            self.engine,
            self.images,
            installation,
            settings.starts_at_once,
            self.talk.reachable,
            self.talk.answers,
            now_ms,
            lambda: self.skew_ms,
        )
        self.stops = Stops(self.engine, self.saved, now_ms, lambda: self.skew_ms)
        self.runs: dict[RunId, Tracked] = {}
        self.sweeper = Cleanup(self.engine, logs, places, self.talk.up, self.spawn_own)
        self.held_images: dict[str, int] = {}
        self._vouched = self._given_up = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = ContainerSlots(host.max_containers)
        # Forgotten runs whose container may still be created; and such containers while they are being removed.
        self._unwanted: set[RunId] = set()
        self._strays: set[str] = set()

    # ---------------------------------------------------------------------------------------- connection

    def begin(self) -> None:
        self.talk.begin()

    async def close(self) -> None:
        tasks = [*self._tasks, *(task for tracked in self.runs.values() for task in tracked.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.talk.close()
        await self.images.close()
        await self.engine.close()
        # The next `begin` finds the runs again.
        self.runs.clear()
        self.sweeper.at_work.clear()
        self._room = ContainerSlots(self.host.max_containers)

    @property
    def up(self) -> bool:
        return self.talk.up.is_set()

    @property
    def skew_ms(self) -> int:
        return self.talk.skew_ms

    @property
    def lost(self) -> bool:
        """Silent for longer than `lost_after`."""
        if self._lost_after_s and self.talk.silent_for_s() > self._lost_after_s:
            self._given_up = True
        return self._given_up

    async def _settle(self) -> None:
        await self.compare()
        self.held_images = await held_images(self.engine)
        if self._given_up:
            # These were reported lost, so the scheduler may have started them elsewhere.
            self._given_up = False
            for tracked in list(self.runs.values()):
                self.stop(tracked, "lost", "its host was silent for so long that it was given up")

    # ------------------------------------------------------------------------------------------- events

    def _heard(self, event: dict[str, Any]) -> None:
        actor = event.get("Actor") or {}
        told = actor.get("Attributes") or {}
        tracked = self.runs.get(told.get(RUN, ""))
        action = str(event.get("Action") or event.get("status") or "")
        if action == "create":
            self._made(told.get(RUN, ""), actor.get("ID") or "")
            return
        if tracked is None and action == "start":
            self.spawn_own(self._look_at_all())
        if tracked is None or tracked.over:
            return
        at_ms = int(event.get("timeNano") or 0) // 1_000_000 - self.skew_ms
        if action == "start":
            tracked.container = actor.get("ID") or tracked.container
            self.seen_running(tracked, at_ms)
        elif action == "die":
            code = int(told.get("exitCode") or told.get("containerExitCode") or 0)
            tracked.container = actor.get("ID") or tracked.container
            # A daemon that was suspended stamps events when it resumes, not when they happened.
            if self.talk.lively and (code == 0 or tracked.stopping is not None):
                state = State("exited", code, started_ms=tracked.started_ms, finished_ms=at_ms)
                self._ended(tracked, state)
            else:
                self.spawn(tracked, self._find_out(tracked))
        elif action == "destroy" and actor.get("ID") != tracked.voided:
            self._finish(tracked, gone(tracked.run, at_ms, f"its container was removed from {self.host.name}"))
        elif action.endswith("unhealthy"):
            self.health_seen(tracked, "failing")
            self.stop(tracked, "unhealthy", "its health check failed too often in a row")
        elif action.endswith("healthy"):
            self.health_seen(tracked, "ok")

    async def _look_at_all(self) -> None:
        """An unknown container was started, perhaps by a request of an earlier server."""
        with contextlib.suppress(BackendError):  # `_settle` compares when the host is back
            await self.compare()

    def _made(self, run: RunId, container: str) -> None:
        """Remove a created container without a tracked run: at once if the run is forgotten, else after STRAY_S, in which the
        run may be ordered again."""
        tracked = self.runs.get(run)
        if tracked is not None and tracked.over and not tracked.container:
            tracked.container = container  # removed with the run
        elif tracked is None and container not in self._strays:
            self._strays.add(container)
            self.spawn_own(self._clear_stray(run, container, 0 if run in self._unwanted else STRAY_S))

    async def _clear_stray(self, run: RunId, container: str, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
            await self.talk.answers()
            found = await self.engine.container(container)
            if run not in self.runs and found is not None and never_ran(found):
                await self.sweeper.remove(container, force=False)
        finally:
            self._strays.discard(container)

    async def _find_out(self, tracked: Tracked) -> None:
        """Classify a failed end. A container that is removed right after it was killed is lost."""
        container = tracked.container
        try:
            state = await self._inspect(tracked)
            if state is not None and state.code in (137, 143) and not state.oom and state.health != "unhealthy":
                await asyncio.sleep(LINGER_S)
                state = await self._inspect(tracked)
        except BackendError:
            return  # an outage: `compare` finds out afterwards
        if tracked.over:
            return
        if state is None or state.status == "removing":
            if tracked.voided == container:
                return  # removed by us: ContainerStarts finds out how it ended
            self._finish(tracked, gone(tracked.run, self._now_ms(), f"its container was removed from {self.host.name}"))
        elif self.up or state.code == 0 or tracked.stopping is not None:
            self._ended(tracked, state)

    async def _inspect(self, tracked: Tracked) -> State | None:
        found = await self.engine.container(tracked.container)
        return state_of(found, self.skew_ms) if found is not None else None

    # --------------------------------------------------------------------------------- the whole picture

    async def compare(self) -> None:
        """Compare our containers with the tracked runs. Ends are reported again until they are forgotten."""
        params = {"all": "1", "filters": msgspec.json.encode({"label": self._ours}).decode()}
        # Only a run that had a container before the request can have lost it.
        had_one = [tracked for tracked in self.runs.values() if tracked.container and tracked.prepared is None]
        listed = await self.engine.ask_json("GET", "containers/json", params=params)
        there = {(item.get("Labels") or {}).get(RUN, ""): item for item in listed}
        self.sweeper.go_on({run: item["Id"] for run, item in there.items()})
        for run, item in there.items():
            if run and run not in self.sweeper.at_work:
                await self._compare_one(run, item)
        for tracked in had_one:
            if tracked.run not in there and self.runs.get(tracked.run) is tracked:
                if tracked.over:
                    self._tell_again(tracked)
                else:
                    self._finish(tracked, gone(tracked.run, self._now_ms(), self._no_longer))
        if self._vouched:
            # `known` reported these as placed while the host could not be checked.
            self._vouched = False
            for run in self._places.all():
                if run not in self.runs:
                    self._tell(gone(run, self._now_ms(), self._no_longer))

    @property
    def _no_longer(self) -> str:
        return f"its container is no longer on {self.host.name}"

    async def _compare_one(self, run: RunId, item: dict[str, Any]) -> None:
        status = "exited" if item.get("State") == "stopped" else item.get("State", "")
        tracked = self.runs.get(run)
        if status in ("created", "configured", "initialized"):
            self._made(run, item["Id"])
            if tracked is not None and tracked.over:
                self._tell_again(tracked)
            return
        if tracked is not None and tracked.over:
            self._tell_again(tracked)
            return
        if tracked is None:
            tracked = self.runs[run] = Tracked(run, care_of(item.get("Labels") or {}))
            self._room.take(tracked)
            self._places.add(run)
        tracked.container = item["Id"]
        if status in ("running", "paused") and tracked.running:
            return
        found = await self.engine.container(item["Id"])
        if found is not None:
            self.adopt(tracked, found)

    def adopt(self, tracked: Tracked, found: dict[str, Any]) -> None:
        """Take over a container as the daemon describes it."""
        state = state_of(found, self.skew_ms)
        tracked.prepared = None
        tracked.container = found["Id"]
        tracked.memory = int((found.get("HostConfig") or {}).get("Memory") or 0)
        if state.going:
            self.seen_running(tracked, state.started_ms or self._now_ms())
            if state.health == "unhealthy":
                self.stop(tracked, "unhealthy", "its health check failed too often in a row")
        elif state.ended:
            tracked.started_ms = state.started_ms
            went = self.talk.ever_up and not self.up and not self.talk.info.get("LiveRestoreEnabled")
            self._ended(tracked, state, daemon_went=went and state.finished_ms >= self.talk.silent_since_ms - SKEW_MS)
        elif state.error:
            self._finish(
                tracked, RunObserved(tracked.run, "failed", self._now_ms(), state.code or None, "error", state.error)
            )

    # ---------------------------------------------------------------------------------------------- runs

    def start(self, prepared: Prepared) -> None:
        """Accept an order; its outcome is reported later. A second order for the same run changes nothing."""
        if prepared.run in self.runs or prepared.run in self.sweeper.at_work:
            return
        tracked = self.runs[prepared.run] = Tracked(prepared.run, prepared.care, prepared)
        tracked.memory = int(prepared.body["HostConfig"].get("Memory") or 0)
        tracked.in_doubt = tracked.may_come_late = self.sent_before(prepared.run)
        self._unwanted.discard(prepared.run)
        self._places.add(prepared.run)
        self.spawn(tracked, self._begin(tracked, prepared))

    def sent_before(self, run: RunId) -> bool:
        """An earlier server may have requested its start."""
        return self._places.has(run)

    async def _begin(self, tracked: Tracked, prepared: Prepared) -> None:
        await self._room.enter(tracked)
        outcome = await self._starting.begin(tracked, prepared)
        tracked.prepared = None
        if isinstance(outcome, RunObserved):
            self._finish(tracked, outcome)
        elif outcome is not None:
            self.adopt(tracked, outcome)
        if tracked.stopping is not None:
            await self._stop(tracked, tracked.care.save)

    def seen_running(self, tracked: Tracked, at_ms: int) -> None:
        if tracked.running or tracked.over:
            return
        tracked.started_ms = at_ms
        tracked.seen = RunObserved(tracked.run, "running", at_ms)
        self._tell(tracked.seen)
        supervision.begin(self, tracked, self._now_ms())

    def _ended(self, tracked: Tracked, state: State, *, daemon_went: bool = False) -> None:
        self._finish(
            tracked,
            end_of(
                tracked.run,
                state,
                tracked.stopping,
                timeout_ms=tracked.care.timeout_ms,
                memory=tracked.memory,
                daemon_went=daemon_went,
            ),
        )

    def _finish(self, tracked: Tracked, end: RunObserved) -> None:
        if tracked.over:
            return
        if tracked.seen is not None and tracked.seen.checkpoint_ms:
            end = structs.replace(end, checkpoint_ms=tracked.seen.checkpoint_ms)
        if tracked.started_ms:
            end = structs.replace(end, started_ms=tracked.started_ms)
        if end.reason_code == "lost" and tracked.stopping is not None and tracked.stopping.code == "":
            end = structs.replace(end, state="stopped", reason_code="", reason=tracked.stopping.reason)
        tracked.end(end)
        self._tell(end)
        mine = asyncio.current_task()
        for task in tracked.tasks:
            if task is not mine:
                task.cancel()
        self._room.leave(tracked)

    def _tell_again(self, tracked: Tracked) -> None:
        if tracked.seen is not None and not self.up:
            self._tell(tracked.seen)

    def stop(
        self, tracked: Tracked, code: str, reason: str, grace_ms: int | None = None, hook: Checkpoint | None = None
    ) -> None:
        grace_ms = tracked.care.grace_ms if grace_ms is None else grace_ms
        if not self.stops.order(tracked, code, reason, grace_ms, hook):
            return
        if tracked.container and tracked.prepared is None:
            self.spawn(tracked, self._stop(tracked, hook))
        else:
            self._room.look()

    async def _stop(self, tracked: Tracked, hook: Checkpoint | None) -> None:
        while not tracked.over:
            try:
                await self.stops.carry_out(tracked, hook)
            except BackendError:
                await asyncio.sleep(0.2)
                await self.talk.up.wait()

    async def save(self, tracked: Tracked, hook: Checkpoint) -> None:
        """Take a checkpoint; the run continues."""
        if tracked.saving:
            return
        tracked.saving = True
        until = asyncio.get_running_loop().time() + hook.timeout_ms / 1000
        try:
            problem = await self.stops.save(tracked, hook, lambda: until)
        except BackendError as error:
            problem = error.message
        finally:
            tracked.saving = False
        if problem and tracked.seen is not None and not tracked.over:
            self._tell(structs.replace(tracked.seen, checkpoint_error=problem))

    def saved(self, tracked: Tracked, at_ms: int) -> None:
        at_ms = min(at_ms, self._now_ms())
        if tracked.seen is None or tracked.over or at_ms <= tracked.seen.checkpoint_ms or at_ms < tracked.started_ms:
            return
        tracked.seen = structs.replace(tracked.seen, checkpoint_ms=at_ms)
        self._tell(tracked.seen)

    def health_seen(self, tracked: Tracked, state: HealthState) -> None:
        if tracked.seen is not None and not tracked.over and tracked.seen.health != state:
            tracked.seen = structs.replace(tracked.seen, health=state)
            self._tell(tracked.seen)

    # --------------------------------------------------------------------------------------- being asked

    async def known(self) -> dict[RunId, RunObserved]:
        """While the host is silent, every run that was sent to it counts as placed: absent means unknown."""
        if self.up:
            try:
                await self.compare()
            except DaemonError as error:
                self.talk.silent(error.message)
        out = {}
        for run, tracked in self.runs.items():
            reason = "whether it has begun is not known until its host answers" if tracked.in_doubt else ""
            out[run] = tracked.seen or RunObserved(run, "placed", self._now_ms(), reason=reason)
        if not self.talk.ever_up:
            self._vouched = True
            reason = f"its host {self.host.name} does not answer"
            for run in self._places.all():
                out.setdefault(run, RunObserved(run, "placed", self._now_ms(), reason=reason))
        return out

    def forget(self, run: RunId) -> None:
        tracked = self.runs.pop(run, None)
        if tracked is not None:
            self._room.leave(tracked)
            if tracked.may_come_late:
                self._unwanted.add(run)
        self.sweeper.forget(run, tracked.container if tracked is not None else "")

    # -------------------------------------------------------------------------------------------- tasks

    def spawn(self, tracked: Tracked, work: Coroutine[Any, Any, None]) -> None:
        """A task of one run; cancelled when the run ends."""
        self._spawn(tracked.tasks, work)

    def spawn_own(self, work: Coroutine[Any, Any, None]) -> None:
        self._spawn(self._tasks, work)

    def _spawn(self, tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(lambda done: self._done(tasks, done))

    def _done(self, tasks: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("docker host %s: %s", self.host.name, error, exc_info=not isinstance(error, BackendError))
