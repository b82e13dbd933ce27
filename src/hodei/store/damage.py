"""Rows that cannot be read: how they are read anyway, which were seen, and what takes their place.

Text that is not UTF-8 is read as bytes, so that strict decoding of the row fails and the rest of the result is kept. Reads
never write: `quarantine` sets a damaged row aside later, on the writer's connection.

A placeholder has every field of a record that can still be read, and guesses nothing. A running job keeps running under
its placeholder with the capacity that it holds. A pending job is held if its whole spec is left, and failed otherwise. An
ended job stays ended.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import Struct

from hodei.model.audit import RECORD_DAMAGED
from hodei.model.effects import Event
from hodei.model.errors import InvalidInput
from hodei.model.ids import JobId, run_id
from hodei.model.job import JOB_ENDED, RUN_ENDED, Job, JobSpec, JobState, Run, TaskSpec
from hodei.store import rows

T = TypeVar("T")
# Errors of strict decoding.
UNREADABLE = (msgspec.MsgspecError, InvalidInput, ValueError, TypeError, ArithmeticError, LookupError, RecursionError)
Key = tuple[str, Any]


class Suspects:
    """Rows that could not be read, by kind and key, with the reason. Thread-safe."""

    def __init__(self) -> None:
        self.seen: dict[Key, str] = {}

    def add(self, kind: str, key: Any, error: object) -> None:
        self.seen.setdefault((kind, key), str(error)[:300] or type(error).__name__)

    def __bool__(self) -> bool:
        return bool(self.seen)

    def read(
        self,
        kind: str,
        found: Iterable[Sequence[Any]],
        decode: Callable[[Any], T],
        key: Callable[[Any], Any],
        placeholder: Callable[[Any, str], T] | None = None,
    ) -> Iterator[T]:
        """Decodes each row. One that cannot be read is noted, and skipped or replaced by its placeholder."""
        for row in found:
            try:
                value = decode(row)
            except UNREADABLE as error:
                self.add(kind, key(row), error)
                if placeholder is None:
                    continue
                value = placeholder(row, str(error))
            yield value


def text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def is_text_error(error: sqlite3.Error) -> bool:
    return "decode to UTF-8" in str(error)


@contextmanager
def lenient(db: sqlite3.Connection) -> Iterator[None]:
    before, db.text_factory = db.text_factory, text_or_bytes
    try:
        yield
    finally:
        db.text_factory = before


def fetch(db: sqlite3.Connection, sql: str, values: Sequence[Any] = ()) -> list[Any]:
    try:
        return db.execute(sql, values).fetchall()
    except sqlite3.OperationalError as error:
        if not is_text_error(error):
            raise
    with lenient(db):
        return db.execute(sql, values).fetchall()


def fetch_json(db: sqlite3.Connection, sql: str, values: Sequence[Any]) -> list[list[Any]]:
    """The rows of a query whose result is one row of JSON."""
    try:
        return rows.rows_in(db.execute(sql, values).fetchone()[0])
    except sqlite3.OperationalError as error:
        if not is_text_error(error):
            raise
    except UNREADABLE:
        pass
    with lenient(db):
        found = db.execute(sql, values).fetchone()[0]
    text = found if isinstance(found, str) else found.decode("utf-8", "surrogateescape")
    return [[_bytes_if_invalid(value) for value in row] for row in json.loads(text)]


def _bytes_if_invalid(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogateescape")
    return value


# Fields that no decision depends on: a job with all other fields intact continues unchanged.
_TEXT_FIELDS = frozenset({"reason", "reason_code", "nodes", "failure"})
_REQUEST = re.compile(r'"request"\s*:\s*(\{[^{}]*\})')
LOST_NODE = "unknown"
# A higher member number is taken for damage, not for the size of the job.
_MAX_MEMBERS = 100_000


class JobPlaceholder(Struct, frozen=True):
    """`uncertain_nodes`: nodes whose allocation by the job is unknown."""

    job: Job
    outcome: str
    uncertain_nodes: tuple[str, ...] = ()


def text_of(value: Any, default: str = "") -> str:
    """The text, with replacement characters for invalid bytes."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else default


def job_placeholder(
    id: JobId, row: Mapping[str, Any], body: Any, runs: Sequence[Run], why: str, now_ms: int
) -> JobPlaceholder:
    """`row`: the raw columns of the job, empty if the row is missing. `body`: the text of its spec."""
    members = max((run.member for run in runs), default=0) + 1
    spec, complete, known = _spec_placeholder(id, row, body, members)
    good, bad = _good_fields(Job, {name: row.get(name) for name in rows.JOB_STATUS if name in row})
    live = [run for run in runs if run.state not in RUN_ENDED]
    state, outcome = _state(row.get("state"), good, live, complete, text_only=bool(row) and bad <= _TEXT_FIELDS)
    attempt = max([good.get("attempt", 0), *(run.attempt for run in runs)])
    first = good.get("first_attempt", 0)
    if live:
        first = min(first or attempt, *(run.attempt for run in live))
        if len(live) == len([run for run in runs if run.attempt >= first]):
            first = min(run.attempt for run in live)
    kept = {name: value for name, value in good.items() if name not in ("id", "state", "attempt", "first_attempt")}
    kept.setdefault("submitted_ms", min((run.placed_ms for run in runs), default=now_ms))
    kept.setdefault("changed_ms", now_ms)
    if state == "failed" and not kept.get("finished_ms"):
        kept["finished_ms"] = now_ms
    if state not in ("scheduled", "running", "succeeded") and state != row.get("state"):
        kept |= {
            "reason_code": RECORD_DAMAGED,
            "reason": f"its record is damaged: {why}; {outcome}",
            "changed_ms": now_ms,
        }
    uncertain = tuple(sorted({run.node for run in live})) if live and not known else ()
    if uncertain:
        outcome += (
            f"; how much it holds is unknown, so {', '.join(uncertain)} is cordoned: uncordon it when the job has ended"
        )
    made = Job(id, spec, state, attempt=attempt, first_attempt=first, **kept)
    return JobPlaceholder(made, outcome, uncertain)


def stray_runs(body: Any, runs: Sequence[Run]) -> list[Run]:
    """Runs of members that the job does not have."""
    try:
        spec = rows.spec_from(body)
    except UNREADABLE:
        return [run for run in runs if run.member >= _MAX_MEMBERS]
    return [run for run in runs if not spec.has_member(run.member)]


def _state(
    stored: Any, good: Mapping[str, Any], live: Sequence[Run], complete: bool, *, text_only: bool
) -> tuple[JobState, str]:
    """The state of the placeholder, and what it means for the user."""
    if stored in JOB_ENDED:
        return stored, "it has ended; the readable part of its record is shown"
    if live:
        return "running", "its runs continue and their end is recorded; it is not retried"
    if good.get("finished_ms"):
        ended: JobState = "succeeded" if good.get("exit_code") == 0 else "failed"
        return ended, "it has ended; the readable part of its record is shown"
    if not complete:
        return "failed", "its spec is lost, so it cannot run: submit it again"
    if text_only and stored in ("pending", "held"):
        return stored, "only texts were lost, and it continues"
    return "held", "check it, then release or cancel it"


def _spec_placeholder(id: JobId, row: Mapping[str, Any], body: Any, members: int) -> tuple[JobSpec, bool, bool]:
    """The readable part of a spec, whether it is complete, and whether the requests are known."""
    try:
        spec = rows.spec_from(body)
        return spec, True, spec.has_member(members - 1)
    except UNREADABLE:
        pass
    text = text_of(body)
    try:
        tree = json.loads(text)
    except ValueError:
        tree = None
    left, tasks = dict[str, Any](), list[TaskSpec]()
    known = False
    if isinstance(tree, dict):
        left, _ = _good_fields(JobSpec, tree)
        given = tree.get("tasks")
        for task in given if isinstance(given, list) else ():
            fields, bad = _good_fields(TaskSpec, task if isinstance(task, dict) else {"request": None})
            tasks.append(TaskSpec(**fields))
            known = (known or len(tasks) == 1) and "request" not in bad
    if not tasks:
        tasks, known = _tasks_in(text, members)
    if any(task.count < 1 for task in tasks) or sum(task.count for task in tasks) < members:
        tasks, known = [TaskSpec(count=members, request=tasks[0].request)], known and len(tasks) == 1
    left |= {"tasks": tuple(tasks), "restart": "never", "retries": 0}
    if "gang" in left:  # its runs continue, but it starts on no further node
        left["gang"] = msgspec.structs.replace(left["gang"], per_node=False)
    for name, default in (("name", f"job-{id}"), ("project", "default"), ("user", "")):
        left[name] = left.get(name) or text_of(row.get(name)) or default
    return JobSpec(**left), False, known


def _tasks_in(text: str, members: int) -> tuple[list[TaskSpec], bool]:
    """The request of a single task, from a text that is no longer JSON."""
    found = _REQUEST.findall(text)
    if len(found) == 1:
        try:
            request = msgspec.json.decode(found[0], type=dict[str, int])
            return [TaskSpec(count=members, request=request)], True
        except msgspec.MsgspecError:
            pass
    return [TaskSpec(count=members)], False


def _good_fields(of: type[Struct], raw: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The readable fields, and the names of the unreadable ones."""
    hints, good, bad = get_type_hints(of), dict[str, Any](), set[str]()
    for name in of.__struct_fields__:
        if name not in raw:
            continue
        value = bool(raw[name]) if hints[name] is bool and raw[name] in (0, 1) else raw[name]
        try:
            decode = rows.JOB_TREES.get(name) if of is Job else None
            good[name] = msgspec.convert(value, hints[name]) if decode is None else decode(value)
            largest = rows.LAST_MS if name.endswith("_ms") else 2**63 - 1
            if type(value) is int and name != "exit_code" and not 0 <= value <= largest:
                raise ValueError("out of range")
        except UNREADABLE:
            good.pop(name, None)
            bad.add(name)
    return good, bad


def run_placeholder(row: Mapping[str, Any]) -> tuple[Run, bool]:
    """The readable part of a run, and whether its allocation is known. A run without a readable state counts as running
    until its backend reports its state, or does not know it."""
    good, bad = _good_fields(Run, {name: row[name] for name in rows.RUN if name not in rows.TREES})
    for tree, decode in rows.TREES.items():
        if row[tree] is not None:
            try:
                good[tree] = decode(row[tree])
            except UNREADABLE:
                bad.add(tree)
    if "state" in bad:
        code = good.get("exit_code")
        good["state"] = "running" if not good.get("finished_ms") else "succeeded" if code == 0 else "failed"
    for name in ("task", "node", "backend"):
        if name in bad:
            good[name] = text_of(row[name]) or LOST_NODE
    good.setdefault("placed_ms", good.get("started_ms", 0))
    # The key stays as stored, even out of range: the record is found by it.
    key = {name: row[name] if isinstance(row[name], int) else 0 for name in ("job", "member", "attempt")}
    return Run(id=run_id(*key.values()), **good | key), not bad & {"grant", "node", "backend"}


def event_placeholder(row: Sequence[Any], why: str) -> Event:
    seq, at_ms, kind, job, run, node, _ = row
    at_ms = at_ms if isinstance(at_ms, int) and 0 <= at_ms <= rows.LAST_MS else 0
    job = job if isinstance(job, int) and job >= 0 else 0
    return Event(seq, at_ms, text_of(kind), job, text_of(run), text_of(node), {"damaged": why})
