"""`sbatch [options] script [arguments]`: the script as a job of Hodei, in this directory and with these variables."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import sys
from typing import TYPE_CHECKING, Any

from hodei.backends.hpc.batch_options import Option, parse_arguments, takes_next_argument
from hodei.cli.shims.finding import ids_of, jobs_of
from hodei.cli.shims.rows import PARTITION, USER, Refused
from hodei.model.errors import HodeiError
from hodei.model.job import JOB_ENDED

if TYPE_CHECKING:
    from hodei.client import Client

# Option errors of sbatch and srun end with this code, all others with 1.
BAD_OPTION = 255
_FROM_ENVIRONMENT = {
    "SBATCH_ACCOUNT": "account", "SBATCH_ARRAY_INX": "array", "SBATCH_CPUS_PER_GPU": "cpus-per-gpu", "SBATCH_EXPORT": "export",
    "SBATCH_GPUS": "gpus", "SBATCH_GRES": "gres", "SBATCH_JOB_NAME": "job-name", "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu", "SBATCH_MEM_PER_GPU": "mem-per-gpu", "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_PARTITION": "partition", "SBATCH_TIMELIMIT": "time",
}  # fmt: skip


def run(words: list[str]) -> int:
    options, rest, wrapped = split(words)
    if wrapped is not None and rest:
        raise Refused("error: Script arguments not permitted with --wrap option")
    if not rest and wrapped is None:
        rest = ["-"]
    text = (
        f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{wrapped}\n"
        if wrapped is not None
        else _read(rest[0])
    )
    name = "wrap" if wrapped is not None else "sbatch" if rest[0] == "-" else rest[0]
    said = {option.name for option in options}
    from hodei.client import Client

    with Client() as client:
        document, notes = submission(client, text, name, from_environment() + options, tuple(rest[1:]))
        for note in notes:
            sys.stderr.write(f"sbatch: note: {note}\n")
        if "test-only" in said:
            return _test(client, document)
        try:
            id = client.submit_all([document])[0]
        except HodeiError as error:
            raise Refused(_failed(error)) from None
        if "parsable" in said and "quiet" not in said:
            sys.stdout.write(f"{id}\n")
        elif "quiet" not in said:
            sys.stdout.write(f"Submitted batch job {id}\n")
        sys.stdout.flush()
        return _wait(client, id, "array" in document) if "wait" in said else 0


def split(words: list[str]) -> tuple[tuple[Option, ...], list[str], str | None]:
    """The options; the script and its arguments; the command of --wrap."""
    options, queue = list[str](), list(words)
    while queue and queue[0].startswith("-") and queue[0] != "-":
        word = queue.pop(0)
        if word == "--":
            break
        options.append(word)
        if queue and takes_next_argument(word):
            options.append(queue.pop(0))
    if queue and queue[0] == ":":
        raise Refused("error: a heterogeneous job (options : options) is not known here; next: hodei job init --full")
    found, problem = parse_arguments(options, "slurm")
    if problem:
        raise Refused(f"{problem}\nit is not known here; see docs/how-to/slurm.md", BAD_OPTION)
    wrapped = [option.value for option in found if option.name == "wrap"]
    return tuple(option for option in found if option.name != "wrap"), queue, wrapped[-1] if wrapped else None


def from_environment() -> tuple[Option, ...]:
    """They count before the script's own options, and behind those of the command line."""
    return tuple(Option(name, os.environ[key]) for key, name in _FROM_ENVIRONMENT.items() if os.environ.get(key))


def submission(
    client: Client, text: str, name: str, options: tuple[Option, ...], arguments: tuple[str, ...], *, files: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """The job, as one of whoever calls. `files`: without a word on it the output goes to slurm-N.out."""
    from hodei.backends.hpc.convert import SbatchCall
    from hodei.cli.convert import converted

    user = getpass.getuser()
    call = SbatchCall(
        env=os.environ,
        jobs=lambda one: ids_of(client, one),
        host=socket.gethostname(),
        user=user,
        options=options,
        arguments=arguments,
        files=files,
        token=secrets.token_hex(6),
    )
    document, notes = converted(text, name, directory=os.getcwd(), call=call)
    labels = {USER: user, PARTITION: document.get("node_selector", {}).get("slurm.hodei.io/queue", "")}
    document["labels"] = {**document.get("labels", {}), **{name: value for name, value in labels.items() if value}}
    return document, notes


def _read(path: str) -> str:
    from hodei.cli.convert import read_script

    try:
        text = read_script(path)
    except HodeiError:
        raise Refused(f"error: Unable to open file {path}") from None
    if not text.startswith("#!"):
        raise Refused(
            "error: This does not look like a batch script.  The first\n"
            "sbatch: error: line must start with #! followed by the path to an interpreter.\n"
            "sbatch: error: For instance: #!/bin/sh"
        )
    return text


def _failed(error: HodeiError) -> str:
    hint = f"\nsbatch: next: {error.hint}" if error.hint else ""
    return f"error: Batch job submission failed: {error.message}{hint}"


def _test(client: Client, document: dict[str, Any]) -> int:
    plan = client.plan([document])[0]
    where = ",".join(dict.fromkeys(one.node for one in plan.placements))
    if plan.status == "unsatisfiable":
        raise Refused(f"error: allocation failure: {plan.summary}")
    sys.stderr.write(
        f"sbatch: Job would start on nodes {where}\n" if where else f"sbatch: Job would wait: {plan.summary}\n"
    )
    return 0


def _wait(client: Client, id: int, array: bool) -> int:
    """The highest exit code of all elements, as sbatch --wait gives it."""
    if array:
        client.wait_array(id)
        views = jobs_of(client, str(id))
    else:
        views = client.wait(id)
    ended = [view for view in views if view.state in JOB_ENDED and view.state != "succeeded"]
    return max((view.exit_code or 1 for view in ended), default=0)
