"""Backends on the wire: how each is, what it can do, and what it was told; commands beside runs."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class BackendView(Struct, frozen=True):
    """`state`: ok, connecting, unhealthy or disabled; `since` and `reason` say more of the last three. `source`: file (it is
    in the configuration file, and cannot be removed) or added. Secrets in `settings` are masked."""

    name: str
    kind: str
    state: str
    since: str
    reason: str
    source: str
    nodes: int
    runs: int
    took_ms: int
    capabilities: list[str]
    settings: dict[str, Any]


class BackendList(Struct, frozen=True):
    backends: list[BackendView]


class BackendRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`settings`: the keys that its table in the configuration file would have, but for `kind`."""

    name: str
    kind: str
    settings: dict[str, Any] = {}


class NodeUsageView(Struct, frozen=True):
    """Measured amounts: cpu in thousandths of a core, memory in bytes."""

    node: str
    used: dict[str, int]


class UsageList(Struct, frozen=True):
    nodes: list[NodeUsageView]


class ExecuteRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A program and its words; no shell reads them. `member`: which of the job's, by number."""

    command: list[str]
    timeout_s: int = 30
    member: int = 0


class ExecutedView(Struct, frozen=True):
    """`exit_code` is null if it was not over in time. What is no text is replaced. `cut`: more was said."""

    run: str
    exit_code: int | None
    stdout: str
    stderr: str
    cut: bool


class NodeExecuteRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A program and its words; no shell reads them."""

    command: list[str]
    timeout_s: int = 30


class NodeExecutedView(Struct, frozen=True):
    """As ExecutedView, of a command on a node."""

    node: str
    exit_code: int | None
    stdout: str
    stderr: str
    cut: bool
