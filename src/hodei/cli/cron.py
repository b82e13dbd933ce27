"""`hodei cron …`: periodic jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hodei.cli.errors import UsageProblem
from hodei.cli.groups import Group
from hodei.cli.options import client, output_option
from hodei.cli.output import Column, emit_one, fields
from hodei.cli.resources import list_command, name_argument, named_command
from hodei.cli.times import ago

if TYPE_CHECKING:
    from hodei.api.resources import PeriodicView

COLUMNS = (
    Column("NAME", lambda p: p.name),
    Column("SCHEDULE", lambda p: p.schedule),
    Column("TIMEZONE", lambda p: p.timezone if p.timezone != "UTC" else "-", if_any=True),
    Column("NEXT", lambda p: "paused" if p.paused else ago(p.next_at) or "never"),
    Column("LAST", lambda p: ago(p.last_due) or "-"),
    Column("JOB", lambda p: str(p.last_job or "-")),
    Column("STATE", lambda p: p.last_state or "-"),
    Column("OVERLAP", lambda p: p.overlap, wide=True),
    Column("MISSED", lambda p: p.missed, wide=True),
    Column("BY", lambda p: p.by, wide=True),
    Column("NOTE", lambda p: p.last_result if p.last_result not in ("", "made") else "-", if_any=True),
)


@click.group(cls=Group)
def cron() -> None:
    """Manage periodic jobs with cron schedules."""


list_command(
    cron,
    lambda server: server.periodics(),
    COLUMNS,
    empty="no periodic jobs",
    help="List periodic jobs with their next time and the result of their last job.",
)
named_command(
    cron,
    "show",
    lambda server, name: server.periodic(name),
    lambda p: _describe(p),
    help="Show one periodic job; with -o yaml the job that it creates.",
)
named_command(
    cron,
    "pause",
    lambda server, name: server.pause_periodic(name),
    lambda p: f"periodic job {p.name} paused",
    help="Create no more jobs until it is resumed.",
)
named_command(
    cron,
    "resume",
    lambda server, name: server.resume_periodic(name),
    lambda p: f"periodic job {p.name} resumed, {_next(p)}",
    help="Resume from the next time on; times missed in between are skipped.",
)
named_command(
    cron,
    "delete",
    lambda server, name: server.delete_periodic(name),
    lambda p: f"periodic job {p.name} deleted",
    help="Delete a periodic job. Jobs that it has created continue.",
)


@cron.command("create")
@name_argument
@click.argument("path", metavar="FILE")
@click.option("--schedule", required=True, metavar="CRON", help="'*/5 * * * *', '0 3 * * mon-fri', @hourly, @daily...")
@click.option("--timezone", default="UTC", show_default=True, help="Time zone: Europe/Madrid, America/New_York.")
@click.option(
    "--missed", type=click.Choice(["skip", "run_once", "run_all"]), default="run_once", show_default=True,
    help="Times missed while no server ran: skip them, create one job, or create all.",
)  # fmt: skip
@click.option(
    "--missed-limit",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    help="Maximum number of missed jobs to create.",
)
@click.option(
    "--overlap", type=click.Choice(["allow", "skip", "replace"]), default="skip", show_default=True,
    help="If the previous job has not ended: run beside it, skip this time, or replace it.",
)  # fmt: skip
@click.option("--paused", is_flag=True, help="Create no jobs until it is resumed.")
@output_option
def create(
    name: str, path: str, schedule: str, timezone: str, missed: str, missed_limit: int, overlap: str, paused: bool,
    output: str,
) -> None:  # fmt: skip
    """Create a periodic job. FILE is a job file with one document; - reads it from stdin."""
    from hodei.api.resources import PeriodicRequest, parse_periodic
    from hodei.cli.documents import read_documents

    documents = read_documents([path])
    if len(documents) != 1:
        raise UsageProblem(f"{path} holds {len(documents)} jobs", hint="a periodic job is made from one document")
    request = PeriodicRequest(name, schedule, documents[0], timezone, missed, missed_limit, overlap, paused)  # type: ignore[arg-type]
    parse_periodic(request, "")  # report a mistake before anything is sent
    with client() as server:
        made = server.create_periodic(request)
    emit_one(made, output, name=lambda p: p.name, text=lambda p: f"periodic job {p.name} created, {_next(p)}")


@cron.command("run")
@name_argument
@output_option
def run(name: str, output: str) -> None:
    """Create a job now, outside the schedule."""
    with client() as server:
        job = server.run_periodic(name)
    emit_one(
        {"id": job, "name": name}, output, name=lambda j: str(j["id"]), text=lambda j: f"job {job} ({name}) submitted"
    )


def _next(view: PeriodicView) -> str:
    return "paused" if view.paused else f"next at {view.next_at} ({ago(view.next_at)})"


def _describe(view: PeriodicView) -> str:
    limit = f", at most {view.missed_limit}" if view.missed == "run_all" else ""
    last = f"job {view.last_job} ({view.last_state or 'forgotten'}), due {view.last_due}" if view.last_job else ""
    text = fields([
        ("name", view.name),
        ("schedule", f"{view.schedule} ({view.timezone})"),
        ("next", _next(view).removeprefix("next at ")),
        ("last", last),
        ("note", view.last_result if view.last_result != "made" else ""),
        ("missed", view.missed + limit),
        ("overlap", view.overlap),
        ("by", f"{view.by}, {view.made_at}"),
    ])  # fmt: skip
    return f"{text}\n\nmore: hodei cron show {view.name} -o yaml, hodei jobs -a -l hodei/periodic={view.name}"
