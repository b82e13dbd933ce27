"""The state of a container as the state of a run. Pure: no I/O."""

from __future__ import annotations

import signal
from datetime import datetime
from typing import Any

from msgspec import Struct

from hodei.model.facts import RunObserved
from hodei.model.ids import RunId
from hodei.model.job import RunState
from hodei.supervision import StopPlan, timeout_reason

START_FAILED, NOT_REACHED = "start_failed", "not_reached"
# Exit codes of a container that its daemon stops at its own shutdown.
_TAKEN_DOWN = (137, 143)
# The last one: its removal was begun, and failed.
_NEVER_RAN = ("created", "configured", "initialized", "dead")


class State(Struct, frozen=True):
    """The part of Docker's own picture that matters."""

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
    def going(self) -> bool:
        return self.status in ("running", "paused", "restarting")


def state_of(inspected: dict[str, Any], skew_ms: int = 0) -> State:
    """`skew_ms`: how far that host's clock is ahead of ours."""
    state = inspected.get("State") or {}
    status = state.get("Status", "")
    return State(
        status="exited" if status == "stopped" else status,  # podman's word
        code=int(state.get("ExitCode") or 0),
        oom=bool(state.get("OOMKilled")),
        error=str(state.get("Error") or ""),
        started_ms=moment_ms(state.get("StartedAt", ""), skew_ms),
        finished_ms=moment_ms(state.get("FinishedAt", ""), skew_ms),
        health=str((state.get("Health") or {}).get("Status") or ""),
    )


def moment_ms(text: str, skew_ms: int = 0) -> int:
    """0 for Docker's "never", which is the year 1."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return 0
    return 0 if at.year <= 1970 else int(at.timestamp() * 1000) - skew_ms


def never_ran(inspected: dict[str, Any]) -> bool:
    """Created, and not started yet."""
    state = state_of(inspected)
    return state.status in _NEVER_RAN and not state.error and not state.started_ms


def end_of(
    run: RunId,
    state: State,
    stopping: StopPlan | None,
    *,
    timeout_ms: int = 0,
    memory: int = 0,
    daemon_went: bool = False,
) -> RunObserved:
    """How it ended: our own doing first, then the system's, then the command's. `daemon_went`: its daemon was gone for a
    while, and takes its containers with it."""
    code, at_ms = state.code, state.finished_ms
    name = signal_name(code - 128)
    if stopping is not None and stopping.saving and code == 0:
        return RunObserved(run, "succeeded", at_ms, 0)  # asked to save its work, not to end: that is its own doing
    if stopping is not None:
        state_name: RunState = "failed" if stopping.code else "stopped"
        return RunObserved(run, state_name, at_ms, code, stopping.code, stopping.because)
    if code and state.oom:
        limit = f" of {memory} bytes" if memory else ""
        return RunObserved(run, "failed", at_ms, code, "oom", f"it went over its memory limit{limit}")
    if code == 0:
        return RunObserved(run, "succeeded", at_ms, 0)
    if code in _TAKEN_DOWN and timeout_ms and at_ms - state.started_ms >= timeout_ms:
        # Stopped by an earlier server that died before it reported.
        return RunObserved(run, "failed", at_ms, code, "timeout", timeout_reason(timeout_ms))
    if code in _TAKEN_DOWN and state.health == "unhealthy":
        return RunObserved(run, "failed", at_ms, code, "unhealthy", "its health check failed too often in a row")
    if code in _TAKEN_DOWN and daemon_went:
        return gone(run, at_ms, "the Docker daemon of its host went away, and took it down")
    if name:
        return RunObserved(run, "failed", at_ms, code, "killed", f"it was ended by {name}")
    return RunObserved(run, "failed", at_ms, code, "", f"exit code {code}")


def gone(run: RunId, at_ms: int, reason: str) -> RunObserved:
    return RunObserved(run, "lost", at_ms, reason_code="lost", reason=reason)


def not_started(run: RunId, at_ms: int, reason: str, *, permanent: bool = False, reached: bool = True) -> RunObserved:
    """`reached` False: its host did not answer, and nothing arrived there: that is no attempt of the job."""
    code = START_FAILED if reached else NOT_REACHED
    return RunObserved(run, "failed", at_ms, reason_code=code, reason=reason, permanent=permanent)


def could_not_run(run: RunId, at_ms: int, said: str) -> RunObserved | None:
    """The daemon's text when the command itself is what can not be started: as a shell would say it. None: it is not."""
    if "docker-init" in said:
        return None
    if "executable file not found" in said or "no such file or directory" in said:
        return RunObserved(run, "failed", at_ms, 127, "", said)
    if "permission denied" in said or "exec format error" in said or "is a directory" in said:
        return RunObserved(run, "failed", at_ms, 126, "", said)
    return None


def signal_name(number: int) -> str:
    """ "" if there is no such signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
