"""The durable store: one SQLite file, one writer, a few readers beside it.

Here are connections, transactions, the epoch's fence and what errors mean; the statements are in `writing` and
`queries`, the tables in `schema`. WAL with `synchronous=FULL`: what `commit` has returned for survives power loss.
"""

from __future__ import annotations

import os
import queue
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hodei.model.audit import AuditEntry, AuditQuery
from hodei.model.booking import Booking
from hodei.model.effects import Event, Save, SaveKey
from hodei.model.errors import HodeiError, InvalidInput, StaleEpoch, Unavailable
from hodei.model.ids import JobId, RunId
from hodei.model.job import Job, Run
from hodei.model.node import NodeMarks
from hodei.model.periodic import Periodic
from hodei.model.usage import UsageRow
from hodei.ports import JobPage, JobQuery, Opened
from hodei.store import audits, health, queries, room, rows, schema, usages, writing
from hodei.store.batch import sort_saves

_BUSY_MS = 10_000
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


class SqliteStore:
    """See `ports.Store`. Reads work without `open` if the file is there: a look from outside takes no epoch."""

    def __init__(self, path: Path, *, readers: int = 4, new_installation: Callable[[], str] = new_installation) -> None:
        self.path = path
        self._new_installation = new_installation
        self._writing = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._epoch = 0
        self._closed = False
        # None stands for a reader that nobody has needed yet.
        self._readers: queue.LifoQueue[sqlite3.Connection | None] = queue.LifoQueue()
        for _ in range(max(1, readers)):
            self._readers.put(None)

    def open(self) -> Opened:
        with self._writing, _errors_of(self.path):
            if self._writer is None:
                self._writer = self._connect_writer()
            with _transaction(self._writer) as db:
                db.execute(
                    """INSERT INTO meta (one, installation, epoch, last_job, last_event) VALUES (1, ?, 0, 0, 0)
                       ON CONFLICT DO NOTHING""",
                    (self._new_installation(),),
                )
                db.execute("UPDATE meta SET epoch = epoch + 1")
                opened = Opened(
                    *db.execute("SELECT installation, epoch, last_job, last_event FROM meta").fetchone(),
                )
            self._epoch, self._closed = opened.epoch, False
            return opened

    def commit(self, saves: Sequence[Save]) -> None:
        # Sorted before the lock is taken: a batch that contradicts itself costs nobody anything.
        batch = sort_saves(saves)
        with self._writing, _errors_of(self.path), self._fenced(batch.last_job, batch.last_event) as db:
            writing.write(db, batch)

    def prune(self, *, ended_before_ms: int, limit: int = 1000) -> list[JobId]:
        with self._writing, _errors_of(self.path), self._fenced() as db:
            return writing.prune(db, ended_before_ms, limit)

    def prune_loose(self, *, before_ms: int, limit: int = 1000) -> int:
        with self._writing, _errors_of(self.path), self._fenced() as db:
            return writing.prune_loose(db, before_ms, limit)

    def shrink(self, limit: int) -> int:
        with self._writing, _errors_of(self.path):
            return 0 if self._writer is None else room.shrink(self._writer, limit)

    def active(self) -> list[tuple[Job, tuple[Run, ...]]]:
        with self._reading() as db:
            return queries.active(db)

    def marks(self) -> list[NodeMarks]:
        with self._reading() as db:
            return [rows.marks_from(text) for (text,) in db.execute("SELECT body FROM mark ORDER BY node")]

    def bookings(self) -> list[Booking]:
        with self._reading() as db:
            return [rows.booking_from(text) for (text,) in db.execute("SELECT body FROM booking ORDER BY name")]

    def usage(self) -> list[UsageRow]:
        with self._reading() as db:
            return usages.read(db)

    def periodics(self) -> list[Periodic]:
        with self._reading() as db:
            return [rows.periodic_from(text) for (text,) in db.execute("SELECT body FROM periodic ORDER BY name")]

    def audit(self, query: AuditQuery) -> list[AuditEntry]:
        with self._reading() as db:
            return audits.find(db, query)

    def prune_audit(self, *, before_ms: int, limit: int = 1000) -> int:
        with self._writing, _errors_of(self.path), self._fenced() as db:
            return audits.prune(db, before_ms, limit)

    def states_between(self, first: JobId, last: JobId) -> dict[str, int]:
        with self._reading() as db:
            return queries.states_between(db, first, last)

    def job(self, job: JobId) -> Job | None:
        with self._reading() as db:
            return queries.job(db, job)

    def jobs(self, query: JobQuery) -> JobPage:
        with self._reading() as db:
            return queries.jobs(db, query)

    def counts(self) -> dict[str, int]:
        with self._reading() as db:
            return queries.counts(db)

    def runs(self, job: JobId) -> list[Run]:
        with self._reading() as db:
            return queries.runs(db, job)

    def run(self, run: RunId) -> Run | None:
        try:
            job, member, attempt = (int(part) for part in run.split("."))
        except ValueError:
            return None
        with self._reading() as db:
            return queries.run(db, job, attempt, member)

    def events(self, *, after: int = 0, job: JobId = 0, limit: int = 1000) -> list[Event]:
        with self._reading() as db:
            return queries.events(db, after, job, limit)

    def dependents(self, awaited: Sequence[JobId], limit: int = 10_000) -> list[tuple[JobId, JobId]]:
        with self._reading() as db:
            return queries.dependents(db, awaited, limit)

    def key(self, key: str) -> SaveKey | None:
        with self._reading() as db:
            row = db.execute("SELECT key, fingerprint, jobs, at_ms FROM key WHERE key = ?", (key,)).fetchone()
            return None if row is None else rows.key_from(row)

    def note(self, name: str) -> str:
        with self._reading() as db:
            row = db.execute("SELECT body FROM note WHERE name = ?", (name,)).fetchone()
            return "" if row is None else str(row[0])

    def check_room(self) -> None:
        with _errors_of(self.path):
            health.check_room(self.path)

    def check(self) -> list[tuple[str, bool, str]]:
        try:
            with self._reading() as db:
                return health.check(db, self._writer, self.path)
        except HodeiError as error:
            return [("store", False, f"{error.message}; {error.hint}")]

    def close(self) -> None:
        """Let go of the file. Readers in use are closed by their users as they hand them back."""
        with self._writing:
            self._closed = True
            idle = []
            with suppress(queue.Empty):
                while True:
                    idle.append(self._readers.get_nowait())
            for reader in idle:
                if reader is not None:
                    reader.close()
                self._readers.put(None)
            # The writer last: the last connection to close empties the WAL into the file, and readers cannot.
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    # ------------------------------------------------------------------------------------- connections

    def _connect_writer(self) -> sqlite3.Connection:
        # Made by us rather than by SQLite, so that it is never readable by others, not even for a moment.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = self._connect("rw")
        try:
            schema.version_of(db)  # refuses what is not ours before the first change
            room.prepare(db, self.path)
            if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
                raise Unavailable(
                    f"{self.path} cannot be written ahead (WAL)",
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

    @contextmanager
    def _fenced(self, last_job: JobId = 0, last_event: int = 0) -> Iterator[sqlite3.Connection]:
        """A transaction of the writer that holds the epoch; anyone else's is refused by the statement itself."""
        if self._writer is None:
            raise Unavailable("the store is not open", hint="open it before writing")
        with _transaction(self._writer) as db:
            mine = db.execute(
                """UPDATE meta SET last_job = max(last_job, ?), last_event = max(last_event, ?) WHERE epoch = ?""",
                (last_job, last_event, self._epoch),
            )
            if mine.rowcount != 1:
                raise StaleEpoch(
                    f"another writer has opened {self.path} since",
                    hint="stop this server; the other one has taken over",
                )
            yield db

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
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
        # Some errors of SQLite have rolled back already.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


_HINTS = {
    "SQLITE_FULL": "free some disk space",
    "SQLITE_BUSY": "another program holds the file: close it, then try again",
    "SQLITE_LOCKED": "another program holds the file: close it, then try again",
    "SQLITE_CORRUPT": "stop the server, keep a copy of the file, and restore the last backup",
    "SQLITE_NOTADB": "this is not a store of Hodei: name another file",
    "SQLITE_READONLY": "make the file and its directory writable for this user",
    "SQLITE_CANTOPEN": "check that the directory exists and that this user may read and write there",
    "SQLITE_IOERR": "check the disk (dmesg, free space), then try again",
}


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Errors of SQLite and the system by what the caller can do; errors of our own making stay as they are."""
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
        raise Unavailable(f"the store {path} is out of reach: {error}", hint=_HINTS["SQLITE_CANTOPEN"]) from error
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidInput(f"a value cannot be stored: {error}") from error
