"""A Hodei backend in one module: runs commands as processes of this machine, without limits or isolation.

    [backends.desk]
    kind = "example"
    cpus = 2

Each run has a directory. A supervisor process (`python -m hodei_backend_example DIRECTORY`) starts the command, survives
the server and records how the command ended, so a restarted server finds every run again. The file `began` makes a start
idempotent: only one supervisor can create it, and it is locked while the supervisor is alive.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from hodei.backends.base import BackendContext, BaseBackend
from hodei.model.backend import Capabilities, needs_of, unmet_by
from hodei.model.effects import Forget, Start, Stop
from hodei.model.errors import NOT_REACHED, BackendError, BackendRefused, NotFound
from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY
from hodei.ports import Stream

POLL_S = 0.05


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `[backends.NAME]`. `cpus`: cores to offer, 0 for all of this machine."""

    cpus: int = 0


def make(name: str, settings: Settings, context: BackendContext) -> ExampleBackend:
    return ExampleBackend(name, settings.cpus or os.cpu_count() or 1, context)


class ExampleBackend(BaseBackend):
    kind = "example"
    capabilities = Capabilities()  # runs commands; no optional features

    def __init__(self, name: str, cpus: int, context: BackendContext) -> None:
        super().__init__(name)
        self._runs = context.home / name / "runs"
        self._keep_s = context.keep_logs_s
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._node = Node(name, name, self.kind, {CPU: cpus * 1000, MEMORY: memory})
        self._open = False
        self._reported: dict[RunId, RunObserved] = {}

    async def open(self) -> None:
        self._runs.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._reported.clear()  # ends are reported again after a restart
        self._open = True

    async def close(self) -> None:
        self._open = False

    async def nodes(self) -> list[Node]:
        if not self._open:
            raise BackendError(f"backend {self.name} is not open", code=NOT_REACHED)
        return [self._node]

    async def start(self, orders: Sequence[Start]) -> dict[RunId, BackendError | BackendRefused]:
        refused: dict[RunId, BackendError | BackendRefused] = {}
        for order in orders:
            try:
                await asyncio.to_thread(self._start, order)
            except BackendRefused as error:
                refused[order.run.id] = error
        return refused

    def _start(self, order: Start) -> None:
        run, task = order.run, order.task
        for need in set(needs_of(order.spec, task)) & set(unmet_by(self.capabilities)):
            raise BackendRefused(
                f"backend {self.name} cannot do what the job needs: {need}", hint="use another backend"
            )
        variables = {
            "HODEI_RUN_ID": run.id,
            "HODEI_JOB_ID": str(run.job),
            "HODEI_RANK": str(run.rank),
            "HODEI_PROJECT": order.spec.project,
        }
        if any("\0" in text for text in (*task.command, *task.env.values())):
            raise BackendRefused("a NUL byte in the command or its environment", hint="remove it")
        directory = self._runs / run.id
        if (directory / "began").exists():
            return
        directory.mkdir(mode=0o700, exist_ok=True)
        # In a file, not on a command line: values of the environment may be secret.
        _write(
            directory / "order.json",
            {
                "command": task.command,
                "env": {**task.env, **variables},
                "workdir": task.workdir or "/",
                "timeout_s": order.spec.timeout_ms / 1000,
            },
        )
        command = [sys.executable, "-m", "hodei_backend_example", str(directory)]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)

    async def stop(self, orders: Sequence[Stop]) -> None:
        for order in orders:
            path = self._runs / order.run / "stop.json"
            if path.parent.exists() and not path.exists():
                _write(path, {"kill_at": time.time() + order.grace_ms / 1000, "reason": order.reason.text})

    async def observe(self) -> list[RunObserved]:
        while True:
            known = await self.known()
            news = [seen for run, seen in known.items() if self._reported.get(run) != seen]
            if news:
                self._reported = known
                return news
            await asyncio.sleep(POLL_S)

    async def known(self) -> dict[RunId, RunObserved]:
        directories = (path for path in self._runs.iterdir() if not (path / "forgotten").exists())
        return {path.name: _look_at(path) for path in directories}

    async def forget(self, orders: Sequence[Forget]) -> None:
        """Logs of forgotten runs are kept for the server's retention time."""
        for order in orders:
            if (self._runs / order.run).exists():
                (self._runs / order.run / "forgotten").touch()
        for path in self._runs.glob("*/forgotten"):
            if time.time() - path.stat().st_mtime > self._keep_s:
                shutil.rmtree(path.parent)

    async def logs(self, run: RunId, stream: Stream, offset: int, limit: int) -> tuple[bytes, int]:
        if not (self._runs / run).is_dir():
            raise NotFound(f"backend {self.name} has no run {run}")
        try:
            with (self._runs / run / stream).open("rb") as file:
                file.seek(offset)
                data = file.read(limit)
        except FileNotFoundError:
            data = b""  # it has not started
        return data, offset + len(data)


def _look_at(directory: Path) -> RunObserved:
    """The state of a run, from its files alone."""
    run, began, ended = directory.name, directory / "began", directory / "ended.json"
    if not began.exists():
        return RunObserved(run, "placed", _mtime_ms(directory / "order.json"))
    started_ms = _mtime_ms(began)
    with suppress(FileNotFoundError):
        end = json.loads(ended.read_text())
        return RunObserved(run, started_ms=started_ms, at_ms=_mtime_ms(ended), **end)
    with began.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return RunObserved(run, "running", started_ms)
    if ended.exists():  # it ended between the two checks
        return _look_at(directory)
    return RunObserved(run, "lost", started_ms, reason_code="lost", reason="its supervisor was killed")


def _mtime_ms(path: Path) -> int:
    return path.stat().st_mtime_ns // 1_000_000


def _write(path: Path, value: object) -> None:
    """Atomic: other processes see the whole file or none."""
    staging = path.with_suffix(f".{os.getpid()}.tmp")
    staging.write_text(json.dumps(value))
    staging.replace(path)


def supervise(directory: Path) -> None:
    """Returns when the run has started, in this or an earlier call. A child process stays until the run has ended."""
    claim = directory / f"claim.{os.getpid()}"
    lock = os.open(claim, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # before the file is visible as `began`; the child holds the lock until it exits
    try:
        os.link(claim, directory / "began")
    except FileExistsError:
        return
    finally:
        claim.unlink()
    if os.fork():
        return
    os.setsid()
    _write(directory / "ended.json", _run(directory, json.loads((directory / "order.json").read_text())))


def _run(directory: Path, order: dict) -> dict:
    with (directory / "stdout").open("wb") as stdout, (directory / "stderr").open("wb") as stderr:
        try:
            child = subprocess.Popen(
                order["command"],
                env={"PATH": os.environ["PATH"], **order["env"]},
                cwd=order["workdir"],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return {"state": "failed", "exit_code": 127, "reason_code": "start_failed", "reason": str(error)}
    stop: dict | None = None
    timeout_at = time.time() + order["timeout_s"] if order["timeout_s"] else None
    timed_out = False
    while child.poll() is None:
        if stop is None:
            with suppress(FileNotFoundError):
                stop = json.loads((directory / "stop.json").read_text())
            if stop is None and timeout_at is not None and time.time() > timeout_at:
                timed_out, stop = True, {"kill_at": time.time() + 10, "reason": "it reached its timeout"}
            if stop is not None:
                _signal(child, signal.SIGTERM)
        elif time.time() > stop["kill_at"]:
            _signal(child, signal.SIGKILL)
        time.sleep(POLL_S)
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    if timed_out:
        return {"state": "failed", "exit_code": code, "reason_code": "timeout", "reason": stop["reason"]}
    if stop is not None:
        _signal(child, signal.SIGKILL)  # processes of the run that ignored TERM
        return {"state": "stopped", "exit_code": code, "reason": stop["reason"]}
    return {"state": "failed" if code else "succeeded", "exit_code": code}


def _signal(child: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


if __name__ == "__main__":
    supervise(Path(sys.argv[1]))
