"""`python -m hodei.cli.shims sbatch|squeue|scancel|sinfo`: Slurm's commands as far as fingers know them, for Hodei.

Each turns its options into a command of `hodei` and becomes it. What is not understood is refused.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import NoReturn

from hodei.backends.hpc.batch_lines import needs_next_word
from hodei.cli.convert import as_yaml, converted, read_script


def main(words: list[str]) -> NoReturn:
    known = {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "sinfo": sinfo}
    if not words or words[0] not in known:
        refuse("hodei.cli.shims", f"say one of {', '.join(known)}")
    name, *rest = words
    become(known[name](rest))


def refuse(name: str, what: str) -> NoReturn:
    sys.stderr.write(f"{name} (hodei): {what}\n")
    sys.exit(2)


def become(command: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", "hodei.cli.main", *command])


def sbatch(words: list[str]) -> list[str]:
    """`sbatch [options] script` or `sbatch [options] --wrap COMMAND`: options as in the script's own lines."""
    options, script, wrapped = [], "", ""
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--wrap" and queue:
            wrapped = queue.pop(0)
        elif word.startswith("--wrap="):
            wrapped = word.partition("=")[2]
        elif word.startswith("-") and word != "-":
            options.append(word)
            if queue and needs_next_word(word):
                options.append(queue.pop(0))
        elif script:
            refuse("sbatch", "arguments behind the script are not taken: put them into the script")
        else:
            script = word
    if bool(script) == bool(wrapped):
        refuse("sbatch", "say a script, or --wrap with a command")
    text = f"#!/bin/sh\n{wrapped}\n" if wrapped else read_script(script)
    first, newline, rest = text.partition("\n")
    line = (
        "#SBATCH " + " ".join("'" + option.replace("'", "'\"'\"'") + "'" for option in options) + "\n"
        if options
        else ""
    )
    if any("\n" in option for option in options):
        refuse("sbatch", "an option has a line end in it")
    whole = f"{first}{newline}{line}{rest}" if first.startswith("#!") else f"{line}{text}"
    document, notes = converted(whole, script or "wrap")
    for note in notes:
        sys.stderr.write(f"sbatch (hodei): {note}\n")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="hodei-sbatch-", delete=False) as file:
        file.write(as_yaml(document))
    code = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-m", "hodei.cli.main", "submit", file.name])
    os.unlink(file.name)
    sys.exit(code)


def squeue(words: list[str]) -> list[str]:
    out, queue = ["jobs"], list(words)
    while queue:
        word = queue.pop(0)
        if word in ("-u", "--user") and queue:
            out += ["--user", queue.pop(0)]
        elif word.startswith("--user="):
            out += ["--user", word.partition("=")[2]]
        elif word in ("-h", "--noheader"):
            continue
        else:
            refuse("squeue", f"{word} is not known here; next: hodei jobs --help")
    return out


def scancel(words: list[str]) -> list[str]:
    if not words or not all(word.isdigit() for word in words):
        refuse("scancel", "say the numbers of jobs; for more: hodei cancel --help")
    return ["cancel", *words]


def sinfo(words: list[str]) -> list[str]:
    if words not in ([], ["-N"], ["-l"], ["-Nl"]):
        refuse("sinfo", "takes no options here; for more: hodei nodes --help")
    return ["nodes"]


if __name__ == "__main__":
    main(sys.argv[1:])
