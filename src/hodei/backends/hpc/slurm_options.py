"""What a job may ask of Slurm beyond its file, as `#SBATCH` lines in its annotation `slurm.hodei.io/options`.

Each option is let through, overridden by what Hodei says, or refused by name. What is not known is refused: nobody can tell
what it would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hodei.backends.hpc.batch_lines import Option, parse_options
from hodei.backends.hpc.ports import Line
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused

ANNOTATION = "slurm.hodei.io/options"
# How a job is spread over its own node and what it needs there; no way out of any rule.
LET_THROUGH = frozenset({
    "constraint", "prefer", "licenses", "contiguous", "cores-per-socket", "sockets-per-node", "threads-per-core", "hint",
    "distribution", "mem-bind", "switches", "signal", "acctg-freq", "wckey", "gres-flags", "gpu-bind", "mincpus",
})  # fmt: skip
# Hodei's own word counts: from the job's file, or because it must know where things are.
_OVERRIDDEN = {
    "job-name", "comment", "output", "error", "input", "open-mode", "time", "time-min", "cpus-per-task", "mem",
    "mem-per-cpu", "mem-per-gpu", "gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-gpu", "tmp", "requeue",
    "no-requeue", "quiet", "verbose", "parsable", "ignore-pbs",
}  # fmt: skip
_WHERE_SLURM_CHOOSES = {"nodelist", "exclude", "exclusive", "oversubscribe"}
_INSTEAD = {
    "chdir": "`workdir` in the job file",
    "dependency": "`after` in the job file",
    "array": "`array` in the job file",
    "export": "`env` in the job file",
    "export-file": "`env` in the job file",
    "get-user-env": "`env` in the job file",
    "wrap": "`command` in the job file",
    "nodelist": "`node_selector` in the job file: Hodei chooses the node here",
    "exclude": "`node_selector` in the job file: Hodei chooses the node here",
    "hold": "`hodei hold`",
    "begin": "`hodei hold` and `hodei release`, or `hodei cron`",
    "priority": "`priority` in the job file",
    "ntasks": "`count` in the job file",
    "nodes": "`count` in the job file",
    "clusters": "`backend` in the job file",
}
_ONE = ("nodes", "ntasks", "ntasks-per-node")


class SlurmOptions:
    """`fixed` are the operator's account, qos and reservation; `allowed` what jobs may name instead, `also` further
    options that the operator lets through."""

    def __init__(
        self,
        *,
        placed: bool,
        fixed: Mapping[str, str] | None = None,
        allowed: Mapping[str, Sequence[str]] | None = None,
        also: Sequence[str] = (),
    ) -> None:
        self._placed, self._also = placed, frozenset(also)
        self._fixed = {name: value for name, value in (fixed or {}).items() if value}
        self._allowed = dict(allowed or {})

    def of(self, order: Start, line: Line) -> tuple[tuple[str, str], ...]:
        """As (name, value) for sbatch. BackendRefused for what is not allowed, or makes no sense."""
        text = order.spec.annotations.get(ANNOTATION, "")
        chosen = dict(self._fixed)
        if not text:
            return tuple(chosen.items())
        options, problems = parse_options(text, "slurm")
        if problems:
            raise BackendRefused(f"annotation {ANNOTATION}: {problems[0]}", hint="see docs/how-to/slurm.md")
        for option in options:
            self._take(option, line, chosen)
        return tuple(chosen.items())

    def _take(self, option: Option, line: Line, chosen: dict[str, str]) -> None:
        name, value = option.name, option.value
        if not value.isprintable() or len(value) > 1000:
            raise _refused(option, "its value is not plain text")
        if name in self._allowed:
            if value != self._fixed.get(name) and value not in self._allowed[name]:
                raise _refused(option, f"the operator does not allow this {name}")
            chosen[name] = value
        elif name == "partition":
            if value != line.name:
                label = f"`node_selector: {{slurm.hodei.io/queue: {value[:60]}}}`"
                raise _refused(option, f"Hodei chose the partition {line.name}", label)
        elif name in _ONE:
            if value not in ("1", "1-1"):
                raise _refused(option, "a member is one task on one node", _INSTEAD["ntasks"])
        elif name == "nice":
            if not (value or "100").isdigit():
                raise _refused(option, "a nice below 0 is for operators")
            chosen[name] = value or "100"
        elif name in LET_THROUGH or name in self._also or (not self._placed and name in _WHERE_SLURM_CHOOSES):
            chosen[name] = value
        elif name not in _OVERRIDDEN:
            raise _refused(option, "it is not for jobs to say", _INSTEAD.get(name, ""))


def _refused(option: Option, why: str, instead: str = "") -> BackendRefused:
    said = f"--{option.name}{'=' + option.value[:80] if option.value else ''}"
    return BackendRefused(
        f"{said!r} in the annotation {ANNOTATION} is refused: {why}",
        hint=f"use {instead}" if instead else "leave it out, or ask the operator (docs/how-to/slurm.md)",
    )
