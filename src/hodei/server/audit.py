"""The one place where calls are put on record: every route that is not a GET, unless it says that it is harmless.

The row goes into the commit that carries the act (`runtime.rights`); a call that came to nothing gets a row of its own.
What was sent is never part of it. Calls without a valid token are for `logins`, and calls that are turned away because their
caller makes too many leave no row: a flood must not fill the disk.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

from starlette.types import Scope

from hodei.model.audit import AuditEntry
from hodei.model.errors import HodeiError
from hodei.runtime.rights import CALLER, Caller
from hodei.server.route import API, Principal, Reply, Route, Shared

log = logging.getLogger("hodei.server")
HEADER = "hodei-request-id"
_ACTS = {"POST": "create", "PUT": "set", "PATCH": "change", "DELETE": "delete"}


def verb_of(route: Route) -> str:
    """`jobs.cancel` for POST /jobs/{id}/cancel, `nodes.change` for PATCH /nodes/{name}."""
    parts = [part for part in route.path.removeprefix(API).split("/") if part]
    words = [part for part in parts if not part.startswith("{")]
    act = route.verb or (words[-1] if len(words) > 1 else _ACTS.get(route.method, route.method.lower()))
    return f"{words[0]}.{act}"


@contextmanager
def on_behalf_of(shared: Shared, route: Route, who: Principal, scope: Scope) -> Iterator[Caller | None]:
    """While it lasts, what is asked for is judged, and committed, in this caller's name. None for routes that leave no row."""
    if route.method == "GET":
        # Not simply left alone: a connection may still carry the context of the call before.
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


async def settle(shared: Shared, caller: Caller, answer: object, code: str) -> None:
    """After the call: the answer carries the request's id, and what has no row yet gets one."""
    if isinstance(answer, Reply):
        answer.headers.setdefault(HEADER, caller.entry.request)
    row = caller.refused(code)
    if row is not None:
        try:
            await shared.service.record(row)
        except HodeiError as error:
            log.warning("an audit row could not be written (%s %s): %s", caller.entry.verb, code or "ok", error.message)


def code_of(answer: object, error: BaseException | None) -> str:
    """Why it was refused; "" if it was not."""
    if error is None:
        return "" if not isinstance(answer, Reply) or answer.status < 400 else str(answer.status)
    return error.code if isinstance(error, HodeiError) else "INTERNAL"
