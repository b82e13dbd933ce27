"""`--output`, `--error` and `--input` of sbatch as redirections of a shell, with the patterns of their names (`%j`, `%A_%a`).

Names are filled in when the job starts. What stands between the patterns is quoted: no shell reads it.
"""

from __future__ import annotations

import re
import shlex

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
