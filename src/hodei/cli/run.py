"""`hodei run`: one command as a job, as if it ran right here."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from hodei.cli import errors
from hodei.cli.documents import checked, document_of, job_options
from hodei.cli.options import client
from hodei.cli.output import note

if TYPE_CHECKING:
    from hodei.client import Client
    from hodei.wire.views import JobView

# Most jobs start within this time; only then is it worth saying why one does not.
PATIENCE_S = 1.0
# How long a cancelled job's end is waited for, beyond its own grace period.
_AFTER_CANCEL_S = 20.0


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", metavar="[--] COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@job_options
@click.option("-d", "--detach", is_flag=True, help="Print the id and do not wait.")
@click.pass_context
def run(ctx: click.Context, /, command: tuple[str, ...], detach: bool, **given: Any) -> None:
    """Run a command as a job: its stdout and stderr come out here, and its exit code is the exit code.

    Ctrl-C cancels the job.

    \b
      hodei run -- python -c 'print(6*7)'
      hodei run --cpu 2 --memory 4Gi --timeout 1h -- make all
    """
    with client() as server:
        document = checked(document_of(command, given, local=server.loopback))
        handle = server.submit(document)
        if detach:
            click.echo(handle.id)
            return
        try:
            view = follow(server, handle.id)
        except KeyboardInterrupt:
            note(f"cancelling job {handle.id} (Ctrl-C again leaves it to its fate)")
            server.cancel(handle.id, reason="interrupted at the terminal")
            server.wait(handle.id, _AFTER_CANCEL_S)
            ctx.exit(130)
        ctx.exit(exit_code(view))


def follow(server: Client, id: int) -> JobView:
    """Copy both streams until the job has ended; say once on stderr why it does not start, if it does not."""
    from hodei.client.logs import Pause

    readers = (
        (server.log_reader(id, stream="stdout"), sys.stdout.buffer),
        (server.log_reader(id, stream="stderr"), sys.stderr.buffer),
    )
    pause, asked_after, started = Pause(), time.monotonic() + PATIENCE_S, False
    while not all(reader.at_end for reader, _ in readers):
        found = False
        for reader, sink in readers:
            if data := reader.read():
                sink.write(data)
                sink.flush()
                found = True
            started = started or bool(reader.run_state)
        if not started and time.monotonic() >= asked_after:
            started = True
            _say_why(server, id)
        time.sleep(pause.after(found))
    return server.wait(id)[0]


def exit_code(view: JobView) -> int:
    """The job's own code; when it has none (never started, lost, cancelled), a word on stderr and 10."""
    if view.state == "succeeded":
        return errors.OK
    if view.exit_code:
        if view.reason_code not in ("", "EXIT_CODE"):  # a command that simply failed has said so itself
            note(f"job {view.id} {view.state}: {view.reason}")
        return view.exit_code
    note(f"job {view.id} {view.state}: {view.reason or view.reason_code or 'no reason was given'}")
    return errors.JOB_FAILED


def _say_why(server: Client, id: int) -> None:
    answer = server.why(id)
    if answer.status in ("waiting", "unsatisfiable", "held"):
        note(f"job {id} is waiting: {answer.summary} [{answer.code}]")
        if answer.hint:
            note(f"  next: {answer.hint}")
