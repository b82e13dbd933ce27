"""From an error to an HTTP answer. The only place in the house that knows statuses; every body is a `Problem`."""

from __future__ import annotations

import logging
import secrets

import msgspec

from hodei.api.views import Problem
from hodei.model.errors import (
    BackendError,
    BackendRefused,
    Conflict,
    HodeiError,
    InvalidInput,
    NotFound,
    NotPermitted,
    QueueFull,
    StaleEpoch,
    Unavailable,
    Unsupported,
)
from hodei.server.route import Principal, Reply

log = logging.getLogger("hodei.server")
_encode = msgspec.json.Encoder().encode


class Refused(HodeiError):
    """The root of the refusals that exist only because this is HTTP; `headers` go into the answer."""

    def __init__(self, message: str, *, hint: str = "", code: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(message, hint=hint, code=code)
        self.headers = headers or {}


class Malformed(Refused):
    code = "MALFORMED"


class Unauthorized(Refused):
    """`kind`: no token was shown (missing), something that is none (malformed), or one that is not known (unknown)."""

    code = "UNAUTHORIZED"
    kind = "unknown"


class Forbidden(Refused):
    """`who` asked, if that is known."""

    code = "FORBIDDEN"
    who: Principal | None = None


class UnknownPath(Refused):
    code = "NO_SUCH_PATH"


class WrongMethod(Refused):
    code = "METHOD_NOT_ALLOWED"


class TooSlow(Refused):
    code = "TOO_SLOW"


class TooLarge(Refused):
    code = "TOO_LARGE"


class UnknownMediaType(Refused):
    code = "UNKNOWN_MEDIA_TYPE"


class ForeignHost(Refused):
    code = "MISDIRECTED"


class TooMany(Refused):
    """This caller holds too many at once."""

    code = "TOO_MANY_REQUESTS"


class TooFast(Refused):
    """This caller calls more often than it may."""

    code = "RATE_LIMITED"


class HeadersTooLarge(Refused):
    code = "HEADERS_TOO_LARGE"


class Busy(Refused):
    """The server as a whole has enough to do."""

    code = "BUSY"


# The first that fits counts, so a subclass stands before its parent. The number after it: Retry-After in seconds.
STATUSES: tuple[tuple[type[Exception], int, int], ...] = (
    (Malformed, 400, 0),
    (Unauthorized, 401, 0),
    (Forbidden, 403, 0),
    (NotPermitted, 403, 0),
    (UnknownPath, 404, 0),
    (WrongMethod, 405, 0),
    (TooSlow, 408, 0),
    (TooLarge, 413, 0),
    (UnknownMediaType, 415, 0),
    (ForeignHost, 421, 0),
    (TooMany, 429, 2),
    (TooFast, 429, 1),
    (HeadersTooLarge, 431, 0),
    (Busy, 503, 1),
    (InvalidInput, 422, 0),
    (NotFound, 404, 0),
    (Conflict, 409, 0),
    (QueueFull, 429, 2),
    (Unavailable, 503, 1),
    (StaleEpoch, 503, 1),
    (BackendError, 503, 5),
    (Unsupported, 501, 0),
    (BackendRefused, 502, 0),
)


def reply_to(error: BaseException) -> Reply:
    """The answer for `error`. What nobody foresaw becomes a 500 with an incident id; its story goes to the log only."""
    if isinstance(error, msgspec.ValidationError):
        error = InvalidInput(str(error))
    elif isinstance(error, msgspec.DecodeError | UnicodeDecodeError):
        error = Malformed(f"the body cannot be read: {error}")
    elif isinstance(error, RecursionError):
        error = Malformed("the body is nested too deeply")
    if isinstance(error, HodeiError):
        for kind, status, retry_s in STATUSES:
            if isinstance(error, kind):
                # A body that could not even be parsed is told apart from one that says something impossible.
                status = 400 if error.code == Malformed.code else status
                headers = dict(error.headers) if isinstance(error, Refused) else {}
                if retry_s:
                    headers.setdefault("retry-after", str(retry_s))
                return _reply(status, error.code, error.message, error.hint, getattr(error, "problems", ()), headers)
    incident = secrets.token_hex(4)
    log.error("incident %s", incident, exc_info=error)
    return _reply(
        500, "INTERNAL", f"something went wrong inside the server (incident {incident})",
        f"the server's log has the details: look for {incident}", (), {},
    )  # fmt: skip


def _reply(
    status: int, code: str, message: str, hint: str, problems: tuple[tuple[str, str], ...], headers: dict[str, str]
) -> Reply:
    problem = Problem(
        code, _clip(message), _clip(hint), [(_clip(where), _clip(what)) for where, what in problems[:100]]
    )
    return Reply(_encode(problem), status=status, headers=headers)


def _clip(text: str, most: int = 2000) -> str:
    """An answer never repeats a caller's ten megabytes, and is always valid UTF-8."""
    text = text if len(text) <= most else text[:most] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")
