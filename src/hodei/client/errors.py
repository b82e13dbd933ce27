"""What a caller of the client can meet beyond the errors of the model, and how a server's `Problem` becomes an exception."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hodei.api.views import JobView, Problem
from hodei.model.errors import (
    BackendError,
    BackendRefused,
    Conflict,
    HodeiError,
    InvalidInput,
    NotFound,
    QueueFull,
    StaleEpoch,
    Unavailable,
    Unsupported,
)


class ServerUnreachable(HodeiError):
    """No server answered. Whether the request was carried out is unknown if the connection was lost on the way."""

    code = "UNREACHABLE"


class Denied(HodeiError):
    """The server does not know the token, or the token may not do this."""

    code = "DENIED"


class WaitTimedOut(HodeiError, TimeoutError):
    """Not every job ended in time; `jobs` says how each of them stands."""

    code = "WAIT_TIMEOUT"

    def __init__(self, message: str, *, hint: str = "", jobs: Sequence[JobView] = ()) -> None:
        super().__init__(message, hint=hint)
        self.jobs = list(jobs)


_BY_CODE: dict[str, type[HodeiError]] = {
    kind.code: kind
    for kind in (
        NotFound, Conflict, QueueFull, Unavailable, StaleEpoch, BackendError, BackendRefused, Unsupported, Denied, InvalidInput,
    )
}  # fmt: skip
_BY_STATUS: dict[int, type[HodeiError]] = {
    400: InvalidInput, 401: Denied, 403: Denied, 404: NotFound, 409: Conflict, 412: Conflict, 413: InvalidInput,
    415: InvalidInput, 422: InvalidInput, 429: QueueFull, 501: Unsupported, 502: Unavailable, 503: Unavailable, 504: Unavailable,
}  # fmt: skip


def error_of(status: int, body: bytes) -> HodeiError:
    """The exception that an answer with `status` of 400 or more stands for."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # A proxy in between, or not a Hodei server at all: what it says is of no use to the reader.
        kind = _BY_STATUS.get(status, HodeiError)
        hint = "" if kind is Denied else "is this the address of a Hodei server? see: hodei doctor"
        return kind(f"the server answered with HTTP status {status}", hint=hint, code=f"HTTP_{status}")
    kind = _BY_CODE.get(problem.code) or _BY_STATUS.get(status, HodeiError)
    if kind is InvalidInput:
        problems = tuple(problem.problems)
        return InvalidInput(problem.message, hint=problem.hint, code=problem.code, problems=problems)
    return kind(problem.message, hint=problem.hint, code=problem.code)
