"""Calls about nodes, backends, reservations, periodic jobs, configuration and the server itself. `api.Client` adds jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import msgspec

from hodei.api.agents import HostList, HostView, TokenList, TokenRequest, TokenView
from hodei.api.config import ConfigHistory, ConfigView
from hodei.api.resources import (
    AuditList,
    AuditView,
    PeriodicList,
    PeriodicRequest,
    PeriodicView,
    ReservationList,
    ReservationRequest,
    ReservationView,
)
from hodei.api.views import (
    BackendList,
    BackendRequest,
    BackendView,
    Check,
    CheckList,
    Info,
    NodeExecutedView,
    NodeExecuteRequest,
    NodeHistoryView,
    NodeList,
    NodePatch,
    NodeUsageView,
    NodeView,
    SubmitReply,
    UsageList,
)
from hodei.client.logs import Backoff
from hodei.client.transport import ServerUnreachable, Transport, find_server
from hodei.model.accounting import QuotaList, QuotaRow, ShareReport
from hodei.model.config import ConfigChange, SchedulingConfig
from hodei.model.errors import HodeiError, InvalidInput, Unavailable

API = "/api/v1"
PAGE = 500
JSON = {"Content-Type": "application/json"}
T = TypeVar("T")


class ResourceClient:
    """The connection to a server, and every call that is not about jobs."""

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        *,
        home: Path | None = None,
        timeout_s: float = 30,
        retry_s: float = 60,
    ) -> None:
        self._transport = Transport(lambda: find_server(address, token, home), timeout_s)
        self._timeout_s = timeout_s
        self._retry_s = retry_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    @property
    def address(self) -> str:
        return self._transport.target.address

    @property
    def loopback(self) -> bool:
        """True if the server runs on this machine, so paths mean the same on both sides."""
        return self._transport.target.loopback

    def nodes(self) -> list[NodeView]:
        return self._get("/nodes", NodeList).nodes

    def node(self, name: str) -> NodeView:
        return self._get(_path("nodes", name), NodeView)

    def node_history(
        self, name: str, *, since: str = "", until: str = "", after: str = "", limit: int = 100
    ) -> NodeHistoryView:
        """One page of the runs that held capacity on a node. The next page is `after` this page's `next`."""
        query = {"since": since, "until": until, "after": after, "limit": str(limit)}
        return self._get(_path("nodes", name, "history"), NodeHistoryView, query)

    def patch_node(self, name: str, patch: NodePatch) -> NodeView:
        body = msgspec.json.encode(patch)
        reply = self._transport.request("PATCH", API + _path("nodes", name), body=body, headers=JSON)
        return decode(reply.body, NodeView)

    def execute_on(self, node: str, command: Sequence[str], *, timeout_s: int = 30) -> NodeExecutedView:
        """Run a command on a node, without a shell. For administrators."""
        request = NodeExecuteRequest(list(command), timeout_s)
        return self._post(_path("nodes", node, "execute"), NodeExecutedView, request, idempotent=False)

    def backends(self) -> list[BackendView]:
        return self._get("/backends", BackendList).backends

    def backend(self, name: str) -> BackendView:
        return self._get(_path("backends", name), BackendView)

    def create_backend(self, name: str, kind: str, settings: Mapping[str, Any] | None = None) -> BackendView:
        request = BackendRequest(name, kind, dict(settings or {}))
        return self._post("/backends", BackendView, request, idempotent=False)

    def disable_backend(self, name: str) -> BackendView:
        return self._post(_path("backends", name, "disable"), BackendView)

    def enable_backend(self, name: str) -> BackendView:
        return self._post(_path("backends", name, "enable"), BackendView)

    def delete_backend(self, name: str, *, force: bool = False) -> BackendView:
        return self._delete(_path("backends", name) + ("?force=1" if force else ""), BackendView)

    def agent_tokens(self) -> list[TokenView]:
        return self._get("/agent/tokens", TokenList).tokens

    def create_agent_token(self, backend: str, *, node: str = "", ttl: str = "1h") -> TokenView:
        """A one-time token by which a host joins; the secret is in `token`, and nowhere else."""
        return self._post("/agent/tokens", TokenView, TokenRequest(backend, node, ttl), idempotent=False)

    def delete_agent_token(self, id: str) -> TokenView:
        return self._delete(_path("agent/tokens", id), TokenView)

    def hosts(self) -> list[HostView]:
        return self._get("/hosts", HostList).hosts

    def host(self, name: str) -> HostView:
        return self._get(_path("hosts", name), HostView)

    def remove_host(self, name: str) -> HostView:
        """Its credential is void, and its runs count as lost."""
        return self._delete(_path("hosts", name), HostView)

    def revoke_node(self, name: str) -> HostView:
        """Its credential is void at once; the node stays in the lists."""
        return self._post(_path("nodes", name, "revoke"), HostView)

    def backend_usage(self, name: str) -> list[NodeUsageView]:
        return self._get(_path("backends", name, "usage"), UsageList).nodes

    def create_reservation(self, request: ReservationRequest) -> ReservationView:
        """Reserve capacity. Conflict, with what is in the way, if there is not enough."""
        return self._post("/reservations", ReservationView, request, idempotent=False)

    def reservations(self) -> list[ReservationView]:
        return self._get("/reservations", ReservationList).reservations

    def reservation(self, name: str) -> ReservationView:
        return self._get(_path("reservations", name), ReservationView)

    def delete_reservation(self, name: str) -> ReservationView:
        return self._delete(_path("reservations", name), ReservationView)

    def create_periodic(self, request: PeriodicRequest) -> PeriodicView:
        return self._post("/periodic", PeriodicView, request, idempotent=False)

    def periodics(self) -> list[PeriodicView]:
        return self._get("/periodic", PeriodicList).periodics

    def periodic(self, name: str) -> PeriodicView:
        return self._get(_path("periodic", name), PeriodicView)

    def pause_periodic(self, name: str) -> PeriodicView:
        return self._post(_path("periodic", name, "pause"), PeriodicView)

    def resume_periodic(self, name: str) -> PeriodicView:
        return self._post(_path("periodic", name, "resume"), PeriodicView)

    def run_periodic(self, name: str) -> int:
        """Create a job now; returns its id."""
        return self._post(_path("periodic", name, "run"), SubmitReply, idempotent=False).ids[0]

    def delete_periodic(self, name: str) -> PeriodicView:
        return self._delete(_path("periodic", name), PeriodicView)

    def shares(self, account: str = "") -> ShareReport:
        """Every account with every term of its fair share; with `account` only that one, its parents and children."""
        return self._get("/shares", ShareReport, {"account": account} if account else None)

    def quotas(self) -> list[QuotaRow]:
        return self._get("/quotas", QuotaList).quotas

    def audit(
        self, *, who: str = "", what: str = "", target: str = "", since: str = "", limit: int = 0
    ) -> Iterator[AuditView]:
        """Newest first, fetched page by page; `limit` 0 means all. For administrators."""
        query = {"who": who, "what": what, "target": target, "since": since}
        before, left = 0, limit
        while True:
            size = min(left, PAGE) if limit else PAGE
            page = self._get("/audit", AuditList, query | {"limit": str(size), "before": str(before or "")}).entries
            yield from page
            left -= len(page)
            if len(page) < size or (limit and left <= 0):
                return
            before = page[-1].seq

    def audit_after(self, after: int, *, who: str = "", what: str = "", target: str = "") -> list[AuditView]:
        """The rows after that number, oldest first."""
        query = {"who": who, "what": what, "target": target, "after": str(after), "limit": str(PAGE)}
        return self._retry(lambda: self._get("/audit", AuditList, query).entries)

    def scheduling(self) -> SchedulingConfig:
        """The scheduling section of the current configuration."""
        return self._get("/scheduling", SchedulingConfig)

    def config(self) -> ConfigView:
        """The current scheduling configuration, with its author and time."""
        return self._get("/config", ConfigView)

    def config_history(self) -> list[ConfigView]:
        """The current and earlier configurations, newest first."""
        return self._get("/config/history", ConfigHistory).configurations

    def set_config(self, body: bytes, content_type: str = "application/toml", *, dry_run: bool = False) -> ConfigChange:
        """Apply another configuration, in TOML, YAML or JSON. InvalidInput lists every mistake; nothing is changed then."""
        headers = {"Content-Type": content_type}
        query = {"dry_run": "1"} if dry_run else None
        reply = self._transport.request("PUT", f"{API}/config", body=body, headers=headers, query=query)
        return decode(reply.body, ConfigChange)

    def reload_config(self, *, dry_run: bool = False) -> ConfigChange:
        """Make the server read its configuration file again."""
        return self._post(f"/config/reload{'?dry_run=1' if dry_run else ''}", ConfigChange)

    def undo_config(self, to: int = 0, *, dry_run: bool = False) -> ConfigChange:
        """Restore the previous configuration, or the one numbered `to`."""
        # A repeated request would go back twice.
        query = "&".join([f"to={int(to)}"] * (to != 0) + ["dry_run=1"] * dry_run)
        return self._post(f"/config/undo{query and '?' + query}", ConfigChange, idempotent=False)

    def info(self) -> Info:
        return self._get("/info", Info)

    def checks(self) -> list[Check]:
        return self._get("/checks", CheckList).checks

    def ready(self) -> bool:
        """True if the server schedules; Unavailable while it starts or stops."""
        return self._transport.request("GET", "/readyz").status < 300

    def server_date(self) -> str:
        """The `Date` header of a response, empty if it has none."""
        return self._transport.request("GET", "/livez").headers.get("Date", "")

    def _get(self, path: str, kind: type[T], query: Mapping[str, str] | None = None, *, timeout_s: float = 0) -> T:
        return decode(self._transport.request("GET", API + path, query=query, timeout_s=timeout_s).body, kind)

    def _delete(self, path: str, kind: type[T]) -> T:
        return decode(self._transport.request("DELETE", API + path, idempotent=False).body, kind)

    def _post(self, path: str, kind: type[T], body: object = None, *, idempotent: bool = True) -> T:
        data = b"" if body is None else encode(body)
        reply = self._transport.request("POST", API + path, body=data, headers=JSON, idempotent=idempotent)
        return decode(reply.body, kind)

    def _retry(self, call: Callable[[], T], *, wait_for_first: bool = False) -> T:
        """Repeat `call` for up to `retry_s` while the server is down; `wait_for_first`: also if it never answered."""
        began, backoff = time.monotonic(), Backoff()
        while True:
            try:
                return call()
            except (ServerUnreachable, Unavailable):
                if not (self._transport.connected or wait_for_first) or time.monotonic() - began > self._retry_s:
                    raise
                time.sleep(backoff.next_s())


def _path(kind: str, name: str, verb: str = "") -> str:
    return f"/{kind}/{quote(name, safe='')}{f'/{verb}' if verb else ''}"


def encode(body: object) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise InvalidInput(f"the job cannot be written as JSON: {error}") from None


def decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "do server and client have the same version? see: hodei doctor"
        raise HodeiError(f"cannot understand the server's answer: {error}", hint=hint, code="BAD_ANSWER") from None
