"""`hodei logs`: what a job writes. Of one run byte for byte; of many line by line, with who wrote it and when."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from hodei.cli import arrays
from hodei.cli.failure_tail import last_lines
from hodei.cli.options import client, job_argument
from hodei.cli.output import note
from hodei.cli.refs import look_up, only
from hodei.cli.times import since_ms, stamp
from hodei.model.errors import NotFound

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client
    from hodei.client.logs import LogReader
    from hodei.client.many_logs import Wish

BOTH = ("stdout", "stderr")


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("--stdout", "stream", flag_value="stdout", help="Only what it writes to stdout.")
@click.option("--stderr", "stream", flag_value="stderr", help="Only what it writes to stderr; printed to stdout.")
@click.option("--member", type=click.IntRange(0), help="Only this member of a gang [default: all].")
@click.option("--attempt", type=click.IntRange(1), help="Which attempt [default: the newest].")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Begin with the last N lines of each stream.")
@click.option("--since", default="", metavar="TIME", help="Only what was written since: 10m, 2h or 2026-01-31T08:00Z.")
def logs(
    job: str, follow: bool, stream: str | None, member: int | None, attempt: int | None, tail: int | None, since: str
) -> None:
    """Print what a job has written, or follow what it writes.

    Both streams are shown: its stdout on stdout, its stderr on stderr, nothing added or changed. Of an array and of a gang
    every line is shown with who wrote it and when.
    """
    from hodei.client.many_logs import Wish

    wish = Wish(
        streams=(stream,) if stream else BOTH, members=None if member is None else (member,), attempt=attempt or 0,
        tail=tail, since_ms=since_ms(since), follow=follow,
    )  # fmt: skip
    with client() as server:
        meant = look_up(server, [job])
        detail = None if meant.arrays else server.job(only(meant, job))
        view = meant.arrays[0] if detail is None else detail.job
        # A job for every node has as many members as have run.
        has_many = detail is not None and (view.members > 1 or len({run.member for run in detail.runs}) > 1)
        many = bool(meant.arrays) or (has_many and member is None)
        wrote = copy_lines(server, view, wish, prefix=many) if many or since else _copy_bytes(server, view.id, wish)
        if many and attempt and not wrote:
            _check_attempt(server, view, attempt)
    if not wrote and tail != 0:
        what = f"array {view.id}[]" if meant.arrays else f"job {view.id}"
        note(
            f"{what} ({view.state}) has written nothing{f' to {stream}' if stream else ''}{' since then' if since else ''}"
        )


def _check_attempt(server: Client, view: JobView, attempt: int) -> None:
    """NotFound as for a single job, if none of many has had so many attempts."""
    whole = arrays.folded(view)
    newest = max((one.attempt for one in server.elements(view)), default=0) if whole else view.attempt
    if newest < attempt:
        who = f"no element of array {view.id}[] has" if whole else f"job {view.id} has no"
        what = f"{who} {'an ' if whole else ''}attempt {attempt}"
        raise NotFound(what, hint=f"the newest: {newest or 'none'}", code="NO_SUCH_ATTEMPT")


def copy_lines(server: Client, view: JobView, wish: Wish, *, prefix: bool = True) -> bool:
    """`sweep[3] 14:05:01 | text`. True if anything was written."""
    from hodei.client.many_logs import lines_of

    sinks = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    wrote = False
    for line in lines_of(server, view, wish):
        sink = sinks[line.stream] if len(wish.streams) > 1 else sys.stdout.buffer
        text = line.text
        if prefix:
            end = b"" if text.endswith(b"\n") else b"\n"
            text = f"{line.who} {stamp(line.at_ms)} | ".encode() + text + end
        sink.write(text)
        sink.flush()
        wrote = True
    return wrote


def _copy_bytes(server: Client, id: int, wish: Wish) -> bool:
    member = wish.members[0] if wish.members else 0
    readers = [
        server.log_reader(id, stream=stream, member=member, attempt=wish.attempt, follow=wish.follow)
        for stream in wish.streams
    ]
    wrote = False
    if wish.tail is not None:
        for number, reader in enumerate(readers):
            sink = sys.stderr.buffer if number else sys.stdout.buffer
            lines = last_lines(iter(reader.read, b""), wish.tail)
            sink.writelines(lines)
            sink.flush()
            wrote = wrote or bool(lines)
    copied, _ = copy_streams(readers)
    return wrote or bool(copied)


def copy_streams(readers: list[LogReader], each_round: Callable[[], object] = lambda: None) -> tuple[int, int]:
    """Copy them side by side until all are at their end, the first to stdout and the second to stderr. How many bytes that
    was, and which of them was written last."""
    from hodei.client.logs import Pause

    sinks, pause, copied, last = (sys.stdout.buffer, sys.stderr.buffer), Pause(), 0, 0
    while not all(reader.at_end for reader in readers):
        found = False
        for number, (reader, sink) in enumerate(zip(readers, sinks, strict=False)):
            if data := reader.read():
                sink.write(data)
                sink.flush()
                found, copied, last = True, copied + len(data), number
        each_round()
        if not all(reader.at_end for reader in readers):
            time.sleep(pause.after(found))
    return copied, last
