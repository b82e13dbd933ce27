"""Questions to SQLite. Every answer of bounded size comes back as one row of JSON; `writing` tells why."""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from hodei.model.effects import Event
from hodei.model.ids import JobId
from hodei.model.job import Job, Run
from hodei.model.lifecycle import JOB_ENDED, JobState
from hodei.model.selector import all_match
from hodei.ports import JobPage, JobQuery
from hodei.store import rows

MOST_JOBS_IN_A_PAGE = 1000
# With labels the jobs are looked at one by one: so many at most for one page, which may then be short but not the last.
MOST_SCANNED = 20_000
_ALL_STATES: tuple[str, ...] = get_args(JobState)
_ACTIVE = "job.state IN ({})".format(", ".join(f"'{state}'" for state in _ALL_STATES if state not in JOB_ENDED))
_NO_END = 2**63 - 1

_JOB_COLUMNS = ", ".join([*(f"job.{column}" for column in rows.STANDING), "spec.body"])
_RUN_COLUMNS = ", ".join(f"run.{column}" for column in rows.RUN)
_EVENT_COLUMNS = ", ".join(rows.EVENT)


def job(db: sqlite3.Connection, id: JobId) -> Job | None:
    row = db.execute(
        f"SELECT {_JOB_COLUMNS} FROM job JOIN spec ON spec.job = job.id WHERE job.id = ?",  # noqa: S608 (constants)
        (id,),
    ).fetchone()
    return None if row is None else rows.job_from(row)


def jobs(db: sqlite3.Connection, query: JobQuery) -> JobPage:
    limit = max(1, min(query.limit, MOST_JOBS_IN_A_PAGE))
    if not query.labels:
        found = _job_rows(db, query, query.after, limit + 1)
        page = [rows.job_from(row) for row in found[:limit]]
        return JobPage(page, page[-1].id if len(found) > limit else 0)
    page, after, scanned = [], query.after, 0
    while scanned < MOST_SCANNED:
        found = _job_rows(db, query, after, MOST_JOBS_IN_A_PAGE)
        for row in found:
            if all_match(query.labels, rows.labels_in(row[-1])):
                if len(page) == limit:
                    return JobPage(page, page[-1].id)
                page.append(rows.job_from(row))
        if len(found) < MOST_JOBS_IN_A_PAGE:
            return JobPage(page)
        after, scanned = found[-1][0], scanned + len(found)
    return JobPage(page, after)


def _job_rows(db: sqlite3.Connection, query: JobQuery, after: JobId, limit: int) -> list[list[Any]]:
    """The next `limit` jobs below `after`, labels aside.

    Each state is asked for on its own and the answers are merged, so that an index gives the order and no question
    costs more than its page."""
    wanted = ["id < ?"]
    values: list[int | str] = [after or _NO_END]
    for column, value in (("project", query.project), ("user", query.user), ("name", query.name)):
        if value:
            wanted.append(f"{column} = ?")
            values.append(value)
    if query.since_ms:
        wanted.append("submitted_ms >= ?")
        values.append(query.since_ms)
    if query.ids:
        wanted.append("id IN (SELECT value FROM json_each(?))")
        values.append(rows.json_text(query.ids))
    every_state = not query.states or set(query.states) >= set(_ALL_STATES)
    picks, parameters = [], []
    for state in (None,) if every_state else sorted(set(query.states)):
        conditions = wanted if state is None else [*wanted, "state = ?"]
        picks.append(
            f"SELECT id FROM (SELECT id FROM job WHERE {' AND '.join(conditions)} ORDER BY id DESC LIMIT ?)"  # noqa: S608 (constants)
        )
        parameters += [*values, *([] if state is None else [state]), limit]
    found = db.execute(
        f"""SELECT json_group_array(json_array({_JOB_COLUMNS})) FROM
            (SELECT id AS picked FROM ({" UNION ALL ".join(picks)}) ORDER BY id DESC LIMIT ?)
            JOIN job ON job.id = picked JOIN spec ON spec.job = picked""",  # noqa: S608 (constants)
        (*parameters, limit),
    ).fetchone()[0]
    # SQL promises no order inside an aggregate.
    return sorted(rows.rows_in(found), key=lambda row: -row[0])


def active(db: sqlite3.Connection) -> list[tuple[Job, tuple[Run, ...]]]:
    """Row by row: it can be a million jobs, and it is asked once, at the start, when nothing else is busy."""
    runs: dict[JobId, list[Run]] = {}
    db.execute("BEGIN")  # both questions about one and the same moment
    # Nothing made here is garbage; looking for some again and again would double the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for run in _runs_of_current_attempts(db):
            runs.setdefault(run.job, []).append(run)
        found = db.execute(f"SELECT {_JOB_COLUMNS} FROM job JOIN spec ON spec.job = job.id WHERE {_ACTIVE}")  # noqa: S608 (constants)
        jobs = sorted(map(rows.job_from, found), key=lambda job: job.id)
    finally:
        if collecting:
            gc.enable()
        db.execute("COMMIT")
    return [(job, tuple(runs.get(job.id, ()))) for job in jobs]


def _runs_of_current_attempts(db: sqlite3.Connection) -> Iterator[Run]:
    found = db.execute(
        f"""SELECT {_RUN_COLUMNS} FROM job JOIN run ON run.job = job.id AND run.attempt >= job.first_attempt
            WHERE {_ACTIVE} ORDER BY run.job, run.attempt, run.member"""  # noqa: S608 (constants)
    )
    return map(rows.run_from, found)


def dependents(db: sqlite3.Connection, awaited: Sequence[JobId], limit: int) -> list[tuple[JobId, JobId]]:
    found = db.execute(
        """SELECT json_group_array(json_array(awaited, job)) FROM
            (SELECT awaited, job FROM awaits WHERE awaited IN (SELECT value FROM json_each(?))
             ORDER BY awaited, job LIMIT ?)""",
        (rows.json_text(list(awaited)), limit),
    ).fetchone()[0]
    return sorted((awaited, job) for awaited, job in rows.rows_in(found))


def counts(db: sqlite3.Connection) -> dict[str, int]:
    found = db.execute("SELECT json_group_array(json_array(state, jobs)) FROM tally").fetchone()[0]
    return dict.fromkeys(_ALL_STATES, 0) | dict(rows.rows_in(found))


def states_between(db: sqlite3.Connection, first: JobId, last: JobId) -> dict[str, int]:
    found = db.execute(
        """SELECT json_group_array(json_array(state, jobs)) FROM
            (SELECT state, count(*) AS jobs FROM job WHERE id BETWEEN ? AND ? GROUP BY state)""",
        (first, last),
    ).fetchone()[0]
    return dict(sorted(rows.rows_in(found)))


def runs(db: sqlite3.Connection, job: JobId) -> list[Run]:
    found = db.execute(
        f"SELECT json_group_array(json_array({_RUN_COLUMNS})) FROM run WHERE job = ?",  # noqa: S608 (constants)
        (job,),
    ).fetchone()[0]
    return sorted(map(rows.run_from, rows.rows_in(found)), key=lambda run: (run.attempt, run.member))


def run(db: sqlite3.Connection, job: JobId, attempt: int, member: int) -> Run | None:
    row = db.execute(
        f"SELECT {_RUN_COLUMNS} FROM run WHERE job = ? AND attempt = ? AND member = ?",  # noqa: S608 (constants)
        (job, attempt, member),
    ).fetchone()
    return None if row is None else rows.run_from(row)


def events(db: sqlite3.Connection, after: int, job: JobId, limit: int) -> list[Event]:
    of_job = "job = ? AND " if job else ""
    found = db.execute(
        f"""SELECT json_group_array(json_array({_EVENT_COLUMNS})) FROM
            (SELECT * FROM event WHERE {of_job}seq > ? ORDER BY seq LIMIT ?)""",  # noqa: S608 (constants)
        (*([job] if job else []), after, max(0, limit)),
    ).fetchone()[0]
    return sorted(map(rows.event_from, rows.rows_in(found)), key=lambda event: event.seq)
