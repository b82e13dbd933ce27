"""`hodei sim replay TRACE --policy NAME`: one workload under one policy."""

from __future__ import annotations

import re
import shutil
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import click

from hodei.cli.output import emit_one, is_for_people
from hodei.model.resources import format_duration, human_amount
from hodei.sim.commands.output import Progress, print_notes, staged_directory, staged_file, write_waits
from hodei.sim.commands.simulate import out_option, prepare, request_of, run_options, simulate, waits_option
from hodei.sim.metrics import Result
from hodei.sim.report import gantt_for_terminal, write_report
from hodei.sim.report.table import numbers_of

_STARTS = {"head": "from the head of the queue", "backfill": "backfilled", "spill": "spilled"}


@click.command()
@run_options
@click.option("--policy", required=True, metavar="NAME", help="See: hodei sim policies.")
@out_option
@waits_option
@click.option("--gantt", is_flag=True, help="Draw a Gantt chart as text as well.")
def replay(**options: Any) -> int:
    """Run a workload under one policy in simulated time, and report how its jobs fared. TRACE: see hodei sim traces."""
    given = SimpleNamespace(**options)
    verbose = is_for_people(given.output) and not given.quiet
    progress = Progress([given.policy], sys.stderr, shown=verbose)
    try:
        with staged_directory(given.out) as directory, staged_file(given.waits) as waits:
            progress.set_status(0, "reading the trace")
            prepared = prepare(request_of(given, given.policy))
            progress.begin(0)
            result = simulate(prepared, partial(progress.update, 0))
            if waits is not None:
                write_waits(waits, [result])
            if directory is not None:
                progress.set_status(0, "writing the report")
                write_report([result], directory)
    except KeyboardInterrupt:
        progress.clear()
        print(f"interrupted: {progress.describe(0)}; nothing was written", file=sys.stderr)
        return 130
    finally:
        progress.clear()
    if verbose:
        print_notes(prepared.workload.notes, given.out)

    def text(_: object) -> str:
        parts = [describe(result, len(prepared.nodes))]
        if given.gantt:
            parts.append(gantt_for_terminal(result, shutil.get_terminal_size().columns).rstrip("\n"))
        return "\n".join([*parts, *([f"report: {given.out / 'index.html'}"] if given.out else [])])

    emit_one(prepared.for_json(numbers_of(result)), given.output, name=lambda _: result.policy, text=text)
    return 0


def describe(result: Result, nodes: int) -> str:
    """The main numbers as text."""
    numbers = numbers_of(result)
    capacity = ", ".join(f"{human_amount(name, amount)} {name}" for name, amount in result.capacity.items())
    waits = (
        f"mean {_time(numbers['mean_wait_s'])}, p95 {_time(numbers['p95_wait_s'])}, "
        f"longest {_time(numbers['max_wait_s'])}"
    )
    used = ", ".join(f"{part:.1%} {name}" for name, part in numbers["utilisation_of"].items() if part)
    rows = {
        "jobs": f"{numbers['jobs']:,}, of which {numbers['finished']:,} ended",
        "bounded slowdown": "-" if numbers["bounded_slowdown"] is None else f"{numbers['bounded_slowdown']:.2f}",
        "waits": waits,
        "utilisation": used or "no run",
        "starts": ", ".join(f"{numbers['starts'][kind]:,} {text}" for kind, text in _STARTS.items()),
        "preemptions": f"{numbers['preemptions']:,}",
        "start reservations broken": f"{numbers['start_reservations_broken']:,}",
        "simulated": f"{_time(numbers['makespan_s'])} in {numbers['seconds']:.1f} s, "
        f"{numbers['jobs_per_second']:,.0f} jobs/s",
    }
    if numbers["unplaced"]:
        rows["never started"] = f"{numbers['unplaced']:,}: too large for every node, or the simulation ended first"
    head = f"{result.workload} under {result.policy}, {nodes:,} node{'s' * (nodes != 1)} ({capacity})"
    return "\n".join([head, *(f"  {name:<27}{text}" for name, text in rows.items())])


def _time(seconds: float | None) -> str:
    """The two largest units: `3d 4h`, `12m 5s`; `-` for None."""
    if seconds is None:
        return "-"
    return " ".join(re.findall(r"\d+[a-z]+", format_duration(round(seconds) * 1000))[:2])
