"""`hodei run`: one command as a job, as if it ran right here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from hodei.cli import errors, failure_tail
from hodei.cli.documents import checked, document_of, job_options
from hodei.cli.interrupt import CancelOnInterrupt
from hodei.cli.logs import BOTH, copy_lines, copy_streams
from hodei.cli.options import client
from hodei.cli.output import note

if TYPE_CHECKING:
    from hodei.client import Client

# Most jobs start within this time; only then is it worth saying why one does not.
PATIENCE_S = 1.0


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", metavar="[--] COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@job_options
@click.option("-d", "--detach", is_flag=True, help="Print the id and do not wait.")
@click.pass_context
def run(ctx: click.Context, /, command: tuple[str, ...], detach: bool, **given: Any) -> None:
    """Run a command as a job: its stdout and stderr come out here, and its exit code is the exit code.

    Ctrl-C cancels the job; what it still writes is shown until it has ended. With --array every line says which element wrote it; exit code 10 if one did not succeed.

    \b
      hodei run -- python -c 'print(6*7)'
      hodei run --cpu 2 --memory 4Gi --timeout 1h -- make all
    """
    from hodei.client import ArrayId

    with client() as server, client() as canceller:
        document = checked(document_of(command, given, local=server.loopback))
        handle = server.submit(document)
        if detach:
            click.echo(f"{handle.id}[]" if isinstance(handle.id, ArrayId) else handle.id)
            return
        interrupt = CancelOnInterrupt(canceller, handle.id)
        follow = _follow_array if isinstance(handle.id, ArrayId) else _follow_job
        try:
            with interrupt:
                code = follow(server, handle.id, interrupt)
        except KeyboardInterrupt:
            if interrupt.failed is not None:
                raise interrupt.failed from None
            if interrupt.too_long:
                note(f"{handle.id} has not ended yet: hodei job show {handle.id}")
            code = 130
        ctx.exit(130 if interrupt.asked else code)


def _follow_array(server: Client, id: int, interrupt: CancelOnInterrupt) -> int:
    """Every element's lines, with its name; 10 if one of them did not succeed."""
    from hodei.cli.act import wait_for
    from hodei.cli.refs import Meant
    from hodei.client.many_logs import Wish

    array = server.array(id)
    copy_lines(server, array, Wish(follow=True))
    if interrupt.asked:
        return errors.OK
    return wait_for(server, Meant([array], []))


def _follow_job(server: Client, id: int, interrupt: CancelOnInterrupt) -> int:
    """Copy both streams until the job has ended; say once on stderr why it does not start, if it does not."""
    readers = [server.log_reader(id, stream=stream) for stream in BOTH]
    asked_after, started = time.monotonic() + PATIENCE_S, False

    def look() -> None:
        nonlocal started
        started = started or any(reader.run_state for reader in readers)
        if not started and not interrupt.asked and time.monotonic() >= asked_after:
            started = True
            _say_why(server, id)

    _, last = copy_streams(readers, look)
    view = server.wait(id)[0]
    if interrupt.asked or view.state == "succeeded":
        return errors.OK
    # What it said on stderr is what people look for; it is said again only if other output came after it.
    if last == BOTH.index("stdout") and failure_tail.tail(server, view, "stderr"):
        failure_tail.say(server, view)
    else:
        note(failure_tail.ended(view))
    return view.exit_code or errors.JOB_FAILED


def _say_why(server: Client, id: int) -> None:
    answer = server.why(id)
    if answer.status in ("waiting", "unsatisfiable", "held"):
        note(f"job {id} is waiting: {answer.summary} [{answer.code}]")
        if answer.hint:
            note(f"  next: {answer.hint}")
