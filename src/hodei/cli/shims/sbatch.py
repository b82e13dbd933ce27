"""`sbatch [options] script [arguments]`: submits the script as a job, in this directory and with these variables."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import sys
from typing import TYPE_CHECKING, Any

from hodei.backends.hpc.batch_options import Option, parse_arguments, takes_next_argument
from hodei.cli.shims.jobs import BAD_OPTION, PARTITION, USER, CommandError, job_ids, job_views
from hodei.model.errors import HodeiError
from hodei.model.job import JOB_ENDED
from hodei.model.node import QUEUE_LABEL_SUFFIX

if TYPE_CHECKING:
    from hodei.client import Client

_VARIABLES = {
    "SBATCH_ACCOUNT": "account", "SBATCH_ARRAY_INX": "array", "SBATCH_CPUS_PER_GPU": "cpus-per-gpu", "SBATCH_EXPORT": "export",
    "SBATCH_GPUS": "gpus", "SBATCH_GRES": "gres", "SBATCH_JOB_NAME": "job-name", "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu", "SBATCH_MEM_PER_GPU": "mem-per-gpu", "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_PARTITION": "partition", "SBATCH_TIMELIMIT": "time",
}  # fmt: skip


def sbatch(argv: list[str]) -> int:
    options, rest, wrapped = split(argv)
    if wrapped is not None and rest:
        raise CommandError("error: Script arguments not permitted with --wrap option")
    if wrapped is not None:
        name, text = "wrap", f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{wrapped}\n"
    else:
        rest = rest or ["-"]
        name, text = "sbatch" if rest[0] == "-" else rest[0], _read(rest[0])
    # Variables take precedence over the script's options, and the command line over variables.
    variables = tuple(Option(name, os.environ[key]) for key, name in _VARIABLES.items() if os.environ.get(key))
    flags = {option.name for option in options}
    from hodei.client import Client

    with Client() as client:
        document, notes = build_document(client, text, name, variables + options, tuple(rest[1:]))
        sys.stderr.writelines(f"sbatch: note: {note}\n" for note in notes)
        if "test-only" in flags:
            return _test_only(client, document)
        try:
            id = client.submit_all([document])[0]
        except HodeiError as error:
            hint = f"\nsbatch: next: {error.hint}" if error.hint else ""
            raise CommandError(f"error: Batch job submission failed: {error.message}{hint}") from None
        if "quiet" not in flags:
            sys.stdout.write(f"{id}\n" if "parsable" in flags else f"Submitted batch job {id}\n")
        sys.stdout.flush()
        return _wait(client, id, "array" in document) if "wait" in flags else 0


def split(argv: list[str]) -> tuple[tuple[Option, ...], list[str], str | None]:
    """The options; the script and its arguments; the command of --wrap."""
    arguments, queue = list[str](), list(argv)
    while queue and queue[0].startswith("-") and queue[0] != "-":
        argument = queue.pop(0)
        if argument == "--":
            break
        arguments.append(argument)
        if queue and takes_next_argument(argument):
            arguments.append(queue.pop(0))
    if queue and queue[0] == ":":
        raise CommandError(
            "error: heterogeneous jobs (options : options) are not supported; next: hodei job init --full"
        )
    found, problem = parse_arguments(arguments, "slurm")
    if problem:
        raise CommandError(f"{problem}\nsupported options: docs/how-to/slurm.md", BAD_OPTION)
    wrapped = [option.value for option in found if option.name == "wrap"]
    return tuple(option for option in found if option.name != "wrap"), queue, wrapped[-1] if wrapped else None


def build_document(
    client: Client,
    text: str,
    name: str,
    options: tuple[Option, ...],
    arguments: tuple[str, ...],
    *,
    by_srun: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """The job document of this call, and notes. `by_srun`: see `SbatchCall`."""
    from hodei.backends.hpc.convert import SbatchCall
    from hodei.cli.convert import converted

    user = getpass.getuser()
    call = SbatchCall(
        env=os.environ,
        jobs=lambda id: job_ids(client, id),
        host=socket.gethostname(),
        user=user,
        options=options,
        arguments=arguments,
        by_srun=by_srun,
        token=secrets.token_hex(6),
    )
    document, notes = converted(text, name, directory=os.getcwd(), call=call)
    partition = document.get("node_selector", {}).get(f"slurm{QUEUE_LABEL_SUFFIX}", "")
    labels = {USER: user, **({PARTITION: partition} if partition else {})}
    document["labels"] = {**document.get("labels", {}), **labels}
    return document, notes


def _read(path: str) -> str:
    from hodei.cli.convert import read_script

    try:
        text = read_script(path)
    except HodeiError:
        raise CommandError(f"error: Unable to open file {path}") from None
    if not text.startswith("#!"):
        raise CommandError(
            "error: This does not look like a batch script.  The first\n"
            "sbatch: error: line must start with #! followed by the path to an interpreter.\n"
            "sbatch: error: For instance: #!/bin/sh"
        )
    return text


def _test_only(client: Client, document: dict[str, Any]) -> int:
    plan = client.plan([document])[0]
    if plan.status == "unsatisfiable":
        raise CommandError(f"error: allocation failure: {plan.summary}")
    nodes = ",".join(dict.fromkeys(placement.node for placement in plan.placements))
    result = f"Job would start on nodes {nodes}" if nodes else f"Job would wait: {plan.summary}"
    sys.stderr.write(f"sbatch: {result}\n")
    return 0


def _wait(client: Client, id: int, array: bool) -> int:
    """The highest exit code of all elements, as sbatch --wait returns it."""
    from hodei.client import ArrayId

    if array:
        client.wait(ArrayId(id))
        views = job_views(client, str(id))
    else:
        views = client.wait(id)
    failed = [view for view in views if view.state in JOB_ENDED and view.state != "succeeded"]
    return max((view.exit_code or 1 for view in failed), default=0)
