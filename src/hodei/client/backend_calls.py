"""Calls about backends, and commands beside runs. `api.Client` has them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from hodei.api.backends import (
    BackendList,
    BackendRequest,
    BackendView,
    ExecutedView,
    ExecuteRequest,
    NodeExecutedView,
    NodeExecuteRequest,
    NodeUsageView,
    UsageList,
)
from hodei.client.job_refs import Reference
from hodei.client.resource_calls import MoreCalls


class BackendCalls(MoreCalls):
    def backends(self) -> list[BackendView]:
        return self._get("/backends", BackendList).backends

    def backend(self, name: str) -> BackendView:
        return self._get(f"/backends/{quote(name, safe='')}", BackendView)

    def add_backend(self, name: str, kind: str, settings: Mapping[str, Any] | None = None) -> BackendView:
        return self._post("/backends", BackendView, BackendRequest(name, kind, dict(settings or {})), again=False)

    def disable_backend(self, name: str) -> BackendView:
        return self._post(f"/backends/{quote(name, safe='')}/disable", BackendView)

    def enable_backend(self, name: str) -> BackendView:
        return self._post(f"/backends/{quote(name, safe='')}/enable", BackendView)

    def remove_backend(self, name: str, *, force: bool = False) -> BackendView:
        return self._delete(f"/backends/{quote(name, safe='')}{'?force=1' if force else ''}", BackendView)

    def backend_usage(self, name: str) -> list[NodeUsageView]:
        return self._get(f"/backends/{quote(name, safe='')}/usage", UsageList).nodes

    def execute(self, job: Reference, command: Sequence[str], *, member: int = 0, timeout_s: int = 30) -> ExecutedView:
        """A command beside a running job; no shell reads its words."""
        request = ExecuteRequest(list(command), timeout_s, member)
        return self._post(f"/jobs/{self._one(job)}/execute", ExecutedView, request, again=False)

    def execute_on(self, node: str, command: Sequence[str], *, timeout_s: int = 30) -> NodeExecutedView:
        """A command on a node, for administrators; no shell reads its words."""
        request = NodeExecuteRequest(list(command), timeout_s)
        return self._post(f"/nodes/{quote(node, safe='')}/execute", NodeExecutedView, request, again=False)
