"""Model values to rows and back. Columns carry the names of the fields they hold; JSON only where a value is a tree.

Reading is strict: what a healthy server could not have written raises (one of `damage.UNREADABLE`).
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from hodei.model.audit import AuditEntry
from hodei.model.cron import Periodic
from hodei.model.effects import Event, SaveKey
from hodei.model.escalation_state import decode_escalation
from hodei.model.ids import run_id
from hodei.model.interning import SpecInterner
from hodei.model.job import Decision, Job, JobSpec, JobState, Run
from hodei.model.node import Grant, NodeOverrides
from hodei.model.outcome import StopReason
from hodei.model.reservation import Reservation

Row = Sequence[Any]

# The order of `Job`'s own fields, the spec left out.
STANDING = tuple(field for field in Job.__struct_fields__ if field != "spec")
JOB = (*STANDING, "project", "user", "name")
RUN_KEY = ("job", "attempt", "member")
RUN_STANDING = (
    *RUN_KEY, "task", "node", "backend", "state", "placed_ms", "started_ms", "finished_ms",
    "exit_code", "reason_code", "reason", "rank", "checkpoint_ms", "health", "stop_reason",
)  # fmt: skip
RUN = (*RUN_STANDING, "decision", "grant", "kind")
EVENT = ("seq", "at_ms", "kind", "job", "run", "node", "detail")
KEY = ("key", "fingerprint", "jobs", "at_ms")

_ESCALATION = STANDING.index("escalation_state")
_STATE = STANDING.index("state")
_JOB_STATES = frozenset(get_args(JobState))
_JOB_TYPES = get_type_hints(Job)
_PLAIN = frozenset({int, str, type(None)})
_job_numbers = itemgetter(*(i for i, name in enumerate(STANDING) if _JOB_TYPES[name] in (int, bool)))
_job_times = itemgetter(*(i for i, name in enumerate(STANDING) if name.endswith("_ms")))
_FLAGS = tuple(STANDING.index(f"{asked}_requested") for asked in ("cancel", "requeue", "suspend"))

# Those that many jobs have in common.
_TEXTS_AND_TIMES = tuple(
    STANDING.index(column)
    for column in (
        "state", "submitted_ms", "changed_ms", "reason_code", "reason", "queued_ms", "not_before_ms", "scheduled_ms",
        "started_ms", "nodes", "failure", "move", "escalation_state", "last_preemption",
    )
)  # fmt: skip
_SPECS = 1024

job_standing = attrgetter(*STANDING)
job_row = attrgetter(*STANDING, "spec.project", "spec.user", "spec.name")
_run_head = attrgetter(*RUN_STANDING[:-1])
_event_head = attrgetter(*EVENT[:-1])

_encode = msgspec.json.Encoder().encode
_decode_spec = msgspec.json.Decoder(JobSpec).decode
_decode_decision = msgspec.json.Decoder(Decision).decode
_decode_grant = msgspec.json.Decoder(Grant).decode
_decode_stop_reason = msgspec.json.Decoder(StopReason).decode
_decode_overrides = msgspec.json.Decoder(NodeOverrides).decode
_decode_reservation = msgspec.json.Decoder(Reservation).decode
_decode_periodic = msgspec.json.Decoder(Periodic).decode
_decode_jobs = msgspec.json.Decoder(tuple[int, ...]).decode
_decode_detail = msgspec.json.Decoder(dict[str, Any]).decode
_decode_any = msgspec.json.Decoder().decode

LAST_MS = 253_402_300_799_999  # the end of the year 9999: later times cannot be shown
# No server has ever given out so many numbers: a row with a higher one is damaged. As many again are left for new ones.
LAST_NUMBER = 2**52
_Count = Annotated[int, Meta(ge=0)]
_Moment = Annotated[int, Meta(ge=0, le=LAST_MS)]


def _strict(name: str, of: type[Struct], columns: Sequence[str], **special: Any) -> type[Struct]:
    """A row of these columns as it must be, by the types of the struct's fields."""
    hints = get_type_hints(of)
    types = {column: special.get(column, hints.get(column, str)) for column in columns}
    for column, kind in types.items():
        if kind is bool:
            types[column] = Annotated[int, Meta(ge=0, le=1)]
        elif column.endswith("_ms"):
            types[column] = _Moment
        elif kind is int:
            types[column] = _Count
    return msgspec.defstruct(name, list(types.items()), array_like=True, forbid_unknown_fields=True)


class _Labels(Struct):
    """Just the labels of a spec: reading only these is several times faster than the whole."""

    labels: dict[str, str] = {}


_decode_labels = msgspec.json.Decoder(_Labels).decode


TREES: dict[str, Callable[[str], Any]] = {
    "decision": _decode_decision,
    "grant": _decode_grant,
    "stop_reason": _decode_stop_reason,
}
_RunRow = _strict("_RunRow", Run, RUN, **dict.fromkeys(TREES, str | None))
_EventRow = _strict("_EventRow", Event, EVENT, detail=str)
_AuditRow = _strict("_AuditRow", AuditEntry, AuditEntry.__struct_fields__)
_astuple = msgspec.structs.astuple


def spec_text(spec: JobSpec) -> str:
    return _encode(spec).decode()


def labels_in(spec: str) -> dict[str, str]:
    return _decode_labels(spec).labels


def _values(row: Row) -> list[Any]:
    """The columns of STANDING, checked."""
    values = list(row[:-1])
    # By hand and not by `_strict`, which takes half as long again: at a start a million of these may be read.
    if values[_STATE] not in _JOB_STATES or not _PLAIN.issuperset(map(type, values)):
        raise ValueError(
            f"the state {values[_STATE]!r}" if values[_STATE] not in _JOB_STATES else "text that is no text"
        )
    if min(_job_numbers(values)) < 0 or max(_job_times(values)) > LAST_MS or not 0 < values[0] <= LAST_NUMBER:
        raise ValueError("a number that cannot be")
    for flag in _FLAGS:
        values[flag] = bool(values[flag])
    if values[_ESCALATION]:
        decode_escalation(values[_ESCALATION])
    return values


def job_from(row: Row) -> Job:
    """From the columns of STANDING and the spec's text."""
    values = _values(row)
    return Job(values[0], spec_from(row[-1]), *values[1:])


def spec_from(text: str) -> JobSpec:
    spec = _decode_spec(text)
    if not spec.tasks or any(task.count < 1 for task in spec.tasks):
        raise ValueError("a task without members")
    return spec


class Jobs:
    """Many jobs at once, which share what is equal in them: a queue of a hundred thousand is mostly the same few specs."""

    def __init__(self) -> None:
        self._pool = SpecInterner()
        self._specs: dict[str, JobSpec] = {}

    def job_from(self, row: Row) -> Job:
        one, values = self._pool.intern, _values(row)
        for place in _TEXTS_AND_TIMES:
            if values[place]:
                values[place] = one(values[place])
        return Job(values[0], self._spec(row[-1]), *values[1:])

    def _spec(self, text: str) -> JobSpec:
        found = self._specs.get(text)
        if found is None:
            if len(self._specs) >= _SPECS:
                self._specs.clear()
            found = self._specs[text] = self._pool.spec(spec_from(text))
        return found


def run_standing(run: Run) -> tuple[Any, ...]:
    return (*_run_head(run), None if run.stop_reason is None else _encode(run.stop_reason).decode())


def run_row(run: Run) -> tuple[Any, ...]:
    decision = None if run.decision is None else _encode(run.decision).decode()
    grant = None if run.grant is None else _encode(run.grant).decode()
    return (*run_standing(run), decision, grant, run.kind)


def tree_from(column: str, text: str) -> Any:
    """A run's decision, grant or stop reason."""
    return TREES[column](text)


def run_from(row: Row) -> Run:
    values = dict(zip(RUN, _astuple(msgspec.convert(row, _RunRow)), strict=True))
    for tree in TREES:
        if values[tree] is not None:
            values[tree] = tree_from(tree, values[tree])
    return Run(id=run_id(values["job"], values["member"], values["attempt"]), **values)


def event_row(event: Event) -> tuple[Any, ...]:
    return (*_event_head(event), _encode(event.detail).decode() if event.detail else "")


def event_from(row: Row) -> Event:
    seq, at_ms, kind, job, run, node, detail = _astuple(msgspec.convert(row, _EventRow))
    return Event(seq, at_ms, kind, job, run, node, _decode_detail(detail) if detail else {})


def audit_from(row: Row) -> AuditEntry:
    return AuditEntry(*_astuple(msgspec.convert(row, _AuditRow)))


def overrides_text(overrides: NodeOverrides) -> str:
    return _encode(overrides).decode()


def overrides_from(row: Row) -> NodeOverrides:
    """From the node's name and the body."""
    overrides: NodeOverrides = _named(row[0], _decode_overrides(row[1]), "node")
    return overrides


def _named(name: Any, value: Any, field: str = "name") -> Any:
    if getattr(value, field) != name:
        raise ValueError("it is kept under another name")
    return value


def reservation_text(reservation: Reservation) -> str:
    return _encode(reservation).decode()


def reservation_from(row: Row) -> Reservation:
    reservation: Reservation = _named(row[0], _decode_reservation(row[1]))
    if not 0 <= reservation.start_ms <= reservation.end_ms <= LAST_MS:
        raise ValueError("a window that cannot be")
    return reservation


def periodic_text(periodic: Periodic) -> str:
    return _encode(periodic).decode()


def periodic_from(row: Row) -> Periodic:
    periodic: Periodic = _named(row[0], _decode_periodic(row[1]))
    _ = periodic.cron  # raises if it is no schedule
    return periodic


def key_row(key: SaveKey) -> tuple[Any, ...]:
    return (key.key, key.fingerprint, _encode(key.jobs).decode(), key.at_ms)


def key_from(row: Row) -> SaveKey:
    key, fingerprint, jobs, at_ms = row
    if not isinstance(key, str) or not isinstance(fingerprint, str):
        raise TypeError("not a text")
    return SaveKey(key, fingerprint, _decode_jobs(jobs), at_ms)


def json_text(values: Sequence[Any]) -> str:
    """For `json_each(?)`: any number of values in one parameter."""
    return _encode(values).decode()


def rows_in(text: str) -> list[list[Any]]:
    """The rows of one `json_group_array(json_array(...))`."""
    rows: list[list[Any]] = _decode_any(text)
    return rows


# ---------------------------------------------------------------------------------------- state counts
# How many jobs stand in each state, kept up with every commit so that asking costs nothing.


def move(db: sqlite3.Connection, moves: Counter[str]) -> None:
    changes = [[state, change] for state, change in sorted(moves.items()) if change]
    if changes:
        db.execute(
            """INSERT INTO tally (state, jobs) SELECT value ->> 0, value ->> 1 FROM json_each(?) WHERE true
               ON CONFLICT DO UPDATE SET jobs = jobs + excluded.jobs""",
            (json_text(changes),),
        )


def recount(db: sqlite3.Connection) -> None:
    """As it must be: by the jobs that there are."""
    db.execute("DELETE FROM tally")
    db.execute("INSERT INTO tally (state, jobs) SELECT state, count(*) FROM job GROUP BY state")
