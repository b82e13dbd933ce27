"""Named resources: `hodei backend`, `hodei cron` and `hodei reservation`. Each has a table of verbs; `create` has its own
options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, time, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hodei.cli import times
from hodei.cli.documents import read_toml
from hodei.cli.errors import UsageProblem
from hodei.cli.groups import Group
from hodei.cli.options import client, complete_nodes, headers_option, output_option
from hodei.cli.output import Column, clean, emit_list, emit_one, fields, is_for_people, note, short_amount
from hodei.cli.times import ago, clock, duration_text, ms_of

if TYPE_CHECKING:
    from hodei.api.resources import LateView, PeriodicView, ReservationView
    from hodei.api.views import BackendView, NodeUsageView
    from hodei.client import Client
    from hodei.model.reservation import OverstayPolicy

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
name_argument: Decorator = click.argument("name", metavar="NAME")


class Verb(NamedTuple):
    """`hodei NOUN VERB NAME`: `call` gets the client, the name and the values of `options`; `text` describes the result."""

    name: str
    call: Callable[..., Any]
    text: Callable[[Any], str]
    help: str
    options: Sequence[Decorator] = ()


def add_list(
    group: click.Group, fetch: Callable[[Client], Sequence[Any]], columns: Sequence[Column], *, empty: str, help: str
) -> None:
    """Add `hodei NOUN list`."""

    @group.command("list", help=help)
    @output_option
    @headers_option
    def command(output: str, no_headers: bool) -> None:
        with client() as server:
            found = fetch(server)
        emit_list(found, output, columns, headers=not no_headers, empty=empty)


def add_verbs(group: click.Group, *verbs: Verb, argument: Decorator = name_argument) -> None:
    for verb in verbs:
        command: Callable[..., Any] = output_option(_verb_command(verb))
        for decorate in (*verb.options, argument):
            command = decorate(command)
        group.command(verb.name, help=verb.help)(command)


def _verb_command(verb: Verb) -> Callable[..., None]:
    def command(name: str, output: str, **given: Any) -> None:
        with client() as server:
            found = verb.call(server, name, **given)
        emit_one(found, output, text=verb.text)

    return command


@click.group(cls=Group)
def backend() -> None:
    """Manage the systems that jobs run on."""


add_list(
    backend,
    lambda server: server.backends(),
    (
        Column("NAME", lambda b: b.name),
        Column("KIND", lambda b: b.kind),
        Column("STATE", lambda b: b.state),
        Column("SINCE", lambda b: ago(b.since) or "-", if_any=True),
        Column("NODES", lambda b: str(b.nodes)),
        Column("RUNS", lambda b: str(b.runs)),
        Column("FROM", lambda b: b.source, wide=True),
        Column("ANSWERED", lambda b: f"{b.took_ms}ms", wide=True),
        Column("REASON", lambda b: b.reason or "-", if_any=True),
    ),
    empty="no backends",
    help="List the backends and their health.",
)
_force_option = click.option(
    "--force", is_flag=True, help="Even if it has runs: they are not stopped, and count as lost."
)
add_verbs(
    backend,
    Verb("show", lambda server, name: server.backend(name), lambda b: _describe_backend(b),
         "Show one backend; secrets are masked."),
    Verb("disable", lambda server, name: server.disable_backend(name), lambda b: f"backend {clean(b.name)} disabled",
         "Start nothing more there; running jobs continue."),
    Verb("enable", lambda server, name: server.enable_backend(name),
         lambda b: f"backend {clean(b.name)} enabled: {b.state}", "Allow starts there again."),
    Verb("delete", lambda server, name, force: server.delete_backend(name, force=force),
         lambda b: f"backend {clean(b.name)} deleted",
         "Delete a backend that was created at run time. Remove the others from the configuration file.",
         [_force_option]),
)  # fmt: skip


@backend.command("create")
@name_argument
@click.argument("path", metavar="[FILE]", default="")
@click.option("--kind", required=True, metavar="KIND", help="docker, slurm, pbs, kubernetes or local.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting; VALUE is TOML or plain text.")
@output_option
def create_backend(name: str, path: str, kind: str, settings: tuple[str, ...], output: str) -> None:
    """Create a backend in the running server; it survives restarts. FILE has settings in TOML, - reads them from stdin.

    \b
      hodei backend create lab --kind docker --set 'hosts=[{name="h1", url="unix:///run/docker.sock"}]'
      hodei backend create hpc slurm.toml --kind slurm

    Keys: docs/how-to/backends.md. Put secrets into the file: other users can read command lines.
    """
    table = {**(read_toml(path) if path else {}), **dict(map(_parse_setting, settings))}
    with client() as server:
        made = server.create_backend(name, kind, table)
    emit_one(made, output, text=lambda b: f"backend {clean(b.name)} created: {b.state}")


@backend.command("usage")
@name_argument
@output_option
@headers_option
def backend_usage(name: str, output: str, no_headers: bool) -> None:
    """Show the measured usage of its nodes, by all processes."""
    columns = (
        Column("NODE", lambda u: u.node),
        Column("CPU", lambda u: _measured(u, "cpu")),
        Column("MEMORY", lambda u: _measured(u, "memory")),
    )
    with client() as server:
        found = server.backend_usage(name)
    emit_list(found, output, columns, name=lambda u: u.node, headers=not no_headers, empty="no measurements")


def _measured(usage: NodeUsageView, resource: str) -> str:
    from hodei.model.resources import human_amount

    return human_amount(resource, usage.used[resource]) if resource in usage.used else "-"


def _parse_setting(text: str) -> tuple[str, Any]:
    import tomllib

    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageProblem(f"{text!r} is not KEY=VALUE", hint="for example --set image=busybox")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def _describe_backend(view: BackendView) -> str:
    return fields([
        ("name", view.name),
        ("kind", view.kind),
        ("state", f"{view.state}{' since ' + ago(view.since) if view.since else ''}"),
        ("reason", view.reason),
        ("from", "the configuration file" if view.source == "file" else "created at run time"),
        ("nodes", str(view.nodes)),
        ("runs", str(view.runs)),
        ("can", ", ".join(view.capabilities)),
        *((f"  {key}", str(value)) for key, value in sorted(view.settings.items())),
    ])  # fmt: skip


@click.group(cls=Group)
def cron() -> None:
    """Manage periodic jobs with cron schedules."""


add_list(
    cron,
    lambda server: server.periodics(),
    (
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
    ),
    empty="no periodic jobs",
    help="List periodic jobs with their next time and the result of their last job.",
)
add_verbs(
    cron,
    Verb("show", lambda server, name: server.periodic(name), lambda p: _describe_periodic(p),
         "Show one periodic job; with -o yaml the job that it creates."),
    Verb("pause", lambda server, name: server.pause_periodic(name), lambda p: f"periodic job {p.name} paused",
         "Create no more jobs until it is resumed."),
    Verb("resume", lambda server, name: server.resume_periodic(name),
         lambda p: f"periodic job {p.name} resumed, {_next_time(p)}",
         "Resume with the next scheduled time; times missed in between are skipped."),
    Verb("delete", lambda server, name: server.delete_periodic(name), lambda p: f"periodic job {p.name} deleted",
         "Delete a periodic job. Jobs that it has created continue."),
)  # fmt: skip


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
    "--missed-limit", type=click.IntRange(1, 1000), default=10, show_default=True,
    help="Maximum number of missed jobs to create.",
)  # fmt: skip
@click.option(
    "--overlap", type=click.Choice(["allow", "skip", "replace"]), default="skip", show_default=True,
    help="If the previous job has not ended: run both, skip this time, or replace it.",
)  # fmt: skip
@click.option("--paused", is_flag=True, help="Create no jobs until it is resumed.")
@output_option
def create_periodic(path: str, output: str, **given: Any) -> None:
    """Create a periodic job. FILE is a job file with one document; - reads it from stdin."""
    from hodei.api.resources import PeriodicRequest, parse_periodic
    from hodei.cli.documents import read_documents

    documents = read_documents([path])
    if len(documents) != 1:
        raise UsageProblem(f"{path} contains {len(documents)} jobs", hint="a periodic job needs exactly one document")
    request = PeriodicRequest(job=documents[0], **given)
    parse_periodic(request, "")  # report mistakes before anything is sent
    with client() as server:
        made = server.create_periodic(request)
    emit_one(made, output, text=lambda p: f"periodic job {p.name} created, {_next_time(p)}")


@cron.command("run")
@name_argument
@output_option
def run_periodic(name: str, output: str) -> None:
    """Create a job now, outside the schedule."""
    with client() as server:
        job = server.run_periodic(name)
    created = {"id": job, "name": name}
    emit_one(created, output, name=lambda j: str(j["id"]), text=lambda _: f"job {job} ({name}) submitted")


def _next_time(view: PeriodicView) -> str:
    return "paused" if view.paused else f"next at {view.next_at} ({ago(view.next_at)})"


def _describe_periodic(view: PeriodicView) -> str:
    limit = f", at most {view.missed_limit}" if view.missed == "run_all" else ""
    last = f"job {view.last_job} ({view.last_state or 'deleted'}), due {view.last_due}" if view.last_job else ""
    text = fields([
        ("name", view.name),
        ("schedule", f"{view.schedule} ({view.timezone})"),
        ("next", _next_time(view).removeprefix("next at ")),
        ("last", last),
        ("note", view.last_result if view.last_result != "made" else ""),
        ("missed", view.missed + limit),
        ("overlap", view.overlap),
        ("by", f"{view.by}, {view.made_at}"),
    ])  # fmt: skip
    return f"{text}\n\nmore: hodei cron show {view.name} -o yaml, hodei jobs -a -l hodei/periodic={view.name}"


@click.group(cls=Group)
def reservation() -> None:
    """Reserve capacity for a project and a time window; no other job starts that would still hold it then."""


add_list(
    reservation,
    lambda server: server.reservations(),
    (
        Column("NAME", lambda r: r.name),
        Column("PROJECT", lambda r: r.project),
        Column("STATE", lambda r: r.state),
        Column("FROM", lambda r: clock(ms_of(r.start_at))),
        Column("UNTIL", lambda r: clock(ms_of(r.end_at))),
        Column("NODES", lambda r: _node_names(r)),
        Column("EACH", lambda r: _amounts(r.places[0].resources) if r.places else "-"),
        Column("BY", lambda r: r.by or "-", wide=True),
        Column("LATE", lambda r: str(len(r.late)) if r.late else "-", if_any=True),
    ),
    empty="no reservations",
    help="List the reservations that have not ended, soonest first.",
)
add_verbs(
    reservation,
    Verb("show", lambda server, name: server.reservation(name), lambda r: _describe_reservation(r),
         "Show one reservation."),
    Verb("delete", lambda server, name: server.delete_reservation(name),
         lambda r: f"reservation {clean(r.name)} deleted", "Delete a reservation. Jobs that run in it continue."),
)  # fmt: skip


@reservation.command("create")
@name_argument
@click.option("--project", required=True, metavar="PROJECT", help="Project whose jobs may use it.")
@click.option("--from", "start", default="now", metavar="T", help="Start: now [default], +2h, 14:00 or ISO 8601.")
@click.option("--for", "duration", default="", metavar="D", help="Duration: 2h, 90m, 1d.")
@click.option("--until", default="", metavar="T", help="End, instead of --for.")
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Number of nodes; those that are free soonest.")
@click.option(
    "--node", "named", multiple=True, metavar="NODE", shell_complete=complete_nodes, help="This node; may be repeated."
)
@click.option("--cpu", default="", metavar="C", help="Cores of each node [default: whole nodes].")
@click.option("--memory", default="", metavar="M", help="Memory of each node.")
@click.option("--gpu", default="", metavar="G", help="GPUs of each node.")
@click.option(
    "--at-start", type=click.Choice(["let", "stop"]), default="let",
    help="Jobs of other projects that still run there at its start: let them continue [default], or stop and requeue them.",
)  # fmt: skip
@click.option(
    "--at-end", type=click.Choice(["let", "stop"]), default="let",
    help="Jobs of the project that still run there at its end: let them continue [default], or stop and requeue them.",
)  # fmt: skip
@output_option
def create_reservation(
    start: str, until: str, duration: str, nodes: int | None, named: tuple[str, ...], output: str, **given: Any
) -> None:
    """Reserve nodes, or a part of each, for the jobs of one project.

    \b
      hodei reservation create nightly --project ml --from 20:00 --for 3h --nodes 4 --gpu 2
      hodei reservation create demo --project sales --from 2026-03-01T09:00:00Z --until 2026-03-01T12:00:00Z --node node7
    """
    from hodei.api.resources import ReservationRequest

    if bool(duration) == bool(until):
        raise UsageProblem("give either --for (the duration) or --until (the end)", hint="for example --for 2h")
    if bool(nodes) == bool(named):
        raise UsageProblem("give either --nodes (how many) or --node (which)", hint="for example --nodes 2")
    request = ReservationRequest(
        start=_parse_moment(start), duration=duration, until=_parse_moment(until) if until else "",
        nodes=nodes or 0, node=list(named), **given,
    )  # fmt: skip
    with client() as server:
        made = server.create_reservation(request)
    emit_one(made, output, text=_created)
    if is_for_people(output):
        for late in made.late:
            note(f"warning: {_late_text(late, made.at_start)}")


def _parse_moment(text: str) -> str:
    """Times without a zone are in this machine's zone; `14:00` is its next occurrence."""
    if text == "now" or text.startswith("+") or text.isdigit():
        return text
    try:
        if len(text) <= 8 and ":" in text:
            now = datetime.fromtimestamp(times.now_ms() / 1000).astimezone()
            at = datetime.combine(now.date(), time.fromisoformat(text))
            return (at if at.astimezone() > now else at + timedelta(days=1)).astimezone().isoformat()
        return datetime.fromisoformat(text).astimezone().isoformat()
    except ValueError:
        raise UsageProblem(
            f"{text[:40]!r} is not a time", hint="write now, +2h, 14:00, or 2026-01-31T14:00:00 (this machine's zone)"
        ) from None


def _created(view: ReservationView) -> str:
    nodes = ", ".join(place.node for place in view.places[:10]) + (" and more" if len(view.places) > 10 else "")
    window = f"from {clock(ms_of(view.start_at))} until {clock(ms_of(view.end_at))}"
    return clean(f"reservation {view.name}: {nodes} for project {view.project}, {window}")


def _describe_reservation(view: ReservationView) -> str:
    start, end = ms_of(view.start_at), ms_of(view.end_at)
    return fields([
        ("name", view.name),
        ("project", view.project),
        ("state", view.state),
        ("from", f"{clock(start)} ({ago(start)})"),
        ("until", f"{clock(end)} ({ago(end)})"),
        ("lasts", duration_text(end - start)),
        ("made", f"{ago(view.made_at)}{f' by {view.by}' if view.by else ''}"),
        *((place.node, _amounts(place.resources)) for place in view.places),
        ("at start", "runs of other projects that hold its capacity are stopped" if view.at_start == "stop" else ""),
        ("at end", "the project's runs are stopped" if view.at_end == "stop" else ""),
        *(("late", _late_text(late, view.at_start)) for late in view.late),
    ])  # fmt: skip


def _late_text(late: LateView, at_start: OverstayPolicy) -> str:
    when = f"is expected to end at {clock(ms_of(late.end_at))}" if late.end_at else "has no estimate and no timeout"
    stopped = ", and is stopped then if necessary" if at_start == "stop" else ""
    return f"run {late.run} may still be on {late.node} when it starts: it {when}{stopped}"


def _node_names(view: ReservationView) -> str:
    names = [place.node for place in view.places]
    return ",".join(names[:4]) + (f" +{len(names) - 4}" if len(names) > 4 else "")


def _amounts(resources: dict[str, str]) -> str:
    return ", ".join(f"{resource} {short_amount(resource, amount)}" for resource, amount in sorted(resources.items()))
