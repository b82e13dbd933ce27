"""What a route is: a frozen value that says everything about one address, its policy included.

`app` makes the real thing from it, `openapi` the document; handlers see a `Call` and return an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from msgspec import UNSET, Struct
from starlette.types import Receive, Scope, Send

from hodei.model.audit import EnvVisibility

if TYPE_CHECKING:
    from hodei.runtime.service import Service
    from hodei.server.auth import Authenticator, FailedLogins
    from hodei.server.rate_limits import Rates, Room, Slots

Role = Literal["viewer", "user", "admin"]
RANK: dict[str, int] = {"viewer": 1, "user": 2, "admin": 3}
API = "/api/v1"
KIB = 1024
MIB = 1024 * 1024
# Above this size a body is looked at in a thread, so that one large submit does not hold up every other call.
SMALL = 256 * KIB


class Policy(Struct, frozen=True):
    """Who may call: whoever holds a token of at least this rank; rank 0 is everyone."""

    name: str
    rank: int

    def allows(self, role: Role) -> bool:
        return RANK[role] >= self.rank


PUBLIC = Policy("public", 0)
READ = Policy("read", RANK["viewer"])
WRITE = Policy("write", RANK["user"])
ADMIN = Policy("admin", RANK["admin"])


class Principal(Struct, frozen=True):
    """Who is calling. The nameless viewer stands for everyone on public routes. `token`: the hash of the one shown."""

    name: str
    role: Role
    token: bytes = b""

    def sees_of(self, owner: str) -> EnvVisibility:
        """What of the variables of a job of this owner the caller sees without asking for more."""
        return "plain" if self.role == "admin" or (self.name and self.name == owner) else "names"


ANYONE = Principal("", "viewer")


class Param(Struct, frozen=True):
    """One parameter. With `many` it may be repeated (and comma separated, if `commas`), and arrives as a tuple."""

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


@dataclass(frozen=True, slots=True)
class Shared:
    """What every call of one server shares. `closing` is set when the server wants its long calls to end."""

    service: Service
    tokens: Authenticator
    now_ms: Callable[[], int]
    closing: asyncio.Event
    requests: Slots
    rates: Rates
    bodies: Room
    waits: Slots
    streams: Slots
    what_ifs: Slots
    logins: FailedLogins
    heartbeat_s: float
    send_timeout_s: float
    openapi: bytes


@dataclass(frozen=True, slots=True)
class Call:
    """One request that passed its policy: parameters are checked and typed, the body (if the route has one) is read.
    `holder`: whose share of the server it counts against."""

    shared: Shared
    who: Principal
    holder: str
    args: dict[str, Any]
    scope: Scope
    body: bytes = b""
    content_type: str = ""

    @property
    def service(self) -> Service:
        return self.shared.service


class Reply:
    """An answer that is not simply a value of the route's response type."""

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
    """One address. There is no default policy, so none can be forgotten.

    `lane` says which limit on concurrent calls holds it: `short` calls share one, `long` calls (waits, streams)
    take their own place once their body is read, `free` calls (probes) are never turned away. `accepts`: a media type that
    a body may have besides JSON. Whatever is not a GET goes on record (`audit`), unless it is `harmless`: it changes
    nothing. `verb` names the act there, where the path does not.
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
    accepts: str = ""
    lane: Literal["short", "long", "free"] = "short"
    harmless: bool = False
    verb: str = ""

    @property
    def audited(self) -> bool:
        return self.method != "GET" and not self.harmless
