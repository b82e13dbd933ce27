"""`hodei convert`: a batch script of Slurm or PBS as a job file. `hodei slurm-shims`: Slurm's commands for people's fingers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hodei.cli.documents import checked, read_text
from hodei.cli.errors import UsageProblem
from hodei.cli.output import note

if TYPE_CHECKING:
    from hodei.backends.hpc.convert import SbatchCall

LARGEST_SCRIPT = 4 << 20
SHIMS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sacct", "sinfo")


@click.command()
@click.argument("script", type=click.Path(allow_dash=True))
@click.option("--strict", is_flag=True, help="Exit with 1 if anything could not be converted exactly.")
def convert(script: str, strict: bool) -> None:
    """Convert a batch script of Slurm (#SBATCH) or PBS (#PBS) to a job file; report what cannot be converted.

    \b
      hodei convert job.sbatch > job.yaml
      hodei convert job.pbs | hodei plan -

    The job runs in this directory, as with sbatch: see `workdir` in the output.
    """
    document, notes = converted(read_script(script), script, directory=os.getcwd())
    click.echo(as_yaml(document), nl=False)
    for line in notes:
        note(f"note: {line}")
    if strict and notes:
        raise click.exceptions.Exit(1)


def read_script(path: str) -> str:
    return read_text(path, hint="is it a batch script?", limit=LARGEST_SCRIPT)


def converted(
    text: str, path: str, *, directory: str = "", call: SbatchCall | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The job document, checked as a server would check it, and the notes."""
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
    place = Path(directory)
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name in SHIMS:
            path = place / name
            if path.exists() and "hodei.cli.shims" not in path.read_text(errors="replace"):
                raise UsageProblem(f"{path} is there already, and not one of ours", hint="choose another directory")
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hodei.cli.shims {name} "$@"\n')
            path.chmod(0o755)
    except OSError as error:
        raise UsageProblem(f"cannot write to {directory}: {error.strerror}") from None
    note(f"{', '.join(SHIMS)} are in {place}; put it first in PATH")
