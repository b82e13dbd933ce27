"""Runs on a Docker host: container states as run states, tracked runs, their marker files, slots and cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec import Struct

from hodei.backends.docker.container_spec import ContainerSpec, Supervision
from hodei.backends.docker.engine import DaemonError, Engine, parse_time_ms
from hodei.backends.docker.logs import Logs
from hodei.model.errors import BackendError
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.job import RUN_ENDED
from hodei.model.usage import RunUsage
from hodei.supervision import StopPlan, classify_end, oom_reason, start_error_code, timeout_reason

log = logging.getLogger("hodei.docker")

START_FAILED, NOT_REACHED = "start_failed", "not_reached"
UNHEALTHY = "its health check failed too often in a row"
# Exit codes of a container that its daemon stops at its own shutdown.
_KILLED = (137, 143)
# The last one: its removal was begun, and failed.
_NEVER_RAN = ("created", "configured", "initialized", "dead")


class State(Struct, frozen=True):
    """The relevant part of a container's state."""

    status: str
    code: int = 0
    oom: bool = False
    error: str = ""
    started_ms: int = 0
    finished_ms: int = 0
    health: str = ""

    @property
    def ended(self) -> bool:
        return self.status in ("exited", "dead")

    @property
    def running(self) -> bool:
        return self.status in ("running", "paused", "restarting")


def state_of(inspected: dict[str, Any], skew_ms: int = 0) -> State:
    """`skew_ms`: how far the host's clock is ahead of ours."""
    state = inspected.get("State") or {}
    status = state.get("Status", "")
    return State(
        status="exited" if status == "stopped" else status,  # podman
        code=int(state.get("ExitCode") or 0),
        oom=bool(state.get("OOMKilled")),
        error=str(state.get("Error") or ""),
        started_ms=parse_time_ms(state.get("StartedAt", ""), skew_ms),
        finished_ms=parse_time_ms(state.get("FinishedAt", ""), skew_ms),
        health=str((state.get("Health") or {}).get("Status") or ""),
    )


def usage_of(stats: dict[str, Any]) -> RunUsage | None:
    """The usage of a container from its stats; None for one that does not run. Its memory is what it has now, or with
    cgroup v1 its peak."""
    cpu_ns = total_cpu_ns(stats)
    if not cpu_ns:
        return None
    memory, io = stats.get("memory_stats") or {}, dict[str, int]()
    for entry in (stats.get("blkio_stats") or {}).get("io_service_bytes_recursive") or ():
        name = str(entry.get("op", "")).lower()
        io[name] = io.get(name, 0) + int(entry.get("value") or 0)
    peak = int(memory.get("max_usage") or 0) or memory_used(stats)
    return RunUsage(cpu_ns // 1_000_000, peak or None, io.get("read"), io.get("write"))


def total_cpu_ns(stats: dict[str, Any]) -> int:
    return int(((stats.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage") or 0)


def memory_used(stats: dict[str, Any]) -> int:
    """Without cached files that can be dropped at once."""
    memory = stats.get("memory_stats") or {}
    details = memory.get("stats") or {}
    cache = int(details.get("total_inactive_file") or details.get("inactive_file") or 0)
    return max(int(memory.get("usage") or 0) - cache, 0)


def never_ran(inspected: dict[str, Any]) -> bool:
    """Created, and not started yet."""
    state = state_of(inspected)
    return state.status in _NEVER_RAN and not state.error and not state.started_ms


def has_run(inspected: dict[str, Any]) -> bool:
    state = state_of(inspected)
    return state.running or bool(state.ended and state.started_ms)


def end_of(
    run: RunId,
    state: State,
    stop: StopPlan | None,
    *,
    timeout_ms: int = 0,
    memory: int = 0,
    daemon_restarted: bool = False,
) -> RunObserved:
    """`daemon_restarted`: its daemon was away for a while, and stops its containers when it shuts down."""
    code, at_ms = state.code, state.finished_ms
    if stop is None and not state.oom and code in _KILLED:
        if timeout_ms and at_ms - state.started_ms >= timeout_ms:
            # Stopped by an earlier server that died before it reported.
            return RunObserved(run, "failed", at_ms, code, "timeout", timeout_reason(timeout_ms))
        if state.health == "unhealthy":
            return RunObserved(run, "failed", at_ms, code, "unhealthy", UNHEALTHY)
        if daemon_restarted:
            return lost(run, at_ms, "the Docker daemon of its host shut down, and stopped it")
    end = classify_end(code, stop, oom=oom_reason(memory) if state.oom else "")
    return RunObserved(run, end.state, at_ms, code, end.reason_code, end.reason)


def lost(run: RunId, at_ms: int, reason: str) -> RunObserved:
    return RunObserved(run, "lost", at_ms, reason_code="lost", reason=reason)


def not_started(run: RunId, at_ms: int, reason: str, *, permanent: bool = False, reached: bool = True) -> RunObserved:
    """`reached` False: nothing arrived at its host, so it does not count as an attempt of the job."""
    code = START_FAILED if reached else NOT_REACHED
    return RunObserved(run, "failed", at_ms, reason_code=code, reason=reason, permanent=permanent)


def exec_failure(run: RunId, at_ms: int, text: str) -> RunObserved | None:
    """The daemon's error as the exit code of a shell, if the command itself cannot be started; else None."""
    code = start_error_code(text) if "docker-init" not in text else None
    return RunObserved(run, "failed", at_ms, code, "", text) if code is not None else None


class TrackedRun:
    """`spec` is set until the container exists; `observed` is the last report; `end_event` is set at the end, `wake_event` also
    when a stop is shortened. `has_slot`: it holds a container slot. `saving`: a checkpoint is under way. `in_doubt`: a start
    request may have been sent and its outcome is unknown; `discarded`: the container that is removed because of that.
    `create_in_doubt`: the same for a create request. `usage`: as last measured."""

    __slots__ = (
        "container", "create_in_doubt", "discarded", "end_event", "has_slot", "in_doubt", "memory", "observed", "run", "saving",
        "spec", "started_ms", "stop", "supervision", "tasks", "usage", "wake_event",
    )  # fmt: skip

    def __init__(self, run: RunId, supervision: Supervision, spec: ContainerSpec | None = None) -> None:
        self.run, self.supervision, self.spec = run, supervision, spec
        self.container = self.discarded = ""
        self.observed: RunObserved | None = None
        self.started_ms = self.memory = 0
        self.has_slot = self.saving = self.in_doubt = self.create_in_doubt = False
        self.stop: StopPlan | None = None
        self.end_event, self.wake_event = asyncio.Event(), asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.usage: RunUsage | None = None

    @property
    def ended(self) -> bool:
        return self.end_event.is_set()

    @property
    def running(self) -> bool:
        return self.observed is not None and self.observed.state == "running"

    def end(self, end: RunObserved) -> None:
        assert end.state in RUN_ENDED
        self.observed = end
        self.spec = None
        self.end_event.set()
        self.wake_event.set()


class RunMarkers:
    """An empty file per run, from the first request until its end is stored, so that a restarted server knows the runs of an
    unreachable host. After that, until the container is removed, the file name begins with a dot."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._created = False

    def has(self, run: RunId) -> bool:
        return (self._home / run).exists()

    def add(self, run: RunId) -> None:
        self._touch(run)

    def mark_forgotten(self, run: RunId) -> None:
        self._touch(f".{run}")
        self._unlink(run)

    def remove(self, run: RunId) -> None:
        self._unlink(f".{run}")
        self._unlink(run)

    def all(self) -> list[RunId]:
        return [name for name in self._names() if not name.startswith(".")]

    def forgotten(self) -> set[RunId]:
        return {name[1:] for name in self._names() if name.startswith(".")}

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._home))
        except FileNotFoundError:
            return []

    def _touch(self, name: str) -> None:
        if not self._created:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._created = True
        os.close(os.open(self._home / name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._home / name)


AT_ONCE = 2
REMOVE_TIMEOUT_S = 60.0


class Cleanup:
    """Copies the logs of forgotten runs, then removes their containers (`pending`). Resumes after a restart."""

    def __init__(
        self,
        engine: Engine,
        logs: Logs,
        markers: RunMarkers,
        up: asyncio.Event,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._engine, self._logs, self._markers, self._up, self._spawn = engine, logs, markers, up, spawn
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.pending: dict[RunId, str] = {}

    def forget(self, run: RunId, container: str) -> None:
        if container:
            self._markers.mark_forgotten(run)
            self._begin(run, container)
        elif run not in self.pending:
            self._markers.remove(run)

    def resume(self, containers: dict[RunId, str]) -> None:
        """Continue the cleanup of forgotten runs. `containers`: those on the host, by run."""
        for run in self._markers.forgotten() - self.pending.keys():
            if container := containers.get(run):
                self._begin(run, container)
            else:
                self._markers.remove(run)

    def _begin(self, run: RunId, container: str) -> None:
        self.pending[run] = container
        self._spawn(self._clean_up(run, container))

    async def _clean_up(self, run: RunId, container: str) -> None:
        while True:
            await self._up.wait()
            try:
                async with self._slots:
                    try:
                        await self._logs.archive(self._engine, container, run)
                    except DaemonError as error:
                        if not error.status:
                            raise
                    await self.remove(container)
                break
            except (BackendError, OSError) as error:
                log.warning("docker host %s: run %s is not cleaned up yet: %s", self._engine.host.name, run, error)
                await asyncio.sleep(2)
        self._markers.remove(run)
        self.pending.pop(run, None)

    async def remove(self, container: str, *, force: bool = True) -> None:
        params = {"force": "1", "v": "1"} if force else {"v": "1"}
        try:
            await self._engine.request("DELETE", f"containers/{container}", params=params, timeout_s=REMOVE_TIMEOUT_S)
        except DaemonError as error:
            if error.status not in (404, 409):  # removed, or being removed
                raise


class ContainerSlots:
    """How many containers a host runs at once; further starts wait. `limit` 0: any number."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[tuple[TrackedRun, asyncio.Future[None]]] = deque()

    async def acquire(self, tracked: TrackedRun) -> None:
        """Wait for a slot; a run that is stopped meanwhile proceeds without one."""
        if self._taken >= self._limit > 0 and tracked.stop is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((tracked, turn))
            await turn
        else:
            self.take(tracked)

    def take(self, tracked: TrackedRun) -> None:
        """The container exists already: count it without waiting."""
        if not tracked.has_slot:
            tracked.has_slot = True
            self._taken += 1

    def release(self, tracked: TrackedRun) -> None:
        if tracked.has_slot:
            tracked.has_slot = False
            self._taken -= 1
        self.wake()

    def wake(self) -> None:
        """Wake starts that have a slot now or are being stopped."""
        still_waiting: deque[tuple[TrackedRun, asyncio.Future[None]]] = deque()
        while self._waiting:
            tracked, turn = self._waiting.popleft()
            if turn.done():
                continue
            if tracked.stop is not None:
                turn.set_result(None)
            elif self._taken < self._limit:
                self.take(tracked)
                turn.set_result(None)
            else:
                still_waiting.append((tracked, turn))
        self._waiting = still_waiting
