"""`hodei test PATH...`: play scenarios with the real scheduler in simulated time, and say which expectations hold.

Exit code 0: all hold. 1: some do not. 2: a file cannot be read. A directory means every *.scenario.yaml in it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hodei.model.errors import HodeiError, InvalidInput
from hodei.sim.scenario.check import Outcome, run
from hodei.sim.scenario.golden import difference, updated
from hodei.sim.scenario.parse import ENDINGS, read_scenario
from hodei.sim.scenario.report import as_data, told


def files_of(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(inner for inner in path.rglob("*") if inner.name.endswith(ENDINGS))
        if not found:
            raise InvalidInput(f"no {' or '.join('*' + ending for ending in ENDINGS)} in {path}")
        yield from found


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hodei test", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("path", nargs="+", type=Path, help="a scenario file, or a directory of them")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--update", action="store_true", help="write what happened into the files, and show the change")
    parser.add_argument("-q", "--quiet", action="store_true", help="only scenarios of which something does not hold")
    given = parser.parse_args(args)
    outcomes: list[Outcome] = []
    unread: list[dict[str, Any]] = []
    try:
        paths = list(files_of(given.path))
    except HodeiError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    for path in paths:
        try:
            outcome = run(read_scenario(path))
        except HodeiError as error:
            unread.append({"path": str(path), "held": False, "error": error.message})
            _complain(error)
            continue
        if given.update:
            outcome = _update(path, outcome, quiet=given.json)
        outcomes.append(outcome)
        if not given.json and not (given.quiet and outcome.held):
            print(told(outcome) + "\n")
    failed = sum(not outcome.held for outcome in outcomes)
    if given.json:
        print(msgspec.json.encode({"scenarios": [*map(as_data, outcomes), *unread]}).decode())
    else:
        print(_in_all(len(outcomes), failed, len(unread)))
    return 2 if unread else 1 if failed else 0


def _update(path: Path, outcome: Outcome, *, quiet: bool) -> Outcome:
    """The outcome by the new file; what must hold everywhere is not a matter of expectations and stays as it is."""
    before, after = outcome.scenario.text, updated(outcome)
    if after == before:
        return outcome
    if not quiet:
        print(difference(before, after, path))
    path.write_text(after, encoding="utf-8")
    return run(read_scenario(path))


def _complain(error: HodeiError) -> None:
    problems = getattr(error, "problems", ())
    for line in [f"{where}: {what}" if where else what for where, what in problems] or [error.message]:
        print(f"error: {line}", file=sys.stderr)
    if error.hint and not problems:
        print(f"hint: {error.hint}", file=sys.stderr)


def _in_all(count: int, failed: int, unread: int) -> str:
    what = f"{count} scenario{'s' if count != 1 else ''}"
    parts = [f"{failed} of {what} did not hold" if failed else f"{what} held"]
    if unread:
        parts.append(f"{unread} could not be read")
    return ", ".join(parts)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
