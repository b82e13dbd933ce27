"""`hodei sim policies` and `hodei sim traces`: what there is, a line for each."""

from __future__ import annotations

import argparse
import json
from typing import Any

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


def add_arguments(kinds: Any) -> None:
    for name, help, go in (
        ("policies", "list the policies", list_policies),
        ("traces", "list what can be replayed", list_traces),
    ):
        parser = kinds.add_parser(name, help=help, description=f"{help.capitalize()}, a line for each.")
        parser.add_argument("--json", action="store_true", help="print a list of objects")
        parser.set_defaults(go=go)


def list_policies(given: argparse.Namespace) -> int:
    found = [{"name": name, "about": ABOUT.get(name, "")} for name in POLICIES]
    return _show(found, given.json)


def list_traces(given: argparse.Namespace) -> int:
    found = [{"name": name, "about": about, "example": example} for name, about, example in TRACES]
    return _show(found, given.json)


def _show(found: list[dict[str, str]], as_json: bool) -> int:
    if as_json:
        print(json.dumps(found))
        return 0
    keys = list(found[0])
    widths = [max(len(each[key]) for each in found) for key in keys]
    for each in found:
        print("  ".join(each[key].ljust(width) for key, width in zip(keys, widths, strict=True)).rstrip())
    return 0
