"""`hodei sim replay TRACE --policy NAME`: one workload under one policy."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from hodei.model.resources import format_duration, human_amount
from hodei.sim.commands.outputs import file_for, folder_for, write_waits
from hodei.sim.commands.progress import Progress
from hodei.sim.commands.simulate import (
    numbers_for_json,
    order_of,
    out_option,
    prepare,
    run_options,
    simulate,
    waits_option,
)
from hodei.sim.metrics import Result
from hodei.sim.report import gantt_for_terminal, why_no_pictures, write_report
from hodei.sim.report.table import numbers_of

_STARTS = {"head": "first in line", "backfill": "before a promised start", "spill": "beside promised room"}


@click.command()
@run_options
@click.option("--policy", required=True, metavar="NAME", help="See: hodei sim policies.")
@out_option
@waits_option
@click.option("--gantt", is_flag=True, help="Draw a Gantt chart as text as well.")
def replay(**options: Any) -> int:
    """Run a workload under one policy in simulated time, and report how its jobs fared. TRACE: see hodei sim traces."""
    given = SimpleNamespace(**options)
    progress = Progress([given.policy], sys.stderr, shown=not (given.json or given.quiet))
    try:
        with folder_for(given.out) as folder, file_for(given.waits) as waits:
            progress.say(0, "reads the trace")
            prepared = prepare(order_of(given, given.policy))
            progress.begin(0)
            result = simulate(prepared, lambda now_ms, done, jobs: progress.tell(0, now_ms, done, jobs))
            if waits is not None:
                write_waits(waits, [result])
            if folder is not None:
                progress.say(0, "writes the report")
                write_report([result], folder)
    except KeyboardInterrupt:
        progress.clear()
        print(f"interrupted: {progress.how_far(0)}; nothing was written", file=sys.stderr)
        return 130
    finally:
        progress.clear()
    if not given.quiet and not given.json:
        tell_notes(prepared.workload.notes, given.out)
    if given.json:
        print(json.dumps(numbers_for_json(numbers_of(result), prepared)))
        return 0
    print(describe(result, len(prepared.nodes)))
    if given.gantt:
        print(gantt_for_terminal(result, shutil.get_terminal_size().columns), end="")
    if given.out:
        print(f"report: {given.out / 'index.html'}")
    return 0


def tell_notes(notes: list[str], out: Path | None) -> None:
    missing = [why_no_pictures()] if out and why_no_pictures() else []
    for note in [*notes, *missing]:
        print(f"note: {note}", file=sys.stderr)


def describe(result: Result, nodes: int) -> str:
    """The main numbers for a person."""
    numbers = numbers_of(result)
    has = ", ".join(f"{human_amount(name, amount)} {name}" for name, amount in result.capacity.items())
    starts = ", ".join(f"{numbers['starts'][kind]:,} {words}" for kind, words in _STARTS.items())
    waits = (
        f"mean {_time(numbers['mean_wait_s'])}, 19 of 20 at most {_time(numbers['p95_wait_s'])}, "
        f"longest {_time(numbers['max_wait_s'])}"
    )
    used = ", ".join(f"{part:.1%} {name}" for name, part in numbers["utilisation_of"].items() if part)
    rows = {
        "jobs": f"{numbers['jobs']:,}, of which {numbers['finished']:,} ended",
        "bounded slowdown": "-" if numbers["bounded_slowdown"] is None else f"{numbers['bounded_slowdown']:.2f}",
        "waits": waits,
        "utilisation": used or "nothing ran",
        "starts": starts,
        "preemptions": f"{numbers['preemptions']:,}",
        "promises broken": f"{numbers['start_reservations_broken']:,}",
        "simulated": f"{_time(numbers['makespan_s'])} in {numbers['seconds']:.1f} s, "
        f"{numbers['jobs_per_second']:,.0f} jobs/s",
    }
    if numbers["unplaced"]:
        rows["never started"] = f"{numbers['unplaced']:,}: too large for any node, or the time was up"
    head = f"{result.workload} under {result.policy}, {nodes:,} node{'s' * (nodes != 1)} ({has})"
    return "\n".join([head, *(f"  {name:<18}{text}" for name, text in rows.items())])


def _time(seconds: float | None) -> str:
    """Two units are enough for a person: `3d 4h`, `12m 5s`; `-` for a mean over no jobs."""
    if seconds is None:
        return "-"
    whole = format_duration(round(seconds) * 1000)
    parts, number = [], ""
    for letter in whole:
        number += letter
        if letter.isalpha():
            parts.append(number)
            number = ""
    return " ".join(parts[:2])
