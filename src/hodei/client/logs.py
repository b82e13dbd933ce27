"""Reading what a job writes, while it writes: attempt after attempt, across a restart of the server.

The place is kept on this side (attempt and offset), so a reader never sees a byte twice and never misses one.
"""

from __future__ import annotations

from collections.abc import Callable

from hodei.client.transport import Reply
from hodei.model.lifecycle import JOB_ENDED, RUN_ENDED

CHUNK = 256 * 1024
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.03, 0.5


class LogReader:
    """One stream of one member. `attempt` 0 reads the newest attempt, and in `follow` every later one too.

    `read` gives the next bytes, b"" when there are none for now; `at_end` tells whether any can still come.
    `run_state` is empty until a run has been placed; `attempt` and `offset` say how far it has read.
    """

    def __init__(
        self,
        get: Callable[[dict[str, str]], Reply],
        *,
        stream: str,
        member: int,
        attempt: int = 0,
        follow: bool = False,
    ) -> None:
        self._get = get
        self._where = {"stream": stream, "member": str(member), "limit": str(CHUNK)}
        self.attempt = attempt
        self._one_attempt = attempt > 0
        self._follow = follow
        self.offset = 0
        self.run_state = ""
        self.at_end = False

    def read(self) -> bytes:
        if self.at_end:
            return b""
        reply = self._ask(self.attempt)
        self.attempt = self.attempt or _attempt_of(reply)
        told = reply.headers.get("Hodei-Next-Offset") or ""
        self.offset = int(told) if told.isascii() and told.isdigit() else self.offset + len(reply.body)
        self.run_state = reply.headers.get("Hodei-Run-State") or ""
        if not reply.body:
            self.at_end = not self._more_to_come(reply)
        return reply.body

    def _more_to_come(self, reply: Reply) -> bool:
        """This attempt has nothing more to say for now: can it still, or does another one follow?"""
        if not self._follow:
            return False
        if self.run_state and self.run_state not in RUN_ENDED:
            return True
        if not self.attempt or self._one_attempt:
            return not self.run_state and reply.headers.get("Hodei-Job-State") not in JOB_ENDED
        newest = self._ask(0)
        if _attempt_of(newest) > self.attempt:
            self.attempt, self.offset = _attempt_of(newest), 0
            return True
        return newest.headers.get("Hodei-Job-State") not in JOB_ENDED

    def _ask(self, attempt: int) -> Reply:
        return self._get(self._where | {"offset": str(self.offset), "attempt": str(attempt)})


class Pause:
    """How long to wait before asking again: short at first, longer while nothing comes."""

    def __init__(self) -> None:
        self._next_s = _SHORTEST_PAUSE_S

    def after(self, found: bool) -> float:
        """Seconds to wait now."""
        if found:
            self._next_s = _SHORTEST_PAUSE_S
            return 0.0
        pause = self._next_s
        self._next_s = min(_LONGEST_PAUSE_S, self._next_s * 1.5)
        return pause


def _attempt_of(reply: Reply) -> int:
    """`job.member.attempt` -> attempt; 0 when no run has started."""
    last = (reply.headers.get("Hodei-Run") or "").rpartition(".")[2]
    return int(last) if last.isdigit() else 0
