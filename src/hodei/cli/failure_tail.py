"""What a job said before it failed: its last lines, for people who would ask for them next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from hodei.cli import arrays
from hodei.cli.output import note
from hodei.model.errors import HodeiError

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client

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
