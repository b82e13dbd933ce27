"""`hodei node history NODE`: which runs held room on a node, when, and how much of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hodei.cli.nodes import node, short_amount
from hodei.cli.options import client, headers_option, node_argument, output_option
from hodei.cli.output import Column, emit_list, note
from hodei.cli.times import clock, ms_of, now_ms, short

if TYPE_CHECKING:
    from hodei.api.views import NodeRunView

_PAGE = 1000
COLUMNS = (
    Column("RUN", lambda r: r.run),
    Column("NAME", lambda r: r.name or "-"),
    Column("PROJECT", lambda r: r.project or "-"),
    Column("USER", lambda r: r.user or "-"),
    Column("STATE", lambda r: r.state),
    Column("FROM", lambda r: clock(ms_of(r.placed_at))),
    Column("TO", lambda r: clock(ms_of(r.finished_at)) or "now"),
    Column("HELD", lambda r: short((ms_of(r.finished_at) or now_ms()) - ms_of(r.placed_at))),
    Column("CPU", lambda r: _amount(r, "cpu")),
    Column("MEMORY", lambda r: _amount(r, "memory")),
    Column("GPU", lambda r: _amount(r, "gpu"), if_any=True),
    Column("EXIT", lambda r: "-" if r.exit_code is None else str(r.exit_code), wide=True),
    Column("REASON", lambda r: r.reason_code or "-", wide=True),
)


@node.command("history")
@node_argument
@click.option(
    "--since", default="24h", show_default=True, metavar="TIME", help="From then on: 6h, 2d, 2026-01-31T08:00Z."
)
@click.option("--until", default="", metavar="TIME", help="Up to then [default: now].")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many runs.")
@click.option("--all", "every", is_flag=True, help="All of them, however many.")
@output_option
@headers_option
def history(name: str, since: str, until: str, limit: int, every: bool, output: str, no_headers: bool) -> None:
    """Which runs held room on a node, from when to when: those of the newest job first.

    Runs are known for as long as their jobs are (server.retention), also those on a node that is gone.
    """
    runs: list[NodeRunView] = []
    busy_ms: dict[str, int] = {}
    with client() as server:
        page = server.node_history(name, since=since, until=until, limit=_PAGE if every else min(limit, _PAGE))
        span = (page.since, page.until)
        while True:
            runs += page.runs
            for resource, ms in page.busy_ms.items():
                busy_ms[resource] = busy_ms.get(resource, 0) + ms
            if not page.next or (not every and len(runs) >= limit):
                break
            # The span of the first page, so that all are about the same.
            left = _PAGE if every else min(limit - len(runs), _PAGE)
            page = server.node_history(name, since=span[0], until=span[1], after=page.next, limit=left)
    emit_list(runs, output, COLUMNS, name=lambda r: r.run, headers=not no_headers, empty="nothing was there")
    if output in ("table", "wide"):
        note(
            _utilisation(busy_ms, span)
            if not page.next
            else f"there may be more than these {len(runs)}: --limit, --all"
        )


def _utilisation(busy_ms: dict[str, int], span: tuple[str, str]) -> str:
    since, until = (ms_of(moment) for moment in span)
    shares = ", ".join(
        f"{resource} {100 * busy_ms.get(resource, 0) / max(until - since, 1):.1f}%"
        for resource in sorted({"cpu", "memory", *busy_ms})
    )
    return f"held on average from {clock(since)} to {clock(until)}: {shares}"


def _amount(run: NodeRunView, resource: str) -> str:
    return short_amount(resource, run.resources[resource]) if resource in run.resources else "-"
