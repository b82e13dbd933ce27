"""`hodei logs`: what a job writes. Of one run byte for byte; of many line by line, with who wrote it and when."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

import click

from hodei.cli import arrays
from hodei.cli.options import client, job_argument
from hodei.cli.output import note
from hodei.cli.refs import look_up, only
from hodei.cli.times import since_ms, stamp
from hodei.model.errors import HodeiError, NotFound

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client


# ---------------------------------------------------------------------------------------- failure tail
# What a job said before it failed: its last lines, for people who would ask for them next.


LINES = 10
# So many jobs are quoted; the others are counted.
_JOBS = 3


def of_all(server: Client, failed: Iterable[JobView]) -> None:
    """On stderr: how each of them ended, and the last lines of the first few. Of an array its elements are meant."""
    quoted, more = 0, 0
    for view in failed:
        for one in _failed_elements(server, view) if arrays.folded(view) else [view]:
            if quoted < _JOBS:
                say(server, one)
            elif arrays.folded(view):
                more += 1
            else:
                note(ended(one))
            quoted += 1
    if more:
        note(f"and {more} more: hodei jobs --elements --state failed")


def say(server: Client, view: JobView) -> None:
    """How it ended and its last lines: those on stderr, if there are none those on stdout."""
    found, stream = [], ""
    for stream in ("stderr", "stdout") if view.state == "failed" else ():
        found = tail(server, view, stream)
        if found:
            break
    note(ended(view) + (f"; its last lines on {stream}:" if found else ""))
    for line in found:
        note(f"  {line}")
    if found:
        note(f"  all of it: hodei logs {quoted_reference(view)}")


def ended(view: JobView) -> str:
    name = f" ({arrays.name_text(view)})" if view.name else ""
    reason = view.reason or (f"exit code {view.exit_code}" if view.exit_code is not None else view.reason_code)
    return f"job {view.id}{name} {view.state}: {reason or 'no reason was given'}"


def quoted_reference(view: JobView) -> str:
    """As a shell takes it: brackets are quoted."""
    text = arrays.reference_text(view)
    return f"'{text}'" if "[" in text else text


def tail(server: Client, view: JobView, stream: str, count: int = LINES) -> list[str]:
    """The last lines of the newest attempt, of the first member that failed; none if they cannot be had."""
    try:
        member = 0
        if view.members > 1:
            runs = [run for run in server.job(view.id).runs if run.attempt == view.attempt]
            member = next((run.member for run in runs if run.exit_code), 0)
        lines = last_lines(server.logs(view.id, stream=stream, member=member), count)
    except HodeiError:
        return []
    return [line.decode(errors="replace").rstrip("\r\n") for line in lines]


def last_lines(chunks: Iterable[bytes], count: int) -> list[bytes]:
    """The last `count` lines, in bounded memory as long as lines are bounded."""
    lines: deque[bytes] = deque(maxlen=count)
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        lines.extend(line + b"\n" for line in whole)
    if rest:
        lines.append(rest)
    return list(lines)


def _failed_elements(server: Client, array: JobView) -> list[JobView]:
    """The failed ones in order; none of those that were cancelled."""
    return list(islice(server.elements(array, "failed"), 500))[::-1]


# ----------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client
    from hodei.client.logs import LogOptions, LogReader

BOTH = ("stdout", "stderr")


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Follow until the job ends.")
@click.option("--stdout", "stream", flag_value="stdout", help="Only its stdout.")
@click.option("--stderr", "stream", flag_value="stderr", help="Only its stderr; printed to stdout.")
@click.option("--member", type=click.IntRange(0), help="Only this member of a gang [default: all].")
@click.option("--attempt", type=click.IntRange(1), help="Which attempt [default: the newest].")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Start with the last N lines of each stream.")
@click.option("--since", default="", metavar="TIME", help="Only output since: 10m, 2h or 2026-01-31T08:00Z.")
def logs(
    job: str, follow: bool, stream: str | None, member: int | None, attempt: int | None, tail: int | None, since: str
) -> None:
    """Print or follow the output of a job.

    Its stdout goes to stdout and its stderr to stderr, unchanged. For an array or a gang, every line has the element or
    member that wrote it, and the time.
    """
    from hodei.client.logs import LogOptions

    wish = LogOptions(
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


def copy_lines(server: Client, view: JobView, wish: LogOptions, *, prefix: bool = True) -> bool:
    """`sweep[3] 14:05:01 | text`. True if anything was written."""
    from hodei.client.logs import read_lines

    sinks = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    wrote = False
    for line in read_lines(server, view, wish):
        sink = sinks[line.stream] if len(wish.streams) > 1 else sys.stdout.buffer
        text = line.text
        if prefix:
            end = b"" if text.endswith(b"\n") else b"\n"
            text = f"{line.source} {stamp(line.at_ms)} | ".encode() + text + end
        sink.write(text)
        sink.flush()
        wrote = True
    return wrote


def _copy_bytes(server: Client, id: int, wish: LogOptions) -> bool:
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
    from hodei.client.logs import Backoff

    sinks, pause, copied, last = (sys.stdout.buffer, sys.stderr.buffer), Backoff(), 0, 0
    while not all(reader.at_end for reader in readers):
        found = False
        for number, (reader, sink) in enumerate(zip(readers, sinks, strict=False)):
            if data := reader.read():
                sink.write(data)
                sink.flush()
                found, copied, last = True, copied + len(data), number
        each_round()
        if not all(reader.at_end for reader in readers):
            time.sleep(pause.next_s(found))
    return copied, last
