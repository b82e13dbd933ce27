"""`hodei sim policies` and `hodei sim traces`: what there is, a line for each."""

from __future__ import annotations

import json
from operator import itemgetter

import click

from hodei.cli.output import Column, table
from hodei.sim.policies import ABOUT, POLICIES

# Word, what it is, and how it is given.
TRACES: list[tuple[str, str, str]] = [
    ("swf", "Standard Workload Format, the Parallel Workloads Archive's", "kth.swf.gz --procs 100"),
    ("csv", "a table with id,submit_s,run_s,requested_s,procs", "jobs.csv --procs 100"),
    ("openb", "Alibaba's GPU cluster of 2023: pods, and the nodes beside them", "openb/"),
    ("philly", "Microsoft's GPU jobs of 2017", "philly.csv --procs 2490"),
    ("prow", "definitions of CI jobs, run for some days", "'prow.csv?days=7' --procs 500"),
    ("log", "a decision log of a Hodei server: its own jobs and nodes", "decisions.jsonl"),
    ("generate:lublin", "invented: rigid jobs of a parallel machine", "'generate:lublin?jobs=10000&procs=256&seed=1'"),
    ("generate:ci", "invented: pushes that start many small jobs", "'generate:ci?jobs=10000&nodes=20'"),
    ("generate:gpu", "invented: training jobs, alone and in gangs", "'generate:gpu?jobs=10000&nodes=50'"),
    ("generate:mixed", "invented: all three on one cluster", "'generate:mixed?jobs=10000&nodes=20'"),
]


_json = click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")


@click.command("policies")
@_json
def list_policies(as_json: bool) -> None:
    """List the policies."""
    _print([{"name": name, "about": ABOUT.get(name, "")} for name in POLICIES], as_json)


@click.command("traces")
@_json
def list_traces(as_json: bool) -> None:
    """List what can be replayed."""
    _print([{"name": name, "about": about, "example": example} for name, about, example in TRACES], as_json)


def _print(found: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found))
    else:
        click.echo(table(found, [Column(key, itemgetter(key)) for key in found[0]], wide=True, headers=False))
