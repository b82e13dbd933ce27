"""How a run is asked to save its work before it is stopped: a signal to it, or a command beside it. A value only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from signal import Signals
from typing import Any

TIMEOUT_MS = 30_000
# Those that the wrapper of a run outlives; any other would end it, and the run with it.
SIGNALS = ("ALRM", "CONT", "HUP", "INT", "QUIT", "TERM", "URG", "USR1", "USR2", "VTALRM", "WINCH")


class BadHook(ValueError):
    """It can not be used; the message says why. The stop goes on without it."""


@dataclass(frozen=True)
class Hook:
    """Either `signal` or `command` is set; `timeout_ms` bounds how long we wait for it."""

    signal: str = ""
    command: tuple[str, ...] = ()
    timeout_ms: int = TIMEOUT_MS

    @property
    def number(self) -> Signals:
        return Signals[f"SIG{self.signal}"]

    @classmethod
    def from_order(cls, order: Mapping[str, Any] | None) -> Hook | None:
        """None if nothing was asked for. A time of 0 means that none was set."""
        if not order or not isinstance(order, Mapping):
            return None
        name, command, timeout_ms = order.get("signal") or "", order.get("command") or [], order.get("timeout_ms") or 0
        if not isinstance(timeout_ms, int) or timeout_ms < 0:
            raise BadHook("its time is not a whole number from 0 on")
        if command:
            if not isinstance(command, list) or not all(isinstance(w, str) and "\0" not in w for w in command):
                raise BadHook("the command is not a list of words")
            return cls("", tuple(command), timeout_ms or TIMEOUT_MS)
        if not name:
            return None
        name = str(name).upper().removeprefix("SIG")
        if name not in SIGNALS:
            raise BadHook(f"the signal {name[:20]} can not be used; there are {', '.join(SIGNALS)}")
        return cls(name, (), timeout_ms or TIMEOUT_MS)

    def as_order(self) -> dict[str, Any]:
        """What `from_order` reads; also the form in the journal."""
        return {"signal": self.signal, "command": list(self.command), "timeout_ms": self.timeout_ms}
