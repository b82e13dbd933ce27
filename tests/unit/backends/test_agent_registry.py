"""Enrolment tokens and credentials of joined agents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hodei.agent.credentials import CREDENTIAL_PREFIX, digest_of, new_secret
from hodei.backends.remote.hub import Hello, check_version, node_taints
from hodei.backends.remote.registry import REPEAT_MS, AgentRegistry, JoinedNode, UnknownCredential
from hodei.model.errors import Conflict, InvalidInput, NotPermitted, Unavailable

INSTANCE = "ab" * 8


class Desk:
    """A registry with a clock of its own, and everything that it has stored."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.saved: list[tuple[str, dict[str, Any], str]] = []
        self.full = False
        self.registry = AgentRegistry(lambda: self.now_ms, self._commit)

    async def _commit(self, kind: str, detail: dict[str, Any], body: str) -> None:
        if self.full:
            raise Unavailable("the disk is full")
        self.saved.append((kind, detail, body))

    def restarted(self) -> AgentRegistry:
        return AgentRegistry(lambda: self.now_ms, self._commit, self.saved[-1][2])

    def token(self, **fields: Any) -> str:
        return asyncio.run(self.registry.create_token("lab", **{"ttl_ms": 3_600_000, **fields}))[0]

    def enrol(
        self, secret: str, credential: str, *, node: str = "", hostname: str = "host", instance: str = INSTANCE
    ) -> JoinedNode:
        token = self.registry.find_token(secret)
        return asyncio.run(
            self.registry.enrol(token, digest=digest_of(credential), instance=instance, node=node, hostname=hostname)
        )


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_token_enrols_one_host_and_only_hashes_are_stored(desk):
    secret, credential = desk.token(), new_secret(CREDENTIAL_PREFIX)
    node = desk.enrol(secret, credential)
    assert (node.name, node.backend) == ("host", "lab")
    assert desk.registry.find_node(credential).name == "host"
    assert [kind for kind, _, _ in desk.saved] == ["agent.token", "agent.enrolled"]
    assert not any(text in body for _, _, body in desk.saved for text in (secret, credential))
    assert desk.restarted().find_node(credential).name == "host"


def test_a_used_token_is_refused_and_a_lost_answer_is_repeated(desk):
    secret, credential = desk.token(), new_secret(CREDENTIAL_PREFIX)
    desk.enrol(secret, credential)
    assert desk.enrol(secret, credential).name == "host"  # its answer was lost
    with pytest.raises(NotPermitted, match="used before") as stolen:
        desk.enrol(secret, new_secret(CREDENTIAL_PREFIX))
    assert stolen.value.code == "ENROLMENT_USED"
    with pytest.raises(NotPermitted, match="used before"):
        desk.enrol(secret, credential, instance="cd" * 8)
    desk.now_ms += REPEAT_MS + 1
    with pytest.raises(NotPermitted, match="used before"):
        desk.enrol(secret, credential)


def test_expired_and_foreign_tokens_are_refused(desk):
    secret = desk.token(ttl_ms=60_000)
    desk.now_ms += 60_001
    with pytest.raises(NotPermitted, match="expired"):
        desk.enrol(secret, new_secret(CREDENTIAL_PREFIX))
    bound = desk.token(node="edge-1")
    with pytest.raises(NotPermitted, match="for node edge-1"):
        desk.enrol(bound, new_secret(CREDENTIAL_PREFIX), node="edge-2")
    assert desk.enrol(bound, new_secret(CREDENTIAL_PREFIX)).name == "edge-1"
    for wrong in ("hode_x", new_secret("hode_")):
        with pytest.raises(UnknownCredential):
            desk.registry.find_token(wrong)


def test_a_name_is_taken_over_only_by_a_token_for_it(desk):
    first, second = new_secret(CREDENTIAL_PREFIX), new_secret(CREDENTIAL_PREFIX)
    desk.enrol(desk.token(), first)
    with pytest.raises(Conflict, match="another host has joined as node host"):
        desk.enrol(desk.token(), second, instance="cd" * 8)
    desk.enrol(desk.token(node="host"), second, instance="cd" * 8)
    with pytest.raises(UnknownCredential):
        desk.registry.find_node(first)
    assert desk.registry.find_node(second).instance == "cd" * 8


def test_a_new_credential_replaces_the_old_one_at_its_first_use(desk):
    old, new = new_secret(CREDENTIAL_PREFIX), new_secret(CREDENTIAL_PREFIX)
    node = desk.enrol(desk.token(), old)

    async def rotate() -> None:
        registry = desk.registry
        await registry.rotate("host", digest_of(new))
        await registry.rotate("host", digest_of(new))
        assert registry.find_node(old) == registry.find_node(new)
        await registry.used(node, old)
        assert registry.find_node(old).name == "host"
        await registry.used(node, new)

    asyncio.run(rotate())
    with pytest.raises(UnknownCredential):
        desk.registry.find_node(old)
    assert desk.restarted().find_node(new).name == "host"


def test_a_revoked_credential_is_unknown_until_the_host_joins_again(desk):
    credential = new_secret(CREDENTIAL_PREFIX)
    desk.enrol(desk.token(), credential)
    asyncio.run(desk.registry.revoke("host"))
    for registry in (desk.registry, desk.restarted()):
        with pytest.raises(UnknownCredential):
            registry.find_node(credential)
    assert not desk.enrol(desk.token(), new_secret(CREDENTIAL_PREFIX)).revoked_ms


def test_nothing_is_granted_that_could_not_be_stored(desk):
    secret, credential = desk.token(), new_secret(CREDENTIAL_PREFIX)
    desk.full = True
    with pytest.raises(Unavailable):
        desk.enrol(secret, credential)
    with pytest.raises(UnknownCredential):
        desk.registry.find_node(credential)
    desk.full = False
    assert desk.enrol(secret, credential).name == "host"


def test_what_a_host_says_about_itself_is_stored_when_it_changes(desk):
    node = desk.enrol(desk.token(), new_secret(CREDENTIAL_PREFIX))
    described = JoinedNode(
        **{**{f: getattr(node, f) for f in node.__struct_fields__}, "facts": {"cpu_milli": 4000, "storage_bytes": 1}}
    )
    fuller = JoinedNode(
        **{
            **{f: getattr(described, f) for f in node.__struct_fields__},
            "facts": {"cpu_milli": 4000, "storage_bytes": 2},
        }
    )
    for each in (described, fuller, described):
        asyncio.run(desk.registry.describe(each))
    assert [kind for kind, _, _ in desk.saved].count("agent.described") == 1


def test_names_tokens_taints_and_labels_are_checked(desk):
    with pytest.raises(InvalidInput):
        desk.token(node="No/Name")
    with pytest.raises(InvalidInput):
        desk.token(ttl_ms=1)
    base = {"name": "n", "backend": "lab", "instance": INSTANCE, "digest": "", "issued_ms": 0, "joined_ms": 0}
    assert node_taints(JoinedNode(**base, taints=("a=b:NoSchedule",)))[0].key == "a"
    for wrong in ({"taints": ("x",)}, {"labels": {"": "x"}}, {"labels": {"a": "\n"}}):
        with pytest.raises(InvalidInput):
            node_taints(JoinedNode(**base, **wrong))


@pytest.mark.parametrize(
    ("version", "protocol", "fits"),
    [("0.1.0", 1, True), ("0.2.5", 1, True), ("0.0.9", 1, True), ("0.3.0", 1, False), ("1.1.0", 1, False),
     ("0.1.0", 2, False), ("", 1, False)],
)  # fmt: skip
def test_one_minor_version_either_way_is_accepted(monkeypatch, version, protocol, fits):
    monkeypatch.setattr("hodei.backends.remote.hub.__version__", "0.1.0")
    hello = Hello(protocol, version, INSTANCE, "place", {})
    if fits:
        check_version(hello)
        return
    with pytest.raises(Conflict) as refusal:
        check_version(hello)
    assert refusal.value.code == "AGENT_VERSION"
