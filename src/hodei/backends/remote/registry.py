"""Which agents may connect: one-time enrolment tokens, and the credential of each node. Only hashes are kept.

A host chooses its credential itself and sends the hash with its token, so an answer holds no secret, and a lost answer can
be repeated. A credential belongs to one node and to one agent home (`instance`).
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct, structs

from hodei.agent.credentials import CREDENTIAL_PREFIX, ENROLMENT_PREFIX, digest_of, is_well_formed, new_secret
from hodei.model.errors import Conflict, InvalidInput, NotFound, NotPermitted, did_you_mean
from hodei.model.ids import NodeName

log = logging.getLogger("hodei.agents")
NOTE = "agents"
# The same host may repeat an enrolment whose answer was lost for this long.
REPEAT_MS = 300_000
KEEP_TOKENS_MS = 30 * 86_400_000
MAX_NAME = 63
_NODE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_INSTANCE = re.compile(r"[0-9a-f]{8,32}")

# Called with the kind of an event, its detail, and the new content of the note.
Commit = Callable[[str, dict[str, Any], str], Awaitable[None]]


class EnrolmentToken(Struct, frozen=True, omit_defaults=True):
    """`node`: the only name it may enrol, "" for any. The `used_` fields say by whom, once it was used."""

    id: str
    digest: str
    backend: str
    made_ms: int
    expires_ms: int
    node: NodeName = ""
    by: str = ""
    used_ms: int = 0
    used_node: NodeName = ""
    used_instance: str = ""
    used_digest: str = ""


class JoinedNode(Struct, frozen=True, omit_defaults=True):
    """A host that has enrolled. `next_digest`: its new credential, until the first use; the old one is valid until then.
    The rest is what the agent said about its host when it connected last."""

    name: NodeName
    backend: str
    instance: str
    digest: str
    issued_ms: int
    joined_ms: int
    next_digest: str = ""
    revoked_ms: int = 0
    seen_ms: int = 0
    version: str = ""
    facts: dict[str, Any] = {}
    labels: dict[str, str] = {}
    taints: tuple[str, ...] = ()
    offline_ok_ms: int = 0


class Stored(Struct, frozen=True, omit_defaults=True):
    tokens: dict[str, EnrolmentToken] = {}
    nodes: dict[NodeName, JoinedNode] = {}


class UnknownCredential(NotPermitted):
    """No such token or credential. `kind`: malformed or unknown."""

    code = "UNAUTHORIZED"

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class AgentRegistry:
    """`commit` makes a change durable, together with its event."""

    def __init__(self, now_ms: Callable[[], int], commit: Commit | None = None, note: str = "") -> None:
        self._now_ms = now_ms
        self.commit = commit
        self._stored = msgspec.json.decode(note, type=Stored) if note else Stored()
        self._by_digest: dict[str, NodeName] = {}
        self._index()

    def _index(self) -> None:
        self._by_digest = {}
        for node in self._stored.nodes.values():
            if not node.revoked_ms:
                self._by_digest[node.digest] = node.name
                if node.next_digest:
                    self._by_digest[node.next_digest] = node.name

    async def _save(self, stored: Stored, kind: str, **detail: Any) -> None:
        """In memory at once, so that concurrent requests see it; taken back if it cannot be stored."""
        before, self._stored = self._stored, stored
        self._index()
        if self.commit is None:
            return
        try:
            await self.commit(kind, detail, msgspec.json.encode(stored).decode())
        except BaseException:
            if self._stored is stored:
                self._stored = before
                self._index()
            raise

    @property
    def nodes(self) -> dict[NodeName, JoinedNode]:
        return self._stored.nodes

    @property
    def tokens(self) -> dict[str, EnrolmentToken]:
        return self._stored.tokens

    def node(self, name: NodeName) -> JoinedNode:
        found = self._stored.nodes.get(name)
        if found is None:
            raise NotFound(
                f"no host has joined as {name[:80]!r}{did_you_mean(name, self._stored.nodes)}", hint="hodei host list"
            )
        return found

    async def create_token(
        self, backend: str, *, node: NodeName = "", ttl_ms: int, by: str = ""
    ) -> tuple[str, EnrolmentToken]:
        """The token itself, which is shown once, and its record."""
        if node:
            check_node_name(node)
        if not 60_000 <= ttl_ms <= 30 * 86_400_000:
            raise InvalidInput("a token is valid for 1m to 30d", hint="for example --ttl 1h")
        now, secret = self._now_ms(), new_secret(ENROLMENT_PREFIX)
        made = EnrolmentToken(secrets.token_hex(4), digest_of(secret), backend, now, now + ttl_ms, node, by)
        kept = {id: token for id, token in self._stored.tokens.items() if token.expires_ms > now - KEEP_TOKENS_MS}
        stored = structs.replace(self._stored, tokens={**kept, made.id: made})
        await self._save(stored, "agent.token", token=made.id, backend=backend)
        return secret, made

    async def delete_token(self, id: str) -> EnrolmentToken:
        found = self._stored.tokens.get(id)
        if found is None:
            raise NotFound(f"there is no enrolment token {id[:80]!r}", hint="hodei agent token list")
        left = {key: token for key, token in self._stored.tokens.items() if key != id}
        await self._save(structs.replace(self._stored, tokens=left), "agent.token_deleted", token=id)
        return found

    def find_token(self, secret: str) -> EnrolmentToken:
        """UnknownCredential if there is none. Used and expired ones are found too."""
        if not is_well_formed(secret, ENROLMENT_PREFIX):
            raise UnknownCredential("the enrolment token is incomplete or mistyped", "malformed")
        digest, found = digest_of(secret), None
        for token in self._stored.tokens.values():
            if hmac.compare_digest(token.digest, digest):
                found = token
        if found is None:
            raise UnknownCredential("the enrolment token is not known to this server", "unknown")
        return found

    async def enrol(
        self, token: EnrolmentToken, *, digest: str, instance: str, node: NodeName, hostname: str
    ) -> JoinedNode:
        """The node that the host becomes. NotPermitted if the token was used or has expired."""
        if not _DIGEST.fullmatch(digest) or not _INSTANCE.fullmatch(instance):
            raise InvalidInput("the digest of the credential or the name of the agent's home is malformed")
        now = self._now_ms()
        token = self._stored.tokens.get(token.id, token)
        if token.used_ms:
            same = token.used_digest == digest and token.used_instance == instance
            if same and now - token.used_ms < REPEAT_MS and (known := self._stored.nodes.get(token.used_node)):
                return known  # its answer was lost
            raise NotPermitted(
                "the enrolment token was used before",
                hint="create a new one: hodei agent token create; if you did not use it, see `hodei audit`",
                code="ENROLMENT_USED",
            )
        if now > token.expires_ms:
            raise NotPermitted(
                "the enrolment token has expired", hint="create a new one: hodei agent token create",
                code="ENROLMENT_EXPIRED",
            )  # fmt: skip
        if token.node and node and node != token.node:
            raise NotPermitted(
                f"the enrolment token is for node {token.node}, not {node[:80]}", code="ENROLMENT_OTHER_NODE"
            )
        name = check_node_name(token.node or node or hostname)
        known = self._stored.nodes.get(name)
        if known is not None and not known.revoked_ms and known.instance != instance and not token.node:
            raise Conflict(
                f"another host has joined as node {name}",
                hint=f"choose another --node; or replace it with a token for it: hodei agent token create --node {name}",
            )
        made = JoinedNode(name, token.backend, instance, digest, now, now)
        used = structs.replace(token, used_ms=now, used_node=name, used_instance=instance, used_digest=digest)
        stored = Stored({**self._stored.tokens, token.id: used}, {**self._stored.nodes, name: made})
        await self._save(stored, "agent.enrolled", node=name, backend=token.backend, token=token.id)
        return made

    def find_node(self, secret: str) -> JoinedNode:
        """Whose credential it is. UnknownCredential also for revoked ones."""
        if not is_well_formed(secret, CREDENTIAL_PREFIX):
            raise UnknownCredential("the credential of the agent is malformed", "malformed")
        # A lookup by hash: its timing says nothing about the secret.
        name = self._by_digest.get(digest_of(secret))
        if name is None:
            raise UnknownCredential(
                "the credential of the agent is not known to this server, or was revoked", "unknown"
            )
        return self._stored.nodes[name]

    async def used(self, node: JoinedNode, secret: str) -> JoinedNode:
        """A new credential replaces the old one when it is used for the first time."""
        node = self._stored.nodes[node.name]
        if not node.next_digest or digest_of(secret) != node.next_digest:
            return node
        node = structs.replace(node, digest=node.next_digest, next_digest="", issued_ms=self._now_ms())
        await self._put(node, "agent.rotated")
        return node

    async def rotate(self, name: NodeName, digest: str) -> None:
        """Accept a new credential, besides the old one."""
        if not _DIGEST.fullmatch(digest):
            raise InvalidInput("the digest of the credential is malformed")
        node = self.node(name)
        if digest not in (node.digest, node.next_digest):
            await self._put(structs.replace(node, next_digest=digest), "agent.rotating")

    async def describe(self, node: JoinedNode) -> None:
        """What the agent says about its host. Free disk space changes all the time, and alone is not worth a write."""
        before = self._stored.nodes.get(node.name)
        if before is None:
            return
        storage = {"storage_bytes": node.facts.get("storage_bytes", 0)}
        if structs.replace(before, seen_ms=0, facts={**before.facts, **storage}) == structs.replace(node, seen_ms=0):
            self._stored = structs.replace(self._stored, nodes={**self._stored.nodes, node.name: node})
        else:
            await self._put(node, "agent.described")

    async def revoke(self, name: NodeName) -> JoinedNode:
        node = self.node(name)
        if not node.revoked_ms:
            node = structs.replace(node, revoked_ms=self._now_ms(), next_digest="")
            await self._put(node, "node.revoked")
        return node

    async def remove(self, name: NodeName) -> JoinedNode:
        node = self.node(name)
        left = {key: one for key, one in self._stored.nodes.items() if key != name}
        await self._save(structs.replace(self._stored, nodes=left), "node.removed", node=name, backend=node.backend)
        return node

    async def _put(self, node: JoinedNode, kind: str) -> None:
        nodes = {**self._stored.nodes, node.name: node}
        await self._save(structs.replace(self._stored, nodes=nodes), kind, node=node.name, backend=node.backend)


def check_node_name(name: str) -> NodeName:
    if not _NODE.fullmatch(name):
        raise InvalidInput(
            f"{name[:80]!r} is not a name for a node",
            hint=f"use lower-case letters, digits, - and ., at most {MAX_NAME}",
        )
    return name
