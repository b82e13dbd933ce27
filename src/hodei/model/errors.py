"""Errors, classified by what the caller can do about them.

A node that is refused for a job is a value (`Verdict`), not an error. Every error shown to a person has a stable code,
a cause and a next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HodeiError(Exception):
    """Base class. `code` is stable and documented; `hint` is the next step."""

    code = "ERROR"

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code:
            self.code = code


class InvalidInput(HodeiError):
    """The request can never succeed as written. `problems`: (path, what is wrong) for each field."""

    code = "INVALID"

    def __init__(
        self, message: str, *, hint: str = "", code: str = "", problems: tuple[tuple[str, str], ...] = ()
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.problems = problems


class NotFound(HodeiError):
    code = "NOT_FOUND"


class NotPermitted(HodeiError):
    """The caller, or the user it acts for, lacks the permission."""

    code = "FORBIDDEN"


class Conflict(HodeiError):
    """The object has changed, or its state does not allow the operation."""

    code = "CONFLICT"


class QueueFull(HodeiError):
    """A bounded queue is full; a later attempt can succeed."""

    code = "QUEUE_FULL"


class Unavailable(HodeiError):
    """A dependency is unreachable; a later attempt can succeed."""

    code = "UNAVAILABLE"


class StaleEpoch(HodeiError):
    """Another writer has taken over; this one must stop."""

    code = "STALE_EPOCH"


# Codes of a BackendError. NOT_REACHED: the connection failed before the call was sent, so nothing arrived. IN_DOUBT:
# it is unknown whether the call took effect, so it must not be treated as failed; repeating it resolves the doubt.
NOT_REACHED = "NOT_REACHED"
IN_DOUBT = "IN_DOUBT"


class BackendError(HodeiError):
    """The backend did not do it; a retry may succeed. Nothing was started, unless the code is IN_DOUBT."""

    code = "BACKEND_ERROR"


class BackendRefused(HodeiError):
    """The backend will never do it; a retry cannot succeed."""

    code = "BACKEND_REFUSED"


class Unsupported(BackendRefused):
    """The backend lacks the capability; `hint` says what to do instead."""

    code = "BACKEND_CANNOT"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'memory'?)`, or "" if nothing is close."""
    near = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
