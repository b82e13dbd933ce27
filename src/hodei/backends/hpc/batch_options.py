"""Options of batch scripts (`#SBATCH`, `#PBS`): parsed, checked against the operator's rules, and as shell redirections.

Option lines count up to the first command, as in the batch systems. Quotes and backslashes work as in a shell; nothing is
expanded. Unknown and abbreviated options (`--part`) are problems: an option that is not understood cannot be checked.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from msgspec import Struct

from hodei.model.errors import BackendRefused
from hodei.model.node import QUEUE_LABEL_SUFFIX

if TYPE_CHECKING:
    from hodei.backends.hpc.ports import Partition
    from hodei.model.effects import Start

System = Literal["slurm", "pbs"]
_PREFIXES = {"slurm": "#SBATCH", "pbs": "#PBS"}


class Option(Struct, frozen=True):
    """`name` is the long name without dashes; `value` "" for a flag; `line` 0 if it is not from a script."""

    name: str
    value: str = ""
    line: int = 0


class Note(NamedTuple):
    """A problem in one line of a script; in all of it, if `line` is 0."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text


class BatchScript(Struct, frozen=True):
    """`body` is the script without options and without the line `#!interpreter`. `problems`: what could not be parsed.
    `ignored`: options after the first command. `hetjob_line`: where options of a second component of a heterogeneous job begin, 0 if there is none."""

    system: System
    interpreter: str
    options: tuple[Option, ...]
    body: str
    problems: tuple[Note, ...] = ()
    ignored: tuple[Note, ...] = ()
    hetjob_line: int = 0


_SBATCH_LETTERS = {
    "A": "account", "a": "array", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "H": "hold", "i": "input",
    "I": "immediate", "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution",
    "N": "nodes", "n": "ntasks", "o": "output", "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet",
    "s": "oversubscribe", "S": "core-spec", "t": "time", "v": "verbose", "w": "nodelist", "W": "wait", "x": "exclude",
}  # fmt: skip
_SBATCH_FLAGS = frozenset({
    "hold", "overcommit", "quiet", "verbose", "wait", "requeue", "no-requeue", "contiguous", "parsable", "spread-job",
    "use-min-nodes", "reboot", "test-only", "ignore-pbs",
})  # fmt: skip
_SBATCH_OPTIONAL_VALUE = frozenset({
    "exclusive", "oversubscribe", "get-user-env", "no-kill", "nice", "propagate", "immediate", "kill-on-invalid-dep",
})  # fmt: skip
_SBATCH_VALUES = frozenset({
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters", "comment",
    "constraint", "container", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline",
    "delay-boot", "dependency", "distribution", "error", "exclude", "export", "export-file", "extra-node-info", "gid",
    "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "hint",
    "input", "job-name", "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu",
    "mem-per-gpu", "mincpus", "network", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu",
    "ntasks-per-node", "ntasks-per-socket", "open-mode", "output", "partition", "power", "prefer", "priority", "profile",
    "qos", "reservation", "signal", "sockets-per-node", "switches", "thread-spec", "threads-per-core", "time", "time-min",
    "tmp", "uid", "wait-all-nodes", "wckey", "wrap",
})  # fmt: skip
_PBS_LETTERS = {
    "a": "begin", "A": "account", "c": "checkpoint", "C": "prefix", "e": "error", "j": "join", "J": "array", "k": "keep",
    "l": "resource", "m": "mail-type", "M": "mail-user", "N": "name", "o": "output", "p": "priority", "P": "project",
    "q": "queue", "r": "rerun", "R": "remove", "S": "shell", "u": "user", "v": "variables", "W": "attributes",
}  # fmt: skip
_PBS_FLAGS = {
    "f": "foreground", "h": "hold", "I": "interactive", "V": "all-variables", "X": "x11", "z": "quiet", "G": "gui",
}  # fmt: skip


def parse_script(text: str, system: System | None = None) -> BatchScript:
    """`system` None: that of the first option line, else Slurm."""
    if system is None:
        found = re.search(r"^#(SBATCH|PBS)\b", text, re.MULTILINE)
        system = "pbs" if found and found[1] == "PBS" else "slurm"
    prefix = _PREFIXES[system]
    lines = text.replace("\r\n", "\n").split("\n")
    interpreter = ""
    if lines and lines[0].startswith("#!"):
        interpreter = lines.pop(0)[2:].strip()
    options: list[Option] = []
    problems: list[Note] = []
    ignored: list[Note] = []
    body: list[str] = []
    in_head, hetjob_line = True, 0
    for number, line in enumerate(lines, 2 if interpreter else 1):
        if in_head and re.match(rf"{prefix}(\s|$)", line):
            if line[len(prefix) :].split(maxsplit=1)[:1] in (["hetjob"], ["packjob"]):
                hetjob_line = hetjob_line or number
            else:
                _parse_line(line[len(prefix) :], system, number, options, problems)
            continue
        if line.strip() and not line.lstrip().startswith("#"):
            in_head = False
        elif not in_head and line.startswith(prefix):
            ignored.append(Note(number, f"it comes after the first command, so {prefix[1:]} ignores it"))
        body.append(line)
    text = "\n".join(body).strip("\n")
    return BatchScript(system, interpreter, tuple(options), text, tuple(problems), tuple(ignored), hetjob_line)


def parse_options(text: str, system: System) -> tuple[tuple[Option, ...], tuple[Note, ...]]:
    """Option lines, with or without their `#SBATCH` or `#PBS`; and the problems found."""
    options: list[Option] = []
    problems: list[Note] = []
    for number, line in enumerate(text.splitlines(), 1):
        _parse_line(re.sub(rf"^\s*{_PREFIXES[system]}(?=\s|$)", "", line), system, number, options, problems)
    return tuple(options), tuple(problems)


def _parse_line(text: str, system: System, number: int, options: list[Option], problems: list[Note]) -> None:
    try:
        found, problem = parse_arguments(shlex.split(text, comments=True), system, number)
        options += found
    except ValueError as error:
        problem = str(error).lower()
    if problem:
        problems.append(Note(number, problem))


def parse_arguments(arguments: list[str], system: System, line: int = 0) -> tuple[list[Option], str]:
    """The options, and the problem of the first one that cannot be parsed."""
    out: list[Option] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if system == "slurm" and argument.startswith("--") and len(argument) > 2:
            name, has_value, value = argument[2:].partition("=")
            problem = _long(name, bool(has_value), value, queue, out, line)
        elif argument.startswith("-") and len(argument) > 1 and argument[1] != "-":
            problem = _short(argument, system, queue, out, line)
        else:
            problem = f"{argument[:60]!r} is not an option"
        if problem:
            return out, problem
    return out, ""


def _long(name: str, has_value: bool, value: str, queue: list[str], out: list[Option], line: int) -> str:
    if name in _SBATCH_FLAGS:
        if has_value:
            return f"--{name} takes no value"
        out.append(Option(name, "", line))
    elif name in _SBATCH_OPTIONAL_VALUE:
        out.append(Option(name, value, line))
    elif name in _SBATCH_VALUES:
        if not has_value:
            if not queue:
                return f"--{name} needs a value"
            value = queue.pop(0)
        out.append(Option(name, value, line))
    else:
        return f"there is no option --{name[:60]}"
    return ""


def _short(argument: str, system: System, queue: list[str], out: list[Option], line: int) -> str:
    letters = _SBATCH_LETTERS if system == "slurm" else _PBS_LETTERS
    letter, attached = argument[1], argument[2:]
    if system == "pbs" and letter in _PBS_FLAGS:
        out.append(Option(_PBS_FLAGS[letter], "", line))
        return _short(f"-{attached}", system, queue, out, line) if attached else ""
    if letter not in letters:
        return f"there is no option -{letter}"
    name = letters[letter]
    if system == "slurm" and name in _SBATCH_FLAGS:
        out.append(Option(name, "", line))
        return _short(f"-{attached}", system, queue, out, line) if attached else ""
    if system == "slurm" and name in _SBATCH_OPTIONAL_VALUE:
        out.append(Option(name, attached, line))
        return ""
    if not attached:
        if not queue:
            return f"-{letter} needs a value"
        attached = queue.pop(0)
    out.append(Option(name, attached, line))
    return ""


def takes_next_argument(argument: str) -> bool:
    """Whether an option of sbatch takes the next argument as its value."""
    if argument.startswith("--"):
        return "=" not in argument and argument[2:] in _SBATCH_VALUES
    return len(argument) == 2 and _SBATCH_LETTERS.get(argument[1], "") in _SBATCH_VALUES


_SLURM_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def slurm_seconds(text: str) -> int | None:
    """`minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours[:minutes[:seconds]]`; 0 for no limit."""
    if text.upper() in ("UNLIMITED", "INFINITE", "0", "-1"):
        return 0
    found = _SLURM_TIME.fullmatch(text)
    if not found:
        return None
    days, one, two, three = found.groups()
    if days is not None:
        return ((int(days) * 24 + int(one)) * 60 + int(two or 0)) * 60 + int(three or 0)
    if two is None:
        return int(one) * 60
    if three is None:
        return int(one) * 60 + int(two)
    return (int(one) * 60 + int(two)) * 60 + int(three)


def pbs_minutes(text: object) -> int:
    """`01:00:00` or seconds; 0 for no limit."""
    parts = str(text or "").split(":")
    if not all(part.isdigit() for part in parts):
        return 0
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return total // 60


SLURM_ANNOTATION = "slurm.hodei.io/options"
PBS_ANNOTATION = "pbs.hodei.io/options"
# Requirements of a job on its own node that break no rule of the operator.
SLURM_ALLOWED = frozenset({
    "constraint", "prefer", "licenses", "contiguous", "cores-per-socket", "sockets-per-node", "threads-per-core", "hint",
    "distribution", "mem-bind", "switches", "signal", "acctg-freq", "wckey", "gres-flags", "gpu-bind", "mincpus",
})  # fmt: skip
_SLURM_DELEGATED = {"nodelist", "exclude", "exclusive", "oversubscribe"}
_SLURM_ONE = ("nodes", "ntasks", "ntasks-per-node")


class AnnotationOptions:
    """Options of the batch system in a job's annotation: allowed, overridden by Hodei, or refused by name. Unknown ones are
    refused. `fixed`: the operator's values, such as the account. `allowed`: the values that jobs may use instead."""

    system: ClassVar[System]
    annotation: ClassVar[str]
    partition_option: ClassVar[str]
    overridden: ClassVar[frozenset[str]]
    instead: ClassVar[Mapping[str, str]]

    def __init__(
        self, *, fixed: Mapping[str, str] | None = None, allowed: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self._fixed = {name: value for name, value in (fixed or {}).items() if value}
        self._allowed = dict(allowed or {})

    def of(self, order: Start, partition: Partition) -> tuple[tuple[str, str], ...]:
        """(name, value) pairs for the submission. BackendRefused for what is not allowed or cannot be parsed."""
        chosen = dict(self._fixed)
        options, problems = parse_options(order.spec.annotations.get(self.annotation, ""), self.system)
        if problems:
            raise BackendRefused(
                f"annotation {self.annotation}: {problems[0]}", hint=f"see docs/how-to/{self.system}.md"
            )
        for option in options:
            self._add(option, partition, chosen)
        return tuple(chosen.items())

    def _add(self, option: Option, partition: Partition, chosen: dict[str, str]) -> None:
        name, value = option.name, option.value
        if not value.isprintable() or len(value) > 1000:
            raise self._refused(option, "its value is not plain text")
        if name in self._allowed:
            if value != self._fixed.get(name) and value not in self._allowed[name]:
                raise self._refused(option, f"the operator does not allow this {name}")
            chosen[name] = value
        elif name == self.partition_option:
            if value != partition.name:
                selector = f"`node_selector: {{{self.system}{QUEUE_LABEL_SUFFIX}: {value[:60]}}}`"
                raise self._refused(option, f"Hodei chose the {name} {partition.name}", selector)
        elif (accepted := self._accepted(option)) is not None:
            chosen |= accepted
        elif name not in self.overridden:
            raise self._refused(option, "jobs may not set it", self.instead.get(name, ""))

    def _accepted(self, option: Option) -> dict[str, str] | None:
        """What a further option adds; None if there is no rule for it."""
        return None

    def _refused(self, option: Option, reason: str, instead: str = "") -> BackendRefused:
        dashes, separator = ("--", "=") if self.system == "slurm" else ("", " ")
        shown = f"{dashes}{option.name}{separator + option.value[:80] if option.value else ''}"
        return BackendRefused(
            f"{shown!r} in the annotation {self.annotation} is refused: {reason}",
            hint=f"use {instead}" if instead else f"remove it, or ask the operator (docs/how-to/{self.system}.md)",
        )


class SlurmOptions(AnnotationOptions):
    """`placed`: Hodei chooses the node. `also`: further options that the operator allows."""

    system = "slurm"
    annotation = SLURM_ANNOTATION
    partition_option = "partition"
    overridden = frozenset({
        "job-name", "comment", "output", "error", "input", "open-mode", "time", "time-min", "cpus-per-task", "mem",
        "mem-per-cpu", "mem-per-gpu", "gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-gpu", "tmp", "requeue",
        "no-requeue", "quiet", "verbose", "parsable", "ignore-pbs",
    })  # fmt: skip
    instead: ClassVar[Mapping[str, str]] = {
        "chdir": "`workdir` in the job file",
        "dependency": "`after` in the job file",
        "array": "`array` in the job file",
        **dict.fromkeys(("export", "export-file", "get-user-env"), "`env` in the job file"),
        "wrap": "`command` in the job file",
        **dict.fromkeys(("nodelist", "exclude"), "`node_selector` in the job file: Hodei chooses the node here"),
        "hold": "`hodei hold`",
        "begin": "`hodei hold` and `hodei release`, or `hodei cron`",
        "priority": "`priority` in the job file",
        **dict.fromkeys(("ntasks", "nodes"), "`count` in the job file"),
        "clusters": "`backend` in the job file",
    }

    def __init__(
        self,
        *,
        placed: bool,
        fixed: Mapping[str, str] | None = None,
        allowed: Mapping[str, Sequence[str]] | None = None,
        also: Sequence[str] = (),
    ) -> None:
        super().__init__(fixed=fixed, allowed=allowed)
        self._accepted_names = {*SLURM_ALLOWED, *also, *(() if placed else _SLURM_DELEGATED)}

    def _accepted(self, option: Option) -> dict[str, str] | None:
        name, value = option.name, option.value
        if name in _SLURM_ONE:
            if value not in ("1", "1-1"):
                raise self._refused(option, "a member is one task on one node", self.instead["ntasks"])
            return {}
        if name == "nice":
            if not (value or "100").isdigit():
                raise self._refused(option, "a nice below 0 is for operators")
            return {name: value or "100"}
        return {name: value} if name in self._accepted_names else None


class PbsOptions(AnnotationOptions):
    system = "pbs"
    annotation = PBS_ANNOTATION
    partition_option = "queue"
    overridden = frozenset({"name", "output", "error", "join", "keep", "rerun", "shell", "quiet", "mail-type"})
    instead: ClassVar[Mapping[str, str]] = {
        "resource": "`cpu`, `memory`, `gpu` and `timeout` in the job file",
        "array": "`array` in the job file",
        **dict.fromkeys(("variables", "all-variables"), "`env` in the job file"),
        "attributes": "`after` in the job file for dependencies",
        "hold": "`hodei hold`",
        "begin": "`hodei hold` and `hodei release`, or `hodei cron`",
        "priority": "`priority` in the job file",
    }
    _LETTERS: ClassVar[Mapping[str, str]] = {"account": "A", "project": "P"}

    def of(self, order: Start, partition: Partition) -> tuple[tuple[str, str], ...]:
        """(letter, value) pairs for qsub."""
        return tuple((self._LETTERS[name], value) for name, value in super().of(order, partition))


# `--output`, `--error` and `--input` of sbatch, with their file name patterns (`%j`, `%A_%a`).

# Slurm's value of %a in a job that is not an array.
NO_INDEX = "4294967294"
_PATTERN = re.compile(r"%(\d{1,2})?([%AJNabjnstux])")
_JOB = "$HODEI_JOB_ID"
_NUMBERS = {
    "j": _JOB,
    "J": _JOB,
    "A": f"${{HODEI_ARRAY_JOB:-{_JOB}}}",
    "a": f"${{HODEI_ARRAY_INDEX:-{NO_INDEX}}}",
    "b": f"$(( ${{HODEI_ARRAY_INDEX:-{NO_INDEX}}} % 10 ))",
    "n": "${SLURM_NODEID:-0}",
    "t": "${SLURM_PROCID:-0}",
}
_TEXTS = {"N": "${SLURMD_NODENAME:-$(uname -n)}", "u": "${SLURM_JOB_USER:-$(id -un)}"}


def redirections(stdout: str, stderr: str, stdin: str, *, append: bool, name: str) -> str:
    """The shell command that opens the files; "" if there are none. Without `stderr` both streams go to `stdout`."""
    arrow, parts = ">>" if append else ">", []
    if stdout:
        parts.append(f"{arrow}{file_name(stdout, name)}")
    if stderr and stderr != stdout:
        parts.append(f"2{arrow}{file_name(stderr, name)}")
    elif stdout:
        parts.append("2>&1")
    if stdin:
        parts.append(f"<{file_name(stdin, name)}")
    return f"exec {' '.join(parts)}" if parts else ""


def file_name(pattern: str, name: str) -> str:
    """A file name pattern as one shell word. As in Slurm, a backslash switches the patterns off."""
    if "\\" in pattern:
        return shlex.quote(pattern.replace("\\", ""))
    out, at = "", 0
    for found in _PATTERN.finditer(pattern):
        out += _quote(pattern[at : found.start()])
        at = found.end()
        width, letter = min(int(found[1] or 0), 10), found[2]
        if letter in _NUMBERS:
            value = _NUMBERS[letter]
            # Not %d: printf reads numbers with a leading 0 as octal.
            out += f'"$(printf %{width}s "{value}" | tr " " 0)"' if width else f'"{value}"'
        elif letter in _TEXTS:
            out += f'"{_TEXTS[letter]}"'
        else:
            out += _quote({"%": "%", "x": name.replace("/", "_"), "s": "batch"}[letter])
    return out + _quote(pattern[at:]) or "''"


def _quote(text: str) -> str:
    return shlex.quote(text) if text else ""
