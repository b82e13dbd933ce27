"""What running runs use now."""

from __future__ import annotations

from hodei.api.usage import CostList, RunUsageList, RunUsageRow
from hodei.jobfile.render import iso
from hodei.model.errors import InvalidInput
from hodei.model.job import Job, Run
from hodei.model.resources import CPU, MEMORY
from hodei.runtime.run_usage import LiveUsage
from hodei.server.route import API, READ, Call, Param, Route, read_since_ms


async def list_usage(call: Call) -> RunUsageList:
    args, reader = call.args, call.service.run_usage
    running = reader.running(project=args["project"], user=args["user"], node=args["node"])
    found = await reader.read([run for _, run in running])
    rows = [_row(job, run, found.get(run.id)) for job, run in running]
    column = "peak_memory" if args["sort"] == "memory" else "cpu_milli"

    def order(row: RunUsageRow) -> tuple[int, int, str]:
        amount: int | None = getattr(row, column)
        return -1 if amount is None else amount, -row.job, row.run

    rows.sort(key=order, reverse=True)
    first, last = args["after"], args["after"] + args["limit"]
    return RunUsageList(rows[first:last], last if last < len(rows) else 0)


def _row(job: Job, run: Run, live: LiveUsage | None) -> RunUsageRow:
    request = job.spec.task_of(run.member).request
    cpu, memory = request.get(CPU, 0), request.get(MEMORY, 0)
    usage, cpu_milli = (live.usage, live.cpu_milli) if live is not None else (None, None)
    peak = usage.peak_memory if usage is not None else None
    return RunUsageRow(
        run=run.id, job=job.id, name=job.spec.name, project=job.spec.project, user=job.spec.user, node=run.node,
        backend=run.backend, started_at=iso(run.started_ms), cpu_milli=cpu_milli, cpu_request=cpu,
        cpu_percent=_percent(cpu_milli, cpu), peak_memory=peak, memory_request=memory,
        memory_percent=_percent(peak, memory), cpu_ms=usage.cpu_ms if usage is not None else None,
        read_bytes=usage.read_bytes if usage is not None else None,
        write_bytes=usage.write_bytes if usage is not None else None,
    )  # fmt: skip


def _percent(amount: int | None, request: int) -> int | None:
    return None if amount is None or not request else round(amount * 100 / request)


async def list_costs(call: Call) -> CostList:
    args, now_ms = call.args, call.shared.now_ms()
    since_ms = read_since_ms(args["since"] or "30d", now_ms)
    until_ms = read_since_ms(args["until"], now_ms, "until") if args["until"] else now_ms
    if until_ms <= since_ms:
        raise InvalidInput("`until` is not after `since`", hint="without `since`: the last 30 days")
    rows = await call.service.bulk_read(call.service.store.costs, since_ms, until_ms)
    for key in ("project", "user", "backend"):
        if args[key]:
            rows = [row for row in rows if getattr(row, key) == args[key]]
    return CostList(iso(since_ms), iso(until_ms), rows)


ROUTES = (
    Route(
        "GET", f"{API}/costs", READ, "What runs cost, by project, user and backend", list_costs, response=CostList,
        params=(
            Param("since", "start of the time: 6h, 30d or 2026-01-31T08:00Z; without it 30d", default=""),
            Param("until", "end of the time; without it now", default=""),
            Param("project", "only this project", default=""),
            Param("user", "only this user", default=""),
            Param("backend", "only this backend", default=""),
        ),
    ),
    Route(
        "GET", f"{API}/usage", READ, "What running runs use now, the largest first", list_usage, response=RunUsageList,
        params=(
            Param("project", "only runs of this project", default=""),
            Param("user", "only runs of this user", default=""),
            Param("node", "only runs on this node", default=""),
            Param("sort", "by what", default="cpu", choices=("cpu", "memory")),
            Param("after", "`next_after` of the previous page", type=int, default=0),
            Param("limit", "runs per page", type=int, default=100, minimum=1, maximum=1000),
        ),
    ),
)  # fmt: skip
