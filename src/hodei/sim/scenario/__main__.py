"""`hodei test FILE...`: run scenarios with the real scheduler in simulated time, and check their expectations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from hodei.cli.errors import report
from hodei.cli.groups import exit_code
from hodei.cli.options import output_option
from hodei.cli.output import emit_one, is_for_people
from hodei.model.errors import HodeiError, InvalidInput
from hodei.sim.scenario.check import Outcome, check_scenario
from hodei.sim.scenario.parse import ENDINGS, read_scenario
from hodei.sim.scenario.report import format_report, to_json, unified_diff, update_expectations


def scenario_files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(inner for inner in path.rglob("*") if inner.name.endswith(ENDINGS))
        if not found:
            raise InvalidInput(f"no {' or '.join('*' + ending for ending in ENDINGS)} in {path}")
        yield from found


@click.command("test", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--update", is_flag=True, help="Write the actual results into the files, and show the changes.")
@click.option("-q", "--quiet", is_flag=True, help="Only scenarios with unmet expectations.")
@output_option
def test(**options: Any) -> int:
    """Run scenario files with the real scheduler in simulated time, and report which expectations hold.

    FILE is a scenario file, or a directory of *.scenario.yaml files.

    Exit code 0: all hold. 1: some do not. 2: a file cannot be read.
    """
    given = SimpleNamespace(**options)
    shown = is_for_people(given.output)
    outcomes: list[Outcome] = []
    unread: list[dict[str, Any]] = []
    for path in list(scenario_files(given.path)):
        try:
            outcome = check_scenario(read_scenario(path))
        except HodeiError as error:
            unread.append({"path": str(path), "held": False, "error": error.message})
            report(error)
            continue
        if given.update:
            outcome = _update(path, outcome, quiet=not shown)
        outcomes.append(outcome)
        if shown and not (given.quiet and outcome.held):
            click.echo(format_report(outcome) + "\n")
    failed = sum(not outcome.held for outcome in outcomes)
    found = {"scenarios": [*map(to_json, outcomes), *unread]}
    emit_one(
        found, given.output, text=lambda _: _summary(len(outcomes), failed, len(unread)),
        name=lambda each: "\n".join(scenario["path"] for scenario in each["scenarios"]),
    )  # fmt: skip
    return 2 if unread else 1 if failed else 0


def _update(path: Path, outcome: Outcome, *, quiet: bool) -> Outcome:
    """The outcome with the new file."""
    before, after = outcome.scenario.text, update_expectations(outcome)
    if after == before:
        return outcome
    if not quiet:
        print(unified_diff(before, after, path))
    path.write_text(after, encoding="utf-8")
    return check_scenario(read_scenario(path))


def _summary(count: int, failed: int, unread: int) -> str:
    what = f"{count} scenario{'s' if count != 1 else ''}"
    parts = [f"{failed} of {what} did not hold" if failed else f"{what} held"]
    if unread:
        parts.append(f"{unread} could not be read")
    return ", ".join(parts)


def main(args: list[str] | None = None) -> int:
    return exit_code(test.main, args, "hodei test", invalid_input=2)


if __name__ == "__main__":
    sys.exit(main())
