"""Store files: empty, of older and newer versions, and of other programs."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from builders import a_job, a_key, a_record, a_run
from hodei.model.effects import SaveJob, SaveOverrides, SaveRun
from hodei.model.errors import InvalidInput, Unavailable
from hodei.model.job import Candidate, Decision, Job, Run
from hodei.model.node import NodeOverrides
from hodei.model.outcome import StopReason
from hodei.model.usage import RunUsage
from hodei.store import SqliteStore, rows, schema, writes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hodei.db"


def raw(path: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(path, isolation_level=None))


def test_an_empty_file_becomes_a_store(path: Path):
    path.touch()
    store = SqliteStore(path)
    assert store.open().epoch == 1
    with raw(path) as db:
        assert schema.version_of(db) == schema.VERSION


def test_a_file_of_version_1_is_migrated_and_keeps_everything(path: Path):
    with raw(path) as db:
        schema.migrate(db, upto=1)
        assert schema.version_of(db) == 1
        db.execute("INSERT INTO meta VALUES (1, 'abcdefgh', 4, 7, 9)")
        db.execute(
            """INSERT INTO job (id, state, submitted_ms, changed_ms, reason_code, reason, attempt, failures, losses,
               preemptions, cancel_requested, requeue_requested, queued_ms, not_before_ms, scheduled_ms, started_ms,
               finished_ms, exit_code, nodes, first_attempt, version, project, user, name)
               VALUES (7, 'running', 1, 2, 'C', 'why', 1, 0, 0, 0, 1, 0, 0, 0, 3, 4, 0, NULL, 'n1', 1, 5,
               'lab', 'ada', 'train')"""
        )
        db.execute("""INSERT INTO spec VALUES (7, '{"name":"train","tasks":[{}],"project":"lab","user":"ada"}')""")
        db.execute("INSERT INTO tally VALUES ('running', 1)")
        db.execute(
            """INSERT INTO run (job, attempt, member, task, node, backend, state, placed_ms, started_ms, finished_ms,
               exit_code, reason_code, reason, stop_reason, decision)
               VALUES (7, 1, 0, 'main', 'n1', 'local', 'running', 3, 4, 0, NULL, '', '', '{"code":"drained","detail":"n1"}',
               '{"chosen":{"node":"n1","score":5}}')"""
        )
        db.execute("""INSERT INTO event VALUES (9, 4, 'run.started', 7, '7.0.1', 'n1', '{"pid":12}')""")
        db.execute("""INSERT INTO mark VALUES ('n1', '{"node":"n1","cordoned":true}')""")
        db.execute("INSERT INTO key VALUES ('k', 'f', '[7]', 1)")
    store = SqliteStore(path)
    opened = store.open()
    assert (opened.installation, opened.epoch, opened.last_job, opened.last_event) == ("abcdefgh", 5, 7, 9)
    [(job, (run,))] = store.active()
    assert (job.id, job.spec.name, job.cancel_requested, job.version) == (7, "train", True, 5)
    assert (run.id, run.decision) == ("7.0.1", Decision(Candidate("n1", 5)))
    assert run.stop_reason == StopReason("drained", "n1")
    assert store.events()[0].detail == {"pid": 12}
    assert store.overrides() == [NodeOverrides("n1", cordoned=True)]
    assert store.key("k").jobs == (7,)
    assert store.counts()["running"] == 1


def test_runs_of_a_file_without_usage_have_unknown_usage_and_new_ones_keep_theirs(path: Path):
    with raw(path) as db:
        schema.migrate(db, upto=3)
        db.execute("INSERT INTO meta VALUES (1, 'abcdefgh', 4, 7, 9)")
        db.execute(
            """INSERT INTO run (job, attempt, member, task, node, backend, state, placed_ms, started_ms, finished_ms,
               reason_code, reason) VALUES (7, 1, 0, 'main', 'n1', 'local', 'succeeded', 3, 4, 5, '', '')"""
        )
    store = SqliteStore(path)
    store.open()
    before = store.run("7.0.1")
    assert before.usage is None
    usage = RunUsage(cpu_ms=1500, peak_memory=2**30)
    store.commit([SaveRun(structs.replace(before, usage=usage))])
    assert store.run("7.0.1").usage == usage
    store.close()


def test_opening_twice_migrates_once(path: Path):
    for _ in range(2):
        store = SqliteStore(path)
        store.open()
        store.commit([])
        store.close()
    assert SqliteStore(path).open().epoch == 3


def test_a_failed_migration_keeps_the_previous_version(path: Path, monkeypatch: pytest.MonkeyPatch):
    SqliteStore(path).open()
    broken = ("CREATE TABLE half (a INTEGER) STRICT", "CREATE TABLE job (again INTEGER)")
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, broken))
    with raw(path) as db:
        with pytest.raises(sqlite3.OperationalError):
            schema.migrate(db, upto=schema.VERSION + 1)
        assert schema.version_of(db) == schema.VERSION
        assert db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'half'").fetchone() == (0,)


def test_a_file_of_a_newer_version_is_refused_and_unchanged(path: Path):
    store = SqliteStore(path)
    store.open()
    store.close()
    with raw(path) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(InvalidInput, match="knows only up to") as refusal:
        SqliteStore(path).open()
    assert "newer" in refusal.value.hint
    assert path.read_bytes() == before


def test_a_file_of_another_program_is_refused_and_unchanged(path: Path):
    with raw(path) as db:
        db.execute("CREATE TABLE other (a)")
    before = path.read_bytes()
    with pytest.raises(InvalidInput, match="another program"):
        SqliteStore(path).open()
    assert path.read_bytes() == before


def test_a_file_that_is_not_a_database_is_refused(path: Path):
    path.write_text("this is a text file\n" * 100)
    with pytest.raises(Unavailable) as refusal:
        SqliteStore(path).open()
    assert "not a store" in refusal.value.hint


def test_a_new_file_and_its_journal_are_readable_by_the_owner_only(path: Path):
    old = os.umask(0)
    try:
        store = SqliteStore(path)
        store.open()
    finally:
        os.umask(old)
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["hodei.db", "hodei.db-shm", "hodei.db-wal"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_every_field_of_a_job_and_a_run_has_its_column():
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        schema.migrate(db)
        columns = {table: {row[1] for row in db.execute(f"PRAGMA table_info({table})")} for table in ("job", "run")}
    assert columns["job"] == {*Job.__struct_fields__, "project", "user", "name"} - {"spec"} == set(rows.JOB)
    assert columns["run"] == {*Run.__struct_fields__} - {"id"} == set(rows.RUN)


PLANS = {
    "the newest page": "SELECT id FROM job WHERE id < 9 ORDER BY id DESC LIMIT 5",
    "one state": "SELECT id FROM job WHERE id < 9 AND state = 'failed' ORDER BY id DESC LIMIT 5",
    "one project": "SELECT id FROM job WHERE id < 9 AND project = 'p' ORDER BY id DESC LIMIT 5",
    "one user": "SELECT id FROM job WHERE id < 9 AND user = 'u' ORDER BY id DESC LIMIT 5",
    "one name": "SELECT id FROM job WHERE id < 9 AND name = 'n' ORDER BY id DESC LIMIT 5",
    "what to prune": writes.TO_PRUNE.replace("?", "5"),
    "events of a job": "SELECT * FROM event WHERE job = 1 AND seq > 5 ORDER BY seq LIMIT 5",
    "events": "SELECT * FROM event WHERE seq > 5 ORDER BY seq LIMIT 5",
    "runs of a job": "SELECT * FROM run WHERE job = 5",
}


@pytest.mark.parametrize("sql", PLANS.values(), ids=PLANS.keys())
def test_no_query_sorts_or_reads_a_whole_table(sql: str):
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        schema.migrate(db)
        plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}")]
    assert not [
        line
        for line in plan
        if "SCAN job" in line or "SCAN event" in line or "SCAN run" in line or "TEMP B-TREE" in line
    ], plan
    if " job = 1 " in sql:
        assert "event_job" in plan[0]


def test_a_committed_batch_can_be_queried_with_plain_sqlite(path: Path):
    store = SqliteStore(path)
    store.open()
    store.commit([SaveJob(a_job(1), new=True), SaveRun(a_run(1), new=True), a_record(1, job=1), a_key()])
    store.commit([SaveOverrides(NodeOverrides("n1", cordoned=True))])
    with raw(path) as db:
        found = db.execute("SELECT name, state, json_extract(body, '$.name') FROM job JOIN spec ON job = id").fetchall()
    assert found == [("job-1", "pending", "job-1")]
