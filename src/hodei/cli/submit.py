"""`hodei submit`, `plan` and `run`: from files or a command to jobs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from hodei.cli import errors, logs
from hodei.cli.documents import checked, document_of, job_options, read_documents
from hodei.cli.errors import UsageProblem
from hodei.cli.logs import STREAMS, copy_lines, copy_streams
from hodei.cli.options import client, headers_option, output_option
from hodei.cli.output import Column, clean, counted, emit_list, emit_one, is_for_people, note
from hodei.model.errors import HodeiError, InvalidInput

if TYPE_CHECKING:
    from hodei.client import Client

COMMAND = "hodei.command"
# Most jobs start within this time; `run` explains why a job has not started only after it.
EXPLAIN_AFTER_S = 1.0
# How long `run` waits for the end of a cancelled job, in addition to its grace period.
AFTER_GRACE_S = 10.0
_DEFAULT_GRACE = "10s"
_INTERRUPTED = 130


class FilesOrCommand(click.Command):
    """Takes files; everything after `--` is one command, kept as `ctx.meta[COMMAND]`."""

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
    from hodei.client.api import document_name

    with client() as server:
        documents = documents_from(ctx, files, given, local=lambda: server.loopback)
        ids = server.submit_all(documents, key=key)
        submitted: list[dict[str, Any]] = [
            {"id": int(id), "name": document_name(document)} | _element_count(document)
            for id, document in zip(ids, documents, strict=False)
        ]
        if is_for_people(output) and not quiet:
            for job in submitted:
                count = job.get("elements")
                what = f"array {job['id']}[]" if count else f"job {job['id']}"
                name = f" ({clean(job['name'])})" if job["name"] else ""
                elements = f": {counted(count, 'element')}" if count else ""
                click.echo(f"{what}{name} submitted{elements}")
        else:
            emit_list(submitted, "name" if quiet else output, (), name=_id_of)
        if wait:
            from hodei.cli.job_actions import wait_for
            from hodei.cli.refs import Targets

            arrays = [server.array(id) for id in ids if isinstance(id, ArrayId)]
            ctx.exit(wait_for(server, Targets(arrays, [id for id in ids if not isinstance(id, ArrayId)])))


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
        documents = documents_from(ctx, files, given, local=lambda: server.loopback)
        plans = unless_too_large(ctx, lambda: server.plan(documents))
    if is_for_people(output) and len(plans) == 1:
        click.echo(render(plans[0], wide=output == "wide", planned=True))
    else:
        columns = [
            Column("JOB", lambda p: p.name),
            Column("STATUS", lambda p: p.status),
            Column("NODES", lambda p: ",".join(dict.fromkeys(where.node for where in p.placements)) or "-"),
            Column("WHY", lambda p: p.summary),
        ]
        emit_list(plans, output, columns, headers=not no_headers)
    statuses = {found.status for found in plans}
    if "unsatisfiable" in statuses:
        ctx.exit(errors.UNSCHEDULABLE)
    if detailed_exitcode and statuses - {"placed"}:
        ctx.exit(2)


def unless_too_large(ctx: click.Context, call: Callable[[], Any]) -> Any:
    """The result of `call`. A job that no node could ever take is reported with the exit code for that."""
    try:
        return call()
    except InvalidInput as error:
        if error.code != "LARGER_THAN_CLUSTER":
            raise
        errors.report(error)
        ctx.exit(errors.UNSCHEDULABLE)


def documents_from(
    ctx: click.Context, files: tuple[str, ...], given: dict[str, Any], *, local: Callable[[], bool]
) -> list[dict[str, Any]]:
    """The documents of the files, or the one from the options and the command after `--`."""
    command = ctx.meta.get(COMMAND, ())
    options = [key.replace("_", "-") for key, value in given.items() if value not in (None, ())]
    if command and files:
        raise UsageProblem(f"both a file ({files[0]}) and a command ({command[0]})", hint="give one or the other")
    if command:
        return [checked(document_of(command, given, local=local()))]
    if not files:
        raise UsageProblem("there is nothing to submit", hint="name a file, - for stdin, or a command after --")
    if options:
        raise UsageProblem(f"--{options[0]} is for a command, not for a file", hint="put the command after --")
    return read_documents(files)


def _element_count(document: dict[str, Any]) -> dict[str, int]:
    spec = document.get("spec")
    if "array" not in (spec if isinstance(spec, dict) else document):
        return {}
    from hodei.jobfile.parse import parse_job
    from hodei.model.array import element_count

    return {"elements": element_count(parse_job(document))}


def _id_of(job: dict[str, Any]) -> str:
    return f"{job['id']}{'[]' if 'elements' in job else ''}"


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", metavar="[--] COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@job_options
@click.option("-d", "--detach", is_flag=True, help="Print the id and do not wait.")
@output_option
@click.pass_context
def run(ctx: click.Context, /, command: tuple[str, ...], detach: bool, output: str, **given: Any) -> None:
    """Run a command as a job, print its stdout and stderr, and exit with its exit code.

    Ctrl-C cancels the job; its output is shown until it has ended. With --array every line names its
    element; exit code 10 if one did not succeed. -o is the format of the id with -d.

    \b
      hodei run -- python -c 'print(6*7)'
      hodei run --cpu 2 --memory 4Gi --timeout 1h -- make all
    """
    from hodei.client import ArrayId

    with client() as server, client() as cancel_client:
        document = checked(document_of(command, given, local=server.loopback))
        handle = server.submit(document)
        is_array = isinstance(handle.id, ArrayId)
        if detach:
            submitted = {"id": int(handle.id), "name": handle.name} | _element_count(document)
            emit_one(submitted, output, name=_id_of, text=_id_of)
            return
        interrupt = CancelOnInterrupt(cancel_client, handle.id)
        try:
            with interrupt:
                code = (_follow_array if is_array else _follow_job)(server, handle.id, interrupt)
        except KeyboardInterrupt:
            if interrupt.error is not None:
                raise interrupt.error from None
            if interrupt.timed_out:
                note(f"{handle.id} has not ended yet: hodei job show {handle.id}")
            code = _INTERRUPTED
        ctx.exit(_INTERRUPTED if interrupt.requested else code)


class CancelOnInterrupt:
    """Cancels the job on Ctrl-C, so that its output can be followed until it ends. `requested`: Ctrl-C was pressed.
    `error`: the cancel could not be sent. `timed_out`: the job did not end in time. The last two, and a second Ctrl-C, raise
    KeyboardInterrupt. `server` must be used by nothing else, because the handler runs in the middle of other requests."""

    def __init__(self, server: Client, id: int) -> None:
        self._server, self._id = server, id
        self.requested = self.timed_out = False
        self.error: HodeiError | None = None
        self._installed = False

    def __enter__(self) -> CancelOnInterrupt:
        # If SIGINT is ignored (nohup, a background job of a script), it stays ignored.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_interrupt)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.requested:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_interrupt(self, _: int, frame: FrameType | None) -> None:
        from hodei.client import ArrayId

        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.requested = True
        what = "array" if isinstance(self._id, ArrayId) else "job"
        # Not through Python's buffers: the interrupted code may be using them.
        os.write(2, f"cancelling {what} {self._id} (press Ctrl-C again to stop waiting)\n".encode())
        try:
            self._server.cancel(self._id, "interrupted at the terminal")
            grace_s = self._grace_s()
        except HodeiError as error:
            # Raised here, the interrupted code would take it for an error of its own request.
            self.error = error
            raise KeyboardInterrupt from None
        signal.signal(signal.SIGALRM, self._on_timeout)
        signal.setitimer(signal.ITIMER_REAL, grace_s + AFTER_GRACE_S)

    def _on_timeout(self, _: int, frame: FrameType | None) -> None:
        self.timed_out = True
        raise KeyboardInterrupt

    def _grace_s(self) -> float:
        """The grace period of the job; all elements of an array have the same."""
        from hodei.model.resources import parse_duration_ms

        spec = self._server.job(int(self._id)).spec
        inner = spec.get("spec")
        return parse_duration_ms((inner if isinstance(inner, dict) else spec).get("grace", _DEFAULT_GRACE)) / 1000


def _follow_array(server: Client, id: int, interrupt: CancelOnInterrupt) -> int:
    from hodei.cli.job_actions import wait_for
    from hodei.cli.refs import Targets
    from hodei.client.logs import LogOptions

    array = server.array(id)
    copy_lines(server, array, LogOptions(follow=True))
    return errors.OK if interrupt.requested else wait_for(server, Targets([array], []))


def _follow_job(server: Client, id: int, interrupt: CancelOnInterrupt) -> int:
    """Copy both streams until the job has ended. If it does not start, explain once on stderr why."""
    readers = [server.log_reader(id, stream=stream) for stream in STREAMS]
    explain_at, settled = time.monotonic() + EXPLAIN_AFTER_S, False

    def explain_if_pending() -> None:
        nonlocal settled
        settled = settled or any(reader.run_state for reader in readers)
        if not settled and not interrupt.requested and time.monotonic() >= explain_at:
            settled = True
            _explain_pending(server, id)

    _, last = copy_streams(readers, explain_if_pending)
    view = server.wait(id)[0]
    if interrupt.requested or view.state == "succeeded":
        return errors.OK
    # Repeat the last lines of stderr only if stdout was written after them.
    if last == STREAMS.index("stdout") and logs.tail(server, view, "stderr"):
        logs.report_failure(server, view)
    else:
        note(logs.outcome(view))
    return view.exit_code or errors.JOB_FAILED


def _explain_pending(server: Client, id: int) -> None:
    answer = server.why(id)
    if answer.status in ("waiting", "unsatisfiable", "held"):
        note(f"job {id} is waiting: {answer.summary} [{answer.code}]")
        if answer.hint:
            note(f"  next: {answer.hint}")
