"""For tests: `hodei kube run` as a real process against the control plane, which tests stop, kill and start again."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from ports import free_port
from real.kubernetes.api import wait
from real.kubernetes.plane import Plane
from real.kubernetes.processes import spawn

_TIMEOUT_S = 90.0
HODEI = Path(sys.executable).parent / "hodei"


def kube_command(plane: Plane, *arguments: object, user: str = "hodei") -> str:
    """The output of `hodei kube ...`, which must succeed."""
    command = [HODEI, "kube", *map(str, arguments), f"--kubeconfig={plane.kubeconfig(user)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class PodScheduler:
    """`faults_expected`: its log may contain a Traceback. Otherwise that fails the test."""

    def __init__(self, plane: Plane, folder: Path, name: str, extra: Sequence[str], user: str, elect: bool) -> None:
        self.name = name
        self.address = f"127.0.0.1:{free_port()}"
        self.log = folder / f"hodei-{name}-{self.address.rsplit(':', 1)[1]}.log"
        self.faults_expected = False
        self.process: subprocess.Popen[bytes] | None = None
        election = [] if elect else ["--no-leader-elect"]
        self._command = [
            HODEI, "kube", "run", f"--kubeconfig={plane.kubeconfig(user)}", f"--scheduler-name={name}",
            f"--listen={self.address}", *election, *extra,
        ]  # fmt: skip

    def start(self, ready: bool = True) -> PodScheduler:
        """Start it and wait until it is ready; `ready=False` returns at once (for one that waits for a lease)."""
        assert self.process is None or self.process.poll() is not None, "it is already running"
        env = {key: value for key, value in os.environ.items() if key != "KUBECONFIG" and not key.startswith("HODEI_")}
        self.process = spawn(self._command, self.log, env=env)
        if ready:
            self.until_ready()
        return self

    def until_ready(self) -> None:
        wait(self.is_ready, f"hodei kube run ({self.name}) is ready", _TIMEOUT_S)

    def is_ready(self) -> bool:
        assert self.process is not None
        code = self.process.poll()
        assert code is None, f"hodei kube run ended with {code}:\n{self.output()}"
        try:
            return self.get("/readyz") != ""
        except OSError:
            return False

    def get(self, path: str) -> str:
        """Read a path of its HTTP server: /metrics, /healthz, ..."""
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text

    def stop(self) -> int:
        """Send SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(_TIMEOUT_S)

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(_TIMEOUT_S)

    def output(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def close(self) -> None:
        """Stop it if it runs; it must exit with 0."""
        if self.process is not None and self.process.poll() is None:
            try:
                code = self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"hodei kube run did not stop within {_TIMEOUT_S:g} s:\n{self.output()}") from None
            assert code == 0, f"hodei kube run ended with {code}:\n{self.output()}"
        if not self.faults_expected:
            assert "Traceback" not in self.output(100_000), self.output(200)


class PodSchedulers:
    """Each call starts one. `elect`: with leader election; `ready`: wait until it is ready."""

    def __init__(self, plane: Plane, folder: Path) -> None:
        self._plane = plane
        self._folder = folder
        self.started: list[PodScheduler] = []

    def __call__(
        self,
        name: str = "hodei",
        extra: Sequence[str] = (),
        *,
        user: str = "hodei",
        elect: bool = False,
        ready: bool = True,
    ) -> PodScheduler:
        made = PodScheduler(self._plane, self._folder, name, extra, user, elect)
        self.started.append(made)
        return made.start(ready)

    def close(self) -> None:
        """Stop all of them, then raise the first failure."""
        failures = []
        for one in self.started:
            try:
                one.close()
            except AssertionError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
