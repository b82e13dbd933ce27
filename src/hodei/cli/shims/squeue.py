"""`squeue`: the jobs that wait and run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hodei.backends.slurm_variables import folded_numbers
from hodei.cli.shims.finding import jobs_of, rows, states_of
from hodei.cli.shims.rows import Fields, Refused, Row, clock, lines, read, span
from hodei.model.errors import NotFound

if TYPE_CHECKING:
    from hodei.client import Client

_USUAL = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
_LONG = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
_ORDER = {"PENDING": 0, "RUNNING": 1, "SUSPENDED": 2}


class _Folded(Row):
    """Elements of an array that wait for the same reason, as one row: `17_[3,5-9%2]`."""

    def __init__(self, elements: list[Row]) -> None:
        super().__init__(elements[0].view, elements[0]._client)
        array = self.view.array
        assert array is not None
        limit = f"%{array.at_most}" if array.at_most else ""
        self._indices = folded_numbers(row.view.array.index for row in elements if row.view.array) + limit

    @property
    def job(self) -> str:
        return f"{self.array_job}_[{self._indices}]"

    @property
    def index(self) -> str:
        return self._indices


FIELDS: Fields[Row] = {
    "i": ("JOBID", lambda row: row.job),
    "A": ("JOBID", lambda row: row.view.id),
    "F": ("ARRAY_JOB_ID", lambda row: row.array_job),
    "K": ("ARRAY_TASK_ID", lambda row: row.index),
    "P": ("PARTITION", lambda row: row.partition),
    "j": ("NAME", lambda row: row.view.name),
    "u": ("USER", lambda row: row.user),
    "a": ("ACCOUNT", lambda row: row.view.project),
    "t": ("ST", lambda row: row.short_state),
    "T": ("STATE", lambda row: row.state),
    "M": ("TIME", lambda row: span(row.elapsed_s)),
    "l": ("TIME_LIMIT", lambda row: row.limit),
    "L": ("TIME_LEFT", lambda row: row.left),
    "D": ("NODES", lambda row: row.node_count),
    "R": ("NODELIST(REASON)", lambda row: row.nodes_or_reason),
    "N": ("NODELIST", lambda row: row.nodes),
    "r": ("REASON", lambda row: row.reason),
    "C": ("CPUS", lambda row: row.cpus),
    "c": ("MIN_CPUS", lambda row: row.cpus),
    "m": ("MIN_MEMORY", lambda row: row.memory),
    "Q": ("PRIORITY", lambda row: row.view.priority),
    "p": ("PRIORITY", lambda row: row.view.priority),
    "q": ("QOS", lambda row: row.view.qos),
    "S": ("START_TIME", lambda row: row.start),
    "e": ("END_TIME", lambda row: row.end),
    "V": ("SUBMIT_TIME", lambda row: clock(row.view.submitted_at)),
    "Z": ("WORK_DIR", lambda row: row.spec.tasks[0].workdir),
}
_LONG_NAMES = {
    "jobid": "A", "jobarrayid": "i", "arrayjobid": "F", "arraytaskid": "K", "partition": "P", "name": "j", "username": "u",
    "account": "a", "statecompact": "t", "state": "T", "timeused": "M", "timelimit": "l", "timeleft": "L", "numnodes": "D",
    "nodelist": "N", "reasonlist": "R", "reason": "r", "numcpus": "C", "minmemory": "m", "priority": "Q", "priorityllong": "Q",
    "qos": "q", "starttime": "S", "endtime": "e", "submittime": "V", "workdir": "Z",
}  # fmt: skip


def run(words: list[str]) -> int:
    given = read(
        words,
        "h/noheader l/long o/format= O/Format= u/user= me j/jobs= t/states= n/name= p/partition= A/account= r/array "
        "a/all v/verbose",
    )
    if given.rest:
        raise Refused(f"error: Unrecognized option: {given.rest[0]}")
    from hodei.client import Client

    states = states_of(given)
    with Client() as client:
        if "jobs" in given:
            found: Iterable[Row] = _named(client, given.several("jobs"), states)
        else:
            found = rows(client, given, states)
        ordered = sorted(found, key=lambda row: (_ORDER.get(row.state, 3), -row.view.priority, row.view.id))
        if "array" not in given:
            ordered = list(_folded(ordered))
        if "long" in given:
            sys.stdout.write(time.strftime("%a %b %d %H:%M:%S %Y\n"))
        format = given.get("format") or (_long_format(given.get("Format")) if "Format" in given else "")
        format = format or (_LONG if "long" in given else _USUAL)
        for line in lines(format, FIELDS, ordered, header="noheader" not in given):
            sys.stdout.write(f"{line}\n")
    return 0


def _named(client: Client, texts: list[str], states: set[str]) -> Iterator[Row]:
    known = False
    for text in texts:
        try:
            for view in jobs_of(client, text):
                known = True
                if Row(view).state in states:
                    yield Row(view, client)
        except NotFound:
            continue
    if texts and not known:
        raise Refused("slurm_load_jobs error: Invalid job id specified")


def _folded(found: Iterable[Row]) -> Iterator[Row]:
    groups: dict[object, list[Row]] = {}
    for row in found:
        array = row.view.array
        key = (array.first, row.reason) if array is not None and row.waits else row.view.id
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        yield _Folded(group) if group[0].view.array is not None and group[0].waits else group[0]


def _long_format(text: str) -> str:
    out = ""
    for part in text.split(","):
        name, _, width = part.strip().partition(":")
        letter = _LONG_NAMES.get(name.lower())
        if letter is None or not (width or "20").lstrip(".").isdigit():
            raise Refused(f"error: Invalid job format specification: {part[:60]}")
        out += f"%{width or '20'}{letter}"
    return out
