"""`hodei whatif`: who would start when if a job came, nodes came or went, or another policy were in force."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hodei.cli import errors
from hodei.cli.documents import job_options, read_toml
from hodei.cli.errors import UsageProblem
from hodei.cli.options import client, complete_nodes, output_option
from hodei.cli.output import Column, clean, emit_one, indent, table
from hodei.cli.submit import COMMAND, FilesOrCommand, documents_from
from hodei.cli.times import clock, short
from hodei.model.errors import InvalidInput
from hodei.model.explanation import ProjectedEviction, ProjectedStart, WhatIf

if TYPE_CHECKING:
    from hodei.model.config import SchedulingConfig

_NODES_SHOWN = 4
_JOBS_SHOWN = 20
_TIMEOUT_S = 60


@click.command(cls=FilesOrCommand)
@click.argument("files", metavar="[FILE... | - | -- COMMAND...]", nargs=-1)
@click.option("--policy", metavar="FILE", help="Assume the [scheduling] section of this configuration (TOML).")
@click.option("--add-nodes", type=click.IntRange(1, 10_000), metavar="N", help="Assume N more nodes.")
@click.option(
    "--like", metavar="NODE", shell_complete=complete_nodes, help="Model for the added nodes [default: the largest]."
)
@click.option(
    "--remove-node", metavar="NODE", multiple=True, shell_complete=complete_nodes,
    help="Assume that this node is drained and removed; may be repeated.",
)  # fmt: skip
@job_options
@output_option
@click.pass_context
def whatif(
    ctx: click.Context,
    /,
    files: tuple[str, ...],
    policy: str | None,
    add_nodes: int | None,
    like: str | None,
    remove_node: tuple[str, ...],
    output: str,
    **given: Any,
) -> None:
    """Report which jobs would start when, and which would be stopped, after a change. Nothing is changed.

    \b
      hodei whatif train.yaml
      hodei whatif --add-nodes 4 --like gpu-1
      hodei whatif train.yaml --remove-node n3
      hodei whatif --policy easy.toml

    The scheduler itself runs ahead in simulated time, with and without the change, and jobs run as long as
    estimated. Exit code 5: no node could ever take one of the jobs.
    """
    from hodei.api.views import WhatIfRequest

    if like and not add_nodes:
        raise UsageProblem("--like says what added nodes are like, and none are added", hint="give --add-nodes N too")
    asks_for_jobs = bool(files or ctx.meta.get(COMMAND))
    if not (asks_for_jobs or policy or add_nodes or remove_node):
        raise UsageProblem(
            "what is to be different?", hint="name a job file, or give --add-nodes, --remove-node or --policy"
        )
    scheduling = read_policy(policy) if policy else None
    with client(_TIMEOUT_S) as server:
        documents = documents_from(ctx, files, given, local=lambda: server.loopback) if asks_for_jobs else []
        question = WhatIfRequest(documents, scheduling, add_nodes or 0, like or "", list(remove_node))
        try:
            answer = server.what_if(question)
        except InvalidInput as error:
            if error.code != "LARGER_THAN_CLUSTER":
                raise
            errors.report(error)
            ctx.exit(errors.UNSCHEDULABLE)
    emit_one(answer, output, name=lambda a: "\n".join(job.name for job in a.jobs), text=render)


def read_policy(path: str) -> SchedulingConfig:
    """The `scheduling` section of a configuration file, or a file that has nothing else."""
    import msgspec

    from hodei.model.config import SchedulingConfig

    found = read_toml(path)
    try:
        return msgspec.convert(found.get("scheduling", found), SchedulingConfig)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{path}: {error}", hint="docs/reference/configuration.md") from None


# ------------------------------------------------------------------------------------------------ for people


def render(answer: WhatIf) -> str:
    parts = [_asked(job, answer.at_ms) for job in answer.jobs]
    if answer.evicted:
        parts.append("would be sent away:\n" + indent(_evicted(answer.evicted, answer.at_ms)))
    for title, jobs in (("would start later:", answer.later), ("would start sooner:", answer.sooner)):
        if jobs:
            parts.append(f"{title}\n" + indent(_moved(jobs, answer.at_ms)))
    if answer.same:
        parts.append(f"{_jobs(answer.same)} that {'waits' if answer.same == 1 else 'wait'} would start as now")
    elif not (answer.jobs or answer.evicted or answer.later or answer.sooner):
        parts.append("nobody waits: nothing would be different")
    parts += [f"note: {clean(note)}" for note in answer.notes]
    return "\n".join(parts)


def _asked(job: ProjectedStart, now_ms: int) -> str:
    if not job.start_ms:
        return f"{clean(job.name)}: no start in sight"
    when = "now" if job.start_ms <= now_ms else f"at {clock(job.start_ms)} (in {short(job.start_ms - now_ms)})"
    return f"{clean(job.name)} would start {when} on {clean(_nodes(job.nodes))}"


def _evicted(gone: tuple[ProjectedEviction, ...], now_ms: int) -> str:
    columns = [
        Column("JOB", lambda e: str(e.job)),
        Column("NAME", lambda e: e.name),
        Column("WHEN", lambda e: _when(e.at_ms, now_ms)),
        Column("FOR", lambda e: f"{e.by} ({e.by_name})" if e.by else e.by_name or "-"),
        Column("AGAIN", lambda e: _when(e.again_ms, now_ms)),
    ]
    return _some(gone, columns)


def _moved(jobs: tuple[ProjectedStart, ...], now_ms: int) -> str:
    columns = [
        Column("JOB", lambda j: str(j.job)),
        Column("NAME", lambda j: j.name),
        Column("BEFORE", lambda j: _when(j.before_ms, now_ms)),
        Column("AFTER", lambda j: _when(j.start_ms, now_ms)),
        Column("BY", lambda j: _by(j)),
        Column("NODES", lambda j: _nodes(j.nodes) or "-"),
    ]
    return _some(jobs, columns)


def _some(rows: tuple[Any, ...], columns: list[Column]) -> str:
    text = table(rows[:_JOBS_SHOWN], columns)
    return text if len(rows) <= _JOBS_SHOWN else f"{text}\n… and {len(rows) - _JOBS_SHOWN} more (-o json has all)"


def _when(ms: int, now_ms: int) -> str:
    return "never" if not ms else "now" if ms <= now_ms else clock(ms)


def _by(job: ProjectedStart) -> str:
    if not job.start_ms or not job.before_ms:
        return "-"
    moved_ms = job.start_ms - job.before_ms
    return f"{'+' if moved_ms > 0 else '-'}{short(abs(moved_ms))}"


def _nodes(nodes: tuple[str, ...]) -> str:
    shown = ", ".join(nodes[:_NODES_SHOWN])
    return shown + (f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else "")


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"
