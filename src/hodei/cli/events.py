"""`hodei event list`, `hodei audit list`, and the timeline of `hodei job history`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from hodei.cli.groups import Group
from hodei.cli.options import client, complete_jobs, headers_option, output_option
from hodei.cli.output import Column, clean, emit_list, is_for_people
from hodei.cli.refs import resolve_job
from hodei.cli.times import ago, duration_text, iso
from hodei.model.effects import Event

if TYPE_CHECKING:
    from hodei.api.resources import AuditView
    from hodei.client import Client

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


@click.group(cls=Group)
def event() -> None:
    """Print or follow events."""


@event.command("list")
@click.option("-f", "--follow", is_flag=True, help="Follow new events until Ctrl-C.")
@click.option("--after", type=click.IntRange(0), help="Start after this number.")
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, help="Number of last events, without --after."
)
@click.option("--job", "job", metavar="JOB", shell_complete=complete_jobs, help="Only events of this job.")
@output_option
@headers_option
def list_events(follow: bool, after: int | None, limit: int, job: str | None, output: str, no_headers: bool) -> None:
    """Print the last events, or all after a number; with -f also new ones."""
    with client() as server:
        id = resolve_job(server, job) if job else 0
        if after is None:
            # Numbers have no gaps, so this is where the last `limit` start. The events of one job are few: read all.
            after = 0 if id else max(0, server.last_event() - limit)
        found = (event_dict(event) for event in server.events(after, follow, job=id))
        if follow and is_for_people(output):
            _print_lines(found)
            return
        output = "jsonl" if follow and output in ("json", "yaml") else output
        emit_list(found, output, COLUMNS, name=number, headers=not no_headers, empty="no events")


def number(event: dict[str, Any]) -> str:
    return str(event["seq"])


def event_dict(event: Event) -> dict[str, Any]:
    """An event with every field of the API, and its time in ISO 8601."""
    return {
        "seq": event.seq, "at": iso(event.at_ms), "at_ms": event.at_ms, "kind": event.kind, "job": event.job,
        "run": event.run, "node": event.node, "detail": event.detail,
    }  # fmt: skip


def detail_text(detail: dict[str, Any]) -> str:
    """`key=value` of all values that are not empty; lists with commas."""
    given = {key: value for key, value in detail.items() if value not in ("", None, [], {})}
    return " ".join(f"{k}={','.join(map(str, v)) if isinstance(v, list) else v}" for k, v in given.items())


def _print_lines(found: Iterator[dict[str, Any]]) -> None:
    """Print each event as it arrives, so columns cannot be aligned."""
    for event in found:
        what = detail_text(event["detail"])
        who = " ".join(
            part for part in (f"job={event['job']}" if event["job"] else "", event["run"], event["node"]) if part
        )
        click.echo(clean(f"{event['at']}  {event['kind']:<18}  {who}{'  ' + what if what else ''}"))


AUDIT_COLUMNS = (
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
_POLL_S = 1.0


@click.group(cls=Group, default="list")
def audit() -> None:
    """Show who changed what; `hodei audit` alone is `hodei audit list`. For administrators."""


@audit.command("list")
@click.option("--who", default="", metavar="NAME", help="Only actions of this caller.")
@click.option("--what", default="", metavar="VERB", help="Only this verb: jobs.cancel, or jobs, or cancel.")
@click.option("--target", default="", metavar="NAME", help="Only actions on this job, node...")
@click.option("--since", default="", metavar="TIME", help="Only since: 6h, 2d or 2026-01-31T08:00Z.")
@click.option(
    "--limit", type=click.IntRange(1), default=100, show_default=True, help="Maximum number of rows, newest first."
)
@click.option("-f", "--follow", is_flag=True, help="Follow new rows until Ctrl-C, oldest first.")
@output_option
@headers_option
def list_audit(
    who: str, what: str, target: str, since: str, limit: int, follow: bool, output: str, no_headers: bool
) -> None:
    """Show who changed what, when, from where, and whether it was allowed, newest first. For administrators."""
    with client() as server:
        found = list(server.audit(who=who, what=what, target=target, since=since, limit=limit))
        if not follow:
            headers = not no_headers
            emit_list(found, output, AUDIT_COLUMNS, name=lambda e: str(e.seq), headers=headers, empty="no entries")
            return
        entries = _follow(server, found[::-1], who, what, target)
        if is_for_people(output):
            for entry in entries:
                line = f"{entry.at}  {entry.who:<12}  {entry.verb:<20}  {entry.target:<12}  {_outcome(entry)}"
                click.echo(clean(f"{line}  {entry.detail}" if entry.detail else line))
        else:
            emit_list(entries, "name" if output == "name" else "jsonl", AUDIT_COLUMNS, name=lambda e: str(e.seq))


def _follow(server: Client, known: list[AuditView], who: str, what: str, target: str) -> Iterator[AuditView]:
    yield from known
    last = known[-1].seq if known else next((entry.seq for entry in server.audit(limit=1)), 0)
    while True:
        more = server.audit_after(last, who=who, what=what, target=target)
        yield from more
        last = more[-1].seq if more else last
        time.sleep(_POLL_S)


def _outcome(entry: AuditView) -> str:
    return f"refused: {entry.code}" if entry.code else "ok"


_EVENT_TEXTS = {
    "job.submitted": "submitted",
    "job.scheduled": "placed",
    "job.started": "started",
    "job.held": "held",
    "job.released": "released",
    "job.suspend_requested": "suspend requested",
    "job.suspended": "suspended",
    "job.resumed": "resumed",
    "job.cancel_requested": "cancel requested",
    "job.requeue_requested": "requeue requested",
    "job.requeued": "back in the queue",
    "job.preempting": "preempting other jobs",
    "job.preempted": "preempted",
    "run.ended": "run ended",
    "job.ended": "ended",
}
_SHOWN_KEYS = {"state", "by", "reason", "reason_code"}


def timeline(events: Iterable[dict[str, Any]], name: str) -> Iterator[str]:
    """One line for each event: its time, the time since the previous one, what happened, why, and by whom."""
    first = before = 0
    for event in events:
        at_ms, detail = event["at_ms"], event["detail"]
        if not first:
            first = before = at_ms
            yield f"job {event['job']} {name}".rstrip()
        attempt = str(event["run"]).rpartition(".")[2]
        what = _EVENT_TEXTS.get(event["kind"], event["kind"].replace(".", " ").replace("_", " "))
        if detail.get("state"):
            what += f": {detail['state']}"
        where = f" on {event['node']}" if event["node"] else ""
        run = f" (attempt {attempt}, run {event['run']})" if event["run"] else ""
        why = detail.get("reason") or detail.get("reason_code") or ""
        rest = detail_text({key: value for key, value in detail.items() if key not in _SHOWN_KEYS})
        by = f", by {detail['by']}" if detail.get("by") else ""
        line = f"{event['at']}  {_since(at_ms - before):>8}  {what}{where}{run}{f': {why}' if why else ''}{by}"
        yield clean(f"{line}  [{rest}]" if rest else line)
        before = at_ms


def _since(ms: int) -> str:
    return f"+{duration_text(ms)}" if ms else ""
