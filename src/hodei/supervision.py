"""Rules for a live run, shared by the agent and the backends: stop with grace and kill, exit, health, idle time, checkpoints.

No I/O and no clock: callers observe and pass times of a clock of their own, all in one unit. Standard library only,
because the agent may import nothing else.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal, NamedTuple

CUT_SHORT = "its checkpoint was cut short"
# Signals that the agent's wrapper of a run survives; any other would end the wrapper, and the run with it.
CHECKPOINT_SIGNALS = ("ALRM", "CONT", "HUP", "INT", "QUIT", "TERM", "URG", "USR1", "USR2", "VTALRM", "WINCH")
# Less than one part in so many of a core is idle.
BUSY_PART = 100
SHORTEST_IDLE_MS, LONGEST_IDLE_MS = 1_000, 15_000


def timeout_reason(timeout_ms: int) -> str:
    return f"it ran longer than its timeout of {timeout_ms / 1000:g}s"


def idle_reason(idle_ms: int) -> str:
    return f"it was idle for {idle_ms / 1000:g}s"


def oom_reason(limit_bytes: int = 0) -> str:
    return "it went over its memory limit" + (f" of {limit_bytes} bytes" if limit_bytes else "")


def no_checkpoint(timeout_ms: int) -> str:
    return f"no checkpoint was seen within {timeout_ms / 1000:g}s"


def command_problem(exit_code: int | None, timeout_ms: int) -> str:
    """Why a checkpoint command did not save the work, "" if it did. `exit_code` None: it is still running."""
    if exit_code is None:
        return f"its checkpoint command did not end within {timeout_ms / 1000:g}s"
    return f"its checkpoint command failed: exit code {exit_code}" if exit_code else ""


def checkpoint_signal(name: str) -> str:
    """The name of a checkpoint signal without SIG. ValueError if it cannot be used."""
    short = name.upper().removeprefix("SIG")
    if short not in CHECKPOINT_SIGNALS:
        raise ValueError(f"the signal {short[:20]} cannot be used; use one of {', '.join(CHECKPOINT_SIGNALS)}")
    return short


def signal_name(number: int) -> str:
    """ "" if there is no such signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def start_error_code(text: str) -> int | None:
    """The exit code that a shell gives a command which a container runtime could not start; None for other errors."""
    if "executable file not found" in text or "no such file or directory" in text:
        return 127
    if "permission denied" in text or "exec format error" in text or "is a directory" in text:
        return 126
    return None


@dataclass
class StopPlan:
    """A stop under way: the run saves its work until `save_until`, gets TERM, and KILL at `kill_at`. `code` is "" for an
    order, else a reason code of RunObserved; `note` says what went wrong with saving; `saving`: TERM was not sent yet."""

    code: str
    reason: str
    kill_at: float
    save_until: float = 0
    grace: float = 0
    saving: bool = False
    note: str = ""

    @classmethod
    def begin(cls, code: str, reason: str, now: float, grace: float, save: float = 0) -> StopPlan:
        return cls(code, reason, now + save + grace, now + save, grace, saving=save > 0)

    def shorten(self, now: float, grace: float, save: float = 0) -> bool:
        """A later order with its own time to save and grace: it counts only if it ends the run earlier."""
        kill_at = now + save + grace
        if kill_at >= self.kill_at:
            return False
        self.kill_at, self.grace = kill_at, grace
        if self.saving and now + save < self.save_until:
            self.save_until, self.note = now + save, CUT_SHORT
        return True

    def finish_saving(self, now: float, problem: str = "") -> None:
        """Saved or not, the stop continues with TERM."""
        self.saving, self.note = False, problem
        self.kill_at = min(self.kill_at, now + self.grace)

    @property
    def because(self) -> str:
        return "; ".join(text for text in (self.reason, self.note) if text)


class End(NamedTuple):
    """How a run ended, in the terms of RunObserved."""

    state: Literal["succeeded", "failed", "stopped", "lost"]
    reason_code: str = ""
    reason: str = ""


def classify_end(code: int | None, stop: StopPlan | None, *, oom: str = "") -> End:
    """A stop explains an end first, then the kernel, then the command itself. `code` None: the exit code is lost. `oom`: why
    the kernel killed it for its memory, "" if it did not."""
    if stop is not None and stop.saving and code == 0:
        return End("succeeded")  # it was asked to save its work, not to end, and finished by itself
    if stop is not None:
        return End("failed" if stop.code else "stopped", stop.code, stop.because)
    if code is None:
        return End("lost", "lost", "its process disappeared without an exit code")
    if code and oom:
        return End("failed", "oom", oom)
    if code == 0:
        return End("succeeded")
    if name := signal_name(code - 128):
        return End("failed", "killed", f"it was ended by {name}")
    return End("failed", "", f"exit code {code}")


@dataclass
class HealthCounter:
    """Failed health checks in a row."""

    failures: int = 0

    def observe(self, error: str, limit: int) -> str:
        """Count one check (`error` is "" if it passed); why the run must stop, "" if it may continue."""
        self.failures = self.failures + 1 if error else 0
        return health_reason(self.failures, error) if self.failures >= limit else ""


def health_reason(failures: int, error: str = "") -> str:
    times = f"{failures} times in a row" if failures > 1 else "once"
    return f"its health check failed {times}" + (f": {error}" if error else "")


class IdleDetector:
    """A run is idle while it uses hardly any processor time and writes no output."""

    def __init__(self, idle_ms: int) -> None:
        self._idle_ms = idle_ms
        self.step_ms = min(max(idle_ms // 10, SHORTEST_IDLE_MS), LONGEST_IDLE_MS)
        self._last: tuple[int, float, object] | None = None
        self._quiet_since_ms = 0

    def is_due(self, now_ms: int) -> bool:
        return self._last is None or now_ms - self._last[0] >= self.step_ms

    def observe(self, now_ms: int, cpu_ms: float, output: object) -> bool:
        """True once it has been idle for too long. `output` is any value that changes when the run writes."""
        last, self._last = self._last, (now_ms, cpu_ms, output)
        # An ended process takes its processor time with it: less than before is not activity.
        if last is None or (cpu_ms - last[1]) * BUSY_PART >= now_ms - last[0] or output != last[2]:
            self._quiet_since_ms = now_ms
        return now_ms - self._quiet_since_ms >= self._idle_ms


def is_checkpoint_complete(before: object, last: object, seen: object) -> bool:
    """Whether a checkpoint file is new and no longer being written: two looks in a row see the same."""
    return bool(seen) and seen != before and seen == last
