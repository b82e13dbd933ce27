"""The lines `#SBATCH` and `#PBS` at the head of a batch script, as options with their full names. Reads text, does nothing.

As the systems do: lines count up to the first one that is a command; quotes and backslashes as in a shell, but nothing is
ever expanded. An option that there is not is a problem, also one that is only cut short (`--part`): what is not understood
can not be held against a rule.
"""

from __future__ import annotations

import re
import shlex
from typing import Literal

from msgspec import Struct

System = Literal["slurm", "pbs"]


class Option(Struct, frozen=True):
    """`name` without dashes and in full; `value` "" for a flag."""

    name: str
    value: str = ""
    line: int = 0


class BatchScript(Struct, frozen=True):
    """`body`: all that is not an option, without the first line's `#!interpreter`. `problems`: what could not be read.
    `several`: the line in which options of a second job begin (a heterogeneous job), 0 if there is none."""

    system: System
    interpreter: str
    options: tuple[Option, ...]
    body: str
    problems: tuple[str, ...] = ()
    several: int = 0


# Slurm's options by their letters.
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
# These may come with a value or without.
_SBATCH_EITHER = frozenset({
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
    "f": "foreground",
    "h": "hold",
    "I": "interactive",
    "V": "all-variables",
    "X": "x11",
    "z": "quiet",
    "G": "gui",
}


def system_of(text: str) -> System:
    """By its first line of options; Slurm if it has none."""
    found = re.search(r"^#(SBATCH|PBS)\b", text, re.MULTILINE)
    return "pbs" if found and found[1] == "PBS" else "slurm"


def parse_script(text: str, system: System | None = None) -> BatchScript:
    system = system or system_of(text)
    mark = "#SBATCH" if system == "slurm" else "#PBS"
    lines = text.replace("\r\n", "\n").split("\n")
    interpreter = ""
    if lines and lines[0].startswith("#!"):
        interpreter = lines.pop(0)[2:].strip()
    first = 2 if interpreter else 1
    options: list[Option] = []
    problems: list[str] = []
    body: list[str] = []
    in_head, several = True, 0
    for number, line in enumerate(lines, first):
        if in_head and re.match(rf"{mark}(\s|$)", line):
            words, problem = _words(line[len(mark) :])
            if words in (["hetjob"], ["packjob"]):
                several = several or number
                continue
            if not problem:
                found, problem = parse_words(words, system, number)
                options += found
            if problem:
                problems.append(f"line {number}: {problem}")
            continue
        if line.strip() and not line.lstrip().startswith("#"):
            in_head = False
        elif not in_head and line.startswith(mark):
            problems.append(f"line {number}: it comes after the first command, so {mark[1:]} ignores it")
        body.append(line)
    return BatchScript(system, interpreter, tuple(options), "\n".join(body).strip("\n"), tuple(problems), several)


def parse_options(text: str, system: System) -> tuple[tuple[Option, ...], tuple[str, ...]]:
    """Lines of options, each with or without its `#SBATCH`; and what could not be read."""
    mark = "#SBATCH" if system == "slurm" else "#PBS"
    options: list[Option] = []
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words, problem = _words(re.sub(rf"^\s*{mark}(?=\s|$)", "", line))
        if not problem:
            found, problem = parse_words(words, system, number)
            options += found
        if problem:
            problems.append(f"line {number}: {problem}")
    return tuple(options), tuple(problems)


def _words(text: str) -> tuple[list[str], str]:
    try:
        return shlex.split(text, comments=True), ""
    except ValueError as error:
        return [], str(error).lower()


def parse_words(words: list[str], system: System, line: int = 0) -> tuple[list[Option], str]:
    """Options of one line, and what is wrong with the first that makes no sense."""
    out: list[Option] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if system == "slurm" and word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            problem = _long(name, bool(has_value), value, queue, out, line)
        elif word.startswith("-") and len(word) > 1 and word[1] != "-":
            problem = _short(word, system, queue, out, line)
        else:
            problem = f"{word[:60]!r} is no option"
        if problem:
            return out, problem
    return out, ""


def _long(name: str, has_value: bool, value: str, queue: list[str], out: list[Option], line: int) -> str:
    if name in _SBATCH_FLAGS:
        if has_value:
            return f"--{name} takes no value"
        out.append(Option(name, "", line))
    elif name in _SBATCH_EITHER:
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


def _short(word: str, system: System, queue: list[str], out: list[Option], line: int) -> str:
    letters = _SBATCH_LETTERS if system == "slurm" else _PBS_LETTERS
    letter, attached = word[1], word[2:]
    if system == "pbs" and letter in _PBS_FLAGS:
        out.append(Option(_PBS_FLAGS[letter], "", line))
        return _short(f"-{attached}", system, queue, out, line) if attached else ""
    if letter not in letters:
        return f"there is no option -{letter}"
    name = letters[letter]
    if system == "slurm" and name in _SBATCH_FLAGS:
        out.append(Option(name, "", line))
        return _short(f"-{attached}", system, queue, out, line) if attached else ""
    if system == "slurm" and name in _SBATCH_EITHER:
        out.append(Option(name, attached, line))
        return ""
    if not attached:
        if not queue:
            return f"-{letter} needs a value"
        attached = queue.pop(0)
    out.append(Option(name, attached, line))
    return ""


def needs_next_word(word: str) -> bool:
    """Whether an option of sbatch on a command line takes the word behind it for its value."""
    if word.startswith("--"):
        return "=" not in word and word[2:] in _SBATCH_VALUES
    return len(word) == 2 and _SBATCH_LETTERS.get(word[1], "") in _SBATCH_VALUES


# ----------------------------------------------------------------------------------------- batch files
# `--output`, `--error` and `--input` of sbatch as redirections of a shell, with the patterns of their names (`%j`,
# `%A_%a`).


# What Slurm puts for the index in a job that is no array.
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
    """The line of a shell that opens them; "" if there are none. Without `stderr` both streams go to `stdout`."""
    arrow, words = ">>" if append else ">", []
    if stdout:
        words.append(f"{arrow}{file_name(stdout, name)}")
    if stderr and stderr != stdout:
        words.append(f"2{arrow}{file_name(stderr, name)}")
    elif stdout:
        words.append("2>&1")
    if stdin:
        words.append(f"<{file_name(stdin, name)}")
    return f"exec {' '.join(words)}" if words else ""


def file_name(pattern: str, name: str) -> str:
    """One word for a shell. As in Slurm, a backslash switches the patterns off."""
    if "\\" in pattern:
        return shlex.quote(pattern.replace("\\", ""))
    out, at = "", 0
    for found in _PATTERN.finditer(pattern):
        out += _plain(pattern[at : found.start()])
        at = found.end()
        width, letter = min(int(found[1] or 0), 10), found[2]
        if letter in _NUMBERS:
            value = _NUMBERS[letter]
            # Not %d of printf: numbers that begin with 0 would be read as octal.
            out += f'"$(printf %{width}s "{value}" | tr " " 0)"' if width else f'"{value}"'
        elif letter in _TEXTS:
            out += f'"{_TEXTS[letter]}"'
        else:
            out += _plain({"%": "%", "x": name.replace("/", "_"), "s": "batch"}[letter])
    return out + _plain(pattern[at:]) or "''"


def _plain(text: str) -> str:
    return shlex.quote(text) if text else ""
