"""`hodei job list`, `show`, `history`, `export` and `init`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import click

from hodei.cli.options import (
    client,
    complete_nodes,
    headers_option,
    job_argument,
    output_option,
    redraw,
    watch_option,
)
from hodei.cli.output import Column, emit_list, emit_one, fields, indent, labels_text, note, paint, table
from hodei.cli.refs import (
    ACTIVE,
    describe_array,
    element_text,
    elements_text,
    id_text,
    name_text,
    quoted_reference,
    reference_text,
    resolve_job,
    resolve_targets,
    single_job,
)
from hodei.cli.times import ago, duration_text, elapsed
from hodei.jobfile.values import format_numbers
from hodei.model.accounting import CostRow
from hodei.model.job import JOB_TRANSITIONS
from hodei.model.usage import cores_number, size_text

if TYPE_CHECKING:
    from hodei.api.views import JobDetail, JobView, RunView

COLUMNS = (
    Column("ID", reference_text),
    Column("NAME", name_text),
    Column("STATE", lambda v: v.state),
    Column("PROJECT", lambda v: v.project),
    Column("USER", lambda v: v.user or "-", wide=True),
    Column("PRIORITY", lambda v: str(v.priority), wide=True),
    Column("NODES", lambda v: _nodes(v), if_any=True),
    Column("EXIT", lambda v: "-" if v.exit_code is None else str(v.exit_code)),
    Column("ATTEMPT", lambda v: str(v.attempt), wide=True),
    Column("FAILURE", lambda v: v.failure or "-", wide=True, if_any=True),
    Column("SUBMITTED", lambda v: ago(v.submitted_at)),
    Column("RUNTIME", lambda v: elapsed(v.started_at, v.finished_at) or "-"),
    Column("LABELS", lambda v: labels_text(v.labels, ",") or "-", wide=True),
    Column("REASON", lambda v: elements_text(v) or v.reason or v.reason_code or "-", if_any=True),
)
RUN_COLUMNS = (
    Column("RUN", lambda r: r.id),
    Column("TASK", lambda r: r.task),
    Column("STATE", lambda r: r.state),
    Column("RANK", lambda r: str(r.rank)),
    Column("NODE", lambda r: r.node),
    Column("PARTS", lambda r: _grant(r) or "-", if_any=True),
    Column("EXIT", lambda r: "-" if r.exit_code is None else str(r.exit_code)),
    Column("STARTED", lambda r: ago(r.started_at) or "-"),
    Column("RUNTIME", lambda r: elapsed(r.started_at, r.finished_at) or "-"),
    Column("HEALTH", lambda r: r.health or "-", if_any=True),
    Column("CHECKPOINT", lambda r: ago(r.checkpoint_at) or "-", if_any=True),
    Column("REASON", lambda r: r.reason or r.reason_code or "-", if_any=True),
)


COST_COLUMNS = (
    Column("PROJECT", lambda row: row.project),
    Column("USER", lambda row: row.user),
    Column("BACKEND", lambda row: row.backend),
    Column("RUNS", lambda row: str(row.runs), right=True),
    Column("COST", lambda row: f"{row.cost:.4g}", right=True),
)
USAGE_COLUMNS = (
    Column("RUN", lambda r: r.run),
    Column("NAME", lambda r: r.name),
    Column("PROJECT", lambda r: r.project),
    Column("USER", lambda r: r.user or "-", wide=True),
    Column("NODE", lambda r: r.node),
    Column("CPU", lambda r: "-" if r.cpu_milli is None else cores_number(r.cpu_milli), right=True),
    Column("OF", lambda r: cores_number(r.cpu_request) if r.cpu_request else "-", right=True),
    Column("CPU%", lambda r: "-" if r.cpu_percent is None else str(r.cpu_percent), right=True),
    Column("MEMORY", lambda r: "-" if r.peak_memory is None else size_text(r.peak_memory), right=True),
    Column("OF", lambda r: size_text(r.memory_request) if r.memory_request else "-", right=True),
    Column("MEM%", lambda r: "-" if r.memory_percent is None else str(r.memory_percent), right=True),
    Column("READ", lambda r: "-" if r.read_bytes is None else size_text(r.read_bytes), wide=True, right=True),
    Column("WRITTEN", lambda r: "-" if r.write_bytes is None else size_text(r.write_bytes), wide=True, right=True),
    Column("RUNTIME", lambda r: elapsed(r.started_at, "") or "-"),
)


@click.command("list")
@click.option("-a", "--all", "every", is_flag=True, help="Include ended jobs.")
@click.option(
    "--state", multiple=True, type=click.Choice(list(JOB_TRANSITIONS)), help="Only jobs in this state; repeatable."
)
@click.option("--project", default="", help="Only jobs of this project.")
@click.option("--user", default="", help="Only jobs of this user.")
@click.option("--name", default="", help="Only jobs with this name.")
@click.option("-l", "--selector", default="", help="Only jobs with these labels: team=a, stage in (x, y), !old.")
@click.option("--since", default="", metavar="TIME", help="Only jobs submitted since: 6h, 2d or 2026-01-31T08:00Z.")
@click.option(
    "--limit", type=click.IntRange(1), default=1000, show_default=True, help="Maximum number of jobs, newest first."
)
@click.option("--elements", is_flag=True, help="Show every element of an array as its own row.")
@output_option
@headers_option
@watch_option
def list_jobs(
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

        empty = "no such jobs" if every or state else "no active jobs (all: hodei jobs -a)"
        emit_list(counted(), output, COLUMNS, name=reference_text, headers=not no_headers, empty=empty)
        if shown == limit:
            note(f"these are the newest {limit}; there may be more (--limit)")

    with client() as server:
        if watch:
            redraw(server, lambda: list(fetch()), draw, output)
        else:
            draw(fetch())


@click.command()
@click.option("--project", default="", help="Only runs of this project.")
@click.option("--user", default="", help="Only runs of this user.")
@click.option("--node", default="", help="Only runs on this node.", shell_complete=complete_nodes)
@click.option("--sort", type=click.Choice(["cpu", "memory"]), default="cpu", show_default=True, help="Largest first.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Maximum number of runs.")
@output_option
@headers_option
def top(project: str, user: str, node: str, sort: str, limit: int, output: str, no_headers: bool) -> None:
    """Show what running jobs use and what they requested, once, one row per run. CPU is that since the previous
    measurement, or on average since the start; memory is the peak. `-` is unknown."""
    with client() as server:
        rows = server.usage(project=project, user=user, node=node, sort=sort, limit=limit)
        emit_list(rows, output, USAGE_COLUMNS, name=lambda r: r.run, headers=not no_headers, empty="nothing is running")


@click.command()
@click.option("--since", default="30d", show_default=True, metavar="TIME", help="Start: 6h, 30d, 2026-01-31T08:00Z.")
@click.option("--until", default="", metavar="TIME", help="End [default: now].")
@click.option(
    "--by",
    type=click.Choice(["project", "user", "backend"]),
    default="project",
    show_default=True,
    help="One row for each.",
)
@click.option("--project", default="", help="Only this project.")
@output_option
@headers_option
def cost(since: str, until: str, by: str, project: str, output: str, no_headers: bool) -> None:
    """Show what runs cost, by the prices of the nodes and the share of a node that each run requested. With -o json, one
    row for each project, user and backend."""
    with client() as server:
        found = server.costs(since=since, until=until, project=project)
    if output != "table" and output != "wide":
        emit_list(found.rows, output, COST_COLUMNS, name=lambda row: row.project)
        return
    sums: dict[str, CostRow] = {}
    for row in found.rows:
        key = getattr(row, by)
        before = sums.get(key, CostRow(key, "", "", 0, 0.0))
        sums[key] = CostRow(key, "", "", before.runs + row.runs, before.cost + row.cost)
    columns = (Column(by.upper(), lambda row: row.project), *COST_COLUMNS[-2:])
    rows = sorted(sums.values(), key=lambda row: (-row.cost, row.project))
    empty = "nothing has run on a node with a price (`cost` of a backend or a node)"
    emit_list(rows, output, columns, name=lambda row: row.project, headers=not no_headers, empty=empty)


@click.command()
@job_argument
@click.option(
    "--show-secrets", is_flag=True, help="Show values of variables that look secret; for the owner of the job."
)
@output_option
def show(job: str, show_secrets: bool, output: str) -> None:
    """Show one job: its state and its runs; with -o yaml its whole specification. The name or number of an array shows
    the states of its elements; one of them is `sweep[3]`."""
    with client() as server:
        targets = resolve_targets(server, [job])
        if targets.arrays:
            emit_one(targets.arrays[0], output, name=id_text, text=describe_array)
            return
        detail = server.job(single_job(targets, job), secrets=show_secrets)
    wide = output == "wide"
    emit_one(detail, output, name=lambda d: reference_text(d.job), text=lambda d: _describe(d, wide=wide))


@click.command()
@job_argument
@output_option
@headers_option
def history(job: str, output: str, no_headers: bool) -> None:
    """Show the history of one job, oldest first: every change, its cause and its author. With -o wide as a table of events."""
    from hodei.cli import events

    with client() as server:
        id = resolve_job(server, job)
        name = server.job(id).job.name  # NotFound for an unknown job, instead of an empty list
        found = [events.event_dict(event) for event in server.events(job=id)]
    if output == "table":
        for line in events.timeline(found, name):
            click.echo(line)
        return
    emit_list(found, output, events.COLUMNS, name=events.number, headers=not no_headers, empty="no events")


@click.command()
@job_argument
@click.option("--scenario", is_flag=True, help="As a scenario file for `hodei test`.")
def export(job: str, scenario: bool) -> None:
    """Write what happened around a job to stdout: nodes, other jobs, actions and results.

    Commands and environments of jobs are omitted.
    """
    from hodei.cli.errors import UsageProblem
    from hodei.client.incident import scenario_text

    if not scenario:
        raise UsageProblem("the format is missing", hint=f"hodei job export {job} --scenario > incident.scenario.yaml")
    with client() as server:
        click.echo(scenario_text(server, resolve_job(server, job)), nl=False)


@click.command()
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
        ("array", element_text(view)),
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
        ("expected", f"to run {duration_text(view.expected_ms)} ({view.expected_by})" if view.expected_ms else ""),
        ("labels", labels_text(view.labels)),
        ("members", _members(detail)),
        ("gang", _gang(detail)),
        ("distribution", _distribution(detail)),
        ("checkpoint", _checkpoint(detail)),
        ("may wait", _max_wait(detail)),
        ("attempt", str(view.attempt)),
        ("submitted", _moment(view.submitted_at)),
        ("scheduled", _moment(view.scheduled_at)),
        ("started", _moment(view.started_at)),
        ("finished", _moment(view.finished_at)),
        ("ran for", elapsed(view.started_at, view.finished_at)),
        ("usage", detail.efficiency.text if detail.efficiency else ""),
        ("request", detail.efficiency.hint if detail.efficiency else ""),
        ("cost", f"{detail.cost:.4g}" if detail.cost else ""),
    ])  # fmt: skip
    head = head.replace(view.state, paint(view.state, view.state), 1) if view.state else head
    if detail.runs:
        ranked = any(run.rank for run in detail.runs)
        columns = [column for column in RUN_COLUMNS if column.header != "RANK" or wide or ranked]
        head += "\n\nruns\n" + indent(table(detail.runs, columns, wide=wide, inset=2))
    reference = quoted_reference(view)
    return head + f"\n\nmore: hodei why {reference}, hodei logs {reference}, hodei job show {reference} -o yaml"


def _moment(text: str) -> str:
    return f"{text} ({ago(text)})" if text else ""


def _nodes(view: JobView) -> str:
    if len(view.nodes) <= 2:
        return ",".join(view.nodes) or "-"
    return f"{view.nodes[0]} +{len(view.nodes) - 1}"


def _members(detail: JobDetail) -> str:
    """`8 in 1 task, 4 are enough; 5 of 8 run`; the last part only if some members do not run."""
    view = detail.job
    running = len({run.member for run in detail.runs if run.attempt >= view.first_attempt and run.state == "running"})
    if _keys(detail).get("per_node"):
        return "one on each matching node" + (f"; {running} run" if view.state == "running" else "")
    text = f"{view.members} in {view.tasks} task{'s' if view.tasks != 1 else ''}"
    tasks: list[dict[str, Any]] = _keys(detail).get("tasks") or []
    if any(task.get("min") for task in tasks):
        enough = sum(task.get("min") or task.get("count") or 1 for task in tasks)
        text += f", {enough} {'is' if enough == 1 else 'are'} enough"
    if view.state == "running" and running < view.members:
        text += f"; {running} of {view.members} run"
    return text


def _gang(detail: JobDetail) -> str:
    rules: dict[str, Any] = _keys(detail).get("gang") or {}
    parts = []
    if topology := rules.get("topology"):
        preferred = isinstance(topology, dict)
        parts.append(f"all in one {topology['key']} if possible" if preferred else f"all in one {topology}")
    if rules.get("on_failure") == "repair":
        parts.append("only a lost member is replaced")
    elif rules:
        parts.append("a lost member restarts all")
    if rules.get("assembly_timeout"):
        parts.append(f"all must run within {rules['assembly_timeout']}")
    if rules.get("elastic"):
        parts.append("grows and shrinks with the free capacity")
    return "; ".join(parts)


def _max_wait(detail: JobDetail) -> str:
    keys = _keys(detail)
    parts = [f"{keys['scheduling_timeout']} each time"] if keys.get("scheduling_timeout") else []
    parts += [f"{keys['max_queue_time']} for its first start"] if keys.get("max_queue_time") else []
    return ", ".join(parts)


def _distribution(detail: JobDetail) -> str:
    rules: dict[str, Any] = _keys(detail).get("distribution") or {}
    match rules.get("model"):
        case "colocated":
            return "all tasks on one backend"
        case "distributed":
            return "tasks over backends, by transfer costs"
        case "hub_and_spoke":
            return f"tasks over backends, by transfer costs to {rules.get('hub')}"
    return ""


def _checkpoint(detail: JobDetail) -> str:
    rules: dict[str, Any] = _keys(detail).get("checkpoint") or {}
    parts = []
    if rules.get("signal"):
        parts.append(f"signal {rules['signal']}")
    if rules.get("command"):
        parts.append("command " + " ".join(rules["command"]))
    if parts:
        parts.append(f"up to {rules.get('timeout', '30s')} before it is stopped")
    if rules.get("file"):
        parts.append(f"time from {rules['file']}")
    return ", ".join(parts)


def _grant(run: RunView) -> str:
    """`cpu 0-3, gpu 0, gpu 1 x0.5`"""
    parts = [f"cpu {format_numbers(run.cpus)}"] if run.cpus else []
    parts += [f"gpu {number}" + (f" x{share:g}" if share != 1 else "") for number, share in run.gpus.items()]
    return ", ".join(parts)


def _keys(detail: JobDetail) -> dict[str, Any]:
    keys = detail.spec.get("spec")
    return keys if isinstance(keys, dict) else {}
