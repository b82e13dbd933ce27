"""The durable store: one SQLite file, one writer, a few readers.

Connections, transactions, the fence by epoch and the meaning of errors are here; statements are in `writes` and
`queries`, tables in `schema`. WAL with `synchronous=FULL`: a commit that has returned survives power loss.
"""

from __future__ import annotations

import os
import queue
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from hodei.model.accounting import CostRow, UsageRow
from hodei.model.audit import AuditEntry, AuditQuery, DamagedRecord
from hodei.model.capacity import NodeOrder
from hodei.model.cron import Periodic
from hodei.model.effects import Event, Save, SaveKey
from hodei.model.errors import HodeiError, InvalidInput, StaleEpoch, Unavailable
from hodei.model.ids import JobId, RunId
from hodei.model.job import Job, Run
from hodei.model.node import NodeOverrides
from hodei.model.reservation import Reservation
from hodei.ports import JobPage, JobQuery, NodeRunsPage, NodeRunsQuery, Opened, lost_key
from hodei.store import health, quarantine, queries, rows, schema, writes
from hodei.store.batch import sort_saves
from hodei.store.damage import Suspects, fetch

T = TypeVar("T")
_BUSY_MS = 10_000
_INSTALLATION = re.compile("[a-z2-7]{8}")
# A file up to this size is checked when it is opened, which takes about a second. `hodei doctor` checks any file.
_CHECKED_BYTES = 64 << 20
_LAST_EPOCH = 2**62
_WRITER = (
    "PRAGMA synchronous = FULL",
    "PRAGMA cache_size = -65536",  # KiB
    "PRAGMA temp_store = MEMORY",
    # Fewer, larger checkpoints: a page that changed ten times since the last one is copied once.
    "PRAGMA wal_autocheckpoint = 4000",
    "PRAGMA journal_size_limit = 67108864",
)


def new_installation() -> str:
    """Eight lower-case base32 characters."""
    return "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz234567") for _ in range(8))


def from_url(url: str, home: Path) -> SqliteStore:
    """`sqlite:FILE`, relative to the home directory; `sqlite:///FILE` for an absolute path; `sqlite:` for hodei.db."""
    path = url.partition(":")[2].removeprefix("//")
    return SqliteStore(home / (path or "hodei.db"))


class SqliteStore:
    """See `ports.Store`. Reads work without `open` if the file exists: a process that only reads takes no epoch."""

    def __init__(self, path: Path, *, readers: int = 4, new_installation: Callable[[], str] = new_installation) -> None:
        self.path = path
        self._new_installation = new_installation
        self._lock = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._epoch = 0
        self._closed = False
        self._suspects = Suspects()
        # None stands for a reader that is not connected yet.
        self._readers: queue.LifoQueue[sqlite3.Connection | None] = queue.LifoQueue()
        for _ in range(max(1, readers)):
            self._readers.put(None)

    def open(self) -> Opened:
        with self._lock, _errors_of(self.path):
            if self._writer is None:
                self._writer = self._open_checked()
            with _transaction(self._writer) as db:
                if db.execute("SELECT NOT EXISTS (SELECT 1 FROM meta) AND EXISTS (SELECT 1 FROM job)").fetchone()[0]:
                    # Under another name none of its runs would be found, and all would run a second time.
                    raise self._damaged("the name of the installation is missing")
                db.execute(
                    """INSERT INTO meta (one, installation, epoch, last_job, last_event) VALUES (1, ?, 0, 0, 0)
                       ON CONFLICT DO NOTHING""",
                    (self._new_installation(),),
                )
                if not 0 <= db.execute("SELECT epoch FROM meta").fetchone()[0] <= _LAST_EPOCH:
                    raise self._damaged("its epoch cannot be read")
                quarantine.renumber(db, time.time_ns() // 1_000_000)
                db.execute("UPDATE meta SET epoch = epoch + 1")
                # No number is used twice, whatever the row says.
                db.execute(
                    """UPDATE meta SET last_job = max(last_job, (SELECT coalesce(max(id), 0) FROM job), 0),
                        last_event = max(last_event, (SELECT coalesce(max(seq), 0) FROM event), 0)"""
                )
                rows.recount(db)
                opened = Opened(*db.execute("SELECT installation, epoch, last_job, last_event FROM meta").fetchone())
                if not _INSTALLATION.fullmatch(opened.installation):
                    raise self._damaged("the name of the installation cannot be read")
            self._epoch, self._closed = opened.epoch, False
            return opened

    def commit(self, saves: Sequence[Save]) -> None:
        # Sorted before the lock is taken: a contradictory batch delays no other writer.
        batch = sort_saves(saves)
        with self._write(batch.last_job, batch.last_event) as db:
            writes.write(db, batch)

    def repair_conflicts(self, saves: Sequence[Save], now_ms: int) -> list[DamagedRecord]:
        batch = sort_saves(saves)
        with self._write() as db:
            return quarantine.repair_conflicts(db, batch, now_ms)

    def prune(self, *, ended_before_ms: int, limit: int = 1000) -> list[JobId]:
        with self._write() as db:
            return writes.prune(db, ended_before_ms, limit)

    def prune_unattached(self, *, before_ms: int, limit: int = 1000) -> int:
        with self._write() as db:
            return writes.prune_unattached(db, before_ms, limit)

    def shrink(self, limit: int) -> int:
        with self._lock, _errors_of(self.path):
            return 0 if self._writer is None else health.shrink(self._writer, limit)

    def active(self) -> list[tuple[Job, tuple[Run, ...]]]:
        with self._read() as db:
            return queries.active(db, self._suspects)

    def overrides(self) -> list[NodeOverrides]:
        return self._read_all("node mark", "SELECT node, body FROM mark ORDER BY node", rows.overrides_from)

    def node_orders(self) -> list[NodeOrder]:
        return self._read_all("node order", "SELECT node, body FROM node_order ORDER BY node", rows.node_order_from)

    def reservations(self) -> list[Reservation]:
        return self._read_all("reservation", "SELECT name, body FROM reservation ORDER BY name", rows.reservation_from)

    def periodics(self) -> list[Periodic]:
        return self._read_all("periodic job", "SELECT name, body FROM periodic ORDER BY name", rows.periodic_from)

    def _read_all(self, kind: str, sql: str, decode: Callable[[Sequence[Any]], T]) -> list[T]:
        with self._read() as db:
            return list(self._suspects.read(kind, fetch(db, sql), decode, itemgetter(0)))

    def usage(self) -> list[UsageRow]:
        with self._read() as db:
            return writes.read_usage(db, self._suspects)

    def audit(self, query: AuditQuery) -> list[AuditEntry]:
        with self._read() as db:
            return queries.audit(db, query, self._suspects)

    def prune_audit(self, *, before_ms: int, limit: int = 1000) -> int:
        with self._write() as db:
            return queries.prune_audit(db, before_ms, limit)

    def states_between(self, first: JobId, last: JobId) -> dict[str, int]:
        with self._read() as db:
            return queries.states_between(db, first, last)

    def job(self, job: JobId) -> Job | None:
        with self._read() as db:
            return queries.job(db, job, self._suspects)

    def jobs(self, query: JobQuery) -> JobPage:
        with self._read() as db:
            return queries.jobs(db, query, self._suspects)

    def counts(self) -> dict[str, int]:
        with self._read() as db:
            return queries.counts(db)

    def runs(self, job: JobId) -> list[Run]:
        with self._read() as db:
            return queries.runs(db, job, self._suspects)

    def run(self, run: RunId) -> Run | None:
        try:
            job, member, attempt = (int(part) for part in run.split("."))
        except ValueError:
            return None
        with self._read() as db:
            return queries.run(db, job, attempt, member, self._suspects)

    def runs_on(self, query: NodeRunsQuery) -> NodeRunsPage:
        with self._read() as db:
            return queries.runs_on(db, query, self._suspects)

    def costs(self, since_ms: int, until_ms: int) -> list[CostRow]:
        with self._read() as db:
            return queries.costs(db, since_ms, until_ms)

    def events(self, *, after: int = 0, job: JobId = 0, limit: int = 1000) -> list[Event]:
        with self._read() as db:
            return queries.events(db, after, job, limit, self._suspects)

    def dependents(self, awaited: Sequence[JobId], limit: int = 10_000) -> list[tuple[JobId, JobId]]:
        with self._read() as db:
            return queries.dependents(db, awaited, limit)

    def key(self, key: str) -> SaveKey | None:
        with self._read() as db:
            found = fetch(db, "SELECT key, fingerprint, jobs, at_ms FROM key WHERE key = ?", (key,))
            return next(
                self._suspects.read("key", found, rows.key_from, itemgetter(0), lambda row, _: lost_key(key)), None
            )

    def note(self, name: str) -> str:
        with self._read() as db:
            found = fetch(db, "SELECT body FROM note WHERE name = ?", (name,))
        if found and not isinstance(found[0][0], str):
            self._suspects.add("note", name, "not text")
            return ""
        return found[0][0] if found else ""

    @property
    def suspects(self) -> list[tuple[str, JobId]]:
        return [(kind, quarantine.job_of_key(kind, key)) for kind, key in list(self._suspects.seen)]

    def mark_suspect(self, kind: str, key: JobId | str, reason: str) -> None:
        self._suspects.add(kind, key, reason)

    def repair(self, now_ms: int, known: quarantine.Known | None = None) -> list[DamagedRecord]:
        seen = dict(self._suspects.seen)
        if not seen:
            return []
        with self._write() as db:
            found = quarantine.repair(db, seen, known or {}, now_ms)
        for key in seen:
            self._suspects.seen.pop(key, None)
        return found

    def damaged(self) -> list[DamagedRecord]:
        with self._read() as db:
            return quarantine.list_damaged(db)

    def scan(self, kind: str, after: Any, limit: int) -> Any:
        with self._read() as db:
            return queries.scan(db, kind, after, limit, self._suspects)

    def check_disk_space(self) -> None:
        with _errors_of(self.path):
            health.check_disk_space(self.path)

    def check(self) -> list[tuple[str, bool, str]]:
        try:
            with self._read() as db:
                return health.check(db, self._writer, self.path)
        except HodeiError as error:
            return [("store", False, f"{error.message}; {error.hint}")]

    def close(self) -> None:
        """Readers in use are closed when their users return them."""
        with self._lock:
            self._closed = True
            idle = []
            with suppress(queue.Empty):
                while True:
                    idle.append(self._readers.get_nowait())
            for reader in idle:
                if reader is not None:
                    reader.close()
                self._readers.put(None)
            # The writer last: the last connection that closes moves the WAL into the file, which readers cannot do.
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _open_checked(self) -> sqlite3.Connection:
        """The writer's connection. Unavailable if the structure of the file is damaged."""
        db = self._connect_writer()
        try:
            if self.path.stat().st_size <= _CHECKED_BYTES:
                problems = [text for (text,) in db.execute("PRAGMA quick_check(3)")]
                if problems != ["ok"]:
                    raise self._damaged("; ".join(problems)[:500])
        except BaseException:
            db.close()
            raise
        return db

    def _connect_writer(self) -> sqlite3.Connection:
        # Created here and not by SQLite, so that other users can never read it.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = self._connect("rw")
        try:
            schema.version_of(db)  # refuses files of other programs before the first change
            health.prepare(db, self.path)
            if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
                raise Unavailable(
                    f"{self.path} does not support write-ahead logging (WAL)",
                    hint="put the store on a local disk, not a network share",
                )
            for pragma in _WRITER:
                db.execute(pragma)
            schema.migrate(db)
        except BaseException:
            db.close()
            raise
        return db

    def _connect(self, mode: str) -> sqlite3.Connection:
        db = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,  # transactions begin and end where the code says so
            check_same_thread=False,
            cached_statements=256,
            timeout=_BUSY_MS / 1000,
        )
        if mode == "ro":
            db.execute("PRAGMA query_only = 1")
            db.execute("PRAGMA cache_size = -8192")
        return db

    def _damaged(self, what: str) -> Unavailable:
        return Unavailable(f"the store {self.path} is damaged: {what}", hint=_HINTS["SQLITE_CORRUPT"])

    @contextmanager
    def _write(self, last_job: JobId = 0, last_event: int = 0) -> Iterator[sqlite3.Connection]:
        """A transaction of the writer, refused unless it holds the epoch."""
        with self._lock, _errors_of(self.path):
            if self._writer is None:
                raise Unavailable("the store is not open", hint="open it before writing")
            with _transaction(self._writer) as db:
                fence = db.execute(
                    "UPDATE meta SET last_job = max(last_job, ?), last_event = max(last_event, ?) WHERE epoch = ?",
                    (last_job, last_event, self._epoch),
                )
                if fence.rowcount != 1:
                    raise StaleEpoch(
                        f"another writer has opened {self.path} since",
                        hint="stop this server; the other one has taken over",
                    )
                yield db

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with _errors_of(self.path):
            db = self._readers.get()
            try:
                if db is None:
                    if self._closed:
                        raise Unavailable("the store is closed", hint="open it again first")
                    db = self._connect("ro")
                yield db
            finally:
                if self._closed and db is not None:
                    db.close()
                    db = None
                self._readers.put(db)


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        # After some errors SQLite has rolled back already.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


_RESTORE = (
    "stop the server, keep a copy of the file, and restore the last backup (docs/how-to/run-as-a-service.md#restore)"
)
_HINTS = {
    "SQLITE_FULL": "free some disk space",
    "SQLITE_BUSY": "another program holds the file: close it, then try again",
    "SQLITE_LOCKED": "another program holds the file: close it, then try again",
    "SQLITE_CORRUPT": _RESTORE,
    "SQLITE_NOTADB": f"this is not a store of Hodei, or its first page was overwritten: {_RESTORE}",
    "SQLITE_READONLY": "make the file and its directory writable for this user",
    "SQLITE_CANTOPEN": "check that the directory exists and that this user may read and write there",
    "SQLITE_IOERR": "check the disk (dmesg, free space), then try again",
}


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Translates errors of SQLite and the system to what the caller can do; programming errors stay as they are."""
    try:
        yield
    except (sqlite3.ProgrammingError, sqlite3.IntegrityError):
        raise
    except sqlite3.DatabaseError as error:
        name = getattr(error, "sqlite_errorname", "")
        kind = "_".join(name.split("_")[:2])
        hint = _HINTS.get(kind, "run `hodei doctor`")
        raise Unavailable(f"the store {path} does not answer: {error}", hint=hint) from error
    except OSError as error:
        raise Unavailable(f"the store {path} cannot be reached: {error}", hint=_HINTS["SQLITE_CANTOPEN"]) from error
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidInput(f"a value cannot be stored: {error}") from error
