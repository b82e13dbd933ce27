"""The audit log: one row for every request except GET, unless its route is `read_only`; and failed logins.

The row goes into the commit of the change (`runtime.rights`); a refused request gets a row in its own commit. The body is
never part of it. Requests refused by a limit leave no row: a flood must not fill the disk.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from urllib.parse import unquote

from starlette.types import Scope

from hodei.model.audit import AuditEntry
from hodei.model.effects import SaveAudit
from hodei.model.errors import HodeiError
from hodei.runtime.rights import CALLER, Caller
from hodei.server.errors import RateLimited, Unauthorized
from hodei.server.rate_limits import RateLimit, client_address
from hodei.server.route import API, Principal, Reply, Route, Shared

log = logging.getLogger("hodei.server")
HEADER = "hodei-request-id"
LOGIN_FAILED = "login.failed"
_ACTIONS = {"POST": "create", "PUT": "set", "PATCH": "change", "DELETE": "delete"}


def verb_of(route: Route) -> str:
    """`jobs.cancel` for POST /jobs/{id}/cancel, `nodes.change` for PATCH /nodes/{name}."""
    parts = [part for part in route.path.removeprefix(API).split("/") if part]
    words = [part for part in parts if not part.startswith("{")]
    action = route.verb or (words[-1] if len(words) > 1 else _ACTIONS.get(route.method, route.method.lower()))
    return f"{words[0]}.{action}"


@contextmanager
def caller_context(shared: Shared, route: Route, who: Principal, scope: Scope) -> Iterator[Caller | None]:
    """Inside it, changes are authorized and committed in the name of this caller. None for routes that are not audited."""
    if route.method == "GET":
        # Reset, because the connection may still carry the context of an earlier request.
        before = CALLER.set(None)
        try:
            yield None
        finally:
            CALLER.reset(before)
        return
    remote = scope.get("client") or ("",)
    entry = AuditEntry(
        at_ms=shared.now_ms(),
        who=who.name,
        role=who.role,
        verb=verb_of(route),
        target=", ".join(unquote(str(value))[:200] for value in scope.get("path_params", {}).values()),
        request=secrets.token_hex(8),
        remote=str(remote[0]),
    )
    caller = Caller(entry)
    before = CALLER.set(caller)
    try:
        yield caller if route.audited else None
    finally:
        CALLER.reset(before)


async def complete_audit(shared: Shared, caller: Caller, answer: object, code: str) -> None:
    """After the request: its id goes into the response, and a request without a row gets one."""
    if isinstance(answer, Reply):
        answer.headers.setdefault(HEADER, caller.entry.request)
    row = caller.refused(code)
    if row is not None:
        try:
            await shared.service.save(row)
        except HodeiError as error:
            log.warning("cannot write an audit row (%s %s): %s", caller.entry.verb, code or "ok", error.message)


def code_of(answer: object, error: BaseException | None) -> str:
    """The code of the error; "" without one."""
    if error is None:
        return "" if not isinstance(answer, Reply) or answer.status < 400 else str(answer.status)
    return error.code if isinstance(error, HodeiError) else "INTERNAL"


class FailedLogins:
    """Counts requests without a valid token by kind (`count`), and records those with a wrong token (`save`)."""

    def __init__(
        self,
        count: Callable[[str], None],
        save: Callable[[SaveAudit], Awaitable[None]],
        now_ms: Callable[[], int],
    ) -> None:
        self._count, self._save, self._now_ms = count, save, now_ms
        self._per_address = RateLimit(per_s=1 / 60, burst=1)
        self._total = RateLimit(per_s=1 / 30, burst=30)
        self._omitted = 0
        self._writes: set[asyncio.Task[None]] = set()

    def record(self, error: Unauthorized, route: Route, scope: Scope) -> None:
        """Does not wait for the row: a failing store must not delay the response."""
        self._count(error.kind)
        if error.kind == "missing":
            return
        address = client_address(scope.get("client"))
        try:
            self._per_address.spend(address)
            self._total.spend("")
        except RateLimited:
            self._omitted += 1
            return
        # The route, not the path, which is input and may contain a secret.
        target = f"{route.method} {route.path}"
        more, self._omitted = self._omitted, 0
        target += f" (and {more} more before)" if more else ""
        entry = AuditEntry(self._now_ms(), "", "", LOGIN_FAILED, target, error.code, remote=address)
        log.warning("refused a request from %s with an invalid token: %s", address or "a socket", target)
        task = asyncio.ensure_future(self._write(entry))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _write(self, entry: AuditEntry) -> None:
        try:
            await self._save(SaveAudit(entry))
        except HodeiError as error:
            log.warning("cannot write an audit row (%s): %s", entry.verb, error.message)
