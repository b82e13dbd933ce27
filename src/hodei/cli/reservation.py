"""`hodei reservation …`: capacity for a project and a time window."""

from __future__ import annotations

from datetime import datetime, time, timedelta
from typing import TYPE_CHECKING

import click

from hodei.cli import times
from hodei.cli.errors import UsageProblem
from hodei.cli.groups import Group
from hodei.cli.nodes import short_amount
from hodei.cli.options import client, complete_nodes, output_option
from hodei.cli.output import Column, clean, emit_one, fields, note
from hodei.cli.resources import list_command, name_argument, named_command
from hodei.cli.times import ago, clock, ms_of, short

if TYPE_CHECKING:
    from hodei.api.resources import LateView, ReservationView
    from hodei.model.reservation import OverstayPolicy

COLUMNS = (
    Column("NAME", lambda r: r.name),
    Column("PROJECT", lambda r: r.project),
    Column("STATE", lambda r: r.state),
    Column("FROM", lambda r: clock(ms_of(r.start_at))),
    Column("UNTIL", lambda r: clock(ms_of(r.end_at))),
    Column("NODES", lambda r: _nodes(r)),
    Column("EACH", lambda r: _amounts(r.places[0].resources) if r.places else "-"),
    Column("BY", lambda r: r.by or "-", wide=True),
    Column("LATE", lambda r: str(len(r.late)) if r.late else "-", if_any=True),
)


@click.group(cls=Group)
def reservation() -> None:
    """Reserve capacity for a project and a time window; no other job starts that would still hold it then."""


list_command(
    reservation,
    lambda server: server.reservations(),
    COLUMNS,
    empty="no reservations",
    help="List the reservations that have not ended, soonest first.",
)
named_command(
    reservation,
    "show",
    lambda server, name: server.reservation(name),
    lambda found: _describe(found),
    help="Show one reservation.",
)
named_command(
    reservation,
    "delete",
    lambda server, name: server.delete_reservation(name),
    lambda found: f"reservation {clean(found.name)} deleted",
    help="Delete a reservation. Jobs that run in it continue.",
)


@reservation.command("create")
@name_argument
@click.option("--project", required=True, metavar="PROJECT", help="Project whose jobs may use it.")
@click.option(
    "--from", "start", default="now", metavar="T", help="When it begins: now [default], +2h, 14:00 or ISO 8601."
)
@click.option("--for", "duration", default="", metavar="D", help="How long it lasts: 2h, 90m, 1d.")
@click.option("--until", default="", metavar="T", help="When it ends, instead of --for.")
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
def create(
    name: str, project: str, start: str, duration: str, until: str, nodes: int | None, named: tuple[str, ...],
    cpu: str, memory: str, gpu: str, at_start: OverstayPolicy, at_end: OverstayPolicy, output: str,
) -> None:  # fmt: skip
    """Reserve nodes, or a part of each, for the jobs of one project.

    \b
      hodei reservation create nightly --project ml --from 20:00 --for 3h --nodes 4 --gpu 2
      hodei reservation create demo --project sales --from 2026-03-01T09:00:00Z --until 2026-03-01T12:00:00Z --node node7
    """
    from hodei.api.resources import ReservationRequest

    if bool(duration) == bool(until):
        raise UsageProblem("say how long it lasts with --for, or when it ends with --until")
    if bool(nodes) == bool(named):
        raise UsageProblem("say how many nodes with --nodes, or which with --node")
    request = ReservationRequest(
        name, project, _moment(start), duration, _moment(until) if until else "", nodes or 0, list(named),
        cpu, memory, gpu, {}, at_start, at_end,
    )  # fmt: skip
    with client() as server:
        made = server.create_reservation(request)
    emit_one(made, output, name=lambda r: r.name, text=_made)
    if output in ("table", "wide"):
        for late in made.late:
            note(f"warning: {_late(late, made.at_start)}")


def _moment(text: str) -> str:
    """Times without a zone are this machine's; `14:00` is the next one to come."""
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


def _made(view: ReservationView) -> str:
    nodes = ", ".join(place.node for place in view.places[:10]) + (" and more" if len(view.places) > 10 else "")
    window = f"from {clock(ms_of(view.start_at))} until {clock(ms_of(view.end_at))}"
    return clean(f"reservation {view.name}: {nodes} for project {view.project}, {window}")


def _describe(view: ReservationView) -> str:
    start, end = ms_of(view.start_at), ms_of(view.end_at)
    return fields([
        ("name", view.name),
        ("project", view.project),
        ("state", view.state),
        ("from", f"{clock(start)} ({ago(start)})"),
        ("until", f"{clock(end)} ({ago(end)})"),
        ("lasts", short(end - start)),
        ("made", f"{ago(view.made_at)}{f' by {view.by}' if view.by else ''}"),
        *((place.node, _amounts(place.resources)) for place in view.places),
        *((("at start", "others' runs that are in the way are stopped"),) if view.at_start == "stop" else ()),
        *((("at end", "the project's runs are stopped"),) if view.at_end == "stop" else ()),
        *(("late", _late(late, view.at_start)) for late in view.late),
    ])  # fmt: skip


def _late(late: LateView, at_start: OverstayPolicy) -> str:
    when = f"is expected to end at {clock(ms_of(late.end_at))}" if late.end_at else "has no estimate and no timeout"
    fate = ", and is stopped then if need be" if at_start == "stop" else ""
    return f"run {late.run} may still be on {late.node} when it begins: it {when}{fate}"


def _nodes(view: ReservationView) -> str:
    names = [place.node for place in view.places]
    return ",".join(names[:4]) + (f" +{len(names) - 4}" if len(names) > 4 else "")


def _amounts(resources: dict[str, str]) -> str:
    return ", ".join(f"{resource} {short_amount(resource, amount)}" for resource, amount in sorted(resources.items()))
