"""`hodei events`: the history of the installation, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from hodei.cli.options import client, complete_jobs, headers_option, output_option
from hodei.cli.output import Column, clean, emit_list
from hodei.cli.refs import resolve_job
from hodei.cli.times import ago, iso
from hodei.model.effects import Event

COLUMNS = (
    Column("SEQ", lambda e: str(e["seq"])),
    Column("TIME", lambda e: e["at"], wide=True),
    Column("WHEN", lambda e: ago(e["at_ms"])),
    Column("KIND", lambda e: e["kind"]),
    Column("JOB", lambda e: str(e["job"] or "-")),
    Column("RUN", lambda e: e["run"] or "-"),
    Column("NODE", lambda e: e["node"] or "-"),
    Column("DETAIL", lambda e: detail_text(e["detail"]) or "-"),
)


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with new ones until Ctrl-C.")
@click.option("--after", type=click.IntRange(0), help="Begin after this number.")
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, help="The last so many, without --after."
)
@click.option("--job", "job", metavar="JOB", shell_complete=complete_jobs, help="Only events of this job.")
@output_option
@headers_option
def events(follow: bool, after: int | None, limit: int, job: str | None, output: str, no_headers: bool) -> None:
    """Print the last events, or all after a number; with -f new ones as they happen."""
    with client() as server:
        id = resolve_job(server, job) if job else 0
        if after is None:
            # Numbers have no gaps, so the last `limit` of all begin here; those of one job are few enough to read all.
            after = 0 if id else max(0, server.last_event() - limit)
        found = (plain(event) for event in server.events(after, follow, job=id))
        if follow and output in ("table", "wide"):
            _print_as_they_come(found)
        elif follow and output in ("json", "yaml"):
            emit_list(found, "jsonl", COLUMNS, name=lambda e: str(e["seq"]))
        else:
            emit_list(found, output, COLUMNS, name=lambda e: str(e["seq"]), headers=not no_headers, empty="no events")


def plain(event: Event) -> dict[str, Any]:
    """An event as the API gives it, every field there, with its time in ISO 8601 too."""
    return {
        "seq": event.seq, "at": iso(event.at_ms), "at_ms": event.at_ms, "kind": event.kind, "job": event.job,
        "run": event.run, "node": event.node, "detail": event.detail,
    }  # fmt: skip


def detail_text(detail: dict[str, Any]) -> str:
    """`key=value` for what there is to say; lists with commas."""
    said = {key: value for key, value in detail.items() if value not in ("", None, [], {})}
    return " ".join(f"{k}={','.join(map(str, v)) if isinstance(v, list) else v}" for k, v in said.items())


def _print_as_they_come(found: Iterator[dict[str, Any]]) -> None:
    """One line each: widths cannot be known before the end, so columns are loose."""
    for event in found:
        what = detail_text(event["detail"])
        who = " ".join(
            part for part in (f"job={event['job']}" if event["job"] else "", event["run"], event["node"]) if part
        )
        click.echo(clean(f"{event['at']}  {event['kind']:<18}  {who}{'  ' + what if what else ''}"))
