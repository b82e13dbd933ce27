"""`hodei jobs` and `hodei job …`: what there is, and everything about one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import TYPE_CHECKING

import click

from hodei.cli import arrays, failure_tail, gang_text
from hodei.cli.graph import graph
from hodei.cli.groups import Group
from hodei.cli.options import client, headers_option, job_argument, output_option, watch_option
from hodei.cli.output import Column, emit_list, emit_one, fields, indent, note, paint, table
from hodei.cli.refs import ACTIVE, look_up, only, resolve_job
from hodei.cli.times import ago, short, span
from hodei.model.lifecycle import JOB_STEPS

if TYPE_CHECKING:
    from hodei.api.views import JobDetail, JobView

COLUMNS = (
    Column("ID", arrays.reference_text),
    Column("NAME", arrays.name_text),
    Column("STATE", lambda v: v.state),
    Column("PROJECT", lambda v: v.project),
    Column("USER", lambda v: v.user or "-", wide=True),
    Column("PRIORITY", lambda v: str(v.priority), wide=True),
    Column("NODES", lambda v: _nodes(v), if_any=True),
    Column("EXIT", lambda v: "-" if v.exit_code is None else str(v.exit_code)),
    Column("ATTEMPT", lambda v: str(v.attempt), wide=True),
    Column("FAILURE", lambda v: v.failure or "-", wide=True, if_any=True),
    Column("SUBMITTED", lambda v: ago(v.submitted_at)),
    Column("RUNTIME", lambda v: span(v.started_at, v.finished_at) or "-"),
    Column("LABELS", lambda v: ",".join(f"{k}={x}" for k, x in sorted(v.labels.items())) or "-", wide=True),
    Column("REASON", lambda v: arrays.elements_text(v) or v.reason or v.reason_code or "-", if_any=True),
)
RUN_COLUMNS = (
    Column("RUN", lambda r: r.id),
    Column("TASK", lambda r: r.task),
    Column("STATE", lambda r: r.state),
    Column("RANK", lambda r: str(r.rank)),
    Column("NODE", lambda r: r.node),
    Column("PARTS", lambda r: gang_text.parts(r) or "-", if_any=True),
    Column("EXIT", lambda r: "-" if r.exit_code is None else str(r.exit_code)),
    Column("STARTED", lambda r: ago(r.started_at) or "-"),
    Column("RUNTIME", lambda r: span(r.started_at, r.finished_at) or "-"),
    Column("HEALTH", lambda r: r.health or "-", if_any=True),
    Column("CHECKPOINT", lambda r: ago(r.checkpoint_at) or "-", if_any=True),
    Column("REASON", lambda r: r.reason or r.reason_code or "-", if_any=True),
)


@click.command()
@click.option("-a", "--all", "every", is_flag=True, help="Ended jobs too.")
@click.option("--state", multiple=True, type=click.Choice(list(JOB_STEPS)), help="Only jobs in this state; repeatable.")
@click.option("--project", default="", help="Only jobs of this project.")
@click.option("--user", default="", help="Only jobs of this user.")
@click.option("--name", default="", help="Only jobs with this name.")
@click.option("-l", "--selector", default="", help="Only jobs with these labels: team=a, stage in (x, y), !old.")
@click.option("--since", default="", metavar="TIME", help="Only jobs submitted since: 6h, 2d or 2026-01-31T08:00Z.")
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, help="At most so many, newest first.")
@click.option("--elements", is_flag=True, help="Every element of an array as a row of its own.")
@output_option
@headers_option
@watch_option
def jobs(
    every: bool,
    state: tuple[str, ...],
    project: str,
    user: str,
    name: str,
    selector: str,
    since: str,
    limit: int,
    elements: bool,
    output: str,
    no_headers: bool,
    watch: bool,
) -> None:
    """List jobs, newest first: the active ones; all with -a, with --since or with --state."""
    every = every or bool(since)

    def fetch() -> Iterator[JobView]:
        return server.jobs(
            state=state or (() if every else ACTIVE),
            project=project, user=user, name=name, label=selector, since=since, limit=limit,
            arrays="" if elements else "fold",
        )  # fmt: skip

    def draw(views: Iterable[JobView]) -> None:
        shown = 0

        def counted() -> Iterator[JobView]:
            nonlocal shown
            for view in views:
                shown += 1
                yield view

        nothing = "no such jobs" if every or state else "no active jobs (all: hodei jobs -a)"
        emit_list(counted(), output, COLUMNS, name=arrays.reference_text, headers=not no_headers, empty=nothing)
        if shown == limit:
            note(f"these are the newest {limit}; there may be more (--limit)")

    with client() as server:
        if watch:
            from hodei.cli.watch import redraw

            redraw(server, lambda: list(fetch()), draw, output)
        else:
            draw(fetch())


@click.group(cls=Group)
def job() -> None:
    """Show one job, its history or an example job file, or export an incident."""


@job.command("show")
@job_argument
@click.option(
    "--show-secrets", is_flag=True, help="Values of variables that look secret too; for the owner of the job."
)
@output_option
def show_job(job: str, show_secrets: bool, output: str) -> None:
    """Everything about one job: where it stands, its runs; with -o yaml its whole specification. Of an array by its name
    or number: how its elements stand; one of them is `sweep[3]`."""
    with client() as server:
        meant = look_up(server, [job])
        if meant.arrays:
            emit_one(meant.arrays[0], output, name=arrays.id_text, text=arrays.describe)
            return
        detail = server.job(only(meant, job), secrets=show_secrets)
    emit_one(
        detail, output, name=lambda d: arrays.reference_text(d.job), text=lambda d: _describe(d, wide=output == "wide")
    )


@job.command("history")
@job_argument
@output_option
@headers_option
def history(job: str, output: str, no_headers: bool) -> None:
    """What happened to one job, oldest first: every change, why, and by whom. With -o wide as a table of events."""
    from hodei.cli.events import COLUMNS as EVENT_COLUMNS
    from hodei.cli.events import plain

    with client() as server:
        id = resolve_job(server, job)
        # A job that does not exist has no history, and that is an error, not an empty list.
        name = server.job(id).job.name
        found = [plain(event) for event in server.events(job=id)]
    if output == "table":
        from hodei.cli.history import print_timeline

        print_timeline(found, name)
        return
    emit_list(found, output, EVENT_COLUMNS, name=lambda e: str(e["seq"]), headers=not no_headers, empty="no events")


@job.command("export")
@job_argument
@click.option("--scenario", is_flag=True, help="As a scenario file that `hodei test` plays again.")
def export(job: str, scenario: bool) -> None:
    """Write to stdout what happened around a job: nodes, other jobs, what was done, and what came of it.

    What jobs run and their environment are left out.
    """
    from hodei.cli.errors import UsageProblem
    from hodei.client.incident import scenario_text

    if not scenario:
        raise UsageProblem("export as what?", hint=f"hodei job export {job} --scenario > incident.scenario.yaml")
    with client() as server:
        click.echo(scenario_text(server, resolve_job(server, job)), nl=False)


job.add_command(graph)


@job.command("init")
@click.option("--full", is_flag=True, help="The full form: several tasks, affinity, tolerations.")
def init(full: bool) -> None:
    """Write a commented example job file to stdout."""
    example = "example-full.yaml" if full else "example.yaml"
    click.echo(files("hodei.cli").joinpath(example).read_text(), nl=False)


def _describe(detail: JobDetail, *, wide: bool = False) -> str:
    view = detail.job
    head = fields([
        ("id", str(view.id)),
        ("name", view.name),
        ("array", arrays.place_text(view)),
        ("state", f"{view.state}{' (cancel requested)' if view.cancel_requested else ' (suspend requested)' if view.suspend_requested else ''}"),
        ("reason", f"{view.reason}{f' [{view.reason_code}]' if view.reason_code else ''}" if view.reason or view.reason_code else ""),
        ("record", detail.damage),
        ("failure", view.failure),
        ("exit code", "" if view.exit_code is None else str(view.exit_code)),
        ("project", view.project),
        ("user", view.user),
        ("priority", str(view.priority)),
        ("profile", view.profile),
        ("qos", view.qos),
        ("expected", f"to run {short(view.expected_ms)} ({view.expected_by})" if view.expected_ms else ""),
        ("labels", ", ".join(f"{k}={v}" for k, v in sorted(view.labels.items()))),
        ("members", gang_text.members(detail)),
        ("gang", gang_text.gang(detail)),
        ("distribution", gang_text.distribution(detail)),
        ("checkpoint", gang_text.checkpoint(detail)),
        ("may wait", gang_text.waits(detail)),
        ("attempt", str(view.attempt)),
        ("submitted", _moment(view.submitted_at)),
        ("scheduled", _moment(view.scheduled_at)),
        ("started", _moment(view.started_at)),
        ("finished", _moment(view.finished_at)),
        ("ran for", span(view.started_at, view.finished_at)),
    ])  # fmt: skip
    head = head.replace(view.state, paint(view.state, view.state), 1) if view.state else head
    if detail.runs:
        alone = not any(run.rank for run in detail.runs)
        columns = [column for column in RUN_COLUMNS if column.header != "RANK" or wide or not alone]
        head += "\n\nruns\n" + indent(table(detail.runs, columns, wide=wide, inset=2))
    word = failure_tail.quoted_reference(view)
    return head + f"\n\nmore: hodei why {word}, hodei logs {word}, hodei job show {word} -o yaml"


def _moment(text: str) -> str:
    return f"{text} ({ago(text)})" if text else ""


def _nodes(view: JobView) -> str:
    if len(view.nodes) <= 2:
        return ",".join(view.nodes) or "-"
    return f"{view.nodes[0]} +{len(view.nodes) - 1}"
