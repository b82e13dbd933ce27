"""Queries. Results of bounded size are one row of JSON (see `writes`).

A row that cannot be read is noted in `suspects`, and a placeholder takes its place in the result.
"""

from __future__ import annotations

import gc
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, get_args

from hodei.model.accounting import CostRow
from hodei.model.affinity import all_match
from hodei.model.audit import AuditEntry, AuditQuery
from hodei.model.effects import Event
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, Job, JobState, Run
from hodei.ports import JobPage, JobQuery, NodeRunsPage, NodeRunsQuery
from hodei.store import damage, rows
from hodei.store.damage import UNREADABLE, Suspects, fetch, fetch_json, is_text_error, lenient

AUDIT_COLUMNS = ("at_ms", "who", "role", "verb", "target", "code", "request", "remote", "detail")
AUDIT_TABLE = """CREATE TABLE audit (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at_ms INTEGER NOT NULL,
        who TEXT NOT NULL,
        role TEXT NOT NULL,
        verb TEXT NOT NULL,
        target TEXT NOT NULL,
        code TEXT NOT NULL,
        request TEXT NOT NULL,
        remote TEXT NOT NULL
    ) STRICT"""
# The command that was run on a node.
AUDIT_DETAIL = ("ALTER TABLE audit ADD COLUMN detail TEXT NOT NULL DEFAULT ''",)
_NAMES = ", ".join(AUDIT_COLUMNS)
_VALUES = ", ".join(f"value ->> {i}" for i in range(len(AUDIT_COLUMNS)))
_INSERT = f"INSERT INTO audit ({_NAMES}) SELECT {_VALUES} FROM json_each(?)"  # noqa: S608 (constants)


def write_audit(db: sqlite3.Connection, entries: Sequence[AuditEntry]) -> None:
    values = [[getattr(entry, column) for column in AUDIT_COLUMNS] for entry in entries]
    db.execute(_INSERT, (rows.text(values),))


def audit(db: sqlite3.Connection, query: AuditQuery, suspects: Suspects) -> list[AuditEntry]:
    wanted, values = ["at_ms >= ?"], list[int | str]([query.since_ms])
    for column, value in (("who", query.who), ("target", query.target)):
        if value:
            wanted.append(f"{column} = ?")
            values.append(value)
    if query.what:
        things, act = "substr(verb, 1, instr(verb, '.') - 1)", "substr(verb, instr(verb, '.') + 1)"
        wanted.append(f"? IN (verb, {things}, {act})")
        values.append(query.what)
    if query.before:
        wanted.append("seq < ?")
        values.append(query.before)
    order = "DESC"
    if query.after is not None:
        wanted.append("seq > ?")
        values.append(query.after)
        order = "ASC"
    found = fetch_json(
        db,
        f"""SELECT json_group_array(json_array({_NAMES}, seq)) FROM
            (SELECT * FROM audit WHERE {" AND ".join(wanted)} ORDER BY seq {order} LIMIT ?)""",  # noqa: S608 (constants)
        (*values, max(1, query.limit)),
    )
    read = suspects.read("audit", found, rows.audit_from, lambda row: row[-1], _audit_placeholder)
    return sorted(read, key=lambda e: e.seq, reverse=order == "DESC")


def _audit_placeholder(row: Sequence[Any], why: str) -> AuditEntry:
    texts = dict(zip(AUDIT_COLUMNS[1:], map(damage.text_of, row[1:-1]), strict=True))
    return AuditEntry(row[0] if 0 <= row[0] <= rows.LAST_MS else 0, seq=row[-1], **texts)


def prune_audit(db: sqlite3.Connection, before_ms: int, limit: int) -> int:
    """Rows are in order of time, so the oldest have the lowest numbers. Returns the number of deleted rows."""
    deleted = db.execute(
        "DELETE FROM audit WHERE seq IN (SELECT seq FROM audit ORDER BY seq LIMIT ?) AND at_ms < ?", (limit, before_ms)
    )
    return deleted.rowcount


MAX_PAGE = 1000
# With labels jobs are checked one by one: at most this many for a page, which may then be short but not the last.
MAX_SCANNED = 20_000
MAX_RUNS_SCANNED = 50_000
_ALL_STATES: tuple[str, ...] = get_args(JobState)
_MAX_ID = 2**63 - 1

_JOB_COLUMNS = ", ".join([*(f"job.{column}" for column in rows.JOB_STATUS), "spec.body"])
_RUN_COLUMNS = ", ".join(f"run.{column}" for column in rows.RUN)
_EVENT_COLUMNS = ", ".join(rows.EVENT)
_first, _run_key = itemgetter(0), itemgetter(0, 1, 2)  # of a row
_key_of = attrgetter("job", "attempt", "member")


def job(db: sqlite3.Connection, id: JobId, suspects: Suspects) -> Job | None:
    found = fetch(
        db,
        f"SELECT {_JOB_COLUMNS} FROM job LEFT JOIN spec ON spec.job = job.id WHERE job.id = ?",  # noqa: S608 (constants)
        (id,),
    )
    return next(_jobs_from(found, suspects), None)


def _jobs_from(
    found: Iterable[Sequence[Any]], suspects: Suspects, read: Callable[[Sequence[Any]], Job] = rows.job_from
) -> Iterator[Job]:
    return suspects.read("job", found, read, _first, _job_placeholder)


def _job_placeholder(row: Sequence[Any], why: str) -> Job:
    """For this result; the one that is stored later takes its runs into account too."""
    raw = dict(zip(rows.JOB_STATUS, row[:-1], strict=True))
    return damage.job_placeholder(row[0], raw, row[-1], (), why, time.time_ns() // 1_000_000).job


def jobs(db: sqlite3.Connection, query: JobQuery, suspects: Suspects) -> JobPage:
    limit = max(1, min(query.limit, MAX_PAGE))
    if not query.labels:
        found = _job_rows(db, query, query.after, limit + 1)
        page = list(_jobs_from(found[:limit], suspects))
        return JobPage(page, page[-1].id if len(found) > limit else 0)
    page, after, scanned = [], query.after, 0
    while scanned < MAX_SCANNED:
        found = _job_rows(db, query, after, MAX_PAGE)
        for row in found:
            try:
                matches = all_match(query.labels, rows.labels_in(row[-1]))
            except UNREADABLE as error:
                suspects.add("job", row[0], error)
                continue
            if matches:
                if len(page) == limit:
                    return JobPage(page, page[-1].id)
                page += _jobs_from([row], suspects)
        if len(found) < MAX_PAGE:
            return JobPage(page)
        after, scanned = found[-1][0], scanned + len(found)
    return JobPage(page, after)


def _job_rows(db: sqlite3.Connection, query: JobQuery, after: JobId, limit: int) -> list[list[Any]]:
    """The next `limit` jobs below `after`, without regard to labels. Each state is queried separately and the results are
    merged, so that an index gives the order and no query costs more than its page."""
    wanted = ["id < ?"]
    values: list[int | str] = [after or _MAX_ID]
    for column, value in (("project", query.project), ("user", query.user), ("name", query.name)):
        if value:
            wanted.append(f"{column} = ?")
            values.append(value)
    if query.since_ms:
        wanted.append("submitted_ms >= ?")
        values.append(query.since_ms)
    if query.ids:
        wanted.append("id IN (SELECT value FROM json_each(?))")
        values.append(rows.text(query.ids))
    every_state = not query.states or set(query.states) >= set(_ALL_STATES)
    picks, parameters = [], []
    for state in (None,) if every_state else sorted(set(query.states)):
        conditions = wanted if state is None else [*wanted, "state = ?"]
        picks.append(
            f"SELECT id FROM (SELECT id FROM job WHERE {' AND '.join(conditions)} ORDER BY id DESC LIMIT ?)"  # noqa: S608 (constants)
        )
        parameters += [*values, *([] if state is None else [state]), limit]
    found = fetch_json(
        db,
        f"""SELECT json_group_array(json_array({_JOB_COLUMNS})) FROM
            (SELECT id AS picked FROM ({" UNION ALL ".join(picks)}) ORDER BY id DESC LIMIT ?)
            JOIN job ON job.id = picked LEFT JOIN spec ON spec.job = picked""",  # noqa: S608 (constants)
        (*parameters, limit),
    )
    # SQL guarantees no order inside an aggregate.
    return sorted(found, key=lambda row: -row[0])


def active(db: sqlite3.Connection, suspects: Suspects) -> list[tuple[Job, tuple[Run, ...]]]:
    """Row by row: up to a million jobs, once, when the server starts."""
    db.execute("BEGIN")  # all queries see the same snapshot
    # Nothing created here is garbage; collections would double the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        try:
            found = _active(db, suspects)
        except sqlite3.OperationalError as error:
            if not is_text_error(error):
                raise
            with lenient(db):
                found = _active(db, suspects)
        for (state,) in fetch(db, _DISTINCT_STATES):
            if state is not None and state not in _ALL_STATES:
                for (id,) in db.execute("SELECT id FROM job WHERE CAST(state AS BLOB) = CAST(? AS BLOB)", (state,)):
                    suspects.add("job", id, f"the state {damage.text_of(state)[:40]!r}")
    finally:
        if collecting:
            gc.enable()
        db.execute("COMMIT")
    return found


_ACTIVE = "job.state IN ({})".format(", ".join(f"'{state}'" for state in _ALL_STATES if state not in JOB_ENDED))
# From one state to the next by the index: the cost depends on the states, not on the jobs.
_DISTINCT_STATES = """WITH RECURSIVE distinct_states(state) AS (
        SELECT min(state) FROM job
        UNION ALL SELECT (SELECT min(state) FROM job WHERE job.state > distinct_states.state)
            FROM distinct_states WHERE distinct_states.state IS NOT NULL
    ) SELECT state FROM distinct_states"""


def _active(db: sqlite3.Connection, suspects: Suspects) -> list[tuple[Job, tuple[Run, ...]]]:
    runs: dict[JobId, list[Run]] = {}
    for run in _runs_of_current_attempts(db, suspects):
        runs.setdefault(run.job, []).append(run)
    found = db.execute(f"SELECT {_JOB_COLUMNS} FROM job LEFT JOIN spec ON spec.job = job.id WHERE {_ACTIVE}")  # noqa: S608 (constants)
    jobs = sorted(_jobs_from(found, suspects, rows.JobDecoder().job_from), key=lambda job: job.id)
    out = []
    for job in jobs:
        of_job = tuple(runs.get(job.id, ()))
        if job.state in ("scheduled", "running") and not of_job:
            suspects.add("job", job.id, "it is running without any run")
        elif not all(job.spec.has_member(run.member) for run in of_job):
            suspects.add("job", job.id, "it has a run of a member that does not exist")
        out.append((job, of_job))
    return out


def _runs_of_current_attempts(db: sqlite3.Connection, suspects: Suspects) -> Iterator[Run]:
    found = db.execute(
        f"""SELECT {_RUN_COLUMNS} FROM job JOIN run ON run.job = job.id AND run.attempt >= job.first_attempt
            WHERE {_ACTIVE} ORDER BY run.job, run.attempt, run.member"""  # noqa: S608 (constants)
    )
    return _runs_from(found, suspects)


def _runs_from(found: Iterable[Sequence[Any]], suspects: Suspects) -> Iterator[Run]:
    return suspects.read("run", found, rows.run_from, _run_key, _run_placeholder)


def _run_placeholder(row: Sequence[Any], why: str) -> Run:
    return damage.run_placeholder(dict(zip(rows.RUN, row, strict=True)))[0]


def dependents(db: sqlite3.Connection, awaited: Sequence[JobId], limit: int) -> list[tuple[JobId, JobId]]:
    found = fetch_json(
        db,
        """SELECT json_group_array(json_array(awaited, job)) FROM
            (SELECT awaited, job FROM awaits WHERE awaited IN (SELECT value FROM json_each(?))
             ORDER BY awaited, job LIMIT ?)""",
        (rows.text(list(awaited)), limit),
    )
    return sorted((awaited, job) for awaited, job in found)


def counts(db: sqlite3.Connection) -> dict[str, int]:
    found = fetch_json(db, "SELECT json_group_array(json_array(state, jobs)) FROM tally", ())
    return dict.fromkeys(_ALL_STATES, 0) | {state: jobs for state, jobs in found if state in _ALL_STATES}


def states_between(db: sqlite3.Connection, first: JobId, last: JobId) -> dict[str, int]:
    found = fetch_json(
        db,
        """SELECT json_group_array(json_array(state, jobs)) FROM
            (SELECT state, count(*) AS jobs FROM job WHERE id BETWEEN ? AND ? GROUP BY state)""",
        (first, last),
    )
    return dict(sorted((state, jobs) for state, jobs in found if state in _ALL_STATES))


def runs(db: sqlite3.Connection, job: JobId, suspects: Suspects) -> list[Run]:
    found = fetch_json(
        db,
        f"SELECT json_group_array(json_array({_RUN_COLUMNS})) FROM run WHERE job = ?",  # noqa: S608 (constants)
        (job,),
    )
    return sorted(_runs_from(found, suspects), key=lambda run: (run.attempt, run.member))


def run(db: sqlite3.Connection, job: JobId, attempt: int, member: int, suspects: Suspects) -> Run | None:
    found = fetch(
        db,
        f"SELECT {_RUN_COLUMNS} FROM run WHERE job = ? AND attempt = ? AND member = ?",  # noqa: S608 (constants)
        (job, attempt, member),
    )
    return next(_runs_from(found, suspects), None)


def runs_on(db: sqlite3.Connection, query: NodeRunsQuery, suspects: Suspects) -> NodeRunsPage:
    """There is no index by node: every job would pay for a rare query. A page scans a limited number of runs in the order of
    their keys, and says where the next one continues."""
    limit, before = max(1, min(query.limit, MAX_PAGE)), query.after or (_MAX_ID, 0, 0)
    last = fetch(
        db,
        """SELECT job, attempt, member FROM run WHERE (job, attempt, member) < (?, ?, ?)
            ORDER BY job DESC, attempt DESC, member DESC LIMIT 1 OFFSET ?""",
        (*before, MAX_RUNS_SCANNED - 1),
    )
    down_to: tuple[int, int, int] = _run_key(last[0]) if last else (0, 0, 0)
    found = fetch_json(
        db,
        f"""SELECT json_group_array(json_array({_RUN_COLUMNS})) FROM
            (SELECT * FROM run WHERE (job, attempt, member) < (?, ?, ?) AND (job, attempt, member) >= (?, ?, ?)
             AND node = ? AND placed_ms < ? AND (finished_ms = 0 OR finished_ms > ?)
             ORDER BY job DESC, attempt DESC, member DESC LIMIT ?) AS run""",  # noqa: S608 (constants)
        (*before, *down_to, query.node, query.until_ms, query.since_ms, limit),
    )
    runs = sorted(_runs_from(found, suspects), key=_key_of, reverse=True)
    if len(runs) >= limit:
        return NodeRunsPage(runs, _key_of(runs[-1]))
    return NodeRunsPage(runs, down_to if last else None)


def runs_after(
    db: sqlite3.Connection, after: tuple[int, int, int], limit: int, suspects: Suspects
) -> tuple[int, int, int] | None:
    """Read the next `limit` runs in the order of their keys. Returns the last key, None at the end."""
    found = fetch(
        db,
        f"""SELECT {_RUN_COLUMNS} FROM run WHERE (job, attempt, member) > (?, ?, ?)
            ORDER BY job, attempt, member LIMIT ?""",  # noqa: S608 (constants)
        (*after, limit),
    )
    for _ in _runs_from(found, suspects):
        pass
    return _run_key(found[-1]) if len(found) == limit else None


def costs(db: sqlite3.Connection, since_ms: int, until_ms: int) -> list[CostRow]:
    found = fetch_json(
        db,
        """SELECT json_group_array(json_array(project, user, backend, runs, cost)) FROM (
            SELECT job.project, job.user, run.backend, count(*) AS runs, sum(
                CAST(cost_milli AS REAL)
                * (min(CASE run.finished_ms WHEN 0 THEN ?2 ELSE run.finished_ms END, ?2) - max(placed_ms, ?1))
            ) / 3.6e9 AS cost
            FROM run JOIN job ON job.id = run.job
            WHERE cost_milli > 0 AND placed_ms < ?2 AND (run.finished_ms = 0 OR run.finished_ms > ?1)
            GROUP BY job.project, job.user, run.backend ORDER BY job.project, job.user, run.backend)""",
        (since_ms, until_ms),
    )
    return [CostRow(*row) for row in found]


def events(db: sqlite3.Connection, after: int, job: JobId, limit: int, suspects: Suspects) -> list[Event]:
    of_job = "job = ? AND " if job else ""
    found = fetch_json(
        db,
        f"""SELECT json_group_array(json_array({_EVENT_COLUMNS})) FROM
            (SELECT * FROM event WHERE {of_job}seq > ? ORDER BY seq LIMIT ?)""",  # noqa: S608 (constants)
        (*([job] if job else []), after, max(0, limit)),
    )
    read = suspects.read("event", found, rows.event_from, _first, damage.event_placeholder)
    return sorted(read, key=lambda event: event.seq)


def scan(db: sqlite3.Connection, kind: str, after: Any, limit: int, suspects: Suspects) -> Any:
    """See `Store.scan`."""
    if kind == "run":
        return runs_after(db, after or (0, 0, 0), limit, suspects)
    if kind == "job":
        return jobs(db, JobQuery(after=after or 0, limit=limit), suspects).next_after or None
    if kind == "event":
        found: Sequence[Any] = events(db, after or 0, 0, limit, suspects)
        return found[-1].seq if len(found) == limit else None
    if kind == "audit":
        found = audit(db, AuditQuery(after=after or 0, limit=limit), suspects)
        return found[-1].seq if len(found) == limit else None
    if kind == "key":
        query = "SELECT key, fingerprint, jobs, at_ms, rowid FROM key WHERE rowid > ? ORDER BY rowid LIMIT ?"
        found = fetch(db, query, (after or 0, limit))
        for _ in suspects.read("key", found, lambda row: rows.key_from(row[:-1]), _first):
            pass
        return found[-1][-1] if len(found) == limit else None
    return None
