"""Who is before whom, and why: priorities, shares of the cluster and what was used of them."""

from __future__ import annotations

from hodei.model.accounting import QuotaList, ShareReport
from hodei.model.array import shell_reference
from hodei.model.errors import Conflict, NotFound
from hodei.model.explanation import PriorityBreakdown
from hodei.server.route import API, READ, Call, Param, Route

_ID = Param("id", "the job's number", type=int, where="path", minimum=1)
_ACCOUNT = Param("account", "only accounts of this name, those above and those below them", default="")


async def priority(call: Call) -> PriorityBreakdown:
    service, number = call.service, call.args["id"]
    found = await service.standing(number)
    if found is None:
        job = await service.read(service.store.job, number)
        if job is None:
            raise NotFound(f"there is no job {number}", hint="hodei jobs --all")
        hint = f"hodei why {shell_reference(number, job.spec.array)}"
        raise Conflict(f"job {number} is {job.state}: it has no place in a line", hint=hint)
    return found


async def shares(call: Call) -> ShareReport:
    service = call.service
    found = service.controller.accounts.share_report(service.clock.now_ms())
    if found is None:
        raise NotFound(
            "nobody keeps account of shares here", hint="set scheduling.shares.enabled = true", code="NO_SHARES"
        )
    return found.about(call.args["account"]) if call.args["account"] else found


async def quotas(call: Call) -> QuotaList:
    return QuotaList(call.service.controller.accounts.quota_rows())


ROUTES = (
    Route("GET", f"{API}/shares", READ, "Every account with every term of its fair share", shares,
          response=ShareReport, params=(_ACCOUNT,)),
    Route("GET", f"{API}/quotas", READ, "How every project stands with its quota", quotas, response=QuotaList),
    Route("GET", f"{API}/jobs/{{id}}/priority", READ, "What its place in line comes from, term by term", priority,
          response=PriorityBreakdown, params=(_ID,)),
)  # fmt: skip
