"""`hodei convert`: a batch script of Slurm or PBS to a job file. `hodei slurm-shims`: Slurm's commands for Hodei."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hodei.cli.documents import checked, read_text
from hodei.cli.errors import UsageProblem
from hodei.cli.options import output_option
from hodei.cli.output import emit_one, note

if TYPE_CHECKING:
    from hodei.backends.hpc.convert import SbatchCall

MAX_SCRIPT_BYTES = 4 << 20
SHIMS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sacct", "sinfo")


@click.command()
@click.argument("path", metavar="FILE")
@click.option("--strict", is_flag=True, help="Exit with 1 if anything could not be converted exactly.")
@output_option
def convert(path: str, strict: bool, output: str) -> None:
    """Convert a batch script of Slurm (#SBATCH) or PBS (#PBS) to a job file; report what cannot be converted.

    FILE is the script; - reads it from stdin. The job file is YAML, with -o json JSON.

    \b
      hodei convert job.sbatch > job.yaml
      hodei convert job.pbs | hodei plan -

    The job runs in this directory, as with sbatch: see `workdir` in the output.
    """
    document, notes = converted(read_script(path), path, directory=os.getcwd())
    emit_one(document, output, name=lambda d: str(d.get("name", "")), text=lambda found: as_yaml(found).rstrip("\n"))
    for line in notes:
        note(f"note: {line}")
    if strict and notes:
        raise click.exceptions.Exit(1)


def read_script(path: str) -> str:
    return read_text(path, hint="name a batch script, or - for stdin", limit=MAX_SCRIPT_BYTES)


def converted(
    text: str, path: str, *, directory: str = "", call: SbatchCall | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The job document, checked as by a server, and the notes."""
    from hodei.backends.hpc.convert import convert as to_document

    document, notes = to_document(text, "" if path == "-" else path, directory=directory, call=call)
    return checked(document), notes


def as_yaml(document: dict[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, lines)
    return yaml.dump(document, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


@click.command("slurm-shims")
@click.argument("directory", type=click.Path(file_okay=False))
def slurm_shims(directory: str) -> None:
    """Write sbatch, srun, squeue, scancel, scontrol, sacct and sinfo into DIRECTORY. They call Hodei, with the common
    options, columns and exit codes of Slurm.

    \b
      hodei slurm-shims ~/hodei-bin && export PATH=~/hodei-bin:$PATH

    Unknown options are refused, not ignored.
    """
    target = Path(directory)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in SHIMS:
            path = target / name
            if path.exists() and "hodei.cli.shims" not in path.read_text(errors="replace"):
                raise UsageProblem(f"{path} exists and is not a shim of Hodei", hint="choose another directory")
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hodei.cli.shims {name} "$@"\n')
            path.chmod(0o755)
    except OSError as error:
        raise UsageProblem(f"cannot write to {directory}: {error.strerror}") from None
    note(f"{', '.join(SHIMS)} are in {target}; put it first in PATH")
