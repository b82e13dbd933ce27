"""`hodei sim compare TRACE --policies a,b,c`: one workload under several policies, side by side."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from hodei.model.errors import HodeiError
from hodei.sim.commands.outputs import file_for, folder_for, write_waits
from hodei.sim.commands.parallel import Failure, cores, run_all
from hodei.sim.commands.progress import Progress
from hodei.sim.commands.replay import tell_notes
from hodei.sim.commands.simulate import add_run_arguments, numbers_for_json, order_of, prepare, whole
from hodei.sim.metrics import summary
from hodei.sim.policies import policy
from hodei.sim.report import draw_table, write_report
from hodei.sim.results import Result


def add_arguments(kinds: Any) -> None:
    about = "Run a workload under several policies, side by side, and compare how its jobs fared."
    parser = kinds.add_parser("compare", help="one workload under several policies", description=about)
    parser.add_argument("--policies", required=True, type=policy_names, metavar="A,B,C", help="see: hodei sim policies")
    add_run_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write a report with pictures into this folder")
    parser.add_argument("--workers", type=whole, metavar="N", help="how many at once [default: one for each core]")
    parser.set_defaults(go=go)


def go(given: argparse.Namespace) -> int:
    for name in given.policies:
        policy(name)
    progress = Progress(given.policies, sys.stderr, shown=not (given.json or given.quiet))
    try:
        with folder_for(given.out) as folder, file_for(given.waits) as waits:
            # Read here too: what is wrong with the trace is wrong for all policies, and told once.
            prepared = prepare(order_of(given, given.policies[0]))
            orders = [order_of(given, name) for name in given.policies]
            ended = run_all(orders, progress, given.workers or cores())
            results = [each for each in ended if isinstance(each, Result)]
            failures = {n: each for n, each in zip(given.policies, ended, strict=True) if isinstance(each, Failure)}
            if not results:
                name, failure = next(iter(failures.items()))
                raise HodeiError(f"every policy failed; {name}: {failure.what}", hint="nothing was written")
            if waits is not None:
                write_waits(waits, results)
            if folder is not None:
                write_report(results, folder)
    except KeyboardInterrupt:
        progress.clear()
        for place, name in enumerate(given.policies):
            print(f"interrupted: {name}: {progress.how_far(place)}", file=sys.stderr)
        print("nothing was written", file=sys.stderr)
        return 130
    finally:
        progress.clear()
    if not given.quiet and not given.json:
        tell_notes(prepared.workload.notes, given.out)
    for name, failure in failures.items():
        print(f"error: {name} failed: {failure.what}", file=sys.stderr)
    if given.json:
        told = {
            "workload": prepared.workload.name,
            "results": [numbers_for_json(summary(result), prepared) for result in results],
            "failed": {name: failure.what for name, failure in failures.items()},
        }
        print(json.dumps(told))
    else:
        print(f"{prepared.workload.name}, {len(prepared.workload.arrivals):,} jobs")
        print(draw_table(results, colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")), end="")
        if given.out:
            print(f"report: {given.out / 'index.html'}")
    return 1 if failures else 0


def policy_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("name at least one policy")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError("a policy is named twice")
    return names
