"""Which command is meant, and what becomes of errors."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NoReturn

from hodei import __version__
from hodei.cli.shims.rows import Refused
from hodei.model.errors import HodeiError, InvalidInput

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sacct", "sinfo")
_INTERRUPTED = 130
# How sbatch and srun end when an option makes no sense.
BAD_OPTION = 255


def main(words: list[str]) -> NoReturn:
    if not words or words[0] not in COMMANDS:
        sys.exit(f"hodei.cli.shims: say one of {', '.join(COMMANDS)}")
    name, *rest = words
    if rest and rest[0] in ("--help", "--usage", "--version", "-V"):
        print(f"{name} for Hodei {__version__}")
        if rest[0] in ("--help", "--usage"):
            print(f"It takes {name}'s everyday options and refuses the others: docs/how-to/slurm.md")
        sys.exit(0)
    try:
        code = import_module(f"hodei.cli.shims.{name}").run(rest)
        sys.stdout.flush()
    except Refused as refused:
        sys.stderr.write(f"{name}: {refused}\n")
        code = refused.code
    except HodeiError as error:
        lines = [error.message, *(f"next: {error.hint}" for _ in range(1) if error.hint)]
        if isinstance(error, InvalidInput):
            lines[1:1] = [f"{place}: {text}" if place else text for place, text in error.problems]
        sys.stderr.writelines(f"{name}: error: {line}\n" for line in dict.fromkeys(lines))
        code = _code(name, error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 141
    except KeyboardInterrupt:
        code = _INTERRUPTED
    sys.exit(code)


def _code(name: str, error: HodeiError) -> int:
    if name not in ("sbatch", "srun"):
        return 1
    from hodei.backends.hpc.convert import BadOption  # the others start faster without it

    return BAD_OPTION if isinstance(error, BadOption) else 1


if __name__ == "__main__":
    main(sys.argv[1:])
