"""The durable store only: file and disk errors, access by other processes, and its checks."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from builders import NOW_MS, a_job, a_record
from hodei.model.affinity import parse_selector
from hodei.model.effects import SaveJob
from hodei.model.errors import InvalidInput, Unavailable
from hodei.ports import JobQuery
from hodei.store import SqliteStore, health, queries, schema, sqlite


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hodei.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    store.open()
    yield store
    store.close()


def new(*ids: int, **fields) -> list[SaveJob]:
    return [SaveJob(a_job(id, **fields), new=True) for id in ids]


def test_a_missing_directory_is_an_error(tmp_path: Path):
    with pytest.raises(Unavailable) as error:
        SqliteStore(tmp_path / "nowhere" / "hodei.db").open()
    assert "directory" in error.value.hint


def test_a_directory_instead_of_a_file_is_an_error(tmp_path: Path):
    with pytest.raises(Unavailable):
        SqliteStore(tmp_path).open()


def test_reading_a_missing_file_is_an_error_and_creates_none(path: Path):
    with pytest.raises(Unavailable):
        SqliteStore(path).counts()
    assert not path.exists()
    assert SqliteStore(path).check()[0][1] is False


def test_a_full_disk_changes_nothing_and_writes_work_again_with_free_space(store: SqliteStore):
    store.commit(new(1))
    store._writer.execute("PRAGMA max_page_count = 40")  # like a full disk
    with pytest.raises(Unavailable) as error:
        store.commit(new(*range(2, 2000)))
    assert "disk space" in error.value.hint
    assert [job.id for job in store.jobs(JobQuery()).jobs] == [1]
    assert store.counts()["pending"] == 1
    store._writer.execute("PRAGMA max_page_count = 1000000")
    store.commit(new(2))
    assert store.counts()["pending"] == 2


def test_a_file_held_by_another_program_is_unavailable_and_then_works_again(path: Path, monkeypatch):
    monkeypatch.setattr(sqlite, "_BUSY_MS", 20)
    store = SqliteStore(path)
    store.open()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable) as error:
        store.commit(new(1))
    assert "another program" in error.value.hint
    other.execute("ROLLBACK")
    other.close()
    store.commit(new(1))
    assert store.job(1) is not None
    store.close()


@pytest.mark.parametrize("name", ["broken \udcff name", "fine"], ids=["not text", "a number beyond 64 bits"])
def test_a_value_that_cannot_be_stored_is_refused_and_leaves_nothing(store: SqliteStore, name: str):
    with pytest.raises(InvalidInput):
        store.commit([*new(1), SaveJob(a_job(2, reason=name, exit_code=2**70 if name == "fine" else 0), new=True)])
    assert store.counts()["pending"] == 0


def test_a_read_only_process_takes_no_epoch_and_changes_nothing(store: SqliteStore, path: Path):
    store.commit(new(1))
    reader = SqliteStore(path)
    assert reader.counts()["pending"] == 1
    assert all(ok for _, ok, _ in reader.check())
    with reader._read() as db, pytest.raises(sqlite3.OperationalError):
        db.execute("DELETE FROM job")
    reader.close()
    store.commit(new(2))


def test_a_closed_store_is_not_readable_until_it_is_opened_again(store: SqliteStore):
    store.commit(new(1))
    store.close()
    with pytest.raises(Unavailable):
        store.job(1)
    store.open()
    assert store.job(1) is not None


def test_more_threads_than_readers_share_the_readers(path: Path):
    store = SqliteStore(path, readers=2)
    store.open()
    store.commit(new(*range(1, 50)))
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: [answers.append(len(store.jobs(JobQuery()).jobs)) for _ in range(20)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [49] * 160
    assert store._readers.qsize() == 2
    store.close()


def test_a_query_by_label_scans_a_bounded_number_of_jobs_and_continues_from_there(store: SqliteStore, monkeypatch):
    monkeypatch.setattr(queries, "MAX_PAGE", 10)
    monkeypatch.setattr(queries, "MAX_SCANNED", 20)
    store.commit([*new(1, labels={"rare": "yes"}), *new(*range(2, 60))])
    pages, after, found = 0, 0, []
    while True:
        page = store.jobs(JobQuery(labels=parse_selector("rare"), after=after))
        found += [job.id for job in page.jobs]
        pages += 1
        after = page.next_after
        if not after:
            break
    assert (pages, found) == (3, [1])


def test_the_checks_report_their_findings(store: SqliteStore):
    found = {name: text for name, _, text in store.check()}
    assert found["store integrity"] == "ok"
    assert found["store journal mode"] == "wal"
    assert found["store synchronous"] == "full"
    assert found["store file mode"] == "0600"
    assert found["store schema"].startswith("version ")
    assert found["store disk space"].endswith("free")


def test_the_checks_report_a_file_that_others_can_read_and_a_nearly_full_disk(store: SqliteStore, monkeypatch):
    store.path.chmod(0o644)
    monkeypatch.setattr(health, "LOW_DISK_BYTES", 2**62)
    assert {name for name, ok, _ in store.check() if not ok} == {"store file mode", "store disk space"}


def test_the_installation_is_created_once(path: Path):
    assert SqliteStore(path, new_installation=lambda: "aaaaaaaa").open().installation == "aaaaaaaa"
    assert SqliteStore(path, new_installation=lambda: "bbbbbbbb").open().installation == "aaaaaaaa"


def test_different_threads_may_commit_one_after_the_other(store: SqliteStore):
    for id in range(1, 6):
        thread = threading.Thread(target=store.commit, args=([*new(id), a_record(id, job=id)],))
        thread.start()
        thread.join()
    assert store.counts()["pending"] == 5


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 63, 64, 65, 511, 513, 1024, 2049])
def test_batches_of_every_size_are_written_completely(store: SqliteStore, count: int):
    ids = range(1, count + 1)
    store.commit([*new(*ids), *(a_record(id, job=id) for id in ids)])
    store.commit([SaveJob(a_job(id, state="held", version=id)) for id in ids])
    assert [(job.id, job.state, job.version) for job, _ in store.active()] == [(id, "held", id) for id in ids]
    assert [event.job for event in store.events(limit=5000)] == list(ids)


def _filled_and_pruned(store: SqliteStore) -> None:
    old = NOW_MS - 1000
    for first in range(1, 12_001, 2000):
        jobs = [
            a_job(id, state="succeeded", changed_ms=old, annotations={"n": "x" * 1000})
            for id in range(first, first + 2000)
        ]
        store.commit([SaveJob(job, new=True) for job in jobs])
    while store.prune(ended_before_ms=NOW_MS):
        pass


def _shrink(store: SqliteStore) -> int:
    total = 0
    while pages := store.shrink(500):
        assert pages <= 500
        total += pages
    return total


def test_space_of_pruned_jobs_is_freed_in_small_steps(tmp_path: Path):
    store = SqliteStore(tmp_path / "hodei.db")
    store.open()
    _filled_and_pruned(store)
    assert _shrink(store) > 1000
    store.commit([SaveJob(a_job(20_000), new=True)])
    store.close()
    assert (tmp_path / "hodei.db").stat().st_size < 6 << 20
    reopened = SqliteStore(tmp_path / "hodei.db")
    reopened.open()
    assert reopened.job(20_000) == a_job(20_000)
    assert ("store integrity", True, "ok") in reopened.check()
    reopened.close()


def test_a_small_file_of_an_older_version_gets_incremental_vacuum_when_it_is_opened(tmp_path: Path):
    path = tmp_path / "hodei.db"
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    schema.migrate(db, upto=1)
    assert db.execute("PRAGMA auto_vacuum").fetchone() == (0,)
    db.close()
    store = SqliteStore(path)
    store.open()
    _filled_and_pruned(store)
    assert _shrink(store) > 1000
    store.close()
