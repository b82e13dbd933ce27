"""`hodei wait`, `cancel`, `hold`, `release`, `requeue`: one verb over many jobs. One that fails does not stop the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from hodei.cli import arrays, errors
from hodei.cli.errors import UsageProblem
from hodei.cli.jobs import COLUMNS
from hodei.cli.options import client, headers_option, jobs_argument, output_option
from hodei.cli.output import clean, emit_list, note
from hodei.cli.refs import resolve, resolve_job
from hodei.model.errors import HodeiError

if TYPE_CHECKING:
    from hodei.client import Client
    from hodei.wire.views import JobView


@click.command()
@jobs_argument
@click.option("--timeout", metavar="TIME", help="Give up after this long (90s, 1h30m): exit code 6.")
@click.option("--progress", is_flag=True, help="Count the ended ones on stderr.")
@output_option
@headers_option
@click.pass_context
def wait(
    ctx: click.Context, jobs: tuple[str, ...], timeout: str | None, progress: bool, output: str, no_headers: bool
) -> None:
    """Wait until jobs have ended. Exit code 10 if one of them did not succeed, 6 when the time was up."""
    from hodei.model.quantity import parse_duration_ms

    timeout_s = None if timeout is None else parse_duration_ms(timeout) / 1000
    whole, single = arrays.split(jobs)
    with client() as server:
        code = errors.OK
        if whole:
            ids = [arrays.array_of(server, one, resolve_job).id for one in whole]
            code = arrays.wait_for_arrays(server, ids, timeout_s)
        if single:
            code = code or wait_for(
                server, resolve(server, single), timeout_s, progress=progress, output=output, headers=not no_headers
            )
    ctx.exit(code)


def wait_for_all(server: Client, made: list[dict[str, Any]]) -> int:
    """For jobs and arrays that were just submitted."""
    code = arrays.wait_for_arrays(server, [job["id"] for job in made if "elements" in job], None)
    single = [job["id"] for job in made if "elements" not in job]
    return code or (wait_for(server, single) if single else code)


def wait_for(
    server: Client,
    ids: list[int],
    timeout_s: float | None = None,
    *,
    progress: bool = False,
    output: str = "",
    headers: bool = True,
) -> int:
    """Wait for them all, print how they ended (if `output` says how), and give the exit code."""
    ended = 0

    def tick(view: JobView) -> None:
        nonlocal ended
        ended += 1
        line = f"{ended}/{len(ids)} ended"
        click.echo(f"\r{line}" if sys.stderr.isatty() else line, nl=not sys.stderr.isatty(), err=True)

    try:
        views = server.wait(ids, timeout_s, on_end=tick if progress else None)
    finally:
        if progress and sys.stderr.isatty():
            click.echo("", err=True)
    if output:
        emit_list(views, output, COLUMNS, name=lambda view: str(view.id), headers=headers, empty="no active jobs")
    bad = [view for view in views if view.state != "succeeded"]
    for view in bad if not output else ():
        note(f"job {view.id} {view.state}: {view.reason or f'exit code {view.exit_code}'}")
    return errors.JOB_FAILED if bad else errors.OK


@click.command()
@jobs_argument
@click.option("--reason", default="", help="Why; kept with the job.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask, even for `all`.")
@output_option
@click.pass_context
def cancel(ctx: click.Context, jobs: tuple[str, ...], reason: str, yes: bool, output: str) -> None:
    """End jobs: waiting ones leave the queue, running ones are stopped (TERM, grace period, KILL)."""
    whole, single = arrays.split(jobs)
    with client() as server:
        code = arrays.each_array(
            server, whole, resolve_job, lambda id: server.cancel_array(id, reason), output, "cancel requested"
        )
        ids = resolve(server, single)
        if "all" in jobs and ids and not yes:
            _confirm(f"cancel {len(ids)} active jobs?")
        if whole and not single:
            ctx.exit(code)
        ctx.exit(code or each(ids, lambda id: server.cancel(id, reason), output, "cancel requested", "cancelled"))


@click.command()
@jobs_argument
@output_option
@click.pass_context
def hold(ctx: click.Context, jobs: tuple[str, ...], output: str) -> None:
    """Keep jobs from starting until they are released."""
    _all_of(ctx, jobs, lambda server: (server.hold, server.hold_array), output, "hold requested", "held")


@click.command()
@jobs_argument
@output_option
@click.pass_context
def release(ctx: click.Context, jobs: tuple[str, ...], output: str) -> None:
    """Let held jobs start again."""
    _all_of(ctx, jobs, lambda server: (server.release, server.release_array), output, "released", "released")


@click.command()
@jobs_argument
@output_option
@click.pass_context
def requeue(ctx: click.Context, jobs: tuple[str, ...], output: str) -> None:
    """Start jobs again from the beginning: ended ones anew, running ones are stopped first."""
    with client() as server:
        ctx.exit(each(resolve(server, jobs), server.requeue, output, "requeue requested", "requeued"))


def _all_of(
    ctx: click.Context,
    jobs: tuple[str, ...],
    verbs: Callable[[Client], tuple[Callable[[int], JobView], Callable[[int], JobView]]],
    output: str,
    asked: str,
    done: str,
) -> None:
    """To jobs and to whole arrays."""
    whole, single = arrays.split(jobs)
    with client() as server:
        to_job, to_array = verbs(server)
        code = arrays.each_array(server, whole, resolve_job, to_array, output, done)
        if single:
            code = code or each(resolve(server, single), to_job, output, asked, done)
    ctx.exit(code)


def each(ids: list[int], act: Callable[[int], JobView], output: str, asked: str, done: str) -> int:
    """Do it to every one; report failures as they come; the exit code of the first failure.

    `asked` is what is said while the job has still to follow (it is running), `done` once it has.
    """
    views, code = [], errors.OK
    for id in ids:
        try:
            views.append(act(id))
        except HodeiError as error:
            code = code or errors.exit_code_of(error)
            if code == errors.UNREACHABLE:
                raise
            errors.report(error)
    if output in ("table", "wide"):
        if not ids:
            note("no active jobs")
        for view in views:
            word = asked if view.state in ("running", "scheduled") else done
            click.echo(f"job {view.id}{f' ({clean(view.name)})' if view.name else ''} {word}")
    else:
        emit_list(views, output, (), name=lambda view: str(view.id))
    return code


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise UsageProblem(f"{question} nobody is there to ask", hint="add --yes")
    if not click.confirm(question, default=False, err=True):
        raise click.Abort
