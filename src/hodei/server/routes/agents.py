"""Hosts that join by an agent: enrolment, the exchanges of their sessions, and their administration."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from hodei.api.agents import (
    EnrolRequest,
    EnrolView,
    HostList,
    HostView,
    RotateRequest,
    RotateView,
    TokenList,
    TokenRequest,
    TokenView,
)
from hodei.backends.remote.hub import AgentHub, AgentSession, CredentialCopied, Exchange, Exchanged, SessionOver
from hodei.backends.remote.registry import EnrolmentToken, JoinedNode
from hodei.jobfile.render import iso
from hodei.model.audit import AuditEntry
from hodei.model.effects import SaveAudit
from hodei.model.resources import format_duration, parse_duration_ms
from hodei.process import cancel_tasks
from hodei.server.auth import bearer_token
from hodei.server.errors import reply_to
from hodei.server.route import ADMIN, API, ENROLMENT, MIB, NODE, READ, Call, Param, Reply, Route
from hodei.server.stream import until_disconnected

# A message of an agent may be a page of runs or the output of a command.
EXCHANGE_LIMIT = 16 * MIB
_NAME = Param("name", "name of the node", where="path", maximum=63)
_TOKEN = Param("id", "id of the token", where="path", maximum=20)
_exchange = msgspec.json.Decoder(Exchange)
_enrol_request = msgspec.json.Decoder(EnrolRequest)
_rotate_request = msgspec.json.Decoder(RotateRequest)
_token_request = msgspec.json.Decoder(TokenRequest)
_encode = msgspec.json.Encoder().encode


async def exchange(call: Call) -> Exchanged | HangingExchange:
    hub, request = call.shared.agents, _exchange.decode(call.body)
    secret = bearer_token(call.scope)
    try:
        session = await hub.exchange(hub.registry.find_node(secret), secret, request)
    except CredentialCopied as error:
        if error.first:
            remote = str((call.scope.get("client") or ("",))[0])
            row = AuditEntry(call.shared.now_ms(), call.who.name, "", "agent.connect", "", error.code, remote=remote)
            await call.service.save(SaveAudit(row))
        raise
    if not request.hold_ms:
        return hub.answer(session, with_messages=False)
    return HangingExchange(call, hub, session, min(request.hold_ms, hub.hold_ms(session.node)) / 1000)


class HangingExchange:
    """Answers when there are messages for the agent, or after a while, as an ASGI app."""

    def __init__(self, call: Call, hub: AgentHub, session: AgentSession, hold_s: float) -> None:
        self._call, self._hub, self._session, self._hold_s = call, hub, session, hold_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._session
        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(session.wait(self._hold_s)),
            asyncio.ensure_future(until_disconnected(receive)),
            asyncio.ensure_future(self._call.shared.closing.wait()),
        ]
        session.polls += 1
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1].done():
                return
        finally:
            session.polls -= 1
            await cancel_tasks(tasks)
        if session.closed:
            await reply_to(SessionOver("this session is over"))(scope, receive, send)
            return
        await Reply(_encode(self._hub.answer(session, with_messages=True)))(scope, receive, send)


async def enrol(call: Call) -> EnrolView:
    hub, request = call.shared.agents, _enrol_request.decode(call.body)
    token = hub.registry.find_token(bearer_token(call.scope))
    hub.check_backend(token.backend)
    node = await hub.registry.enrol(
        token, digest=request.digest, instance=request.instance, node=request.node, hostname=request.hostname
    )
    hub.enrolled(node)
    return EnrolView(node.name, node.backend)


async def rotate(call: Call) -> RotateView:
    hub = call.shared.agents
    node = hub.registry.find_node(bearer_token(call.scope))
    await hub.registry.rotate(node.name, _rotate_request.decode(call.body).digest)
    return RotateView(node.name)


async def create_token(call: Call) -> TokenView:
    hub, request = call.shared.agents, _token_request.decode(call.body)
    hub.check_backend(request.backend)
    secret, made = await hub.registry.create_token(
        request.backend, node=request.node, ttl_ms=parse_duration_ms(request.ttl), by=call.who.name
    )
    return _token_view(made, call.shared.now_ms(), secret)


async def list_tokens(call: Call) -> TokenList:
    tokens = call.shared.agents.registry.tokens.values()
    return TokenList([_token_view(token, call.shared.now_ms()) for token in tokens])


async def delete_token(call: Call) -> TokenView:
    return _token_view(await call.shared.agents.registry.delete_token(call.args["id"]), call.shared.now_ms())


def _token_view(token: EnrolmentToken, now_ms: int, secret: str = "") -> TokenView:
    state = "used" if token.used_ms else "expired" if now_ms > token.expires_ms else "valid"
    return TokenView(
        token.id, token.backend, token.node, state, iso(token.made_ms), iso(token.expires_ms), token.by,
        iso(token.used_ms), token.used_node, secret,
    )  # fmt: skip


async def list_hosts(call: Call) -> HostList:
    hub = call.shared.agents
    return HostList([_host_view(hub, node) for _, node in sorted(hub.registry.nodes.items())])


async def show_host(call: Call) -> HostView:
    hub = call.shared.agents
    return _host_view(hub, hub.registry.node(call.args["name"]))


async def remove_host(call: Call) -> HostView:
    hub = call.shared.agents
    return _host_view(hub, await hub.remove(call.args["name"]))


async def revoke_node(call: Call) -> HostView:
    hub = call.shared.agents
    return _host_view(hub, await hub.revoke(call.args["name"]))


def _host_view(hub: AgentHub, node: JoinedNode) -> HostView:
    session = hub.sessions.get(node.name)
    connected = session is not None and not session.closed
    return HostView(
        node.name, node.backend, "revoked" if node.revoked_ms else "connected" if connected else "offline",
        iso(node.joined_ms), iso(node.issued_ms), iso(node.seen_ms), node.version,
        str(node.facts.get("hostname", "")), str(node.facts.get("kernel", "")),
        format_duration(node.offline_ok_ms) if node.offline_ok_ms else "", node.labels, list(node.taints),
    )  # fmt: skip


EXCHANGE_ROUTES = (
    Route("POST", f"{API}/agent/exchange", NODE, "Messages between a joined agent and the server", exchange,
          request=Exchange, response=Exchanged, body_limit=EXCHANGE_LIMIT, concurrency="long", read_only=True),
)  # fmt: skip
ROUTES = (
    Route("POST", f"{API}/agent/enrol", ENROLMENT, "Exchange an enrolment token for the credential of a node", enrol,
          request=EnrolRequest, response=EnrolView),
    Route("POST", f"{API}/agent/rotate", NODE, "Announce the next credential of a node", rotate,
          request=RotateRequest, response=RotateView),
    Route("GET", f"{API}/agent/tokens", ADMIN, "Every enrolment token, without its secret", list_tokens,
          response=TokenList),
    Route("POST", f"{API}/agent/tokens", ADMIN, "Create a one-time enrolment token", create_token,
          request=TokenRequest, response=TokenView, status=201, verb="token"),
    Route("DELETE", f"{API}/agent/tokens/{{id}}", ADMIN, "Delete an enrolment token", delete_token,
          response=TokenView, params=(_TOKEN,), verb="token-delete"),
    Route("GET", f"{API}/hosts", READ, "Every host that has joined", list_hosts, response=HostList),
    Route("GET", f"{API}/hosts/{{name}}", READ, "One host that has joined", show_host, response=HostView,
          params=(_NAME,)),
    Route("DELETE", f"{API}/hosts/{{name}}", ADMIN, "Remove a host; its runs count as lost", remove_host,
          response=HostView, params=(_NAME,)),
    Route("POST", f"{API}/nodes/{{name}}/revoke", ADMIN, "Revoke the credential of a node at once", revoke_node,
          response=HostView, params=(_NAME,)),
)  # fmt: skip
