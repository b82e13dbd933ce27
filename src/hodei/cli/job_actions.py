"""`hodei wait`, `cancel`, `hold`, `release`, `requeue`: one verb over many jobs. One that fails does not stop the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from hodei.cli import arrays, errors, logs
from hodei.cli.errors import UsageProblem
from hodei.cli.jobs import COLUMNS
from hodei.cli.options import client, complete_nodes, headers_option, jobs_argument, output_option
from hodei.cli.output import clean, emit_list, note
from hodei.cli.refs import ACTIVE, Meant, look_up, resolve
from hodei.cli.times import timeout_ms
from hodei.model.errors import HodeiError

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client


@click.command()
@jobs_argument
@click.option("--timeout", metavar="TIME", help="Give up after this long (90s, 1h30m): exit code 6.")
@click.option("--progress", is_flag=True, help="Count ended jobs on stderr.")
@output_option
@headers_option
@click.pass_context
def wait(
    ctx: click.Context, jobs: tuple[str, ...], timeout: str | None, progress: bool, output: str, no_headers: bool
) -> None:
    """Wait until jobs have ended. Exit code 10 if one of them did not succeed, 6 on timeout.

    The name or number of an array means all of its elements.
    """
    timeout_s = None if timeout is None else timeout_ms(timeout) / 1000
    with client() as server:
        meant = look_up(server, jobs)
        ctx.exit(wait_for(server, meant, timeout_s, progress=progress, output=output, headers=not no_headers))


def wait_for(
    server: Client,
    meant: Meant,
    timeout_s: float | None = None,
    *,
    progress: bool = False,
    output: str = "",
    headers: bool = True,
) -> int:
    """Wait for them all, print how they ended (if `output` says how), and give the exit code. Whatever did not succeed is
    named on stderr, with its last lines if no table is printed."""
    from hodei.client import ArrayId

    wanted = [*(ArrayId(array.id) for array in meant.arrays), *meant.jobs]
    ended = 0

    def tick(view: JobView) -> None:
        nonlocal ended
        ended += 1
        line = f"{ended}/{len(wanted)} ended"
        click.echo(f"\r{line}" if sys.stderr.isatty() else line, nl=not sys.stderr.isatty(), err=True)

    try:
        views = server.wait(wanted, timeout_s, on_end=tick if progress else None)
    finally:
        if progress and sys.stderr.isatty():
            click.echo("", err=True)
    if output:
        emit_list(views, output, COLUMNS, name=arrays.reference_text, headers=headers, empty="no active jobs")
    else:
        for view in views:
            if arrays.folded(view) and view.array is not None:
                note(f"array {view.id}[] ({view.name}): {arrays.counts(view.array)}")
    bad = [view for view in views if view.state != "succeeded"]
    if bad and not output:
        logs.of_all(server, bad)
    return errors.JOB_FAILED if bad else errors.OK


@click.command()
@jobs_argument
@click.option("--reason", default="", help="Reason, kept with the job.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask, even for `all`.")
@output_option
@click.pass_context
def cancel(ctx: click.Context, jobs: tuple[str, ...], reason: str, yes: bool, output: str) -> None:
    """Cancel jobs: pending ones leave the queue, running ones are stopped (TERM, grace period, KILL).

    The name or number of an array means all of its elements; one of them is `sweep[3]`.
    """
    with client() as server:
        meant = look_up(server, jobs)
        if "all" in jobs and meant.jobs and not yes:
            _confirm(f"cancel {len(meant.jobs)} active jobs?", hint="add --yes")
        code = each_array(meant.arrays, lambda id: server.cancel_array(id, reason), output, "cancel requested")
        if meant.jobs or not meant.arrays:
            done = each(meant.jobs, lambda id: server.cancel(id, reason), output, "cancel requested", "cancelled")
            code = code or done
    ctx.exit(code)


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
    """Release held jobs."""
    _all_of(ctx, jobs, lambda server: (server.release, server.release_array), output, "released", "released")


@click.command()
@jobs_argument
@click.option(
    "--failed", is_flag=True, help="Only failed jobs, and the jobs that failed because they depended on them."
)
@click.option(
    "-y",
    "--yes",
    is_flag=True,
    help="Do not ask: before elements that have succeeded run again, or for `--failed all`.",
)
@output_option
@click.pass_context
def requeue(ctx: click.Context, jobs: tuple[str, ...], failed: bool, yes: bool, output: str) -> None:
    """Start jobs again from the beginning; running ones are stopped first.

    \b
      hodei requeue --failed sweep     only the elements of an array that have failed
      hodei requeue 'sweep[3]'         one element
      hodei requeue --failed all       every job that has failed
    """
    with client() as server:
        if failed:
            meant = look_up(server, (job for job in jobs if job != "all"))
            if "all" in jobs:
                meant = Meant(meant.arrays, [*meant.jobs, *_all_failed(server, meant, yes=yes)])
            _requeue_failed(server, meant, output)
            return
        meant = look_up(server, jobs)
        if not yes:
            for array in meant.arrays:
                _confirm_successes(array)
        code = each_array(meant.arrays, lambda id: _requeue_array(server, id), output, "requeued")
        if meant.jobs or not meant.arrays:
            code = code or each(meant.jobs, server.requeue, output, "requeue requested", "requeued")
    ctx.exit(code)


def _all_failed(server: Client, meant: Meant, *, yes: bool) -> list[int]:
    """`all` means the active jobs elsewhere, and none of those has failed: here it means all that have."""
    failed = sorted({view.id for view in server.jobs(state=("failed",))} - set(meant.jobs))
    if failed and not yes:
        _confirm(f"requeue {len(failed)} failed jobs?", hint="add --yes")
    return failed


def _requeue_array(server: Client, id: int) -> JobView:
    from hodei.model.errors import Conflict

    if not server.requeue_all(arrays=[id]).requeued:
        raise Conflict(f"no element of array {id}[] has started yet")
    return server.array(id)


def _confirm_successes(array: JobView) -> None:
    """Work that is done would be done again: that is asked about first."""
    assert array.array is not None
    done, every = array.array.states.get("succeeded", 0), array.array.count
    if not done:
        return
    which = clean(array.name) or f"{array.id}[]"
    text = (
        f"array {array.id}[] ({clean(array.name)}): {done} of its {every} elements have succeeded; run them again too?"
    )
    _confirm(text, hint=f"only what failed: hodei requeue --failed {which}; all of them: add --yes")


def _requeue_failed(server: Client, meant: Meant, output: str) -> None:
    done = server.requeue_all(meant.jobs, [array.id for array in meant.arrays], failed=True)
    if output not in ("table", "wide"):
        views = [server.job(id).job for id in (*done.requeued, *done.revived)]
        emit_list(views, output, (), name=arrays.reference_text)
    else:
        left = set(done.requeued)
        for array in meant.arrays:
            assert array.array is not None
            own = [id for id in done.requeued if array.array.first <= id < array.array.first + array.array.count]
            left -= set(own)
            if own:
                click.echo(f"array {array.id}[] ({clean(array.name)}): {len(own)} requeued")
        for id in sorted(left):
            click.echo(f"job {id}{_named(server.job(id).job)} requeued")
        for id in done.revived:
            click.echo(f"job {id}{_named(server.job(id).job)} waits again: what it waited for had failed")
    if done.refused:
        note(f"{len(done.refused)} jobs of other users failed for waiting for these, and were left as they are")
    if not done.requeued:
        note("nothing to do: none of them has failed")


def _all_of(
    ctx: click.Context,
    jobs: tuple[str, ...],
    verbs: Callable[[Client], tuple[Callable[[int], JobView], Callable[[int], JobView]]],
    output: str,
    asked: str,
    done: str,
) -> None:
    """To jobs and to whole arrays."""
    with client() as server:
        to_job, to_array = verbs(server)
        meant = look_up(server, jobs)
        code = each_array(meant.arrays, to_array, output, done)
        if meant.jobs or not meant.arrays:
            code = code or each(meant.jobs, to_job, output, asked, done)
    ctx.exit(code)


def each_array(found: list[JobView], act: Callable[[int], JobView], output: str, done: str) -> int:
    """One verb to whole arrays; the exit code of the first failure."""
    views, code = list["JobView"](), errors.OK
    for array in found:
        try:
            views.append(act(array.id))
        except HodeiError as error:
            code = code or errors.exit_code_of(error)
            if code == errors.UNREACHABLE:
                raise
            errors.report(error)
    if output in ("table", "wide"):
        for view in views:
            click.echo(f"array {view.id}[]{_named(view)} {done}: {arrays.counts(view.array) if view.array else ''}")
    elif views:
        emit_list(views, output, (), name=arrays.id_text)
    return code


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
            click.echo(f"job {view.id}{_named(view)} {word}")
    else:
        emit_list(views, output, (), name=arrays.reference_text)
    return code


def _named(view: JobView) -> str:
    return f" ({clean(arrays.name_text(view))})" if view.name else ""


def _confirm(question: str, *, hint: str) -> None:
    if not sys.stdin.isatty():
        raise UsageProblem(f"{question} There is no terminal to ask at, so nothing was done", hint=hint)
    if not click.confirm(question, default=False, err=True):
        raise click.Abort


# -------------------------------------------------------------------------------- suspend, checkpoint, migrate

# Of an array these verbs mean the elements that they can be done to.
RUNNING = ("scheduled", "running")


@click.command()
@jobs_argument
@output_option
@click.pass_context
def suspend(ctx: click.Context, jobs: tuple[str, ...], output: str) -> None:
    """Suspend jobs: they take a checkpoint if they can, stop, and wait until they are resumed."""
    with client() as server:
        ctx.exit(each(resolve(server, jobs, ACTIVE), server.suspend, output, "suspend requested", "suspended"))


@click.command()
@jobs_argument
@output_option
@click.pass_context
def resume(ctx: click.Context, jobs: tuple[str, ...], output: str) -> None:
    """Resume suspended jobs; the same as `release`."""
    with client() as server:
        ctx.exit(each(resolve(server, jobs, ACTIVE), server.resume, output, "resumed", "resumed"))


@click.command()
@jobs_argument
@output_option
@click.pass_context
def checkpoint(ctx: click.Context, jobs: tuple[str, ...], output: str) -> None:
    """Make running jobs take a checkpoint now and continue.

    `hodei job show` shows the last one. The job file defines how it is taken (`checkpoint`).
    """
    with client() as server:
        ctx.exit(each(resolve(server, jobs, RUNNING), server.checkpoint, output, "told to save its work", "told"))


@click.command()
@jobs_argument
@click.option("--to", default="", metavar="NODE", shell_complete=complete_nodes, help="Only to this node.")
@click.option("--force", is_flag=True, help="Even if no other node can take the job now: it waits then.")
@output_option
@click.pass_context
def migrate(ctx: click.Context, jobs: tuple[str, ...], to: str, force: bool, output: str) -> None:
    """Move running jobs to other nodes: they take a checkpoint if they can, stop, and start elsewhere.

    Refused if no other node can take them now. To empty a whole node: `hodei node drain`.
    """
    with client() as server:
        ctx.exit(
            each(
                resolve(server, jobs, RUNNING),
                lambda id: server.migrate(id, to, force),
                output,
                "is leaving",
                "is leaving",
            )
        )
