"""`hodei share` and `hodei quota`: fair shares with their full calculation, and usage and limits of projects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hodei.cli.groups import Group
from hodei.cli.options import client, headers_option, output_option
from hodei.cli.output import Column, clean, emit_list, emit_one, indent, table
from hodei.cli.times import clock
from hodei.model.errors import NotFound
from hodei.model.resources import format_duration, human_amount

if TYPE_CHECKING:
    from hodei.model.accounting import QuotaRow, ShareReport, ShareRow

_HOUR = 3_600_000 * 1_000_000
_TOP = (
    Column("ACCOUNT", lambda row: clean(row.account)),
    Column("SHARES", lambda row: str(row.shares)),
)
_LAST = (
    Column("FACTOR", lambda row: f"{row.factor_milli / 1000:.3f}"),
    Column("", lambda row: "█" * round(row.factor_milli / 50)),
)
COLUMNS = {
    "fair_tree": (
        *_TOP,
        Column("DUE", lambda row: _percent(row.due)),
        Column("USED", lambda row: _percent(row.used)),
        Column("USAGE", lambda row: _usage(row.usage)),
        Column("LEVELFS", lambda row: "-" if row.level_fs is None else f"{row.level_fs:.4g}"),
        Column("RANK", lambda row: f"{row.rank}/{row.ranked}"),
        *_LAST,
    ),
    "classic": (
        *_TOP,
        Column("DUE", lambda row: _percent(row.due)),
        Column("USED", lambda row: _percent(row.used)),
        Column("USAGE", lambda row: _usage(row.usage)),
        Column("EFFECTIVE", lambda row: "-" if row.effective is None else _percent(row.effective)),
        *_LAST,
    ),
    "drf": (
        *_TOP,
        Column("DOMINANT", lambda row: row.dominant or "-"),
        Column("SHARE", lambda row: _percent(row.used)),
        *_LAST,
    ),
}
BUDGETS = (
    Column("PROJECT", lambda row: clean(row.project)),
    Column("BUDGET", lambda row: row.name),
    Column("USED", lambda row: f"{row.used:.6g}"),
    Column("OF", lambda row: f"{row.limit:g}"),
    Column("SINCE", lambda row: clock(row.since_ms)),
)
QUOTAS = (
    Column("PROJECT", lambda row: clean(row.project)),
    Column("RESOURCE", lambda row: row.resource),
    Column("USED", lambda row: human_amount(row.resource, row.used)),
    Column("HARD", lambda row: _bound(row, row.hard)),
    Column("SOFT", lambda row: _bound(row, row.soft), if_any=True),
    Column("BORROWED", lambda row: human_amount(row.resource, row.borrowed) if row.borrowed else "-", if_any=True),
    Column("MORE", lambda row: _bound(row, row.more)),
    Column("COHORT", lambda row: row.cohort or "-", if_any=True),
    Column("BY", lambda row: ", ".join(f"{clean(u)} {human_amount(row.resource, a)}" for u, a in row.by) or "-"),
)


@click.group(cls=Group, default="list")
def share() -> None:
    """Show the accounts' shares of the cluster; `hodei share` alone is `hodei share list`."""


@share.command("list")
@output_option
def list_shares(output: str) -> None:
    """Show every account's share of the cluster: its shares, its past use, and the resulting factor.

    -o json has all rows with every term, so that the factors can be recomputed.
    """
    with client() as server:
        report = server.shares()
    emit_one(report, output, name=lambda r: r.formula, text=_report)


@share.command("show")
@click.argument("project", metavar="PROJECT")
@output_option
def show_share(project: str, output: str) -> None:
    """Print the full calculation of the factors of a project and its users."""
    with client() as server:
        report = server.shares(project)
        if not report.rows:
            raise _unknown_account(project, server.shares())
    emit_one(report, output, name=lambda _: project, text=_explained)


def _unknown_account(project: str, report: ShareReport) -> NotFound:
    accounts = [row.account for row in report.rows if not row.user or "/" not in row.account]
    known = sorted({account.split("/")[-1] for account in accounts})
    more = " and more" if len(known) > 10 else ""
    return NotFound(
        f"there is no account {project!r}", hint=f"accounts so far: {', '.join(known[:10])}{more}" if known else ""
    )


def _explained(report: ShareReport) -> str:
    parts = [_sum(row, report) for row in report.rows]
    if report.budgets:
        parts.append(table(report.budgets, BUDGETS))
    return "\n\n".join(parts)


@click.group(cls=Group, default="list")
def quota() -> None:
    """Show usage and quotas of projects; `hodei quota` alone is `hodei quota list`."""


@quota.command("list")
@headers_option
@output_option
def list_quotas(no_headers: bool, output: str) -> None:
    """Show usage and limits of all projects: hard and soft quotas, borrowed amounts and borrowers."""
    with client() as server:
        _print_quotas(server.quotas(), no_headers, output)


@quota.command("show")
@click.argument("project", metavar="PROJECT")
@headers_option
@output_option
def show_quota(project: str, no_headers: bool, output: str) -> None:
    """Show usage and limits of one project."""
    with client() as server:
        rows = [row for row in server.quotas() if row.project == project]
    if not rows:
        raise NotFound(f"project {project!r} has no quota", hint="projects that have one: hodei quota list")
    _print_quotas(rows, no_headers, output)


def _print_quotas(rows: list[QuotaRow], no_headers: bool, output: str) -> None:
    unset = "no quotas are set; see docs/how-to/share-a-cluster.md"
    emit_list(
        rows, output, QUOTAS, name=lambda row: f"{row.project}/{row.resource}", headers=not no_headers, empty=unset
    )


def _report(report: ShareReport) -> str:
    past = f"half-life {format_duration(report.half_life_ms)}" if report.half_life_ms else ""
    past = past or (f"the last {format_duration(report.window_ms)}" if report.window_ms else "")
    parts = [
        f"fair share by {report.formula.replace('_', ' ')}" + (f", {past}" if past and report.formula != "drf" else "")
    ]
    parts.append(table(report.rows, COLUMNS[report.formula]) if report.rows else "no account has used anything yet")
    if report.budgets:
        parts.append(table(report.budgets, BUDGETS))
    return "\n\n".join(parts)


def _sum(row: ShareRow, report: ShareReport) -> str:
    """The full calculation for one account."""
    lines = []
    if report.formula == "drf":
        lines.append(f"holds {_percent(row.used)} of all {row.dominant or 'resources'}, for its {row.shares} shares")
        lines.append(f"factor = 1 - {row.used:.6f} = {row.factor_milli / 1000:.3f}")
        return f"{clean(row.account)}\n{indent(chr(10).join(lines))}"
    due = "like its parent account" if row.shares == "parent" else f"{row.shares} of {row.level_shares} shares"
    if report.formula == "classic" and "/" in row.account:
        due += " of its parent's share"
    lines.append(f"due       {due} = {row.due:.6f}" + (" of everything" if report.formula == "classic" else ""))
    if report.formula == "classic":
        lines.append(f"used      {_usage(row.usage)} = {row.used:.6f} of everything")
        effective = 0.0 if row.effective is None else row.effective
        lines.append(f"counted   {effective:.6f}, its own and its siblings' use")
        lines.append(f"factor    2^(-{effective:.6f} / {row.due:.6f}) = {row.factor_milli / 1000:.3f}")
    else:
        lines.append(f"used      {_usage(row.usage)} of {_usage(row.level_usage)} on its level = {row.used:.6f}")
        level = "nothing used yet, so first" if row.level_fs is None else f"{row.level_fs:.6f}"
        lines.append(f"level     due / used = {level}")
        what = "its rank" if row.user else "the best rank below it"
        rank = f"{what} {row.rank} of {row.ranked}, counted from the last"
        lines.append(f"factor    {rank} = {row.factor_milli / 1000:.3f}")
    return f"{clean(row.account)}\n{indent(chr(10).join(lines))}"


def _bound(row: QuotaRow, amount: int | None) -> str:
    return "-" if amount is None else human_amount(row.resource, amount)


def _percent(part: float) -> str:
    return f"{part * 100:.1f}%"


def _usage(usage: int) -> str:
    """In hours of one core, if a core weighs 1."""
    hours = usage / _HOUR
    if hours >= 1000:
        return f"{hours:,.0f} h"
    return f"{hours:.4g} h" if hours >= 0.01 or not hours else f"{hours * 3600:.4g} s"
