"""`python -m hodei.sim replay|compare|capacity|forecasts|policies|traces`, which is `hodei sim`.

Exit codes: 0 done; 1 a simulation failed; 2 invalid command line or input; 130 Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from operator import itemgetter
from types import FrameType

import click

from hodei.cli.groups import Group, exit_code
from hodei.cli.options import headers_option, output_option
from hodei.cli.output import Column, emit_list
from hodei.sim.commands import capacity, compare, forecasts, replay
from hodei.sim.policies import ABOUT, POLICIES


@click.group("sim", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def sim() -> None:
    """Try out policies: the real scheduler in simulated time, with a recorded or generated workload.

    \b
      hodei sim replay kth.swf.gz --policy easy --procs 100
      hodei sim compare 'generate:lublin?jobs=5000' --policies fcfs,easy,conservative --out report
      hodei sim capacity 'generate:ci?jobs=2000' --offer offer.toml
      hodei sim forecasts kth.swf.gz --policies easy,sjf --procs 100
    """


for command in (replay.replay, compare.compare, capacity.capacity, forecasts.forecasts):
    sim.add_command(command)


# Name, description, example.
TRACES: list[tuple[str, str, str]] = [
    ("swf", "Standard Workload Format, the Parallel Workloads Archive's", "kth.swf.gz --procs 100"),
    ("csv", "a table with id,submit_s,run_s,requested_s,procs", "jobs.csv --procs 100"),
    ("openb", "Alibaba's GPU cluster of 2023: pods, and its nodes", "openb/"),
    ("philly", "Microsoft's GPU jobs of 2017", "philly.csv --procs 2490"),
    ("prow", "definitions of CI jobs, run for some days", "'prow.csv?days=7' --procs 500"),
    ("log", "a decision log of a Hodei server: its jobs and nodes", "decisions.jsonl"),
    ("generate:lublin", "generated: rigid jobs of a parallel machine", "'generate:lublin?jobs=10000&procs=256&seed=1'"),
    ("generate:ci", "generated: pushes that start many small jobs", "'generate:ci?jobs=10000&nodes=20'"),
    ("generate:gpu", "generated: training jobs, alone and in gangs", "'generate:gpu?jobs=10000&nodes=50'"),
    ("generate:mixed", "generated: all three on one cluster", "'generate:mixed?jobs=10000&nodes=20'"),
]


@sim.command("policies")
@output_option
@headers_option
def list_policies(output: str, no_headers: bool) -> None:
    """List the policies."""
    _print_list([{"name": name, "about": ABOUT.get(name, "")} for name in POLICIES], output, no_headers)


@sim.command("traces")
@output_option
@headers_option
def list_traces(output: str, no_headers: bool) -> None:
    """List the kinds of traces."""
    found = [{"name": name, "about": about, "example": example} for name, about, example in TRACES]
    _print_list(found, output, no_headers)


def _print_list(found: list[dict[str, str]], output: str, no_headers: bool) -> None:
    columns = [Column(key.upper(), itemgetter(key)) for key in found[0]]
    emit_list(found, output, columns, name=itemgetter("name"), headers=not no_headers)


def main(args: list[str] | None = None) -> int:
    return exit_code(sim.main, args, "hodei sim", invalid_input=2)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # an exception, so that temporary files are removed


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit_on_signal)
    sys.exit(main())
