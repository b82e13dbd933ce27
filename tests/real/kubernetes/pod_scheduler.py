"""For tests: `hodei kube run` as a real process against the control plane; it can be stopped, killed and started again."""

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

_PATIENCE_S = 90.0
HODEI = Path(sys.executable).parent / "hodei"


class PodScheduler:
    """`faults_expected` lets its log hold a Traceback; else that fails the test."""

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
        """Ready when this returns, unless that is not to be waited for (one that waits for a lease)."""
        assert self.process is None or self.process.poll() is not None, "it is running already"
        kept = {key: value for key, value in os.environ.items() if key != "KUBECONFIG" and not key.startswith("HODEI_")}
        self.process = spawn(self._command, self.log, env=kept)
        if ready:
            self.until_ready()
        return self

    def until_ready(self) -> None:
        wait(self.is_ready, f"hodei kube run ({self.name}) is ready", _PATIENCE_S)

    def is_ready(self) -> bool:
        assert self.process is not None
        code = self.process.poll()
        assert code is None, f"hodei kube run ended with {code}:\n{self.said()}"
        try:
            return self.get("/readyz") != ""
        except OSError:
            return False

    def get(self, path: str) -> str:
        """From its own HTTP: /metrics, /healthz, ..."""
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=_PATIENCE_S) as answer:
            text: str = answer.read().decode()
            return text

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(_PATIENCE_S)

    def kill(self) -> None:
        """kill -9, and gone when this returns."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(_PATIENCE_S)

    def said(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def close(self) -> None:
        """One that is running must go when it is told to, with 0."""
        if self.process is not None and self.process.poll() is None:
            try:
                code = self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"hodei kube run did not stop within {_PATIENCE_S:g} s:\n{self.said()}") from None
            assert code == 0, f"hodei kube run ended with {code}:\n{self.said()}"
        if not self.faults_expected:
            assert "Traceback" not in self.said(100_000), self.said(200)


class PodSchedulers:
    """Call it to start one; as often as there are to be. `elect` has them elect a leader, `ready` waits until it is."""

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
        """All of them, also when one does not go as it should; the first fault is told."""
        faults = []
        for one in self.started:
            try:
                one.close()
            except AssertionError as fault:
                faults.append(fault)
        if faults:
            raise faults[0]
