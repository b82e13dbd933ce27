"""Calls that were refused for want of a valid token: all are counted, and those that showed a wrong token go on record.

What was shown is never part of a row. Rows are few, however many calls there are: one a minute for each address, and not
more than some in all. The next row tells how many were left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.types import Scope

from hodei.model.audit import AuditEntry
from hodei.model.effects import SaveAudit
from hodei.model.errors import HodeiError
from hodei.server.address import place_of
from hodei.server.errors import TooFast, Unauthorized
from hodei.server.rate_limits import Rates
from hodei.server.route import Route

log = logging.getLogger("hodei.server")
VERB = "login.failed"


class FailedLogins:
    """`count` is told the kind of each failure, `record` stores a row."""

    def __init__(
        self,
        count: Callable[[str], None],
        record: Callable[[SaveAudit], Awaitable[None]],
        now_ms: Callable[[], int],
    ) -> None:
        self._count, self._record, self._now_ms = count, record, now_ms
        self._each = Rates(per_s=1 / 60, burst=1)
        self._all = Rates(per_s=1 / 30, burst=30)
        self._left_out = 0
        self._writing: set[asyncio.Task[None]] = set()

    def failed(self, error: Unauthorized, route: Route, scope: Scope) -> None:
        """Does not wait for the row to be stored: a store in trouble must not hold the answer up."""
        self._count(error.kind)
        if error.kind == "missing":
            return
        place = place_of(scope.get("client"))
        try:
            self._each.spend(place)
            self._all.spend("")
        except TooFast:
            self._left_out += 1
            return
        # The route, not the path: a path is the caller's own text, and may hold a secret too.
        target = f"{route.method} {route.path}"
        more, self._left_out = self._left_out, 0
        target += f" (and {more} more before)" if more else ""
        entry = AuditEntry(self._now_ms(), "", "", VERB, target, error.code, remote=place)
        log.warning("a call from %s with a token that is not valid was refused: %s", place or "a socket", target)
        task = asyncio.ensure_future(self._write(entry))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, entry: AuditEntry) -> None:
        try:
            await self._record(SaveAudit(entry))
        except HodeiError as error:
            log.warning("an audit row could not be written (%s): %s", entry.verb, error.message)
