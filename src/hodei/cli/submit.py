"""`hodei submit` and `hodei plan`: the same documents, once for real and once for show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hodei.cli import errors
from hodei.cli.documents import checked, document_of, job_options, read_documents
from hodei.cli.errors import UsageProblem
from hodei.cli.options import client, headers_option, output_option
from hodei.cli.output import Column, clean, emit_list
from hodei.model.errors import InvalidInput

COMMAND = "hodei.command"


class FilesOrCommand(click.Command):
    """Takes files; whatever stands behind `--` is one command, and is kept apart as `ctx.meta[COMMAND]`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            dashes = args.index("--")
            args, ctx.meta[COMMAND] = args[:dashes], tuple(args[dashes + 1 :])
        return super().parse_args(ctx, args)


@click.command(cls=FilesOrCommand)
@click.argument("files", metavar="[FILE... | - | -- COMMAND...]", nargs=-1)
@job_options
@click.option("--wait", "wait", is_flag=True, help="Wait until all have ended; exit code 10 if one of them failed.")
@click.option("--key", default="", help="Idempotency key: the same key creates no second job.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the ids.")
@output_option
@click.pass_context
def submit(
    ctx: click.Context, /, files: tuple[str, ...], wait: bool, key: str, quiet: bool, output: str, **given: Any
) -> None:
    """Submit jobs from files (several documents per file), from stdin (-), or one command after `--`.

    \b
      hodei submit train.yaml sweep.yaml
      generate-jobs | hodei submit -
      hodei submit --cpu 2 --memory 4Gi -- python train.py
    """
    from hodei.client import ArrayId

    with client() as server:
        documents = documents_from(ctx, files, given, local=lambda: server.loopback)
        ids = server.submit_all(documents, key=key)
        made: list[dict[str, Any]] = [
            {"id": int(id), "name": _name_of(document)} | _elements_of(document)
            for id, document in zip(ids, documents, strict=False)
        ]
        if quiet:
            output = "name"
        if output in ("table", "wide"):
            for job in made:
                many = job.get("elements")
                what = f"array {job['id']}[]" if many else f"job {job['id']}"
                click.echo(f"{what}{_in_brackets(job['name'])} submitted{f': {many} elements' if many else ''}")
        else:
            emit_list(made, output, (), name=lambda job: f"{job['id']}{'[]' if 'elements' in job else ''}")
        if wait:
            from hodei.cli.job_actions import wait_for
            from hodei.cli.refs import Meant

            whole = [server.array(id) for id in ids if isinstance(id, ArrayId)]
            ctx.exit(wait_for(server, Meant(whole, [id for id in ids if not isinstance(id, ArrayId)])))


@click.command(cls=FilesOrCommand)
@click.argument("files", metavar="[FILE... | - | -- COMMAND...]", nargs=-1)
@job_options
@click.option("--detailed-exitcode", is_flag=True, help="Exit code 2 if a job would have to wait.")
@output_option
@headers_option
@click.pass_context
def plan(
    ctx: click.Context, /, files: tuple[str, ...], detailed_exitcode: bool, output: str, no_headers: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Dry run: report what would happen to jobs if they were submitted now. Nothing is changed.

    Exit code 5: no node could ever take one of them. For pods of Kubernetes: `hodei kube plan`.
    """
    from hodei.cli.why import render

    with client() as server:
        try:
            plans = server.plan(documents_from(ctx, files, given, local=lambda: server.loopback))
        except InvalidInput as error:
            if error.code != "LARGER_THAN_CLUSTER":
                raise
            errors.report(error)  # this server refuses at once what no node could ever take
            ctx.exit(errors.UNSCHEDULABLE)
    if output in ("table", "wide") and len(plans) == 1:
        click.echo(render(plans[0], wide=output == "wide", planned=True))
    else:
        columns = [
            Column("JOB", lambda p: p.name),
            Column("STATUS", lambda p: p.status),
            Column("NODES", lambda p: ",".join(dict.fromkeys(where.node for where in p.placements)) or "-"),
            Column("WHY", lambda p: p.summary),
        ]
        emit_list(plans, output, columns, name=lambda p: p.name, headers=not no_headers)
    statuses = {found.status for found in plans}
    if "unsatisfiable" in statuses:
        ctx.exit(errors.UNSCHEDULABLE)
    if detailed_exitcode and statuses - {"placed"}:
        ctx.exit(2)


def documents_from(
    ctx: click.Context, files: tuple[str, ...], given: dict[str, Any], *, local: Callable[[], bool]
) -> list[dict[str, Any]]:
    """The documents of the files, or the one that options and the command behind `--` describe."""
    command = ctx.meta.get(COMMAND, ())
    described = [key.replace("_", "-") for key, value in given.items() if value not in (None, ())]
    if command and files:
        raise UsageProblem(f"both a file ({files[0]}) and a command ({command[0]})", hint="give one or the other")
    if command:
        return [checked(document_of(command, given, local=local()))]
    if not files:
        raise UsageProblem("there is nothing to submit", hint="name a file, - for stdin, or a command after --")
    if described:
        raise UsageProblem(f"--{described[0]} describes a command, not a file", hint="put the command after --")
    return read_documents(files)


def _elements_of(document: dict[str, Any]) -> dict[str, int]:
    spec = document.get("spec")
    if "array" not in (spec if isinstance(spec, dict) else document):
        return {}
    from hodei.jobfile.parse import parse_job
    from hodei.model.array import element_count

    return {"elements": element_count(parse_job(document))}


def _name_of(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    return str(document.get("name") or (metadata.get("name", "") if isinstance(metadata, dict) else ""))


def _in_brackets(name: str) -> str:
    return f" ({clean(name)})" if name else ""
