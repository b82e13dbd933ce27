"""Verbs for one or more jobs: wait, cancel, hold, release, requeue, suspend, resume, checkpoint, migrate. A failure for one
job does not stop the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import click

from hodei.cli import errors, logs
from hodei.cli.errors import UsageProblem
from hodei.cli.jobs import COLUMNS
from hodei.cli.options import client, complete_nodes, headers_option, jobs_argument, output_option
from hodei.cli.output import clean, counted, emit_list, is_for_people, note
from hodei.cli.refs import (
    ACTIVE,
    Targets,
    is_array_row,
    name_in_brackets,
    reference_text,
    resolve_ids,
    resolve_targets,
    state_counts,
)
from hodei.cli.times import parse_timeout_ms
from hodei.model.errors import Conflict, HodeiError

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client

Action = Callable[[int], "JobView"]
# For an array, `checkpoint` and `migrate` apply to the elements in these states.
RUNNING = ("scheduled", "running")
_CANCEL = "cancel requested"
_NOT_OWNER = "NOT_OWNER"


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
    timeout_s = None if timeout is None else parse_timeout_ms(timeout) / 1000
    with client() as server:
        targets = resolve_targets(server, jobs)
        ctx.exit(wait_for(server, targets, timeout_s, progress=progress, output=output, headers=not no_headers))


def wait_for(
    server: Client,
    targets: Targets,
    timeout_s: float | None = None,
    *,
    progress: bool = False,
    output: str = "",
    headers: bool = True,
) -> int:
    """Wait for all, print them in the format `output`, and return the exit code. Without `output`, jobs that did not
    succeed are reported on stderr with their last lines."""
    from hodei.client import ArrayId

    wanted = [*(ArrayId(array.id) for array in targets.arrays), *targets.jobs]
    ended = 0

    def count(view: JobView) -> None:
        nonlocal ended
        ended += 1
        line = f"{ended}/{len(wanted)} ended"
        click.echo(f"\r{line}" if sys.stderr.isatty() else line, nl=not sys.stderr.isatty(), err=True)

    try:
        views = server.wait(wanted, timeout_s, on_end=count if progress else None)
    finally:
        if progress and sys.stderr.isatty():
            click.echo("", err=True)
    if output:
        emit_list(views, output, COLUMNS, name=reference_text, headers=headers, empty="no active jobs")
    else:
        for view in views:
            if is_array_row(view) and view.array is not None:
                note(f"array {view.id}[] ({view.name}): {state_counts(view.array)}")
    failed = [view for view in views if view.state != "succeeded"]
    if failed and not output:
        logs.report_failures(server, failed)
    return errors.JOB_FAILED if failed else errors.OK


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
        targets = resolve_targets(server, jobs)
        if "all" in jobs and targets.jobs and not yes:
            _confirm(f"cancel {counted(len(targets.jobs), 'active job')}?", hint="add --yes")
        code = _apply(
            targets, lambda id: server.cancel(id, reason), output, _CANCEL, "cancelled",
            array_done=_CANCEL, permitted="all" in jobs,
        )  # fmt: skip
    ctx.exit(code)


@click.command()
@jobs_argument
@click.option("--failed", is_flag=True, help="Only failed jobs, and jobs that failed because they depended on them.")
@click.option(
    "-y", "--yes", is_flag=True,
    help="Do not ask: before elements that have succeeded run again, or for `--failed all`.",
)  # fmt: skip
@output_option
@click.pass_context
def requeue(ctx: click.Context, jobs: tuple[str, ...], failed: bool, yes: bool, output: str) -> None:
    """Start jobs again from the beginning; running ones are stopped first.

    \b
      hodei requeue --failed sweep     only the elements of an array that have failed
      hodei requeue 'sweep[3]'         one element
      hodei requeue --failed all       every failed job that you may requeue
    """
    with client() as server:
        if failed:
            targets = resolve_targets(server, (job for job in jobs if job != "all"))
            if "all" in jobs:
                targets = Targets(targets.arrays, [*targets.jobs, *_all_failed(server, targets, yes=yes)])
            _requeue_failed(server, targets, output, permitted="all" in jobs)
            return
        targets = resolve_targets(server, jobs)
        if not yes:
            for array in targets.arrays:
                _confirm_succeeded(array)
        permitted, done = "all" in jobs, "requeued"
        ctx.exit(
            _apply(targets, lambda id: _requeue(server, id), output, "requeue requested", done, permitted=permitted)
        )


def _all_failed(server: Client, targets: Targets, *, yes: bool) -> list[int]:
    """With `--failed`, `all` means every failed job, not every active one."""
    failed = sorted({view.id for view in server.jobs(state=("failed",))} - set(targets.jobs))
    if failed and not yes:
        _confirm(f"requeue {counted(len(failed), 'failed job')}?", hint="add --yes")
    return failed


def _requeue(server: Client, id: int) -> JobView:
    from hodei.client import ArrayId

    if not isinstance(id, ArrayId):
        return server.requeue(id)
    if not server.requeue_all(arrays=[id]).requeued:
        raise Conflict(f"no element of array {id}[] has started yet")
    return server.array(id)


def _confirm_succeeded(array: JobView) -> None:
    """Ask before elements that have succeeded run again."""
    assert array.array is not None
    done = array.array.states.get("succeeded", 0)
    if not done:
        return
    what = f"array {array.id}[] ({clean(array.name)}): {done} of its {array.array.count} elements have succeeded"
    which = clean(array.name) or f"{array.id}[]"
    hint = f"only failed ones: hodei requeue --failed {which}; all of them: add --yes"
    _confirm(f"{what}; run them again too?", hint=hint)


def _requeue_failed(server: Client, targets: Targets, output: str, *, permitted: bool) -> None:
    arrays = [array.id for array in targets.arrays]
    done = server.requeue_all(targets.jobs, arrays, failed=True, permitted=permitted)
    if not is_for_people(output):
        views = [server.job(id).job for id in (*done.requeued, *done.revived)]
        emit_list(views, output, (), name=reference_text)
    else:
        single_jobs = set(done.requeued)
        for array in targets.arrays:
            assert array.array is not None
            own = [id for id in done.requeued if array.array.first <= id < array.array.first + array.array.count]
            single_jobs -= set(own)
            if own:
                click.echo(f"array {array.id}[] ({clean(array.name)}): {len(own)} requeued")
        for id in sorted(single_jobs):
            click.echo(f"job {id}{name_in_brackets(server.job(id).job)} requeued")
        for id in done.revived:
            click.echo(f"job {id}{name_in_brackets(server.job(id).job)} is pending again: its dependency had failed")
    _note_skipped([(job.code, job.reason) for job in done.refused])
    if not done.requeued and not done.refused:
        note("nothing to do: none of them has failed")


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
        targets, done = Targets([], resolve_ids(server, jobs, RUNNING)), "migration requested"
        permitted = "all" in jobs
        ctx.exit(_apply(targets, lambda id: server.migrate(id, to, force), output, done, done, permitted=permitted))


def _verb(
    name: str,
    act: Callable[[Client], Action],
    help: str,
    *,
    requested: str,
    done: str,
    states: tuple[str, ...] = (),
) -> click.Command:
    """`hodei VERB JOB...`. `states`: the verb has no form for arrays, so it applies to the elements in these states."""

    @click.command(name, help=help)
    @jobs_argument
    @output_option
    @click.pass_context
    def command(ctx: click.Context, jobs: tuple[str, ...], output: str) -> None:
        with client() as server:
            whole = not states
            targets = resolve_targets(server, jobs) if whole else Targets([], resolve_ids(server, jobs, states))
            ctx.exit(_apply(targets, act(server), output, requested, done, permitted="all" in jobs))

    return command


hold = _verb(
    "hold", lambda server: server.hold, "Keep jobs from starting until they are released.",
    requested="hold requested", done="held",
)  # fmt: skip
release = _verb("release", lambda server: server.release, "Release held jobs.", requested="released", done="released")
suspend = _verb(
    "suspend", lambda server: server.suspend,
    "Suspend jobs: they take a checkpoint if they can, stop, and wait until they are resumed.",
    requested="suspend requested", done="suspended", states=ACTIVE,
)  # fmt: skip
resume = _verb(
    "resume", lambda server: server.resume, "Resume suspended jobs; the same as `release`.",
    requested="resumed", done="resumed", states=ACTIVE,
)  # fmt: skip
checkpoint = _verb(
    "checkpoint", lambda server: server.checkpoint,
    """Make running jobs take a checkpoint now and continue.

    `hodei job show` shows the last one. The job file defines how it is taken (`checkpoint`).""",
    requested="checkpoint requested", done="checkpoint requested", states=RUNNING,
)  # fmt: skip


def _apply(
    targets: Targets,
    act: Action,
    output: str,
    requested: str,
    done: str,
    *,
    array_done: str = "",
    permitted: bool = False,
) -> int:
    """Apply a verb to arrays and jobs; returns the exit code of the first failure. `requested` is printed for a running
    job, which has not followed yet, `done` for the others. `permitted`: jobs of other users are skipped."""
    from hodei.client import ArrayId

    arrays, array_code = _call_each([ArrayId(array.id) for array in targets.arrays], act, permitted=permitted)
    jobs, code = _call_each(targets.jobs, act, permitted=permitted)
    if not is_for_people(output):
        emit_list([*arrays, *jobs], output, (), name=reference_text)
        return array_code or code
    for view in arrays:
        counts = state_counts(view.array) if view.array else ""
        click.echo(f"array {view.id}[]{name_in_brackets(view)} {array_done or done}: {counts}")
    for view in jobs:
        click.echo(f"job {view.id}{name_in_brackets(view)} {requested if view.state in RUNNING else done}")
    if not targets.arrays and not targets.jobs:
        note("no active jobs")
    return array_code or code


def _call_each(ids: Sequence[int], act: Action, *, permitted: bool) -> tuple[list[JobView], int]:
    """The results, and the exit code of the first failure. Failures are reported as they happen."""
    views, code, skipped = list["JobView"](), errors.OK, list[tuple[str, str]]()
    for id in ids:
        try:
            views.append(act(id))
        except HodeiError as error:
            if permitted and error.code == _NOT_OWNER:
                skipped.append((error.code, error.message))
                continue
            code = code or errors.exit_code_of(error)
            if code == errors.UNREACHABLE:
                raise
            errors.report(error)
    _note_skipped(skipped)
    return views, code


def _note_skipped(skipped: Sequence[tuple[str, str]]) -> None:
    """One line for each code, with the first of its messages."""
    for code, of_code in groupby(sorted(skipped, key=itemgetter(0)), key=itemgetter(0)):
        (_, first), *others = of_code
        more = f" (and {len(others)} more)" if others else ""
        note(f"skipped {counted(1 + len(others), 'job')}: {clean(first)}{more} [{code}]")


def _confirm(question: str, *, hint: str) -> None:
    if not sys.stdin.isatty():
        raise UsageProblem(f"{question} There is no terminal to ask on, so nothing was done", hint=hint)
    if not click.confirm(question, default=False, err=True):
        raise click.Abort
