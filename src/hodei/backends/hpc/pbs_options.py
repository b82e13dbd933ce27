"""What a job may ask of PBS beyond its file, as `#PBS` lines in its annotation `pbs.hodei.io/options`: let through,
overridden by what Hodei says, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hodei.backends.hpc.batch_lines import Option, parse_options
from hodei.backends.hpc.ports import Line
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused

ANNOTATION = "pbs.hodei.io/options"
_LETTERS = {"account": "A", "project": "P"}
_OVERRIDDEN = {"name", "output", "error", "join", "keep", "rerun", "shell", "quiet", "mail-type"}
_INSTEAD = {
    "resource": "`cpu`, `memory`, `gpu` and `timeout` in the job file",
    "array": "`array` in the job file",
    "variables": "`env` in the job file",
    "all-variables": "`env` in the job file",
    "attributes": "`after` in the job file for dependencies",
    "hold": "`hodei hold`",
    "begin": "`hodei hold` and `hodei release`, or `hodei cron`",
    "priority": "`priority` in the job file",
}


class PbsOptions:
    """`fixed` are the operator's account and project; `allowed` what jobs may name instead."""

    def __init__(self, *, fixed: Mapping[str, str], allowed: Mapping[str, Sequence[str]]) -> None:
        self._fixed = {name: value for name, value in fixed.items() if value}
        self._allowed = dict(allowed)

    def of(self, order: Start, line: Line) -> tuple[tuple[str, str], ...]:
        """As (letter, value) for qsub. BackendRefused for what is not allowed, or makes no sense."""
        chosen = dict(self._fixed)
        options, problems = parse_options(order.spec.annotations.get(ANNOTATION, ""), "pbs")
        if problems:
            raise BackendRefused(f"annotation {ANNOTATION}: {problems[0]}", hint="see docs/how-to/pbs.md")
        for option in options:
            name, value = option.name, option.value
            if name in self._allowed:
                if value != self._fixed.get(name) and value not in self._allowed[name]:
                    raise _refused(option, f"the operator does not allow this {name}")
                chosen[name] = value
            elif name == "queue":
                if value != line.name:
                    label = f"`node_selector: {{pbs.hodei.io/line: {value[:60]}}}`"
                    raise _refused(option, f"Hodei chose the queue {line.name}", label)
            elif name not in _OVERRIDDEN:
                raise _refused(option, "it is not for jobs to say", _INSTEAD.get(name, ""))
        return tuple((_LETTERS[name], value) for name, value in chosen.items())


def _refused(option: Option, why: str, instead: str = "") -> BackendRefused:
    said = f"{option.name}{' ' + option.value[:80] if option.value else ''}"
    return BackendRefused(
        f"{said!r} in the annotation {ANNOTATION} is refused: {why}",
        hint=f"use {instead}" if instead else "leave it out, or ask the operator (docs/how-to/pbs.md)",
    )
