"""`hodei run`: one command as a job, as if it ran right here."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from hodei.cli import errors, logs
from hodei.cli.documents import checked, document_of, job_options
from hodei.cli.logs import BOTH, copy_lines, copy_streams
from hodei.cli.options import client
from hodei.cli.output import note
from hodei.model.errors import HodeiError

if TYPE_CHECKING:
    from hodei.client import Client


# ------------------------------------------------------------------------------------------- interrupt
# Ctrl-C while `hodei run` follows a job: the job is cancelled, and what it still says is shown until it has ended.


# How long the end of a cancelled job is waited for, beyond its own grace period.
AFTER_GRACE_S = 10.0
_USUAL_GRACE = "10s"


class CancelOnInterrupt:
    """`with CancelOnInterrupt(server, id):` around the reading. `asked`: whether Ctrl-C has come. `failed`: why the cancel
    could not be sent; `too_long`: the job had not ended in time. Both leave by KeyboardInterrupt, as a second Ctrl-C does.
    `server`: a client that nothing else uses, because the handler runs in the middle of other requests."""

    def __init__(self, server: Client, id: int) -> None:
        self._server, self._id = server, id
        self.asked = self.too_long = False
        self.failed: HodeiError | None = None
        self._installed = False

    def __enter__(self) -> CancelOnInterrupt:
        # Where SIGINT is ignored (nohup, a script's background job) it stays so.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.asked:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _interrupted(self, _: int, frame: FrameType | None) -> None:
        from hodei.client import ArrayId

        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.asked = True
        what = "array" if isinstance(self._id, ArrayId) else "job"
        # Past Python's buffers: they may be in use by what was interrupted.
        os.write(2, f"cancelling {what} {self._id} (Ctrl-C again leaves it to its fate)\n".encode())
        try:
            self._server.cancel(self._id, "interrupted at the terminal")
            grace_s = self._grace_s()
        except HodeiError as error:
            # Raised as it is, the code that was interrupted would take it for an error of its own request.
            self.failed = error
            raise KeyboardInterrupt from None
        signal.signal(signal.SIGALRM, self._is_too_long)
        signal.setitimer(signal.ITIMER_REAL, grace_s + AFTER_GRACE_S)

    def _is_too_long(self, _: int, frame: FrameType | None) -> None:
        self.too_long = True
        raise KeyboardInterrupt

    def _grace_s(self) -> float:
        """Of an array every element has the same."""
        from hodei.model.resources import parse_duration_ms

        spec = self._server.job(int(self._id)).spec
        inner = spec.get("spec")
        return parse_duration_ms((inner if isinstance(inner, dict) else spec).get("grace", _USUAL_GRACE)) / 1000


# ----------------------------------------------------------------------------------------------------

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
    """Run a command as a job, print its stdout and stderr, and exit with its exit code.

    Ctrl-C cancels the job; its output is shown until it has ended. With --array every line names its
    element; exit code 10 if one did not succeed.

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
    from hodei.cli.job_actions import wait_for
    from hodei.cli.refs import Meant
    from hodei.client.logs import LogOptions

    array = server.array(id)
    copy_lines(server, array, LogOptions(follow=True))
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
    if last == BOTH.index("stdout") and logs.tail(server, view, "stderr"):
        logs.say(server, view)
    else:
        note(logs.ended(view))
    return view.exit_code or errors.JOB_FAILED


def _say_why(server: Client, id: int) -> None:
    answer = server.why(id)
    if answer.status in ("waiting", "unsatisfiable", "held"):
        note(f"job {id} is waiting: {answer.summary} [{answer.code}]")
        if answer.hint:
            note(f"  next: {answer.hint}")
