"""The schema of the SQLite file and its migrations.

`MIGRATIONS[n]` leads from version n to n + 1, each in one transaction; `PRAGMA user_version` is the version of a file. A
released migration is never edited: a change is a new one at the end.
"""

from __future__ import annotations

import sqlite3

from hodei.model.errors import InvalidInput
from hodei.store import quarantine, queries

APPLICATION_ID = 0x484F4445  # "HODE": marks files of Hodei
ENDED = "state IN ('succeeded', 'failed', 'cancelled')"

_VERSION_1 = (
    # One row: the highest numbers ever used, which must survive pruning, and the epoch that fences off older writers.
    """CREATE TABLE meta (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        installation TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        last_job INTEGER NOT NULL,
        last_event INTEGER NOT NULL
    ) STRICT""",
    # Small rows, because each is rewritten several times; the spec never is, so it has a table of its own.
    """CREATE TABLE job (
        id INTEGER PRIMARY KEY,
        state TEXT NOT NULL,
        submitted_ms INTEGER NOT NULL,
        changed_ms INTEGER NOT NULL,
        reason_code TEXT NOT NULL,
        reason TEXT NOT NULL,
        attempt INTEGER NOT NULL,
        failures INTEGER NOT NULL,
        losses INTEGER NOT NULL,
        preemptions INTEGER NOT NULL,
        cancel_requested INTEGER NOT NULL,
        requeue_requested INTEGER NOT NULL,
        queued_ms INTEGER NOT NULL,
        not_before_ms INTEGER NOT NULL,
        scheduled_ms INTEGER NOT NULL,
        started_ms INTEGER NOT NULL,
        finished_ms INTEGER NOT NULL,
        exit_code INTEGER,
        nodes TEXT NOT NULL DEFAULT '',
        first_attempt INTEGER NOT NULL DEFAULT 0,
        version INTEGER NOT NULL,
        failure TEXT NOT NULL DEFAULT '',
        suspend_requested INTEGER NOT NULL DEFAULT 0,
        move TEXT NOT NULL DEFAULT '',
        escalation_state TEXT NOT NULL DEFAULT '',
        last_preemption TEXT NOT NULL DEFAULT '',
        project TEXT NOT NULL,
        user TEXT NOT NULL,
        name TEXT NOT NULL
    ) STRICT""",
    # Every index implicitly ends with the id, so each of these gives its jobs in order of id.
    "CREATE INDEX job_state ON job (state)",
    "CREATE INDEX job_project ON job (project)",
    "CREATE INDEX job_user ON job (user)",
    "CREATE INDEX job_name ON job (name)",
    f"CREATE INDEX job_ended ON job (changed_ms) WHERE {ENDED}",
    "CREATE TABLE spec (job INTEGER PRIMARY KEY, body TEXT NOT NULL) STRICT",
    # The dependents of a job; the other direction is in their specs.
    """CREATE TABLE awaits (
        awaited INTEGER NOT NULL,
        job INTEGER NOT NULL,
        PRIMARY KEY (awaited, job)
    ) STRICT, WITHOUT ROWID""",
    "CREATE TABLE tally (state TEXT PRIMARY KEY, jobs INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    # A run's id is its three numbers, so it is not stored as text again.
    """CREATE TABLE run (
        job INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        member INTEGER NOT NULL,
        task TEXT NOT NULL,
        node TEXT NOT NULL,
        backend TEXT NOT NULL,
        state TEXT NOT NULL,
        placed_ms INTEGER NOT NULL,
        started_ms INTEGER NOT NULL,
        finished_ms INTEGER NOT NULL,
        exit_code INTEGER,
        reason_code TEXT NOT NULL,
        reason TEXT NOT NULL,
        stop_reason TEXT,
        decision TEXT,
        rank INTEGER NOT NULL DEFAULT 0,
        checkpoint_ms INTEGER NOT NULL DEFAULT 0,
        grant TEXT,
        kind TEXT NOT NULL DEFAULT '',
        health TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (job, attempt, member)
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE event (
        seq INTEGER PRIMARY KEY,
        at_ms INTEGER NOT NULL,
        kind TEXT NOT NULL,
        job INTEGER NOT NULL,
        run TEXT NOT NULL,
        node TEXT NOT NULL,
        detail TEXT NOT NULL
    ) STRICT""",
    "CREATE INDEX event_job ON event (job)",
    "CREATE TABLE mark (node TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT",
    "CREATE TABLE reservation (name TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT",
    # Usage of accounts, by bucket of time; amounts do not fit into 64 bits.
    """CREATE TABLE usage (
        path TEXT NOT NULL,
        resource TEXT NOT NULL,
        start_ms INTEGER NOT NULL,
        width_ms INTEGER NOT NULL,
        amount TEXT NOT NULL,
        PRIMARY KEY (path, resource, start_ms)
    ) STRICT, WITHOUT ROWID""",
    "CREATE TABLE note (name TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT",
    "CREATE TABLE periodic (name TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT",
    queries.AUDIT_TABLE,
    # Rows are in order of time, so the oldest keys have the lowest rowids.
    """CREATE TABLE key (
        key TEXT PRIMARY KEY,
        fingerprint TEXT NOT NULL,
        jobs TEXT NOT NULL,
        at_ms INTEGER NOT NULL
    ) STRICT""",
)

# Raw copies of damaged rows, and what was done about each.
_VERSION_2 = quarantine.TABLE

# What a run used, as JSON.
_VERSION_4 = ("ALTER TABLE run ADD COLUMN usage TEXT",)

# Nodes that were ordered and are not reported stopped.
_VERSION_5 = ("CREATE TABLE node_order (node TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT",)

_VERSION_6 = ("ALTER TABLE run ADD COLUMN cost_milli INTEGER NOT NULL DEFAULT 0",)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    _VERSION_1,
    _VERSION_2,
    queries.AUDIT_DETAIL,
    _VERSION_4,
    _VERSION_5,
    _VERSION_6,
)
VERSION = len(MIGRATIONS)


def version_of(db: sqlite3.Connection) -> int:
    """The version of this file; InvalidInput for a file of another program or of a newer Hodei. Changes nothing."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    application: int = db.execute("PRAGMA application_id").fetchone()[0]
    empty = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if application != APPLICATION_ID and not empty:
        raise InvalidInput("this SQLite file belongs to another program", hint="name another file for the store")
    if version > VERSION:
        raise InvalidInput(
            f"the store has schema version {version}, and this program knows only up to {VERSION}",
            hint="it was last opened by a newer Hodei: upgrade this one, or restore a backup from before the upgrade",
        )
    return version


def migrate(db: sqlite3.Connection, *, upto: int = VERSION) -> None:
    """Apply the missing migrations; safe when several programs open the file at once."""
    while version_of(db) < upto:
        db.execute("BEGIN IMMEDIATE")
        try:
            # Checked again under the lock: another program may have migrated in between.
            version = version_of(db)
            if version < upto:
                for statement in MIGRATIONS[version]:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {version + 1}")
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
