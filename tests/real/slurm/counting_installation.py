"""A Hodei server as a process that can be killed, with a store on disk and one batch system. Its jobs write their run ids
into a file, which counts executions. Time windows may be shortened for quick rounds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from agent_host import unique_installation
from builders import a_job_spec
from hodei.backends.base import BackendContext
from hodei.backends.hpc import backend, pbs, slurm, slurm_rest, submission
from hodei.model.ids import JobId
from hodei.runtime.clock import SystemClock
from hodei.store.sqlite import SqliteStore
from hpc_backends import PbsStandIn
from unit.runtime.harness import a_service

ROUNDS = int(os.environ.get("HODEI_ROUNDS", "1"))
DEADLINE_S = 180.0 if ROUNDS == 1 else 900.0
# Time windows for quick rounds; the real ones are an order of magnitude longer.
QUICK = {"window_s": 2.0, "poll_s": 0.2, "command_s": 1.5, "lock_s": 3.0}


def _shorten(window_s: float, poll_s: float, command_s: float, lock_s: float) -> None:
    submission.CONFIRM_WINDOW_S, submission.CONFIRM_EVERY_S, backend.LOCK_TIMEOUT_S = window_s, poll_s, lock_s
    for module in (slurm, pbs):
        module.SUBMIT_TIMEOUT_S = module.QUERY_TIMEOUT_S = command_s  # type: ignore[attr-defined]
    slurm_rest.TIMEOUT_S = command_s


async def serve(home: Path, installation: str, system: dict[str, Any], short: dict[str, float]) -> None:
    """The process: reads the number of jobs to submit from each line of stdin."""
    if short:
        _shorten(**short)
    store = SqliteStore(home / "store.db")
    context = BackendContext(installation, 1, home / "backends", SystemClock())
    if system["kind"] == "pbs":
        stand_in = object.__new__(PbsStandIn)
        stand_in.home = Path(system["commands"])
        hpc = stand_in.backend(context, home / "output", "delegate")
    else:
        settings = {name: value for name, value in system.items() if name != "kind"}
        hpc = slurm.make("hpc", slurm.Settings(output=str(home / "output"), **settings), context)
    service = a_service(store, hpc, clock=SystemClock())  # type: ignore[arg-type]
    await service.start()
    print("started", flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    spec = a_job_spec(cpu="1", memory="16Mi", command=("/bin/sh", "-c", f'echo "$HODEI_RUN_ID" >>{home}/proof'))
    while line := await lines.readline():
        if line == b"ready?\n":
            while not service.backend_manager.healthy()["hpc"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        else:
            await service.submit([spec] * int(line))
        print("done", flush=True)


class CountingInstallation:
    def __init__(self, home: Path, system: dict[str, Any], short: dict[str, float]) -> None:
        self.home, self._system, self._short = home, system, short
        self._store = SqliteStore(home / "store.db")
        self._installation = unique_installation()
        self.submitted = 0
        self._process: subprocess.Popen[str] | None = None

    def up(self) -> None:
        arguments = f"Path({str(self.home)!r}), {self._installation!r}, {self._system!r}, {self._short!r}"
        code = f"import asyncio; from pathlib import Path; from real.slurm.counting_installation import serve; asyncio.run(serve({arguments}))"
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        with open(self.home / "log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._read_line() == "started", self.log()

    def _read_line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _request(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._read_line() == "done", self.log()

    def ready(self) -> None:
        """Wait until jobs can start."""
        self._request("ready?")

    def submit(self, count: int) -> None:
        self._request(str(count))
        self.submitted += count

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def until(self, condition: Any, description: str, deadline_s: float = DEADLINE_S) -> None:
        ends = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < ends, f"{description}: not within {deadline_s:g} s: {self.log()}"
            time.sleep(0.05)

    def journal_has(self, count: int) -> bool:
        """Whether the journal has `count` runs of the last submission."""
        path = self.home / "backends/hpc/journal"
        lines = path.read_bytes().splitlines() if path.exists() else []
        jobs = {int(json.loads(line)["run"].partition(".")[0]) for line in lines}
        return len([job for job in jobs if job > self.submitted - count]) >= count

    def settle(self) -> None:
        self.until(lambda: sum(self._ended().values()) == self.submitted, f"the end of {self.submitted} jobs")

    def _ended(self) -> Counter[str]:
        return Counter({s: n for s, n in self._store.counts().items() if s in ("succeeded", "failed", "cancelled")})

    def executions(self) -> Counter[int]:
        """The number of executions of each job's command, over all attempts."""
        proof = self.home / "proof"
        lines = proof.read_text().split() if proof.exists() else []
        return Counter(int(run.partition(".")[0]) for run in lines)

    def check(self, *, system_may_cancel: bool = False) -> None:
        """Each job ran exactly once. `system_may_cancel`: a slurmctld killed before it saved its state cancels jobs that it
        finds on nodes; such a job fails for that reason and may not have run."""
        ran, jobs = self.executions(), range(1, self.submitted + 1)
        cancelled = {job for job in jobs if system_may_cancel and self._cancelled_by_slurm(job)}
        lost = [job for job in jobs if not ran[job] and job not in cancelled]
        twice = {job: times for job, times in ran.items() if times > 1}
        assert (lost, twice) == ([], {}), f"{self._ended()} {(self.home / 'proof').read_text()} {self.log()}"
        ends = Counter(succeeded=self.submitted - len(cancelled), failed=len(cancelled))
        assert self._ended() == ends, self._ended()

    def _cancelled_by_slurm(self, job: int) -> bool:
        return any(run.reason == "it was cancelled in Slurm, not by Hodei" for run in self._store.runs(JobId(job)))

    def log(self) -> str:
        path = self.home / "log"
        return path.read_text()[-3000:] if path.exists() else ""
