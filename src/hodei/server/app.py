"""The ASGI app, built from the route table. Every request: route, policy, parameters, body, handler, response."""

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

from hodei.backends.remote.hub import AgentHub
from hodei.backends.remote.registry import AgentRegistry
from hodei.model.config import LimitsConfig
from hodei.server.audit import FailedLogins, caller_context, code_of, complete_audit
from hodei.server.auth import Authenticator, authorize, authorize_agent, check_not_revoked
from hodei.server.errors import (
    Forbidden,
    MethodNotAllowed,
    PathNotFound,
    RateLimited,
    ServerBusy,
    TooManyRequests,
    Unauthorized,
    UnsupportedMediaType,
    reply_to,
)
from hodei.server.guard import Guard, check_depth, read_body
from hodei.server.openapi import openapi
from hodei.server.rate_limits import RateLimit, UsageLimit, limit_key
from hodei.server.route import (
    ANYONE,
    ENROLMENT,
    MIB,
    NODE,
    SMALL_BODY,
    Call,
    Principal,
    Reply,
    Route,
    Shared,
    closest,
    read_params,
)
from hodei.server.routes import route_table

if TYPE_CHECKING:
    from hodei.runtime.service import Service

YAML_LIMIT = MIB
_MAX_BODY_BYTES = 512 * MIB
_MAX_WHAT_IFS = 4
_encode = msgspec.json.Encoder().encode


class App:
    """`close` ends waits and streams, so that a shutdown does not wait for them."""

    def __init__(self, table: Sequence[Route], shared: Shared, hosts: Sequence[str], body_timeout_s: float) -> None:
        self.table = tuple(table)
        self.shared = shared
        self.router = Router([_mount(route, shared, body_timeout_s) for route in self.table], redirect_slashes=False)
        self._guard = Guard(self._route, hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    def close(self) -> None:
        self.shared.closing.set()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes Starlette raise for an unknown path or method instead of responding itself
        try:
            await self.router(scope, receive, send)
        except HTTPException as error:
            refusal = self._wrong_method(scope) if error.status_code == 405 else self._unknown_path(scope)
            await reply_to(refusal)(scope, receive, send)

    def _unknown_path(self, scope: Scope) -> PathNotFound:
        path = scope["path"]
        near = closest(path, (route.path for route in self.table))
        hint = f"did you mean {near}?" if near else "/api/v1/openapi.json lists every path"
        return PathNotFound(f"there is no path {path[:200]}", hint=hint)

    def _wrong_method(self, scope: Scope) -> MethodNotAllowed:
        routes = [route for route in self.router.routes if isinstance(route, StarletteRoute)]
        methods = {m for route in routes if route.path_regex.match(scope["path"]) for m in route.methods or ()}
        allowed = ", ".join(sorted(methods))
        message = f"{scope['method'][:20]} is not possible at {scope['path'][:200]}"
        return MethodNotAllowed(message, hint=f"possible: {allowed}", headers={"allow": allowed})


class Endpoint:
    def __init__(self, route: Route, shared: Shared, body_timeout_s: float) -> None:
        self.route, self.shared, self._body_timeout_s = route, shared, body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            who = self._authorize(scope)
        except Forbidden as error:
            answer: ASGIApp = reply_to(error)
            with caller_context(self.shared, self.route, error.who or ANYONE, scope) as caller:
                if caller is not None:
                    await complete_audit(self.shared, caller, answer, error.code)
        except Unauthorized as error:
            answer = self._refuse(error, scope)
        except Exception as error:
            answer = reply_to(error)
        else:
            with caller_context(self.shared, self.route, who, scope) as caller:
                answer, refused = await self._attempt(who, scope, receive)
                # No row for a request refused by a limit: a flood must not fill the disk.
                if caller is not None and not isinstance(refused, RateLimited | TooManyRequests | ServerBusy):
                    await complete_audit(self.shared, caller, answer, code_of(answer, refused))
        await answer(scope, receive, send)

    def _authorize(self, scope: Scope) -> Principal:
        policy, tokens = self.route.policy, self.shared.tokens
        if policy in (ENROLMENT, NODE):
            return authorize_agent(policy, scope, self.shared.agents.registry, tokens)
        return authorize(policy, scope, tokens)

    def _refuse(self, error: Unauthorized, scope: Scope) -> Reply:
        self.shared.failed_logins.record(error, self.route, scope)
        try:
            self.shared.rates.spend(limit_key(ANYONE, scope))
        except RateLimited as too_fast:
            return reply_to(too_fast)
        return reply_to(error)

    async def _attempt(self, who: Principal, scope: Scope, receive: Receive) -> tuple[ASGIApp, Exception | None]:
        try:
            return await self._answer(who, scope, receive), None
        except Exception as error:
            return reply_to(error), error

    async def _answer(self, who: Principal, scope: Scope, receive: Receive) -> ASGIApp:
        route, key = self.route, limit_key(who, scope)
        if route.concurrency == "exempt":
            return self._response(await route.handler(Call(self.shared, who, key, read_params(route, scope), scope)))
        self.shared.rates.spend(key)
        with self.shared.bodies.hold_growing(key) as take:
            if route.concurrency == "short":
                with self.shared.requests.hold(key):
                    return self._response(await route.handler(await self._read(who, key, scope, receive, take)))
            # The handler of a long request has a limit of its own; until its body is read it counts as a short one.
            with self.shared.requests.hold(key):
                call = await self._read(who, key, scope, receive, take)
            answer = await route.handler(call)
            if route.method == "GET" and not callable(answer):
                check_not_revoked(who, self.shared.tokens)  # a wait may have been long; streams check themselves
            return self._response(answer)

    def _response(self, answer: Any) -> ASGIApp:
        response: ASGIApp = answer if callable(answer) else Reply(_encode(answer), status=self.route.status)
        return response

    async def _read(
        self, who: Principal, key: str, scope: Scope, receive: Receive, take: Callable[[int], None]
    ) -> Call:
        call = Call(self.shared, who, key, read_params(self.route, scope), scope)
        return await self._with_body(call, receive, take) if self.route.request is not None else call

    async def _with_body(self, call: Call, receive: Receive, take: Callable[[int], None]) -> Call:
        given = next((value for name, value in call.scope["headers"] if name == b"content-type"), b"")
        media = given.decode("latin-1").partition(";")[0].strip().lower() or "application/json"
        yaml = self.route.request is bytes and media in ("application/yaml", "application/x-yaml", "text/yaml")
        other = media in self.route.accepts
        if not yaml and not other and media != "application/json":
            known = ("application/yaml",) if self.route.request is bytes else self.route.accepts
            either = " or ".join(("application/json", *known))
            raise UnsupportedMediaType(f"cannot read {media[:80]!r}", hint=f"send the header 'Content-Type: {either}'")
        # YAML takes a hundred times longer to parse than JSON, and large submits come from programs.
        limit = min(self.route.body_limit, YAML_LIMIT) if yaml else self.route.body_limit
        body = await read_body(call.scope, receive, limit=limit, timeout_s=self._body_timeout_s, take=take)
        check_not_revoked(call.who, call.shared.tokens)
        if not yaml and not other and len(body) > SMALL_BODY:
            await asyncio.to_thread(check_depth, body)
        elif not yaml and not other:
            check_depth(body)
        return replace(call, body=body, content_type="application/yaml" if yaml else media)


def _mount(route: Route, shared: Shared, body_timeout_s: float) -> StarletteRoute:
    mounted = StarletteRoute(route.path, Endpoint(route, shared, body_timeout_s), methods=[route.method])
    if route.concurrency == "long" and mounted.methods:
        mounted.methods.discard("HEAD")  # a HEAD of a stream would never end
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
    """`hosts`: names and addresses of the server, besides loopback. The limits on connections and times in `limits` are not
    used here, but by `serving` and as `body_timeout_s`."""
    limits = limits or LimitsConfig()
    service.rights.role_of = tokens.role_of
    table = route_table(metrics_public=metrics_public)
    shared = Shared(
        service=service,
        tokens=tokens,
        agents=getattr(service, "agents", None) or AgentHub(AgentRegistry(now_ms), now_ms),
        now_ms=now_ms,
        closing=asyncio.Event(),
        requests=UsageLimit("requests", total=limits.requests, per_caller=limits.requests_per_token),
        rates=RateLimit(per_s=limits.rate_per_token, burst=limits.burst_per_token),
        bodies=UsageLimit("bytes of bodies", total=_MAX_BODY_BYTES, per_caller=_MAX_BODY_BYTES // 4),
        waits=UsageLimit("waits", total=limits.waits, per_caller=limits.waits_per_token),
        streams=UsageLimit("streams", total=limits.streams, per_caller=limits.streams_per_token),
        what_ifs=UsageLimit("what-if queries", total=_MAX_WHAT_IFS, per_caller=_MAX_WHAT_IFS // 2),
        failed_logins=FailedLogins(
            lambda kind: service.prometheus.auth_failures.labels(kind).inc(), service.save, now_ms
        ),
        heartbeat_s=heartbeat_s,
        send_timeout_s=send_timeout_s,
        openapi=_encode(openapi(table)),
    )
    return App(table, shared, hosts, body_timeout_s)
