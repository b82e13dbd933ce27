"""`sacct`: jobs with how they ended. One row for each job: Hodei keeps no account of steps."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from hodei.cli import times
from hodei.cli.output import clean
from hodei.cli.shims.finding import jobs_of, rows, states_of
from hodei.cli.shims.rows import STATES, Given, Refused, Row, clock, full_span, midnight, read
from hodei.cli.times import ms_of
from hodei.model.errors import NotFound

_USUAL = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
_BRIEF = "JobID,State,ExitCode"
# Name: title, width, value.
_Column = tuple[str, int, Callable[[Row], object]]
_FIELDS: dict[str, _Column] = {
    name.lower(): (name, width, value)
    for name, width, value in (
        ("JobID", 12, lambda row: row.job),
        ("JobIDRaw", 12, lambda row: row.view.id),
        ("JobName", 10, lambda row: row.view.name),
        ("Partition", 10, lambda row: row.partition),
        ("Account", 10, lambda row: row.view.project),
        ("AllocCPUS", 10, lambda row: row.cpus if row.view.started_at else 0),
        ("NCPUS", 10, lambda row: row.cpus if row.view.started_at else 0),
        ("ReqCPUS", 8, lambda row: row.cpus),
        ("ReqMem", 10, lambda row: row.memory),
        ("State", 10, lambda row: row.state),
        ("ExitCode", 8, lambda row: row.exit_code),
        ("Elapsed", 10, lambda row: full_span(row.elapsed_s)),
        ("ElapsedRaw", 10, lambda row: row.elapsed_s),
        ("CPUTime", 10, lambda row: full_span(row.elapsed_s * row.cpus)),
        ("CPUTimeRAW", 10, lambda row: row.elapsed_s * row.cpus),
        ("Submit", 19, lambda row: clock(row.view.submitted_at, "Unknown")),
        ("Start", 19, lambda row: clock(row.view.started_at, "Unknown")),
        ("End", 19, lambda row: clock(row.view.finished_at, "Unknown")),
        ("User", 9, lambda row: row.user),
        ("NodeList", 15, lambda row: row.nodes or "None assigned"),
        ("NNodes", 8, lambda row: row.node_count),
        ("NTasks", 8, lambda row: row.tasks),
        ("Timelimit", 10, lambda row: full_span(-(-row.limit_s // 60) * 60) if row.limit_s else "UNLIMITED"),
        ("Reason", 22, lambda row: row.reason),
        ("Priority", 10, lambda row: row.view.priority),
        ("QOS", 10, lambda row: row.view.qos),
        ("WorkDir", 20, lambda row: row.spec.tasks[0].workdir),
        ("MaxRSS", 10, lambda row: ""),
    )
}


def run(words: list[str]) -> int:
    given = read(
        words,
        "j/jobs= n/noheader p/parsable P/parsable2 X/allocations o/format= u/user= me s/state= S/starttime= E/endtime= a/allusers "
        "b/brief A/account= name= delimiter= r/partition= e/helpformat D/duplicates",
    )
    if given.rest:
        raise Refused(f"error: Unknown arguments: {' '.join(given.rest)}")
    if "helpformat" in given:
        sys.stdout.write(" ".join(title for title, _, _ in _FIELDS.values()) + "\n")
        return 0
    columns = _columns(given.get("format") or (_BRIEF if "brief" in given else _USUAL))
    from hodei.client import Client

    with Client() as client:
        states = states_of(given, STATES, option="state")
        if "jobs" in given:
            found = []
            for text in given.several("jobs"):
                try:
                    found += [Row(view, client) for view in jobs_of(client, text)]
                except NotFound:
                    continue
            found = [row for row in found if row.state in states]
        else:
            since, until = _since(given.get("starttime")), _moment(given.get("endtime") or "now")
            found = [row for row in rows(client, given, states, since) if ms_of(row.view.submitted_at) <= until][::-1]
        _print(found, columns, given)
    return 0


def _since(text: str) -> str:
    """`2026-01-31`, `2026-01-31T08:00`, `now-2days`, or today."""
    if text.lower() in ("", "today", "midnight"):
        return midnight()
    if ago := re.fullmatch(r"now-(\d+)(second|minute|hour|day|week)s?", text.lower()):
        unit = {"week": ("d", 7)}.get(ago[2], (ago[2][0], 1))
        return f"{int(ago[1]) * unit[1]}{unit[0]}"
    return datetime.fromtimestamp(_moment(text) / 1000, UTC).isoformat(timespec="seconds")


def _moment(text: str) -> int:
    """In milliseconds since the epoch; without a zone it is this machine's."""
    if text.lower() == "now":
        return times.now_ms()
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise Refused(f"error: Invalid time specification (pos=0): {text[:60]}") from None


def _columns(text: str) -> list[_Column]:
    out = []
    for part in text.split(","):
        name, _, width = part.strip().partition("%")
        field = _FIELDS.get(name.lower())
        if field is None or not re.fullmatch(r"-?\d*", width):
            raise Refused(f"error: Invalid field requested: {part[:60]!r}")
        out.append((field[0], int(width) if width.strip("-") else field[1], field[2]))
    return out


def _print(found: list[Row], columns: list[_Column], given: Given) -> None:
    plain = "parsable" in given or "parsable2" in given
    sign, tail = given.get("delimiter") or "|", (given.get("delimiter") or "|") if "parsable" in given else ""
    if "noheader" not in given:
        titles = [title for title, _, _ in columns]
        if plain:
            sys.stdout.write(sign.join(titles) + tail + "\n")
        else:
            sys.stdout.write(
                "".join(_cell(title, width) for title, (_, width, _) in zip(titles, columns, strict=True)) + "\n"
            )
            sys.stdout.write("".join("-" * abs(width) + " " for _, width, _ in columns) + "\n")
    for row in found:
        texts = [clean(str(value(row))) for _, _, value in columns]
        if plain:
            sys.stdout.write(sign.join(texts) + tail + "\n")
        else:
            sys.stdout.write(
                "".join(_cell(text, width) for text, (_, width, _) in zip(texts, columns, strict=True)) + "\n"
            )


def _cell(text: str, width: int) -> str:
    """To the right, or with a negative width to the left; what is too long ends in +."""
    wide = abs(width)
    cut = text if len(text) <= wide else text[: wide - 1] + "+"
    return (cut.ljust(wide) if width < 0 else cut.rjust(wide)) + " "
