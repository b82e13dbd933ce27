"""`hodei audit`: who did what when. For administrators."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from hodei.cli.options import client, headers_option, output_option
from hodei.cli.output import Column, clean, emit_list
from hodei.cli.times import ago

if TYPE_CHECKING:
    from hodei.api.audit import AuditView
    from hodei.client import Client

COLUMNS = (
    Column("SEQ", lambda e: str(e.seq), wide=True),
    Column("TIME", lambda e: e.at, wide=True),
    Column("WHEN", lambda e: ago(e.at)),
    Column("WHO", lambda e: e.who or "-"),
    Column("ROLE", lambda e: e.role, wide=True),
    Column("WHAT", lambda e: e.verb),
    Column("TARGET", lambda e: e.target or "-"),
    Column("OUTCOME", lambda e: _outcome(e)),
    Column("COMMAND", lambda e: e.detail or "-", if_any=True),
    Column("FROM", lambda e: e.remote or "-", wide=True),
    Column("REQUEST", lambda e: e.request, wide=True),
)
_LOOK_AGAIN_S = 1.0


@click.command()
@click.option("--who", default="", metavar="NAME", help="Only acts of this caller.")
@click.option("--what", default="", metavar="VERB", help="Only this verb: jobs.cancel, or jobs, or cancel.")
@click.option("--target", default="", metavar="NAME", help="Only what was done to this job, node...")
@click.option("--since", default="", metavar="TIME", help="Only since: 6h, 2d or 2026-01-31T08:00Z.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many, newest first.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new ones until Ctrl-C, oldest first.")
@click.option("--json", "as_json", is_flag=True, help="The same as -o jsonl.")
@output_option
@headers_option
def audit(
    who: str, what: str, target: str, since: str, limit: int, follow: bool, as_json: bool, output: str, no_headers: bool
) -> None:
    """Who changed what, when, from where, and whether it was let through: newest first. For administrators."""
    output = "jsonl" if as_json else output
    with client() as server:
        found = list(server.audit(who=who, what=what, target=target, since=since, limit=limit))
        if not follow:
            emit_list(found, output, COLUMNS, name=lambda e: str(e.seq), headers=not no_headers, empty="nothing yet")
            return
        entries = _follow(server, found[::-1], who, what, target)
        if output in ("table", "wide"):
            for entry in entries:
                line = f"{entry.at}  {entry.who:<12}  {entry.verb:<20}  {entry.target:<12}  {_outcome(entry)}"
                click.echo(clean(f"{line}  {entry.detail}" if entry.detail else line))
        else:
            emit_list(entries, "jsonl", COLUMNS, name=lambda e: str(e.seq))


def _follow(server: Client, known: list[AuditView], who: str, what: str, target: str) -> Iterator[AuditView]:
    yield from known
    last = known[-1].seq if known else next((entry.seq for entry in server.audit(limit=1)), 0)
    while True:
        more = server.audit_after(last, who=who, what=what, target=target)
        yield from more
        last = more[-1].seq if more else last
        time.sleep(_LOOK_AGAIN_S)


def _outcome(entry: AuditView) -> str:
    return f"refused: {entry.code}" if entry.code else "ok"
