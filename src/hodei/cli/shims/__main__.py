"""Runs the named command, and turns errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NoReturn

from hodei import __version__
from hodei.cli.shims.jobs import BAD_OPTION, CommandError
from hodei.model.errors import HodeiError, InvalidInput

# The module of each command; imported when it is called, so that the others do not slow it down.
COMMANDS = {
    "sbatch": "sbatch", "srun": "srun", "squeue": "listings", "scancel": "control", "scontrol": "control",
    "sacct": "listings", "sinfo": "listings",
}  # fmt: skip
_INTERRUPTED = 130
_BROKEN_PIPE = 141


def main(argv: list[str]) -> NoReturn:
    if not argv or argv[0] not in COMMANDS:
        sys.exit(f"hodei.cli.shims: the first argument must be one of {', '.join(COMMANDS)}")
    name, *rest = argv
    if rest and rest[0] in ("--help", "--usage", "--version", "-V"):
        print(f"{name} for Hodei {__version__}")
        if rest[0] in ("--help", "--usage"):
            print(f"It supports the common options of {name} and refuses the others: docs/how-to/slurm.md")
        sys.exit(0)
    try:
        code = getattr(import_module(f"hodei.cli.shims.{COMMANDS[name]}"), name)(rest)
        sys.stdout.flush()
    except CommandError as error:
        sys.stderr.write(f"{name}: {error}\n")
        code = error.code
    except HodeiError as error:
        lines = [error.message, *([f"next: {error.hint}"] if error.hint else [])]
        if isinstance(error, InvalidInput):
            lines[1:1] = [f"{place}: {text}" if place else text for place, text in error.problems]
        sys.stderr.writelines(f"{name}: error: {line}\n" for line in dict.fromkeys(lines))
        code = _exit_code(name, error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = _BROKEN_PIPE
    except KeyboardInterrupt:
        code = _INTERRUPTED
    sys.exit(code)


def _exit_code(name: str, error: HodeiError) -> int:
    if name not in ("sbatch", "srun"):
        return 1
    from hodei.backends.hpc.convert import BadOption  # the others start faster without it

    return BAD_OPTION if isinstance(error, BadOption) else 1


if __name__ == "__main__":
    main(sys.argv[1:])
