"""Errors as HTTP responses. The only module that knows status codes; every body is a `Problem`."""

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


class HttpError(HodeiError):
    """Base of the errors that exist only in HTTP; `headers` go into the response."""

    def __init__(self, message: str, *, hint: str = "", code: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(message, hint=hint, code=code)
        self.headers = headers or {}


class BadRequest(HttpError):
    code = "MALFORMED"


class Unauthorized(HttpError):
    """`kind`: there is no token (missing), it is not a token (malformed), or it is not valid (unknown)."""

    code = "UNAUTHORIZED"
    kind = "unknown"


class Forbidden(HttpError):
    """`who`: the caller, if known."""

    code = "FORBIDDEN"
    who: Principal | None = None


class PathNotFound(HttpError):
    code = "NO_SUCH_PATH"


class MethodNotAllowed(HttpError):
    code = "METHOD_NOT_ALLOWED"


class RequestTimeout(HttpError):
    code = "TOO_SLOW"


class PayloadTooLarge(HttpError):
    code = "TOO_LARGE"


class UnsupportedMediaType(HttpError):
    code = "UNKNOWN_MEDIA_TYPE"


class MisdirectedRequest(HttpError):
    code = "MISDIRECTED"


class TooManyRequests(HttpError):
    """The caller has too many at once."""

    code = "TOO_MANY_REQUESTS"


class RateLimited(HttpError):
    """The caller exceeds its rate limit."""

    code = "RATE_LIMITED"


class HeadersTooLarge(HttpError):
    code = "HEADERS_TOO_LARGE"


class ServerBusy(HttpError):
    """The server as a whole is at its limit."""

    code = "BUSY"


# The first match counts, so a subclass precedes its parent. The last number is Retry-After in seconds.
STATUSES: tuple[tuple[type[Exception], int, int], ...] = (
    (BadRequest, 400, 0),
    (Unauthorized, 401, 0),
    (Forbidden, 403, 0),
    (NotPermitted, 403, 0),
    (PathNotFound, 404, 0),
    (MethodNotAllowed, 405, 0),
    (RequestTimeout, 408, 0),
    (PayloadTooLarge, 413, 0),
    (UnsupportedMediaType, 415, 0),
    (MisdirectedRequest, 421, 0),
    (TooManyRequests, 429, 2),
    (RateLimited, 429, 1),
    (HeadersTooLarge, 431, 0),
    (ServerBusy, 503, 1),
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
    """The response for `error`. An unexpected one becomes a 500 with an incident id; its details go to the log only."""
    if isinstance(error, msgspec.ValidationError):
        error = InvalidInput(str(error))
    elif isinstance(error, msgspec.DecodeError | UnicodeDecodeError):
        error = BadRequest(f"the body cannot be parsed: {error}")
    elif isinstance(error, RecursionError):
        error = BadRequest("the body is nested too deeply")
    if isinstance(error, HodeiError):
        for kind, status, retry_s in STATUSES:
            if isinstance(error, kind):
                # A body that cannot be parsed differs from one that can, but is not valid.
                status = 400 if error.code == BadRequest.code else status
                headers = dict(error.headers) if isinstance(error, HttpError) else {}
                if retry_s:
                    headers.setdefault("retry-after", str(retry_s))
                return _reply(status, error.code, error.message, error.hint, getattr(error, "problems", ()), headers)
    incident = secrets.token_hex(4)
    log.error("incident %s", incident, exc_info=error)
    return _reply(
        500, "INTERNAL", f"internal error in the server (incident {incident})",
        f"search the server's log for {incident}", (), {},
    )  # fmt: skip


def _reply(
    status: int, code: str, message: str, hint: str, problems: tuple[tuple[str, str], ...], headers: dict[str, str]
) -> Reply:
    problem = Problem(
        code, _clip(message), _clip(hint), [(_clip(where), _clip(what)) for where, what in problems[:100]]
    )
    return Reply(_encode(problem), status=status, headers=headers)


def _clip(text: str, most: int = 2000) -> str:
    """A response does not repeat megabytes of input, and is always valid UTF-8."""
    text = text if len(text) <= most else text[:most] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")
