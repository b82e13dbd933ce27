"""`hodei sim forecasts TRACE`: replay a workload, forecast the starts of pending jobs, and measure the accuracy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import click
from msgspec import to_builtins

from hodei.cli.output import Column, emit_list, is_for_people, table
from hodei.control.explain.forecasts import FUTURES
from hodei.model.resources import format_duration
from hodei.sim.commands.compare import policy_names
from hodei.sim.commands.output import Progress, print_notes, simulated_time
from hodei.sim.commands.simulate import duration_ms, positive_int, prepare, request_of, run_options
from hodei.sim.forecasts import AccuracyGroup, ForecastAccuracy, measure_accuracy
from hodei.sim.policies import policy
from hodei.wiring import make_controller

_MIN_INTERVAL_MS = 1000
# Shares and medians that are null, not 0, without forecasts.
_STATISTICS = (
    "covered", "starts_covered", "per_job", "per_moment", "worst_moment", "median_error_s", "median_absolute_error_s",
    "median_wait_s",
)  # fmt: skip


def _interval(text: str) -> int:
    found = duration_ms(text)
    if found < _MIN_INTERVAL_MS:
        raise click.BadParameter(f"{text[:40]!r} is too short; give {format_duration(_MIN_INTERVAL_MS)} or more")
    return found


@click.command()
@run_options
@click.option(
    "--policies", "--policy", type=policy_names, default="easy", metavar="A,B,C",
    help="One or several, a row for each [default: easy]; see: hodei sim policies.",
)  # fmt: skip
@click.option("--every", type=_interval, default="6h", metavar="T", help="Time between forecasts [default: 6h].")
@click.option(
    "--futures",
    type=positive_int,
    default=str(FUTURES),
    metavar="N",
    help=f"Runs ahead per forecast [default: {FUTURES}].",
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
    verbose = is_for_people(given.output) and not given.quiet
    progress = Progress(given.policies, sys.stderr, shown=verbose)
    found: list[ForecastAccuracy] = []
    notes: list[str] = []
    place = 0
    try:
        for place, name in enumerate(given.policies):
            progress.set_status(place, "reading the trace")
            prepared = prepare(request_of(given, name))
            notes = prepared.workload.notes
            progress.begin(place)
            found.append(
                measure_accuracy(
                    prepared.workload,
                    name,
                    given.every,
                    given.futures,
                    controller=make_controller(prepared.config),
                    nodes=prepared.nodes,
                    until_ms=prepared.until_ms,
                    on_progress=partial(progress.update, place),
                )
            )
            progress.set_status(place, "done")
    except KeyboardInterrupt:
        progress.clear()
        print(f"interrupted: {given.policies[place]}: {progress.describe(place)}", file=sys.stderr)
        return 130
    finally:
        progress.clear()
    if verbose:
        print_notes(notes)
    if not is_for_people(given.output):
        emit_list([_for_json(each, given.by) for each in found], given.output, (), name=itemgetter("policy"))
        return 0
    print(f"{found[0].trace}, {found[0].jobs:,} jobs, forecasts every {found[0].every}; BY P90 in percent")
    print(_table([_row(accuracy) for accuracy in found]))
    for accuracy in found if given.by else ():
        print(f"\n{accuracy.policy}, by {given.by}")
        print(_table([_group_row(group, given.by) for group in getattr(accuracy, f"by_{given.by}")]))
    return 0


def _for_json(accuracy: ForecastAccuracy, by: str | None) -> dict[str, Any]:
    """The numbers, with the groups of `--by` only."""
    numbers: dict[str, Any] = to_builtins(accuracy)
    for each in ("job", "moment"):
        if each != by:
            del numbers[f"by_{each}"]
    if not accuracy.forecasts:
        numbers |= dict.fromkeys(_STATISTICS)
    for group in numbers.get("by_moment", ()):
        del group["job"]
    return numbers


def _row(accuracy: ForecastAccuracy) -> dict[str, str]:
    row = {
        "POLICY": accuracy.policy,
        "JOBS": f"{accuracy.starts:,}",
        "MOMENTS": f"{accuracy.moments:,}",
        "FORECASTS": f"{accuracy.forecasts:,}",
        "ALL": f"{accuracy.covered:.1f}",
        "FIRST": f"{accuracy.starts_covered:.1f}",
        "PER JOB": f"{accuracy.per_job:.1f}",
        "PER MOMENT": f"{accuracy.per_moment:.1f}",
        "WORST MOMENT": f"{accuracy.worst_moment:.1f}",
        "P50 ERROR": _time(accuracy.median_absolute_error_s),
        "WAIT": _time(accuracy.median_wait_s),
        "NONE": f"{accuracy.missing:,}",
    }
    if not accuracy.forecasts:
        row |= dict.fromkeys(("ALL", "FIRST", "PER JOB", "PER MOMENT", "WORST MOMENT", "P50 ERROR", "WAIT"), "-")
    return row


def _group_row(group: AccuracyGroup, by: str) -> dict[str, str]:
    return {
        **({"JOB": str(group.job)} if by == "job" else {}),
        "FIRST AT" if by == "job" else "AT": simulated_time(group.at_ms),
        "FORECASTS": f"{group.forecasts:,}",
        "BY P90": f"{group.by_p90:.1f}",
        "P50 ERROR": ("-" if group.median_error_s < 0 else "") + _time(abs(group.median_error_s)),
    }


def _time(seconds: float) -> str:
    """In whole minutes from one minute on: a forecast is not more exact."""
    seconds = round(seconds)
    return format_duration((seconds if seconds < 60 else seconds // 60 * 60) * 1000)


def _table(rows: Sequence[dict[str, str]]) -> str:
    if not rows:
        return "no job waited long enough to get a forecast"
    first, *others = rows[0]
    columns = [Column(first, itemgetter(first)), *(Column(key, itemgetter(key), right=True) for key in others)]
    return table(rows, columns, wide=True)
