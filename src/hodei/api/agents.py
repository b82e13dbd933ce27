"""Requests and responses about hosts that join by an agent."""

from __future__ import annotations

from msgspec import Struct


class TokenRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`node`: the only name that it may enrol. `ttl`: how long it is valid."""

    backend: str
    node: str = ""
    ttl: str = "1h"


class TokenView(Struct, frozen=True):
    """An enrolment token; `token` itself is only in the response that creates it. `state`: valid, used or expired."""

    id: str
    backend: str
    node: str
    state: str
    made_at: str
    expires_at: str
    by: str
    used_at: str = ""
    used_by: str = ""
    token: str = ""


class TokenList(Struct, frozen=True):
    tokens: list[TokenView]


class HostView(Struct, frozen=True):
    """A host that has joined. `state`: connected, offline or revoked."""

    name: str
    backend: str
    state: str
    joined_at: str
    credential_at: str
    connected_at: str
    version: str
    hostname: str = ""
    kernel: str = ""
    offline_ok: str = ""
    labels: dict[str, str] = {}
    taints: list[str] = []


class HostList(Struct, frozen=True):
    hosts: list[HostView]


class EnrolRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`digest`: SHA-256 of the credential that the host has chosen. `instance`: random name of the agent's home."""

    digest: str
    instance: str
    node: str
    hostname: str
    protocol: int
    version: str


class EnrolView(Struct, frozen=True):
    node: str
    backend: str


class RotateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    digest: str


class RotateView(Struct, frozen=True):
    node: str
