"""What can go wrong, named by what the caller can do about it.

A refusal of a node is a value (`Verdict`), never one of these. Every error that reaches a person
carries a stable code, the cause, and a next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HodeiError(Exception):
    """The root: `code` is stable and documented, `hint` says what to do next."""

    code = "ERROR"

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code:
            self.code = code


class InvalidInput(HodeiError):
    """The request can never succeed as written. `problems` names each place: (path, what is wrong)."""

    code = "INVALID"

    def __init__(
        self, message: str, *, hint: str = "", code: str = "", problems: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.problems = problems


class NotFound(HodeiError):
    code = "NOT_FOUND"


class NotPermitted(HodeiError):
    """The caller, or the user that it is done for, does not have the right to it."""

    code = "FORBIDDEN"


class Conflict(HodeiError):
    """The thing has changed, or is in a state that does not allow this."""

    code = "CONFLICT"


class QueueFull(HodeiError):
    """A bounded queue has no room; trying later can help."""

    code = "QUEUE_FULL"


class Unavailable(HodeiError):
    """A part we depend on is out of reach; trying later can help."""

    code = "UNAVAILABLE"


class StaleEpoch(HodeiError):
    """Another writer has taken over; this one must stop."""

    code = "STALE_EPOCH"


# Codes of a BackendError. NOT_REACHED: nothing of the call has arrived, the line was dead before it was sent. IN_DOUBT: it
# is unknown whether it was done, so it must not be counted as not done; asking again tells.
NOT_REACHED = "NOT_REACHED"
IN_DOUBT = "IN_DOUBT"


class BackendError(HodeiError):
    """The backend did not do it; asking again may help. Nothing was started, unless the code is IN_DOUBT."""

    code = "BACKEND_ERROR"


class BackendRefused(HodeiError):
    """The backend will never do it; asking again cannot help."""

    code = "BACKEND_REFUSED"


class Unsupported(BackendRefused):
    """The backend's system has no such ability; `hint` says what to do instead."""

    code = "BACKEND_CANNOT"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'memory'?)`, or nothing when nothing is near."""
    near = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
