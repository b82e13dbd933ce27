"""Sessions of agents that dial out. A session is a channel with a `Link` on top, as a connection to a local agent is.

`AgentHub` is one for the server. Each backend with such agents registers for the sessions of its nodes.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct, structs

from hodei import __version__
from hodei.agent.channel import Batch, Channel, ChannelBroken
from hodei.backends.agent_link import Link, Observation
from hodei.backends.remote.registry import AgentRegistry, JoinedNode
from hodei.model.errors import Conflict, InvalidInput, NotFound
from hodei.model.ids import NodeName
from hodei.model.node import Taint

log = logging.getLogger("hodei.agents")
PROTOCOL = 1
MAX_HOLD_MS = 50_000
# Without a request for so long beyond its hold, an agent may be replaced by one from another place.
GRACE_S = 15.0
REPEATED_S = 3600.0
ROTATE_AFTER_MS = 30 * 86_400_000
_SESSION = re.compile(r"[0-9a-f]{32}")
_VERSION = re.compile(r"(\d+)\.(\d+)\.")
_TAINT = re.compile(r"(?P<key>[^=:\s]+)(?:=(?P<value>[^:\s]*))?:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute)")


class SessionOver(Conflict):
    """The agent has to open a new session."""

    code = "SESSION_OVER"


class CredentialCopied(Conflict):
    """A second agent uses the credential of a node. `first`: this was not seen lately."""

    code = "NODE_IN_USE"
    first = False


class Hello(Struct, frozen=True):
    """How an agent opens a session. `place` names the boot of its host and its home there."""

    protocol: int
    version: str
    instance: str
    place: str
    facts: dict[str, Any]
    labels: dict[str, str] = {}
    taints: list[str] = []
    offline_ok_ms: int = 0


class Exchange(Struct, frozen=True):
    """`hold_ms` above 0: hang until there are messages. `skew_ms`: what to add to times of the host's clock."""

    session: str
    ack: int
    first: int
    messages: list[str]
    hold_ms: int = 0
    skew_ms: int = 0
    hello: Hello | None = None


class Exchanged(Struct, frozen=True):
    ack: int
    first: int
    messages: list[str]
    now_ms: int
    hold_ms: int = 0
    rotate: bool = False


class _ChannelTransport:
    """What `Link` needs of a transport, over a channel. One write is one line."""

    def __init__(self, session: AgentSession) -> None:
        self._session = session

    def write(self, data: bytes) -> None:
        self._session.send(data.decode().rstrip("\n"))

    def close(self) -> None:
        self._session.close()


class AgentSession:
    """`last_seen_s`: when its agent last made a request, on the loop's clock."""

    def __init__(self, node: NodeName, id: str, place: str) -> None:
        self.node, self.id, self.place = node, id, place
        self.channel = Channel()
        self.skew_ms = 0
        self.closed = False
        self.polls = 0
        self.last_seen_s = asyncio.get_running_loop().time()
        self._more = asyncio.Event()
        self.on_observations: Callable[[list[Observation]], None] = lambda seen: None
        self.on_closed: Callable[[], None] = lambda: None
        self.link = Link(self._observed)
        self.link.connection_made(_ChannelTransport(self))  # type: ignore[arg-type]

    def _observed(self, seen: list[Observation]) -> None:
        self.on_observations(self.corrected(seen))

    def corrected(self, seen: list[Observation]) -> list[Observation]:
        """With times of the server's clock."""
        if not self.skew_ms:
            return seen
        return [
            structs.replace(
                one,
                at_ms=one.at_ms + self.skew_ms,
                started_ms=one.started_ms + self.skew_ms if one.started_ms else 0,
                checkpoint_ms=one.checkpoint_ms + self.skew_ms if one.checkpoint_ms else 0,
            )
            for one in seen
        ]

    def send(self, message: str) -> None:
        try:
            self.channel.send(message)
        except ChannelBroken as error:
            log.error("node %s: %s", self.node, error)
            self.close()
        self._more.set()

    def take(self, request: Exchange) -> None:
        """SessionOver if the channel is broken."""
        self.last_seen_s = asyncio.get_running_loop().time()
        self.skew_ms = request.skew_ms
        try:
            new = self.channel.receive(Batch(request.ack, request.first, request.messages))
        except ChannelBroken as error:
            log.error("node %s: %s", self.node, error)
            self.close()
            raise SessionOver(str(error)) from None
        for line in new:
            self.link.data_received(line.encode() + b"\n")

    async def wait(self, hold_s: float) -> None:
        """Until there are messages for the agent, the session is closed, or the time has passed."""
        if self.channel.pending or self.closed:
            return
        self._more.clear()
        try:
            async with asyncio.timeout(hold_s):
                await self._more.wait()
        except TimeoutError:
            pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._more.set()
            self.link.connection_lost(None)
            self.on_closed()


class AgentBackend(Protocol):
    """What the hub needs of a backend."""

    name: str

    @property
    def hold_ms(self) -> int:
        """How long a request of its agents may hang."""
        ...

    def connected(self, session: AgentSession, node: JoinedNode) -> None:
        """An agent has opened a session."""
        ...

    def changed(self, node: NodeName) -> None:
        """A node has enrolled, was revoked or removed."""
        ...


class AgentHub:
    def __init__(
        self,
        registry: AgentRegistry,
        now_ms: Callable[[], int],
        *,
        event: Callable[[str, dict[str, Any]], None] = lambda kind, detail: None,
        rotate_after_ms: int = ROTATE_AFTER_MS,
    ) -> None:
        """`event` notes an event in the history."""
        self.registry, self._now_ms, self.event = registry, now_ms, event
        self._rotate_after_ms = rotate_after_ms
        self._backends: dict[str, AgentBackend] = {}
        self.sessions: dict[NodeName, AgentSession] = {}
        self._refused_at_s: dict[NodeName, float] = {}

    def add_backend(self, backend: AgentBackend) -> None:
        self._backends[backend.name] = backend

    def remove_backend(self, backend: AgentBackend) -> None:
        """Its agents try again until there is a backend of that name."""
        if self._backends.get(backend.name) is backend:
            del self._backends[backend.name]
            for node, session in list(self.sessions.items()):
                known = self.registry.nodes.get(node)
                if known is None or known.backend == backend.name:
                    self._close(session)

    def check_backend(self, name: str) -> None:
        if name not in self._backends:
            raise NotFound(
                f"there is no backend {name[:80]!r} that hosts can join",
                hint=f"name one of: {', '.join(sorted(self._backends)) or 'none yet'}; or: hodei backend create {name or 'lab'} --kind hosts",
            )

    async def exchange(self, node: JoinedNode, secret: str, request: Exchange) -> AgentSession:
        """Everything but the wait for messages and the answer (`answer`)."""
        node = await self.registry.used(node, secret)
        if request.hello is not None:
            session = await self._open(node, request.session, request.hello)
        else:
            found = self.sessions.get(node.name)
            if found is None or found.id != request.session or found.closed:
                raise SessionOver("this session is over", hint="the agent opens a new one by itself")
            session = found
        session.take(request)
        return session

    def answer(self, session: AgentSession, *, with_messages: bool) -> Exchanged:
        batch = session.channel.batch(with_messages=with_messages)
        node = self.registry.nodes.get(session.node)
        rotate = node is not None and self._now_ms() - node.issued_ms >= self._rotate_after_ms
        return Exchanged(
            batch.ack, batch.first, batch.messages, self._now_ms(), self.hold_ms(session.node), with_messages and rotate
        )

    def hold_ms(self, node: NodeName) -> int:
        known = self.registry.nodes.get(node)
        backend = self._backends.get(known.backend) if known else None
        return min(MAX_HOLD_MS, backend.hold_ms) if backend else 1000

    async def _open(self, node: JoinedNode, id: str, hello: Hello) -> AgentSession:
        if not _SESSION.fullmatch(id):
            raise InvalidInput("the name of the session is malformed")
        check_version(hello)
        backend = self._backends.get(node.backend)
        if backend is None:
            raise Conflict(
                f"backend {node.backend} of node {node.name} does not exist or is not open now", code="NO_BACKEND"
            )
        before = self.sessions.get(node.name)
        if before is not None and before.id == id and not before.closed:
            return before  # its answer was lost
        if hello.instance != node.instance or (before is not None and self._is_alive(before, hello)):
            self._refuse_copy(node, hello)
        described = structs.replace(
            node, seen_ms=self._now_ms(), version=hello.version, facts=hello.facts, labels=hello.labels,
            taints=tuple(hello.taints), offline_ok_ms=hello.offline_ok_ms,
        )  # fmt: skip
        node_taints(described)
        await self.registry.describe(described)
        if self.registry.nodes.get(node.name, node).revoked_ms or self._backends.get(node.backend) is not backend:
            raise SessionOver("the node was revoked, or its backend removed")
        before = self.sessions.get(node.name)
        session = AgentSession(node.name, id, hello.place)
        self.sessions[node.name] = session
        if before is not None:
            before.close()
        self._refused_at_s.pop(node.name, None)
        backend.connected(session, described)
        return session

    def _is_alive(self, session: AgentSession, hello: Hello) -> bool:
        """Whether the session belongs to another agent that still runs. An agent of the same home and boot is the successor:
        two cannot hold its lock."""
        if session.closed or session.place == hello.place:
            return False
        silent_s = asyncio.get_running_loop().time() - session.last_seen_s
        return session.polls > 0 or silent_s < self.hold_ms(session.node) / 1000 + GRACE_S

    def _refuse_copy(self, node: JoinedNode, hello: Hello) -> None:
        now_s = asyncio.get_running_loop().time()
        refusal = CredentialCopied(
            f"another agent is connected as node {node.name}",
            hint="if this is a copy of its home, join again with a token of its own; else wait a minute",
        )
        # It keeps trying: one event an hour says enough.
        refusal.first = now_s - self._refused_at_s.get(node.name, -REPEATED_S) >= REPEATED_S
        if refusal.first:
            self._refused_at_s[node.name] = now_s
            log.error("a second agent uses the credential of node %s and is refused", node.name)
            self.event("node.credential_copied", {"node": node.name, "backend": node.backend, "place": hello.place})
        raise refusal

    def enrolled(self, node: JoinedNode) -> None:
        """A session of an earlier credential ends."""
        self._close(self.sessions.get(node.name))
        if backend := self._backends.get(node.backend):
            backend.changed(node.name)

    async def revoke(self, name: NodeName) -> JoinedNode:
        node = await self.registry.revoke(name)
        self._forget(node)
        return node

    async def remove(self, name: NodeName) -> JoinedNode:
        node = await self.registry.remove(name)
        self._forget(node)
        return node

    def _forget(self, node: JoinedNode) -> None:
        self._close(self.sessions.get(node.name))
        if backend := self._backends.get(node.backend):
            backend.changed(node.name)

    def _close(self, session: AgentSession | None) -> None:
        if session is not None:
            if self.sessions.get(session.node) is session:
                del self.sessions[session.node]
            session.close()


def check_version(hello: Hello) -> None:
    """Conflict for an agent that is too old or too new: one minor version either way is fine."""
    ours, theirs = _VERSION.match(__version__), _VERSION.match(hello.version)
    near = (
        ours is not None
        and theirs is not None
        and ours[1] == theirs[1]
        and abs(int(ours[2]) - int(theirs[2])) <= 1
        and hello.protocol == PROTOCOL
    )
    if not near:
        raise Conflict(
            f"the agent has version {hello.version[:40]} (protocol {hello.protocol}), the server {__version__} ({PROTOCOL})",
            hint="copy the agent of this server to the host again: hodei agent bundle",
            code="AGENT_VERSION",
        )


def node_taints(node: JoinedNode) -> tuple[Taint, ...]:
    """InvalidInput for a taint or label that cannot be used."""
    out = []
    for text in node.taints:
        found = _TAINT.fullmatch(text)
        if found is None:
            raise InvalidInput(f"{text[:80]!r} is not a taint", hint="write key=value:NoSchedule")
        out.append(Taint(found["key"], found["value"] or "", found["effect"]))  # type: ignore[arg-type]
    for key, value in node.labels.items():
        if not 0 < len(key) <= 317 or len(value) > 253 or not (key + value).isprintable():
            raise InvalidInput(f"the label {key[:80]!r} is empty, too long or not printable")
    return tuple(out)
