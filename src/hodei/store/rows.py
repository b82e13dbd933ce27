"""Model values to rows and back. Columns carry the names of the fields they hold; JSON only where a value is a tree."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct

from hodei.model.booking import Booking
from hodei.model.decision import Decision
from hodei.model.effects import Event, SaveKey
from hodei.model.ids import run_id
from hodei.model.job import Job, JobSpec, Run
from hodei.model.node import Grant, NodeMarks
from hodei.model.periodic import Periodic

Row = Sequence[Any]

# The order of `Job`'s own fields, the spec left out.
STANDING = tuple(field for field in Job.__struct_fields__ if field != "spec")
JOB = (*STANDING, "project", "user", "name")
RUN_KEY = ("job", "attempt", "member")
RUN_STANDING = (
    *RUN_KEY, "task", "node", "backend", "state", "placed_ms", "started_ms", "finished_ms",
    "exit_code", "reason_code", "reason", "stop_requested", "rank", "checkpoint_ms", "health",
)  # fmt: skip
RUN = (*RUN_STANDING, "decision", "grant", "kind")
EVENT = ("seq", "at_ms", "kind", "job", "run", "node", "detail")
KEY = ("key", "fingerprint", "jobs", "at_ms")

_FLAGS = tuple(STANDING.index(f"{asked}_requested") for asked in ("cancel", "requeue", "suspend"))

job_standing = attrgetter(*STANDING)
job_row = attrgetter(*STANDING, "spec.project", "spec.user", "spec.name")
run_standing = attrgetter(*RUN_STANDING)
_event_head = attrgetter(*EVENT[:-1])

_encode = msgspec.json.Encoder().encode
_decode_spec = msgspec.json.Decoder(JobSpec).decode
_decode_decision = msgspec.json.Decoder(Decision).decode
_decode_grant = msgspec.json.Decoder(Grant).decode
_decode_marks = msgspec.json.Decoder(NodeMarks).decode
_decode_booking = msgspec.json.Decoder(Booking).decode
_decode_periodic = msgspec.json.Decoder(Periodic).decode
_decode_jobs = msgspec.json.Decoder(tuple[int, ...]).decode
_decode_any = msgspec.json.Decoder().decode


class _Labels(Struct):
    """Just the labels of a spec: reading only these is several times faster than the whole."""

    labels: dict[str, str] = {}


_decode_labels = msgspec.json.Decoder(_Labels).decode


def spec_text(spec: JobSpec) -> str:
    return _encode(spec).decode()


def labels_in(spec: str) -> dict[str, str]:
    return _decode_labels(spec).labels


def job_from(row: Row) -> Job:
    """From the columns of STANDING and the spec's text."""
    values = list(row[:-1])
    for flag in _FLAGS:
        values[flag] = bool(values[flag])
    return Job(values[0], _decode_spec(row[-1]), *values[1:])


def run_row(run: Run) -> tuple[Any, ...]:
    decision = None if run.decision is None else _encode(run.decision).decode()
    grant = None if run.grant is None else _encode(run.grant).decode()
    return (*run_standing(run), decision, grant, run.kind)


def run_from(row: Row) -> Run:
    values = dict(zip(RUN, row, strict=True))
    for tree, decode in (("decision", _decode_decision), ("grant", _decode_grant)):
        if values[tree] is not None:
            values[tree] = decode(values[tree])
    return Run(id=run_id(values["job"], values["member"], values["attempt"]), **values)


def event_row(event: Event) -> tuple[Any, ...]:
    return (*_event_head(event), _encode(event.detail).decode() if event.detail else "")


def event_from(row: Row) -> Event:
    seq, at_ms, kind, job, run, node, detail = row
    return Event(seq, at_ms, kind, job, run, node, _decode_any(detail) if detail else {})


def marks_text(marks: NodeMarks) -> str:
    return _encode(marks).decode()


def marks_from(text: str) -> NodeMarks:
    return _decode_marks(text)


def booking_text(booking: Booking) -> str:
    return _encode(booking).decode()


def booking_from(text: str) -> Booking:
    return _decode_booking(text)


def periodic_text(periodic: Periodic) -> str:
    return _encode(periodic).decode()


def periodic_from(text: str) -> Periodic:
    return _decode_periodic(text)


def key_row(key: SaveKey) -> tuple[Any, ...]:
    return (key.key, key.fingerprint, _encode(key.jobs).decode(), key.at_ms)


def key_from(row: Row) -> SaveKey:
    key, fingerprint, jobs, at_ms = row
    return SaveKey(key, fingerprint, _decode_jobs(jobs), at_ms)


def json_text(values: Sequence[Any]) -> str:
    """For `json_each(?)`: any number of values in one parameter."""
    return _encode(values).decode()


def rows_in(text: str) -> list[list[Any]]:
    """The rows of one `json_group_array(json_array(...))`."""
    rows: list[list[Any]] = _decode_any(text)
    return rows
