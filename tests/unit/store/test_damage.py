"""A damaged record affects no other: every query works, and the damaged record is quarantined and reported, never deleted."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from builders import NOW_MS, a_job, a_key, a_record, a_run
from hodei.model.accounting import UsageRow
from hodei.model.audit import AuditEntry, AuditQuery
from hodei.model.cron import Periodic
from hodei.model.effects import (
    Save,
    SaveAudit,
    SaveJob,
    SaveOverrides,
    SavePeriodic,
    SaveReservation,
    SaveRun,
    SaveUsage,
    SaveValue,
)
from hodei.model.errors import Conflict, NotFound, Unavailable
from hodei.model.job import Candidate, Decision, GangRules
from hodei.model.node import NodeOverrides
from hodei.model.reservation import Reservation
from hodei.ports import JobQuery
from hodei.store import SqliteStore

_DECISION = Decision(Candidate("n1", 1))
KINDS = ("job", "run", "event", "audit", "key")


def everything() -> list[Save]:
    """Jobs in every state, and one record of every other kind."""
    spec = a_job(1).spec
    return [
        SaveJob(a_job(1, state="pending"), new=True),
        SaveJob(a_job(2, state="running", attempt=1, first_attempt=1), new=True),
        SaveJob(a_job(3, state="succeeded", attempt=1, finished_ms=NOW_MS, exit_code=0), new=True),
        SaveJob(a_job(4, state="held"), new=True),
        *(SaveRun(structs.replace(a_run(id, state=state), decision=_DECISION), new=True)
          for id, state in ((2, "running"), (3, "succeeded"))),
        *(a_record(seq, job=seq % 4, detail={"a": 1}) for seq in range(1, 6)),
        SaveAudit(AuditEntry(NOW_MS, "ada", "user", "jobs.submit", "1")),
        SaveOverrides(NodeOverrides("n1", labels={"a": "b"})),
        SaveReservation(Reservation("b1", "p", NOW_MS, NOW_MS + 1000, (("n1", {"cpu": 1000}),))),
        SavePeriodic(Periodic("nightly", "0 3 * * *", spec)),
        SaveUsage((UsageRow(("org", "p"), "cpu", 0, 3_600_000, 5),)),
        SaveValue("backends", "{}"),
        a_key("k1", jobs=(1,)),
    ]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = SqliteStore(tmp_path / "hodei.db")
    store.open()
    store.commit(everything())
    store.close()
    return tmp_path / "hodei.db"


def damage(path: Path, sql: str, *values: object) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        assert db.execute(sql, values).rowcount > 0
    finally:
        db.close()


def read_all(store: SqliteStore) -> dict[str, object]:
    """All reads of a server; none may fail."""
    jobs = store.jobs(JobQuery()).jobs
    store.jobs(JobQuery(states=("pending", "running")))
    return {
        "active": store.active(),
        "jobs": jobs,
        "each": [store.job(job.id) for job in jobs],
        "runs": [store.runs(job.id) for job in jobs],
        "events": store.events(),
        "audit": store.audit(AuditQuery()),
        "overrides": store.overrides(),
        "reservations": store.reservations(),
        "periodics": store.periodics(),
        "usage": store.usage(),
        "key": store.key("k1"),
        "note": store.note("backends"),
        "counts": store.counts(),
    }


@pytest.fixture
def opened(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    yield store
    store.close()


DAMAGES = {
    "a spec that is not JSON": ("UPDATE spec SET body = '{garbage' WHERE job = ?", 1),
    "a spec of another shape": ("""UPDATE spec SET body = '{"name": 7}' WHERE job = ?""", 1),
    "a missing spec": ("DELETE FROM spec WHERE job = ?", 1),
    "a spec without tasks": ("""UPDATE spec SET body = '{"name": "x", "tasks": []}' WHERE job = ?""", 1),
    "a spec that is not text": ("UPDATE spec SET body = CAST(x'ff00fe' AS TEXT) WHERE job = ?", 1),
    "an unknown state": ("UPDATE job SET state = 'flying' WHERE id = ?", 1),
    "a state that is not text": ("UPDATE job SET state = CAST(x'ff' AS TEXT) WHERE id = ?", 1),
    "a time out of range": ("UPDATE job SET submitted_ms = 9000000000000000 WHERE id = ?", 1),
    "a negative number": ("UPDATE job SET attempt = -1 WHERE id = ?", 1),
    "a reason that is not text": ("UPDATE job SET reason = CAST(x'ff' AS TEXT) WHERE id = ?", 1),
    "an escalation that is not JSON": ("UPDATE job SET escalation_state = '{' WHERE id = ?", 1),
    "a move that is not JSON": ("UPDATE job SET move = 'off n1' WHERE id = ?", 1),
    "the spec of a running job": ("UPDATE spec SET body = '{garbage' WHERE job = ?", 2),
    "the state of a running job": ("UPDATE job SET state = 'flying' WHERE id = ?", 2),
    "the spec of an ended job": ("UPDATE spec SET body = 'x' WHERE job = ?", 3),
    "the state of a run": ("UPDATE run SET state = 'flying' WHERE job = ?", 2),
    "the decision of a run": ("UPDATE run SET decision = '{' WHERE job = ?", 2),
    "the grant of a run": ("UPDATE run SET grant = '[' WHERE job = ?", 2),
    "the usage of a run": ("UPDATE run SET usage = '[' WHERE job = ?", 2),
    "a negative usage of a run": ("""UPDATE run SET usage = '{"cpu_ms":-1}' WHERE job = ?""", 2),
    "the node of a run": ("UPDATE run SET node = CAST(x'ff' AS TEXT) WHERE job = ?", 2),
    "the member of a run": ("UPDATE run SET member = 99 WHERE job = ?", 2),
    "an event's detail": ("UPDATE event SET detail = '[' WHERE seq = ?", 2),
    "an event's kind": ("UPDATE event SET kind = CAST(x'ff' AS TEXT) WHERE seq = ?", 2),
    "an event's time": ("UPDATE event SET at_ms = -1 WHERE seq = ?", 2),
    "a row of the audit": ("UPDATE audit SET who = CAST(x'ff' AS TEXT) WHERE seq = ?", 1),
    "a node override": ("UPDATE mark SET body = '{' WHERE node = ?", "n1"),
    "a reservation": ("UPDATE reservation SET body = '{' WHERE name = ?", "b1"),
    "a reservation's name": ("UPDATE reservation SET name = CAST(x'ff' AS TEXT) WHERE name = ?", "b1"),
    "a periodic job": ("UPDATE periodic SET body = replace(body, '0 3 * * *', 'often') WHERE name = ?", "nightly"),
    "usage": ("UPDATE usage SET amount = 'much' WHERE resource = ?", "cpu"),
    "the account of usage": ("UPDATE usage SET path = '{' WHERE resource = ?", "cpu"),
    "a note": ("UPDATE note SET body = CAST(x'ff' AS TEXT) WHERE name = ?", "backends"),
    "a key": ("UPDATE key SET jobs = '{' WHERE key = ?", "k1"),
}


@pytest.mark.parametrize("damaged", DAMAGES)
def test_one_damaged_record_is_quarantined_and_all_others_are_intact(path: Path, opened: SqliteStore, damaged: str):
    damage(path, *DAMAGES[damaged])
    opened.open()
    before = read_all(opened)
    assert [job.id for job in before["jobs"]] == [4, 3, 2, 1]
    assert opened.suspects
    found = opened.repair(NOW_MS + 5)
    assert found
    assert opened.suspects == []
    assert opened.damaged() == found
    assert all(each.at_ms == NOW_MS + 5 and each.reason and each.outcome for each in found)
    after = read_all(opened)
    assert opened.suspects == [], "the replacement cannot be read"
    assert sum(after["counts"].values()) == 4
    kept = opened._writer.execute("SELECT count(*), min(length(body)) FROM quarantine").fetchone()
    assert kept[0] == len(found)
    assert kept[1] > 2
    touched = {each.job for each in found}
    for job in after["jobs"]:
        if job.id not in touched:
            assert job == next(save.job for save in everything() if isinstance(save, SaveJob) and save.job.id == job.id)
    assert len(after["events"]) == 5


def test_a_running_job_whose_spec_is_lost_continues_and_its_node_is_cordoned(path: Path, opened: SqliteStore):
    damage(path, "UPDATE spec SET body = '{garbage' WHERE job = 2")
    opened.open()
    opened.active()
    (found,) = opened.repair(NOW_MS)
    ((job, (run,)),) = [each for each in opened.active() if each[0].id == 2]
    assert (job.state, job.spec.restart, run.id, run.state) == ("running", "never", "2.0.1", "running")
    assert "cordoned" in found.outcome
    assert opened.overrides() == [NodeOverrides("n1", cordoned=True, labels={"a": "b"})]


def test_a_running_job_with_a_readable_request_keeps_its_allocation(path: Path, opened: SqliteStore):
    request = a_job(2).spec.tasks[0].request
    assert request
    damage(path, """UPDATE spec SET body = replace(body, '"name"', '"name') WHERE job = 2""")
    opened.open()
    opened.active()
    opened.repair(NOW_MS)
    job = opened.job(2)
    assert job.spec.tasks[0].request == request
    assert not opened.overrides()[0].cordoned


@pytest.mark.parametrize("column", ["member", "attempt"])
def test_a_run_with_a_damaged_key_does_not_block_reads_or_repair(path: Path, opened: SqliteStore, column: str):
    damage(path, f"UPDATE run SET {column} = -1 WHERE job = ?", 2)  # noqa: S608 (constants)
    opened.open()
    (before,) = read_all(opened)["runs"][2]
    assert (before.id, before.state) == ("2.-1.1" if column == "member" else "2.0.-1", "running")
    assert opened.repair(NOW_MS)
    assert len(read_all(opened)["jobs"]) == 4


def _add_per_node_job(path: Path) -> None:
    store = SqliteStore(path)
    store.open()
    job = a_job(5, state="running", attempt=3, first_attempt=1, gang=GangRules(per_node=True))
    runs = [a_run(5, member, member + 1, node=f"n{member}", state="running") for member in range(3)]
    store.commit([SaveJob(job, new=True), *(SaveRun(run, new=True) for run in runs)])
    store.close()


def test_a_per_node_job_has_as_many_members_as_there_are_nodes(path: Path, opened: SqliteStore):
    _add_per_node_job(path)
    opened.open()
    ((_, runs),) = [each for each in opened.active() if each[0].id == 5]
    assert opened.repair(NOW_MS) == []
    # Its runs are kept when another part of its record is damaged.
    damage(path, "UPDATE job SET submitted_ms = 9000000000000000 WHERE id = 5")
    opened.active()
    (found,) = opened.repair(NOW_MS)
    assert (found.kind, "cordoned" in found.outcome) == ("job", False)
    assert [run.id for run in opened.runs(5)] == [run.id for run in runs] == ["5.0.1", "5.1.2", "5.2.3"]


def test_the_placeholder_of_a_per_node_job_starts_on_no_other_node(path: Path, opened: SqliteStore):
    _add_per_node_job(path)
    damage(path, """UPDATE spec SET body = replace(body, '"name":"job-5"', '"name":7') WHERE job = 5""")
    opened.open()
    opened.active()
    opened.repair(NOW_MS)
    ((job, runs),) = [each for each in opened.active() if each[0].id == 5]
    assert (job.state, job.spec.gang.per_node, job.spec.size, len(runs)) == ("running", False, 3, 3)


def test_a_pending_job_is_held_if_its_spec_is_complete_and_failed_otherwise(path: Path, opened: SqliteStore):
    damage(path, "UPDATE job SET attempt = -5 WHERE id = 1")
    damage(path, "UPDATE spec SET body = 'x' WHERE job = 4")
    opened.open()
    opened.active()
    opened.repair(NOW_MS)
    complete, incomplete = opened.job(1), opened.job(4)
    assert (complete.state, complete.reason_code, complete.spec) == ("held", "RECORD_DAMAGED", a_job(1).spec)
    assert (incomplete.state, incomplete.reason_code, incomplete.spec.name) == (
        "failed",
        "RECORD_DAMAGED",
        a_job(4).spec.name,
    )
    assert "submit it again" in incomplete.reason


def test_a_job_that_is_intact_in_memory_is_written_back(path: Path, opened: SqliteStore):
    damage(path, "UPDATE spec SET body = 'x' WHERE job = 2")
    damage(path, "UPDATE run SET state = 'flying' WHERE job = 2")
    opened.open()
    assert opened.job(2).spec != a_job(2).spec
    opened.runs(2)
    memory = a_job(2, state="running", attempt=1, first_attempt=1)
    run = structs.replace(a_run(2, state="running"), decision=_DECISION)
    found = opened.repair(NOW_MS, {2: (memory, (run,))})
    assert all("from memory" in each.outcome for each in found)
    assert (opened.job(2), opened.runs(2)) == (memory, [run])


def test_a_damaged_key_counts_as_used(path: Path, opened: SqliteStore):
    damage(path, "UPDATE key SET jobs = '{' WHERE key = 'k1'")
    opened.open()
    for _ in range(2):
        key = opened.key("k1")
        assert (key.fingerprint, key.jobs) == ("", ())
        opened.repair(NOW_MS)


def test_a_scan_finds_damage_that_no_query_has_read(path: Path, opened: SqliteStore):
    damage(path, "UPDATE spec SET body = 'x' WHERE job = 3")
    damage(path, "UPDATE run SET state = 'flying' WHERE job = 3")
    damage(path, "UPDATE event SET detail = '[' WHERE seq = 4")
    damage(path, "UPDATE audit SET who = CAST(x'ff' AS TEXT)")
    damage(path, "UPDATE key SET jobs = '{'")
    opened.open()
    for kind in KINDS:
        after, rounds = None, 0
        while (after := opened.scan(kind, after, 1)) is not None:
            rounds += 1
            assert rounds < 20
    assert sorted(kind for kind, _ in opened.suspects) == ["audit", "event", "job", "key", "run"]


NUMBERS = {
    "a job": ("UPDATE job SET id = ? WHERE id = 1",),
    "a job and its spec": ("UPDATE job SET id = ? WHERE id = 1", "UPDATE spec SET job = ? WHERE job = 1"),
    "an event": ("UPDATE event SET seq = ? WHERE seq = 3",),
    "a row of the audit": ("UPDATE audit SET seq = ?",),
    "the last number of the audit": ("UPDATE sqlite_sequence SET seq = ? WHERE name = 'audit'",),
    "the last job": ("UPDATE meta SET last_job = ?",),
    "the last event": ("UPDATE meta SET last_event = ?",),
}


@pytest.mark.parametrize("number", [2**63 - 1, 2**62, 2**53 + 1, -1, -(2**63)])
@pytest.mark.parametrize("damaged", NUMBERS)
def test_a_damaged_number_does_not_block_new_records(path: Path, damaged: str, number: int):
    for sql in NUMBERS[damaged]:
        damage(path, sql, number)
    reports = []
    for restart in range(3):
        store = SqliteStore(path)
        opened = store.open()
        job, event = opened.last_job + 1, opened.last_event + 1
        assert 4 < job < 2**53
        assert 5 < event < 2**53
        audit = SaveAudit(AuditEntry(NOW_MS, "ada", "user", "jobs.submit", str(job)))
        store.commit([SaveJob(a_job(job), new=True), a_record(event, job=job), audit])
        found = read_all(store)
        assert all(0 < each.id <= job for each in found["jobs"])
        assert [each.seq for each in found["events"]][-1] == event
        assert len(found["events"]) == 6 + restart
        assert len(found["audit"]) == 2 + restart
        assert all(0 < each.seq < 2**53 for each in found["audit"])
        assert not store.suspects
        reports.append(store.damaged())
        store.close()
    assert reports[0] == reports[1] == reports[2], "it was reported again"
    if damaged != "the last number of the audit":
        assert [each.reason for each in reports[0]] == ["a number out of range"]


def test_a_job_with_a_damaged_number_is_identified_by_its_spec(path: Path, opened: SqliteStore):
    opened.open()
    before = read_all(opened)
    opened.commit([SaveJob(a_job(5, name="other"), new=True)])
    opened.close()
    damage(path, "UPDATE job SET id = 4611686018427387904 WHERE id = 5")
    damage(path, "UPDATE job SET id = -7 WHERE id = 2")
    opened.open()
    assert [job.id for job in opened.jobs(JobQuery()).jobs] == [5, 4, 3, 2, 1]
    assert [job for job in opened.jobs(JobQuery()).jobs if job.id < 5] == before["jobs"]
    assert opened.job(2).state == "running"
    assert sorted(each.job for each in opened.damaged()) == [2, 5]


CONFLICTS = {
    "a missing job": "DELETE FROM job WHERE id = 2",
    "a missing job with its spec": "DELETE FROM job WHERE id = 2; DELETE FROM spec WHERE job = 2",
    "a job with another number": "UPDATE job SET id = 70 WHERE id = 2",
    "a job under a negative number": "UPDATE job SET id = -70 WHERE id = 2",
    "a job with the number of the next": "UPDATE job SET id = 5 WHERE id = 2",
    "a spec with the number of the next": "UPDATE spec SET job = 5 WHERE job = 3",
    "a missing run": "DELETE FROM run WHERE job = 2",
    "a run of another job": "UPDATE run SET job = 5 WHERE job = 2",
    "an event with the number of the next": "UPDATE event SET seq = 6 WHERE seq = 1",
}


@pytest.mark.parametrize("damaged", CONFLICTS)
def test_conflicts_of_a_refused_commit_are_repaired(path: Path, opened: SqliteStore, damaged: str):
    last = opened.open()
    (running, (run,)) = next(each for each in opened.active() if each[0].id == 2)
    db = sqlite3.connect(path, isolation_level=None)
    db.executescript(CONFLICTS[damaged])
    db.close()
    job, ended = a_job(last.last_job + 1), structs.replace(running, state="succeeded", finished_ms=NOW_MS)
    saves = [
        SaveJob(job, new=True), SaveRun(a_run(job.id), new=True), a_record(last.last_event + 1, job=job.id),
        SaveJob(ended), SaveRun(structs.replace(run, state="succeeded", finished_ms=NOW_MS)),
    ]  # fmt: skip
    with pytest.raises((NotFound, Conflict)):
        opened.commit(saves)
    found = opened.repair_conflicts(saves, NOW_MS)
    assert found
    opened.commit(saves)
    assert opened.damaged() == found
    assert opened.job(2) == ended
    assert [run.state for run in opened.runs(2)] == ["succeeded"]
    assert (opened.job(job.id), len(opened.runs(job.id))) == (job, 1)
    assert len(opened.events()) == 6
    assert sum(opened.counts().values()) == len(opened.jobs(JobQuery()).jobs)
    assert opened.counts()["running"] == 0


def test_an_invalid_batch_causes_no_repair(opened: SqliteStore):
    opened.open()
    with pytest.raises(NotFound):
        opened.commit([SaveJob(a_job(99))])
    assert opened.repair_conflicts([], NOW_MS) == []


def test_a_number_that_is_damaged_while_the_server_runs_is_quarantined_once(path: Path, opened: SqliteStore):
    opened.open()
    damage(path, "UPDATE job SET id = -7 WHERE id = 3")
    damage(path, "UPDATE job SET id = 4611686018427387904 WHERE id = 4")
    for _ in range(3):
        assert len(opened.jobs(JobQuery()).jobs) >= 2
        opened.repair(NOW_MS)
    assert len(opened.damaged()) == 2
    assert not opened.suspects


@pytest.mark.parametrize(
    "sql", ["UPDATE meta SET epoch = 9223372036854775807", "UPDATE meta SET epoch = -1", "DELETE FROM meta"]
)
def test_a_store_without_a_valid_epoch_is_an_error(path: Path, opened: SqliteStore, sql: str):
    damage(path, sql)
    with pytest.raises(Unavailable) as error:
        opened.open()
    assert "run-as-a-service.md#restore" in error.value.hint


def test_a_file_of_an_older_version_gets_its_quarantine(path: Path):
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("DROP TABLE quarantine")
    db.execute("DROP TABLE node_order")
    db.execute("ALTER TABLE audit DROP COLUMN detail")
    db.execute("ALTER TABLE run DROP COLUMN usage")
    db.execute("ALTER TABLE run DROP COLUMN cost_milli")
    db.execute("PRAGMA user_version = 1")
    db.close()
    store = SqliteStore(path)
    store.open()
    assert store.damaged() == []
    store.close()


TABLES = (
    "job",
    "spec",
    "run",
    "event",
    "mark",
    "reservation",
    "node_order",
    "usage",
    "note",
    "periodic",
    "audit",
    "key",
    "tally",
    "awaits",
)
_CHANGES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.text(max_size=20),
    st.binary(max_size=8).map(lambda raw: ("text", raw)),
    st.sampled_from(["", "{", "[]", "null", '{"a":', "0", "flying"]),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_with_random_damage_the_store_opens_reads_and_repairs(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "hodei.db"
    store = SqliteStore(path)
    store.open()
    store.commit(everything())
    store.close()
    db = sqlite3.connect(path, isolation_level=None)
    for _ in range(data.draw(st.integers(1, 4))):
        table = data.draw(st.sampled_from(TABLES))
        column = data.draw(st.sampled_from([row[1] for row in db.execute(f"PRAGMA table_info({table})")]))
        value = data.draw(_CHANGES)
        placeholder = "CAST(? AS TEXT)" if isinstance(value, tuple) else "?"
        parameter = value[1] if isinstance(value, tuple) else value
        try:
            db.execute(f"UPDATE OR IGNORE {table} SET {column} = {placeholder}", (parameter,))  # noqa: S608 (constants)
        except sqlite3.Error:
            pass  # refused by a constraint of the table
    db.close()
    store = SqliteStore(path)
    try:
        store.open()
        read_all(store)
        store.repair(NOW_MS)
        read_all(store)
        assert all(reason is not None for reason in store.suspects)
        store.commit([SaveJob(a_job(2**40), new=True)])
        assert store.job(2**40) is not None
    finally:
        store.close()


def _garbage_in_the_middle(path: Path) -> None:
    with path.open("r+b") as file:
        for page in range(1, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(b"\xa5" * 512)


FILES = {
    "the header is overwritten": lambda path: path.write_bytes(b"\0" * 100 + path.read_bytes()[100:]),
    "the file is cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "pages are garbage": _garbage_in_the_middle,
    "not a database": lambda path: path.write_bytes(b"this is not a database" * 1000),
}


@pytest.mark.parametrize("damaged", FILES)
def test_a_damaged_file_is_an_error_that_names_the_backup(path: Path, damaged: str):
    FILES[damaged](path)
    before = path.read_bytes()
    with pytest.raises(Unavailable) as error:
        SqliteStore(path).open()
    assert "backup" in error.value.hint
    assert "run-as-a-service.md#restore" in error.value.hint
    assert path.read_bytes() == before
