"""`hodei sim forecasts TRACE`: replay a workload, forecast the starts of the jobs that wait, and grade the forecasts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import click
from msgspec import to_builtins

from hodei.cli.output import Column, table
from hodei.control.explain.forecasts import FUTURES
from hodei.model.resources import format_duration
from hodei.sim.commands.compare import policy_names
from hodei.sim.commands.progress import Progress, simulated
from hodei.sim.commands.replay import tell_notes
from hodei.sim.commands.simulate import duration, order_of, prepare, run_options, until_of, whole
from hodei.sim.forecasts import Graded, Group, grade
from hodei.sim.policies import policy
from hodei.wiring import make_controller

_LEAST_EVERY_MS = 1000
# A share or a median of no forecasts is none, not 0.
_OF_FORECASTS = (
    "covered", "starts_covered", "per_job", "per_moment", "worst_moment", "median_error_s", "median_absolute_error_s",
    "median_wait_s",
)  # fmt: skip


def _interval(text: str) -> int:
    found = duration(text)
    if found < _LEAST_EVERY_MS:
        raise click.BadParameter(f"{text[:40]!r} is too often: from {format_duration(_LEAST_EVERY_MS)} on")
    return found


@click.command()
@run_options
@click.option(
    "--policies", "--policy", type=policy_names, default="easy", metavar="A,B,C",
    help="One or several, a row for each [default: easy]; see: hodei sim policies.",
)  # fmt: skip
@click.option("--every", type=_interval, default="6h", metavar="T", help="Time between forecasts [default: 6h].")
@click.option(
    "--futures", type=whole, default=str(FUTURES), metavar="N", help=f"Runs ahead per forecast [default: {FUTURES}]."
)
@click.option("--by", type=click.Choice(("job", "moment")), help="Show a row for each job or moment as well.")
def forecasts(**options: Any) -> int:
    """Replay a workload, forecast at intervals when each pending job will start, as a server does, and compare with its
    actual start.

    BY P90 is the share of forecasts whose job started by the time that nine of ten should: ALL of them, the FIRST of
    each job, the mean PER JOB and PER MOMENT (the moments at which forecasts were made).
    """
    given = SimpleNamespace(**options)
    for name in given.policies:
        policy(name)
    progress = Progress(given.policies, sys.stderr, shown=not (given.json or given.quiet))
    found: list[Graded] = []
    notes: list[str] = []
    place = 0
    try:
        for place, name in enumerate(given.policies):
            progress.say(place, "reads the trace")
            prepared = prepare(order_of(given, name))
            notes = prepared.workload.notes
            progress.begin(place)
            found.append(
                grade(
                    prepared.workload,
                    name,
                    given.every,
                    given.futures,
                    controller=make_controller(prepared.config),
                    nodes=prepared.nodes,
                    until_ms=until_of(prepared),
                    tell=partial(progress.tell, place),
                )
            )
            progress.say(place, "done")
    except KeyboardInterrupt:
        progress.clear()
        print(f"interrupted: {given.policies[place]}: {progress.how_far(place)}", file=sys.stderr)
        return 130
    finally:
        progress.clear()
    if not given.quiet and not given.json:
        tell_notes(notes, None)
    if given.json:
        print(json.dumps([_for_json(graded, given.by) for graded in found]))
        return 0
    print(f"{found[0].trace}, {found[0].jobs:,} jobs, forecasts every {found[0].every}; BY P90 in percent")
    print(_table([_row(graded) for graded in found]))
    for graded in found if given.by else ():
        print(f"\n{graded.policy}, by {given.by}")
        print(_table([_group_row(group, given.by) for group in _groups(graded, given.by)]))
    return 0


def _groups(graded: Graded, by: str) -> list[Group]:
    return graded.by_job if by == "job" else graded.by_moment


def _for_json(graded: Graded, by: str | None) -> dict[str, Any]:
    """The numbers; the rows only if they were asked for."""
    numbers: dict[str, Any] = to_builtins(graded)
    for each in ("job", "moment"):
        if each != by:
            del numbers[f"by_{each}"]
    if not graded.forecasts:
        numbers |= dict.fromkeys(_OF_FORECASTS)
    for group in numbers.get("by_moment", ()):
        del group["job"]
    return numbers


def _row(graded: Graded) -> dict[str, str]:
    row = {
        "POLICY": graded.policy,
        "JOBS": f"{graded.starts:,}",
        "MOMENTS": f"{graded.moments:,}",
        "FORECASTS": f"{graded.forecasts:,}",
        "ALL": f"{graded.covered:.1f}",
        "FIRST": f"{graded.starts_covered:.1f}",
        "PER JOB": f"{graded.per_job:.1f}",
        "PER MOMENT": f"{graded.per_moment:.1f}",
        "WORST MOMENT": f"{graded.worst_moment:.1f}",
        "P50 ERROR": _time(graded.median_absolute_error_s),
        "WAIT": _time(graded.median_wait_s),
        "NONE": f"{graded.untold:,}",
    }
    if not graded.forecasts:
        row |= dict.fromkeys(("ALL", "FIRST", "PER JOB", "PER MOMENT", "WORST MOMENT", "P50 ERROR", "WAIT"), "-")
    return row


def _group_row(group: Group, by: str) -> dict[str, str]:
    return {
        **({"JOB": str(group.job)} if by == "job" else {}),
        "FIRST AT" if by == "job" else "AT": simulated(group.at_ms),
        "FORECASTS": f"{group.forecasts:,}",
        "BY P90": f"{group.by_p90:.1f}",
        "P50 ERROR": ("-" if group.median_error_s < 0 else "") + _time(abs(group.median_error_s)),
    }


def _time(seconds: float) -> str:
    """To the minute, which is more than a forecast knows; below that to the second."""
    whole = round(seconds)
    return format_duration((whole if whole < 60 else whole // 60 * 60) * 1000)


def _table(rows: Sequence[dict[str, str]]) -> str:
    if not rows:
        return "no job waited long enough to get a forecast"
    first, *others = rows[0]
    columns = [Column(first, itemgetter(first)), *(Column(key, itemgetter(key), right=True) for key in others)]
    return table(rows, columns, wide=True)
