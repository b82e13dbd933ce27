"""`hodei cron …`: jobs that come again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hodei.cli.errors import UsageProblem
from hodei.cli.groups import Group
from hodei.cli.options import client, headers_option, output_option
from hodei.cli.output import Column, emit_list, emit_one, fields
from hodei.cli.times import ago

if TYPE_CHECKING:
    from hodei.api.cron import PeriodicView

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
    """Jobs that come again and again, by the five fields of cron."""


@cron.command("add")
@click.argument("name")
@click.option("--schedule", required=True, metavar="CRON", help="'*/5 * * * *', '0 3 * * mon-fri', @hourly, @daily...")
@click.option("-f", "--file", "path", required=True, metavar="FILE", help="The job: a file with one document, or -.")
@click.option("--timezone", default="UTC", show_default=True, help="Whose clock: Europe/Madrid, America/New_York.")
@click.option(
    "--missed", type=click.Choice(["skip", "run_once", "run_all"]), default="run_once", show_default=True,
    help="What to make up for of the times at which no server was there: nothing, one job, or all.",
)  # fmt: skip
@click.option("--missed-limit", type=click.IntRange(1, 1000), default=10, show_default=True, help="At most, of all.")
@click.option(
    "--overlap", type=click.Choice(["allow", "skip", "replace"]), default="skip", show_default=True,
    help="When the job before has not ended: run beside it, leave this time out, or take its place.",
)  # fmt: skip
@click.option("--paused", is_flag=True, help="Make no jobs until it is resumed.")
@output_option
def add(
    name: str, schedule: str, path: str, timezone: str, missed: str, missed_limit: int, overlap: str, paused: bool,
    output: str,
) -> None:  # fmt: skip
    """Make a periodic job from a job file."""
    from hodei.api.cron import PeriodicRequest, parse_periodic
    from hodei.cli.documents import read_documents

    documents = read_documents([path])
    if len(documents) != 1:
        raise UsageProblem(f"{path} holds {len(documents)} jobs", hint="a periodic job is made from one document")
    request = PeriodicRequest(name, schedule, documents[0], timezone, missed, missed_limit, overlap, paused)  # type: ignore[arg-type]
    parse_periodic(request, "")  # a mistake is told before anything is sent
    with client() as server:
        made = server.add_periodic(request)
    emit_one(made, output, name=lambda p: p.name, text=lambda p: f"periodic job {p.name} added, {_next(p)}")


@cron.command("list")
@output_option
@headers_option
def list_all(output: str, no_headers: bool) -> None:
    """Every periodic job, when it is due next, and what became of its last job."""
    with client() as server:
        found = server.periodics()
    emit_list(found, output, COLUMNS, name=lambda p: p.name, headers=not no_headers, empty="no periodic jobs")


@cron.command("show")
@click.argument("name")
@output_option
def show(name: str, output: str) -> None:
    """Everything about one periodic job; with -o yaml the job that it makes."""
    with client() as server:
        found = server.periodic(name)
    emit_one(found, output, name=lambda p: p.name, text=_describe)


@cron.command("pause")
@click.argument("name")
@output_option
def pause(name: str, output: str) -> None:
    """Make no more jobs until it is resumed."""
    with client() as server:
        found = server.pause_periodic(name)
    emit_one(found, output, name=lambda p: p.name, text=lambda p: f"periodic job {p.name} paused")


@cron.command("resume")
@click.argument("name")
@output_option
def resume(name: str, output: str) -> None:
    """Go on from the next time on; what was left out meanwhile is not made up for."""
    with client() as server:
        found = server.resume_periodic(name)
    emit_one(found, output, name=lambda p: p.name, text=lambda p: f"periodic job {p.name} resumed, {_next(p)}")


@cron.command("run")
@click.argument("name")
@output_option
def run(name: str, output: str) -> None:
    """Make a job now, out of turn."""
    with client() as server:
        job = server.run_periodic(name)
    emit_one(
        {"id": job, "name": name}, output, name=lambda j: str(j["id"]), text=lambda j: f"job {job} ({name}) submitted"
    )


@cron.command("remove")
@click.argument("name")
@output_option
def remove(name: str, output: str) -> None:
    """Remove a periodic job. Jobs that it has made go on."""
    with client() as server:
        found = server.remove_periodic(name)
    emit_one(found, output, name=lambda p: p.name, text=lambda p: f"periodic job {p.name} removed")


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
