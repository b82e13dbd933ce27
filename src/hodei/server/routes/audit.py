"""The audit, for administrators."""

from __future__ import annotations

from hodei.api.audit import AuditList, audit_view
from hodei.model.audit import AuditQuery
from hodei.server.params import read_since_ms
from hodei.server.route import ADMIN, API, Call, Param, Route


async def list_audit(call: Call) -> AuditList:
    args, service = call.args, call.service
    query = AuditQuery(
        who=args["who"], what=args["what"], target=args["target"], before=args["before"], after=args["after"],
        since_ms=read_since_ms(args["since"], call.shared.now_ms()), limit=args["limit"],
    )  # fmt: skip
    return AuditList([audit_view(entry) for entry in await service.read(service.store.audit, query)])


ROUTES = (
    Route(
        "GET", f"{API}/audit", ADMIN, "Who did what when: newest first, or with `after` oldest first", list_audit,
        response=AuditList,
        params=(
            Param("who", "only acts of this caller", default=""),
            Param("what", "only this verb (`jobs.cancel`), these things (`jobs`) or this act (`cancel`)", default=""),
            Param("target", "only what was done to this", default=""),
            Param("since", "only since: ISO 8601, epoch milliseconds, or an age such as 90m", default=""),
            Param("before", "the `seq` of the last row of the page before", type=int, default=0),
            Param("after", "oldest first, from the row after this `seq` on", type=int, default=None),
            Param("limit", "rows per page", type=int, default=100, minimum=1, maximum=1000),
        ),
    ),
)  # fmt: skip
