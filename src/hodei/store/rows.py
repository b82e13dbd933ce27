"""Model values to rows and back. Columns have the names of their fields; nested values are JSON.

Decoding is strict: anything that a server cannot have written raises one of `damage.UNREADABLE`.
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
from hodei.model.capacity import NodeOrder
from hodei.model.cron import Periodic
from hodei.model.effects import Event, SaveKey
from hodei.model.ids import run_id
from hodei.model.interning import SpecInterner
from hodei.model.job import NOT_ESCALATED, Decision, EscalationState, Job, JobSpec, JobState, Move, Run
from hodei.model.node import Grant, NodeOverrides
from hodei.model.outcome import StopReason
from hodei.model.reservation import Reservation
from hodei.model.usage import RunUsage

Row = Sequence[Any]

# The fields of `Job` in their order, without the spec.
JOB_STATUS = tuple(field for field in Job.__struct_fields__ if field != "spec")
JOB = (*JOB_STATUS, "project", "user", "name")
RUN_KEY = ("job", "attempt", "member")
RUN_STATUS = (
    *RUN_KEY, "task", "node", "backend", "state", "placed_ms", "started_ms", "finished_ms",
    "exit_code", "reason_code", "reason", "rank", "checkpoint_ms", "health", "stop_reason", "usage",
)  # fmt: skip
RUN = (*RUN_STATUS, "decision", "grant", "kind", "cost_milli")
EVENT = ("seq", "at_ms", "kind", "job", "run", "node", "detail")
KEY = ("key", "fingerprint", "jobs", "at_ms")

_MOVE, _ESCALATION = JOB_STATUS.index("move"), JOB_STATUS.index("escalation_state")
_STATE = JOB_STATUS.index("state")
_JOB_STATES = frozenset(get_args(JobState))
_JOB_TYPES = get_type_hints(Job)
_COLUMN_TYPES = frozenset({int, str, type(None)})
_job_numbers = itemgetter(*(i for i, name in enumerate(JOB_STATUS) if _JOB_TYPES[name] in (int, bool)))
_job_times = itemgetter(*(i for i, name in enumerate(JOB_STATUS) if name.endswith("_ms")))
_FLAGS = tuple(JOB_STATUS.index(f"{verb}_requested") for verb in ("cancel", "requeue", "suspend"))

# Columns whose values many jobs share.
_SHARED = tuple(
    JOB_STATUS.index(column)
    for column in (
        "state", "submitted_ms", "changed_ms", "reason_code", "reason", "queued_ms", "not_before_ms", "scheduled_ms",
        "started_ms", "nodes", "failure", "move", "escalation_state", "last_preemption",
    )
)  # fmt: skip
_MAX_SPECS = 1024

_job_status = attrgetter(*JOB_STATUS)
_run_head = attrgetter(*RUN_STATUS[:-2])
_event_head = attrgetter(*EVENT[:-1])

_encode = msgspec.json.Encoder().encode
_decode_spec = msgspec.json.Decoder(JobSpec).decode
_decode_move = msgspec.json.Decoder(Move).decode
_decode_escalation = msgspec.json.Decoder(EscalationState).decode
_decode_decision = msgspec.json.Decoder(Decision).decode
_decode_grant = msgspec.json.Decoder(Grant).decode
_decode_stop_reason = msgspec.json.Decoder(StopReason).decode
_decode_usage = msgspec.json.Decoder(RunUsage).decode
_decode_overrides = msgspec.json.Decoder(NodeOverrides).decode
_decode_node_order = msgspec.json.Decoder(NodeOrder).decode
_decode_reservation = msgspec.json.Decoder(Reservation).decode
_decode_periodic = msgspec.json.Decoder(Periodic).decode
_decode_jobs = msgspec.json.Decoder(tuple[int, ...]).decode
_decode_detail = msgspec.json.Decoder(dict[str, Any]).decode
_decode_any = msgspec.json.Decoder().decode

LAST_MS = 253_402_300_799_999  # the end of the year 9999: later times cannot be formatted
# A row with a higher number is damaged: no server has used so many. As many are left for new rows.
LAST_NUMBER = 2**52
_Count = Annotated[int, Meta(ge=0)]
_Moment = Annotated[int, Meta(ge=0, le=LAST_MS)]


def _strict(name: str, of: type[Struct], columns: Sequence[str], **special: Any) -> type[Struct]:
    """The type of a row with these columns, from the types of the struct's fields."""
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
    """Only the labels of a spec: several times faster to decode than all of it."""

    labels: dict[str, str] = {}


_decode_labels = msgspec.json.Decoder(_Labels).decode


TREES: dict[str, Callable[[str], Any]] = {
    "decision": _decode_decision,
    "grant": _decode_grant,
    "stop_reason": _decode_stop_reason,
    "usage": _decode_usage,
}
_RunRow = _strict("_RunRow", Run, RUN, **dict.fromkeys(TREES, str | None))
_EventRow = _strict("_EventRow", Event, EVENT, detail=str)
_AuditRow = _strict("_AuditRow", AuditEntry, AuditEntry.__struct_fields__)
_astuple = msgspec.structs.astuple


def text(value: Any) -> str:
    """As JSON; a list of values for `json_each(?)` is one parameter of any length."""
    return _encode(value).decode()


def labels_in(spec: str) -> dict[str, str]:
    return _decode_labels(spec).labels


def _values(row: Row) -> list[Any]:
    """The checked columns of JOB_STATUS."""
    values = list(row[:-1])
    # By hand: `_strict` takes half as long again, and a start may read a million of these.
    if values[_STATE] not in _JOB_STATES or not _COLUMN_TYPES.issuperset(map(type, values)):
        raise ValueError(
            f"the state {values[_STATE]!r}" if values[_STATE] not in _JOB_STATES else "a column is not text"
        )
    if min(_job_numbers(values)) < 0 or max(_job_times(values)) > LAST_MS or not 0 < values[0] <= LAST_NUMBER:
        raise ValueError("a number out of range")
    for flag in _FLAGS:
        values[flag] = bool(values[flag])
    values[_MOVE] = _move_from(values[_MOVE])
    values[_ESCALATION] = _escalation_from(values[_ESCALATION])
    return values


def _move_from(column: str) -> Move | None:
    return _decode_move(column) if column else None


def _escalation_from(column: str) -> EscalationState:
    return _decode_escalation(column) if column else NOT_ESCALATED


JOB_TREES: dict[str, Callable[[Any], Any]] = {"move": _move_from, "escalation_state": _escalation_from}


def job_status(job: Job) -> list[Any]:
    """The columns of JOB_STATUS."""
    values = list(_job_status(job))
    values[_MOVE] = "" if job.move is None else text(job.move)
    values[_ESCALATION] = "" if job.escalation_state == NOT_ESCALATED else text(job.escalation_state)
    return values


def job_row(job: Job) -> list[Any]:
    return [*job_status(job), job.spec.project, job.spec.user, job.spec.name]


def job_from(row: Row) -> Job:
    """From the columns of JOB_STATUS and the text of the spec."""
    values = _values(row)
    return Job(values[0], spec_from(row[-1]), *values[1:])


def spec_from(body: str) -> JobSpec:
    spec = _decode_spec(body)
    if not spec.tasks or any(task.count < 1 for task in spec.tasks):
        raise ValueError("a task without members")
    return spec


class JobDecoder:
    """Decodes many jobs with shared equal values: a queue of a hundred thousand jobs has few different specs."""

    def __init__(self) -> None:
        self._pool = SpecInterner()
        self._specs: dict[str, JobSpec] = {}

    def job_from(self, row: Row) -> Job:
        one, values = self._pool.intern, _values(row)
        for place in _SHARED:
            if values[place]:
                values[place] = one(values[place])
        return Job(values[0], self._spec(row[-1]), *values[1:])

    def _spec(self, body: str) -> JobSpec:
        found = self._specs.get(body)
        if found is None:
            if len(self._specs) >= _MAX_SPECS:
                self._specs.clear()
            found = self._specs[body] = self._pool.spec(spec_from(body))
        return found


def run_status(run: Run) -> tuple[Any, ...]:
    trees = (None if tree is None else text(tree) for tree in (run.stop_reason, run.usage))
    return (*_run_head(run), *trees)


def run_row(run: Run) -> tuple[Any, ...]:
    trees = (None if tree is None else text(tree) for tree in (run.decision, run.grant))
    return (*run_status(run), *trees, run.kind, run.cost_milli)


def run_from(row: Row) -> Run:
    values = dict(zip(RUN, _astuple(msgspec.convert(row, _RunRow)), strict=True))
    for tree, decode in TREES.items():
        if values[tree] is not None:
            values[tree] = decode(values[tree])
    return Run(id=run_id(values["job"], values["member"], values["attempt"]), **values)


def event_row(event: Event) -> tuple[Any, ...]:
    return (*_event_head(event), text(event.detail) if event.detail else "")


def event_from(row: Row) -> Event:
    seq, at_ms, kind, job, run, node, detail = _astuple(msgspec.convert(row, _EventRow))
    return Event(seq, at_ms, kind, job, run, node, _decode_detail(detail) if detail else {})


def audit_from(row: Row) -> AuditEntry:
    return AuditEntry(*_astuple(msgspec.convert(row, _AuditRow)))


def overrides_from(row: Row) -> NodeOverrides:
    """From the node's name and the body."""
    overrides: NodeOverrides = _named(row[0], _decode_overrides(row[1]), "node")
    return overrides


def _named(name: Any, value: Any, field: str = "name") -> Any:
    if getattr(value, field) != name:
        raise ValueError("it is stored under another name")
    return value


def node_order_from(row: Row) -> NodeOrder:
    order: NodeOrder = _decode_node_order(row[1])
    if order.name != row[0]:
        raise ValueError("the order of another node")
    if not all(0 <= at <= LAST_MS for at in (order.ordered_ms, order.changed_ms, order.ready_ms, order.idle_ms)):
        raise ValueError("a time out of range")
    return order


def reservation_from(row: Row) -> Reservation:
    reservation: Reservation = _named(row[0], _decode_reservation(row[1]))
    if not 0 <= reservation.start_ms <= reservation.end_ms <= LAST_MS:
        raise ValueError("an invalid window")
    return reservation


def periodic_from(row: Row) -> Periodic:
    periodic: Periodic = _named(row[0], _decode_periodic(row[1]))
    _ = periodic.cron  # raises if the schedule is invalid
    return periodic


def key_row(key: SaveKey) -> tuple[Any, ...]:
    return (key.key, key.fingerprint, text(key.jobs), key.at_ms)


def key_from(row: Row) -> SaveKey:
    key, fingerprint, jobs, at_ms = row
    if not isinstance(key, str) or not isinstance(fingerprint, str):
        raise TypeError("not text")
    return SaveKey(key, fingerprint, _decode_jobs(jobs), at_ms)


def rows_in(encoded: str) -> list[list[Any]]:
    """The rows of one `json_group_array(json_array(...))`."""
    rows: list[list[Any]] = _decode_any(encoded)
    return rows


# The number of jobs in each state, updated with every commit so that reading it is cheap.


def change_counts(db: sqlite3.Connection, by_state: Counter[str]) -> None:
    changes = [[state, change] for state, change in sorted(by_state.items()) if change]
    if changes:
        db.execute(
            """INSERT INTO tally (state, jobs) SELECT value ->> 0, value ->> 1 FROM json_each(?) WHERE true
               ON CONFLICT DO UPDATE SET jobs = jobs + excluded.jobs""",
            (text(changes),),
        )


def recount(db: sqlite3.Connection) -> None:
    """Count all jobs again."""
    db.execute("DELETE FROM tally")
    db.execute("INSERT INTO tally (state, jobs) SELECT state, count(*) FROM job GROUP BY state")
