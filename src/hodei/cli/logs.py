"""`hodei logs`: the output of a job. One run is copied byte by byte; many runs line by line, with source and time."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

import click

from hodei.cli.options import client, job_argument, stream_output_option
from hodei.cli.output import emit_list, is_for_people, note
from hodei.cli.refs import is_array_row, name_text, quoted_reference, resolve_targets, single_job
from hodei.cli.times import iso, parse_since_ms, timestamp
from hodei.model.errors import HodeiError, NotFound

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client
    from hodei.client.logs import LogOptions, LogReader

STREAMS = ("stdout", "stderr")
TAIL_LINES = 10
# The output of this many failed jobs is quoted; the others are only named or counted.
_QUOTED_JOBS = 3
_MAX_ELEMENTS = 500


@click.command()
@job_argument
@click.option("-f", "--follow", is_flag=True, help="Follow until the job ends.")
@click.option("--stdout", "stream", flag_value="stdout", help="Only its stdout.")
@click.option("--stderr", "stream", flag_value="stderr", help="Only its stderr; printed to stdout.")
@click.option("--member", type=click.IntRange(0), help="Only this member of a gang [default: all].")
@click.option("--attempt", type=click.IntRange(1), help="Which attempt [default: the newest].")
@click.option("--tail", type=click.IntRange(0), metavar="N", help="Start with the last N lines of each stream.")
@click.option("--since", default="", metavar="TIME", help="Only output since: 10m, 2h or 2026-01-31T08:00Z.")
@stream_output_option
def logs(
    job: str, follow: bool, stream: str | None, member: int | None, attempt: int | None, tail: int | None, since: str,
    output: str,
) -> None:  # fmt: skip
    """Print or follow the output of a job.

    Its stdout goes to stdout and its stderr to stderr, unchanged. For an array or a gang, every line has the element or
    member that wrote it, and the time. With -o jsonl every line is an object with source, stream, at and text.
    """
    from hodei.client.logs import LogOptions

    options = LogOptions(
        streams=(stream,) if stream else STREAMS, members=None if member is None else (member,), attempt=attempt or 0,
        tail=tail, since_ms=parse_since_ms(since), follow=follow,
    )  # fmt: skip
    with client() as server:
        targets = resolve_targets(server, [job])
        detail = None if targets.arrays else server.job(single_job(targets, job))
        view = targets.arrays[0] if detail is None else detail.job
        # A per-node job has as many members as have run.
        is_gang = detail is not None and (view.members > 1 or len({run.member for run in detail.runs}) > 1)
        many = bool(targets.arrays) or (is_gang and member is None)
        if not is_for_people(output):
            _emit_lines(server, view, options, output)
            return
        by_line = many or since
        wrote = copy_lines(server, view, options, prefix=many) if by_line else _copy_bytes(server, view.id, options)
        if many and attempt and not wrote:
            _check_attempt(server, view, attempt)
    if not wrote and tail != 0:
        what = f"array {view.id}[]" if targets.arrays else f"job {view.id}"
        where = f"{f' to {stream}' if stream else ''}{' since then' if since else ''}"
        note(f"{what} ({view.state}) has written nothing{where}")


def _check_attempt(server: Client, view: JobView, attempt: int) -> None:
    """NotFound, as for a single job, if no element or member has had that attempt."""
    is_array = is_array_row(view)
    newest = max((one.attempt for one in server.elements(view)), default=0) if is_array else view.attempt
    if newest < attempt:
        who = f"no element of array {view.id}[] has an" if is_array else f"job {view.id} has no"
        raise NotFound(f"{who} attempt {attempt}", hint=f"the newest: {newest or 'none'}", code="NO_SUCH_ATTEMPT")


def _emit_lines(server: Client, view: JobView, options: LogOptions, output: str) -> None:
    from hodei.client.logs import read_lines

    lines = (
        {
            "source": line.source,
            "stream": line.stream,
            "at": iso(line.at_ms),
            "text": line.text.decode(errors="replace"),
        }
        for line in read_lines(server, view, options)
    )
    emit_list(lines, "jsonl" if options.follow and output != "name" else output, (), name=lambda line: line["source"])


def copy_lines(server: Client, view: JobView, options: LogOptions, *, prefix: bool = True) -> bool:
    """Print `sweep[3] 14:05:01 | text`. True if anything was written."""
    from hodei.client.logs import read_lines

    sinks = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    wrote = False
    for line in read_lines(server, view, options):
        sink = sinks[line.stream] if len(options.streams) > 1 else sys.stdout.buffer
        text = line.text
        if prefix:
            end = b"" if text.endswith(b"\n") else b"\n"
            text = f"{line.source} {timestamp(line.at_ms)} | ".encode() + text + end
        sink.write(text)
        sink.flush()
        wrote = True
    return wrote


def _copy_bytes(server: Client, id: int, options: LogOptions) -> bool:
    member = options.members[0] if options.members else 0
    readers = [
        server.log_reader(id, stream=stream, member=member, attempt=options.attempt, follow=options.follow)
        for stream in options.streams
    ]
    wrote = False
    if options.tail is not None:
        for number, reader in enumerate(readers):
            sink = sys.stderr.buffer if number else sys.stdout.buffer
            lines = last_lines(iter(reader.read, b""), options.tail)
            sink.writelines(lines)
            sink.flush()
            wrote = wrote or bool(lines)
    copied, _ = copy_streams(readers)
    return wrote or bool(copied)


def copy_streams(readers: list[LogReader], each_round: Callable[[], object] = lambda: None) -> tuple[int, int]:
    """Copy all streams until their end, the first to stdout and the second to stderr. Returns the number of bytes, and
    which stream was written last."""
    from hodei.client.logs import Backoff

    sinks, backoff, copied, last = (sys.stdout.buffer, sys.stderr.buffer), Backoff(), 0, 0
    while not all(reader.at_end for reader in readers):
        found = False
        for number, (reader, sink) in enumerate(zip(readers, sinks, strict=False)):
            if data := reader.read():
                sink.write(data)
                sink.flush()
                found, copied, last = True, copied + len(data), number
        each_round()
        if not all(reader.at_end for reader in readers):
            time.sleep(backoff.next_s(reset=found))
    return copied, last


def report_failures(server: Client, failed: Iterable[JobView]) -> None:
    """Print on stderr how each job ended, and the last lines of the first few. An array stands for its elements."""
    quoted, more = 0, 0
    for view in failed:
        for one in _failed_elements(server, view) if is_array_row(view) else [view]:
            if quoted < _QUOTED_JOBS:
                report_failure(server, one)
            elif is_array_row(view):
                more += 1
            else:
                note(outcome(one))
            quoted += 1
    if more:
        note(f"and {more} more: hodei jobs --elements --state failed")


def report_failure(server: Client, view: JobView) -> None:
    """How a job ended, with the last lines of stderr, or of stdout if there are none."""
    found, stream = [], ""
    for stream in ("stderr", "stdout") if view.state == "failed" else ():
        found = tail(server, view, stream)
        if found:
            break
    note(outcome(view) + (f"; its last lines on {stream}:" if found else ""))
    for line in found:
        note(f"  {line}")
    if found:
        note(f"  all of it: hodei logs {quoted_reference(view)}")


def outcome(view: JobView) -> str:
    name = f" ({name_text(view)})" if view.name else ""
    reason = view.reason or (f"exit code {view.exit_code}" if view.exit_code is not None else view.reason_code)
    return f"job {view.id}{name} {view.state}: {reason or 'no reason was given'}"


def tail(server: Client, view: JobView, stream: str, count: int = TAIL_LINES) -> list[str]:
    """The last lines of the newest attempt, of the first member that failed; none if they cannot be read."""
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
    """The last `count` lines, without keeping earlier ones in memory."""
    lines: deque[bytes] = deque(maxlen=min(count, sys.maxsize))
    rest = b""
    for chunk in chunks:
        *complete, rest = (rest + chunk).split(b"\n")
        lines.extend(line + b"\n" for line in complete)
    if rest:
        lines.append(rest)
    return list(lines)


def _failed_elements(server: Client, array: JobView) -> list[JobView]:
    return list(islice(server.elements(array, "failed"), _MAX_ELEMENTS))[::-1]
