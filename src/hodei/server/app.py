"""From the table to an ASGI app: route, policy, parameters, body, handler, answer. In that order, for every route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from hodei.model.config import LimitsConfig
from hodei.server.audit import code_of, on_behalf_of, settle
from hodei.server.auth import Authenticator, FailedLogins, admit, still_valid
from hodei.server.errors import (
    Busy,
    Forbidden,
    TooFast,
    TooMany,
    Unauthorized,
    UnknownMediaType,
    UnknownPath,
    WrongMethod,
    reply_to,
)
from hodei.server.guard import Guard, check_depth, read_body
from hodei.server.openapi import openapi
from hodei.server.params import closest, read_params
from hodei.server.rate_limits import Rates, Room, Slots, holder
from hodei.server.route import ANYONE, MIB, SMALL, Call, Principal, Reply, Route, Shared
from hodei.server.routes import table as route_table

if TYPE_CHECKING:
    from hodei.runtime.service import Service

YAML_LIMIT = MIB
_BODY_BYTES = 512 * MIB
_WHAT_IFS = 4
_encode = msgspec.json.Encoder().encode


class App:
    """The whole server as one ASGI app. `close` ends waits and streams, so that a shutdown need not sit them out."""

    def __init__(self, table: Sequence[Route], shared: Shared, hosts: Sequence[str], body_timeout_s: float) -> None:
        self.table = tuple(table)
        self.shared = shared
        self.router = Router([_mount(route, shared, body_timeout_s) for route in self.table], redirect_slashes=False)
        self._front = Guard(self._route, hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front(scope, receive, send)

    def close(self) -> None:
        self.shared.closing.set()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes Starlette raise for an unknown path or method instead of answering by itself
        try:
            await self.router(scope, receive, send)
        except HTTPException as error:
            refusal = self._wrong_method(scope) if error.status_code == 405 else self._unknown_path(scope)
            await reply_to(refusal)(scope, receive, send)

    def _unknown_path(self, scope: Scope) -> UnknownPath:
        path = scope["path"]
        near = closest(path, (route.path for route in self.table))
        hint = f"did you mean {near}?" if near else "every path is listed in /api/v1/openapi.json"
        return UnknownPath(f"there is nothing at {path[:200]}", hint=hint)

    def _wrong_method(self, scope: Scope) -> WrongMethod:
        here = [route for route in self.router.routes if isinstance(route, StarletteRoute)]
        methods = {m for route in here if route.path_regex.match(scope["path"]) for m in route.methods or ()}
        allowed = ", ".join(sorted(methods))
        message = f"{scope['method'][:20]} is not possible at {scope['path'][:200]}"
        return WrongMethod(message, hint=f"possible: {allowed}", headers={"allow": allowed})


class Endpoint:
    """One route at work."""

    def __init__(self, route: Route, shared: Shared, body_timeout_s: float) -> None:
        self.route, self.shared, self._body_timeout_s = route, shared, body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            who = admit(self.route.policy, scope, self.shared.tokens)
        except Forbidden as error:
            answer: ASGIApp = reply_to(error)
            with on_behalf_of(self.shared, self.route, error.who or ANYONE, scope) as caller:
                if caller is not None:
                    await settle(self.shared, caller, answer, error.code)
        except Unauthorized as error:
            answer = self._turn_away(error, scope)
        except Exception as error:
            answer = reply_to(error)
        else:
            with on_behalf_of(self.shared, self.route, who, scope) as caller:
                answer, refused = await self._attempt(who, scope, receive)
                # Turned away unread: a row for each would let a flood fill the disk.
                if caller is not None and not isinstance(refused, TooFast | TooMany | Busy):
                    await settle(self.shared, caller, answer, code_of(answer, refused))
        await answer(scope, receive, send)

    def _turn_away(self, error: Unauthorized, scope: Scope) -> Reply:
        self.shared.logins.failed(error, self.route, scope)
        try:
            self.shared.rates.spend(holder(ANYONE, scope))
        except TooFast as too_fast:
            return reply_to(too_fast)
        return reply_to(error)

    async def _attempt(self, who: Principal, scope: Scope, receive: Receive) -> tuple[ASGIApp, Exception | None]:
        try:
            return await self._answer(who, scope, receive), None
        except Exception as error:
            return reply_to(error), error

    async def _answer(self, who: Principal, scope: Scope, receive: Receive) -> ASGIApp:
        route, mine = self.route, holder(who, scope)
        if route.lane == "free":
            return self._ready(await route.handler(Call(self.shared, who, mine, read_params(route, scope), scope)))
        self.shared.rates.spend(mine)
        with self.shared.bodies.hold(mine) as take:
            if route.lane == "short":
                with self.shared.requests.hold(mine):
                    return self._ready(await route.handler(await self._read(who, mine, scope, receive, take)))
            # Its handler takes a place of another kind; while its parameters and body come it is a call like others.
            with self.shared.requests.hold(mine):
                call = await self._read(who, mine, scope, receive, take)
            answer = await route.handler(call)
            if route.method == "GET" and not callable(answer):
                still_valid(who, self.shared.tokens)  # a wait may have been long; streams look for themselves
            return self._ready(answer)

    def _ready(self, answer: Any) -> ASGIApp:
        ready: ASGIApp = answer if callable(answer) else Reply(_encode(answer), status=self.route.status)
        return ready

    async def _read(
        self, who: Principal, mine: str, scope: Scope, receive: Receive, take: Callable[[int], None]
    ) -> Call:
        call = Call(self.shared, who, mine, read_params(self.route, scope), scope)
        return await self._with_body(call, receive, take) if self.route.request is not None else call

    async def _with_body(self, call: Call, receive: Receive, take: Callable[[int], None]) -> Call:
        given = next((value for name, value in call.scope["headers"] if name == b"content-type"), b"")
        media = given.decode("latin-1").partition(";")[0].strip().lower() or "application/json"
        yaml = self.route.request is bytes and media in ("application/yaml", "application/x-yaml", "text/yaml")
        toml = bool(self.route.accepts) and media == self.route.accepts
        if not yaml and not toml and media != "application/json":
            either = "application/json or application/yaml" if self.route.request is bytes else "application/json"
            either += f" or {self.route.accepts}" if self.route.accepts else ""
            raise UnknownMediaType(f"cannot read {media[:80]!r}", hint=f"send the header 'Content-Type: {either}'")
        # YAML takes a hundred times longer to read than JSON, and large submits are made by programs.
        limit = min(self.route.body_limit, YAML_LIMIT) if yaml else self.route.body_limit
        body = await read_body(call.scope, receive, limit=limit, timeout_s=self._body_timeout_s, take=take)
        still_valid(call.who, call.shared.tokens)
        if not yaml and not toml and len(body) > SMALL:
            await asyncio.to_thread(check_depth, body)
        elif not yaml and not toml:
            check_depth(body)
        return replace(call, body=body, content_type="application/yaml" if yaml else media)


def _mount(route: Route, shared: Shared, body_timeout_s: float) -> StarletteRoute:
    mounted = StarletteRoute(route.path, Endpoint(route, shared, body_timeout_s), methods=[route.method])
    if route.lane == "long" and mounted.methods:
        mounted.methods.discard("HEAD")  # a stream without a body would be a connection without an end
    return mounted


def make_app(
    service: Service,
    tokens: Authenticator,
    *,
    hosts: Sequence[str] = (),
    metrics_public: bool = False,
    limits: LimitsConfig | None = None,
    body_timeout_s: float = 30.0,
    heartbeat_s: float = 15.0,
    send_timeout_s: float = 10.0,
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> App:
    """The ASGI app for `service`. `hosts`: names and addresses it may be called by, besides loopback's own. Of `limits` those
    on connections and times are for `serving` and `body_timeout_s`."""
    limits = limits or LimitsConfig()
    service.rights.role_of = tokens.role_of
    table = route_table(metrics_public=metrics_public)
    shared = Shared(
        service=service,
        tokens=tokens,
        now_ms=now_ms,
        closing=asyncio.Event(),
        requests=Slots("requests", total=limits.requests, each=limits.requests_per_token),
        rates=Rates(per_s=limits.rate_per_token, burst=limits.burst_per_token),
        bodies=Room("bodies", total=_BODY_BYTES, each=_BODY_BYTES // 4),
        waits=Slots("waits", total=limits.waits, each=limits.waits_per_token),
        streams=Slots("streams", total=limits.streams, each=limits.streams_per_token),
        what_ifs=Slots("what-if questions", total=_WHAT_IFS, each=_WHAT_IFS // 2),
        logins=FailedLogins(lambda kind: service.prometheus.logins.labels(kind).inc(), service.record, now_ms),
        heartbeat_s=heartbeat_s,
        send_timeout_s=send_timeout_s,
        openapi=_encode(openapi(table)),
    )
    return App(table, shared, hosts, body_timeout_s)
