"""Routes: frozen values that hold everything about one path, including its policy, and the parsing of their parameters.

`app` builds the endpoints from them, `openapi` the document. A handler gets a `Call` and returns an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl

from msgspec import UNSET, Struct
from starlette.types import Receive, Scope, Send

from hodei.model.audit import EnvVisibility
from hodei.model.errors import InvalidInput
from hodei.model.resources import parse_duration_ms

if TYPE_CHECKING:
    from hodei.backends.remote.hub import AgentHub
    from hodei.runtime.service import Service
    from hodei.server.audit import FailedLogins
    from hodei.server.auth import Authenticator
    from hodei.server.rate_limits import RateLimit, UsageLimit

Role = Literal["viewer", "user", "admin"]
RANK: dict[str, int] = {"viewer": 1, "user": 2, "admin": 3}
API = "/api/v1"
KIB = 1024
MIB = 1024 * 1024
# Larger bodies are parsed in a thread, so that a large submit does not delay other requests.
SMALL_BODY = 256 * KIB
_MAX_QUERY = 16 * 1024
_SECRETS = {"token", "access_token", "authorization", "bearer", "api_key", "apikey"}


class Policy(Struct, frozen=True):
    """The lowest rank of a role that may call; rank 0 needs no token."""

    name: str
    rank: int

    def allows(self, role: Role) -> bool:
        return RANK[role] >= self.rank


PUBLIC = Policy("public", 0)
READ = Policy("read", RANK["viewer"])
WRITE = Policy("write", RANK["user"])
ADMIN = Policy("admin", RANK["admin"])
# Not open to any role, but to agents by credentials of their own: a one-time enrolment token, or that of a node.
ENROLMENT = Policy("enrolment", RANK["admin"] + 1)
NODE = Policy("node", RANK["admin"] + 1)


class Principal(Struct, frozen=True):
    """The caller; without a name on public routes. `token`: the hash of its token. `agent`: it is a host, named
    `node:NAME` or `enrolment:ID`."""

    name: str
    role: Role
    token: bytes = b""
    agent: bool = False

    def may_see_env_of(self, owner: str) -> EnvVisibility:
        """How much of the environment of this owner's jobs is shown by default."""
        return "plain" if self.role == "admin" or (self.name and self.name == owner) else "names"


ANYONE = Principal("", "viewer")


class Param(Struct, frozen=True):
    """One parameter. With `many` it may be repeated (and comma-separated, if `commas`), and its value is a tuple."""

    name: str
    summary: str
    type: type[int] | type[str] = str
    where: Literal["query", "path", "header"] = "query"
    default: Any = UNSET
    minimum: int = 0
    maximum: int = 2**53
    choices: tuple[str, ...] = ()
    many: bool = False
    commas: bool = True


JOB_ID = Param("id", "number of the job", type=int, where="path", minimum=1)


@dataclass(frozen=True, slots=True)
class Shared:
    """Shared by all requests of a server. `closing` is set when long requests must end."""

    service: Service
    tokens: Authenticator
    agents: AgentHub
    now_ms: Callable[[], int]
    closing: asyncio.Event
    requests: UsageLimit
    rates: RateLimit
    bodies: UsageLimit
    waits: UsageLimit
    streams: UsageLimit
    what_ifs: UsageLimit
    failed_logins: FailedLogins
    heartbeat_s: float
    send_timeout_s: float
    openapi: bytes


@dataclass(frozen=True, slots=True)
class Call:
    """An authorized request with checked parameters and its body. `limit_key`: the caller whose limits apply."""

    shared: Shared
    who: Principal
    limit_key: str
    args: dict[str, Any]
    scope: Scope
    body: bytes = b""
    content_type: str = ""

    @property
    def service(self) -> Service:
        return self.shared.service


class Reply:
    """A complete HTTP response, for answers that are not a value of the route's response type."""

    __slots__ = ("body", "headers", "media_type", "status")

    def __init__(
        self,
        body: bytes,
        *,
        media_type: str = "application/json",
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.body = body
        self.media_type = media_type
        self.status = status
        self.headers = headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", self.media_type.encode("latin-1")),
            (b"content-length", str(len(self.body)).encode("ascii")),
        ]
        headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


Answer = Any  # a value of the route's response type, a Reply, or an ASGI app (streams)
Handler = Callable[[Call], Awaitable[Answer]]


class Route(Struct, frozen=True):
    """One method and path. The policy has no default, so that it cannot be forgotten.

    `concurrency`: `short` requests share one limit, `long` ones (waits, streams) have limits of their own once their body is
    read, `exempt` ones (probes) are never refused. `accepts`: media types of the body besides JSON. Every request except GET
    is audited, unless it is `read_only`. `verb` is the action in the audit log, where the path does not name it.
    """

    method: Literal["GET", "POST", "PATCH", "PUT", "DELETE"]
    path: str
    policy: Policy
    summary: str
    handler: Handler
    request: Any = None
    response: Any = None
    params: tuple[Param, ...] = ()
    status: int = 200
    media_type: str = "application/json"
    body_limit: int = MIB
    accepts: tuple[str, ...] = ()
    concurrency: Literal["short", "long", "exempt"] = "short"
    read_only: bool = False
    verb: str = ""

    @property
    def audited(self) -> bool:
        return self.method != "GET" and not self.read_only


def read_params(route: Route, scope: Scope) -> dict[str, Any]:
    """Every declared parameter, typed, or its default. InvalidInput names all that are wrong or unknown."""
    given = _given(route, scope)
    args: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    for param in route.params:
        values = given.get((param.where, param.name), [])
        try:
            args[param.name] = _value(param, values)
        except InvalidInput as error:
            problems.append((param.name, error.message))
    if problems:
        first = problems[0]
        raise InvalidInput(f"{first[0]}: {first[1]}", problems=tuple(problems))
    return args


def _given(route: Route, scope: Scope) -> dict[tuple[str, str], list[str]]:
    given: dict[tuple[str, str], list[str]] = {
        ("path", name): [value] for name, value in scope.get("path_params", {}).items()
    }
    query = scope.get("query_string", b"")
    if query:
        known = [param.name for param in route.params if param.where == "query"]
        for name, value in _query(query):
            if name not in known:
                raise _unknown(name, known)
            given.setdefault(("query", name), []).append(value)
    headers = {param.name.lower().encode(): param.name for param in route.params if param.where == "header"}
    if headers:
        for raw, found in scope["headers"]:
            if raw in headers:
                given.setdefault(("header", headers[raw]), []).append(found.decode("latin-1"))
    return given


def _query(query: bytes) -> list[tuple[str, str]]:
    if len(query) > _MAX_QUERY:
        raise InvalidInput(f"the query is longer than {_MAX_QUERY} bytes")
    try:
        return parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=200, errors="strict")
    except (ValueError, UnicodeDecodeError):
        raise InvalidInput("the query cannot be parsed", code="MALFORMED") from None


def _unknown(name: str, known: list[str]) -> InvalidInput:
    if name.lower() in _SECRETS:
        return InvalidInput(
            "a URL must not contain a token: URLs end up in logs and histories",
            hint="send the header 'Authorization: Bearer TOKEN', and replace this token if it may have leaked",
        )
    close = get_close_matches(name[:80], known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"possible: {', '.join(known) or 'none'}"
    return InvalidInput(f"unknown parameter {name[:80]!r}", hint=hint)


def _value(param: Param, values: list[str]) -> Any:
    if param.many:
        parts = [part for value in values for part in (value.split(",") if param.commas else (value,))]
        return tuple(_one(param, part) for part in parts if part.strip())
    if len(values) > 1:
        raise InvalidInput("given more than once")
    if not values or (values[0] == "" and param.where == "query"):
        if param.default is UNSET:
            raise InvalidInput("missing")
        return param.default
    return _one(param, values[0])


def _one(param: Param, text: str) -> int | str:
    text = text.strip()
    if param.type is int:
        if not (text.isascii() and text.isdigit()):
            raise InvalidInput(f"{text[:40]!r} is not a whole number")
        number = int(text[:40])  # enough to be out of range
        if not param.minimum <= number <= param.maximum:
            raise InvalidInput(f"{number} is not between {param.minimum} and {param.maximum}")
        return number
    if param.choices and text not in param.choices:
        close = get_close_matches(text[:80], param.choices, 1)
        tail = f"did you mean {close[0]!r}?" if close else f"possible: {', '.join(param.choices)}"
        raise InvalidInput(f"{text[:80]!r} is not a possible value; {tail}")
    if len(text) > min(param.maximum, 1000):
        raise InvalidInput(f"longer than {min(param.maximum, 1000)} characters")
    if not text.isprintable():
        raise InvalidInput("has unprintable characters")
    return text


def read_since_ms(text: str, now_ms: int, name: str = "since") -> int:
    """A time in the past: milliseconds since the epoch, ISO 8601 (UTC without a zone), or an age such as `90m`."""
    if not text:
        return 0
    if text.isascii() and text.isdigit() and len(text) < 17:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            return max(0, now_ms - parse_duration_ms(text))
        except InvalidInput:
            raise InvalidInput(
                f"{name}: {text[:40]!r} is neither a time nor an age", hint="write 2026-01-31T08:00:00Z, 90m or 2d"
            ) from None
    return max(0, round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000))


def closest(path: str, known: Iterable[str]) -> str:
    """The most similar known path, or ""."""
    close = get_close_matches(path[:200], list(known), 1, cutoff=0.7)
    return close[0] if close else ""
