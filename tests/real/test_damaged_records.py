"""A real server with damaged records: it starts, assert_serves all other records, keeps runs alive, and reports the damage.

`HODEI_ROUNDS` is the number of rounds of random damage (default 2); `HODEI_SEED` changes the places.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from agent_host import alive
from real.installation import DEADLINE_S, Installation, pids_in, until, wait_for_file

pytestmark = [pytest.mark.real, pytest.mark.slow]
ROUNDS = int(os.environ.get("HODEI_ROUNDS", "2"))
_GARBAGE = (b"\xff\xfe\x00garbage", "{", "[]", "null", "flying", "", -(2**62), 2**62, -1, 7)
_TABLES = (
    "job",
    "spec",
    "run",
    "event",
    "mark",
    "reservation",
    "usage",
    "note",
    "periodic",
    "audit",
    "key",
    "tally",
    "awaits",
)
_NODES = '[[nodes]]\nname = "big"\ncpu = 4\nmemory = "2Gi"\n\n[[nodes]]\nname = "small"\ncpu = 4\nmemory = "2Gi"\n'


def change(installation: Installation, sql: str, *values: object) -> int:
    db = sqlite3.connect(installation.home / "hodei.db", isolation_level=None)
    try:
        return db.execute(sql, values).rowcount
    finally:
        db.close()


def fill_every_table(installation: Installation) -> None:
    """Write at least one row into every table, with one running job, and stop the server."""
    installation.configure(_NODES + '[scheduling.profiles.default]\nqueue = "fair"\n').up()
    installation.ended(installation.submit("sh", "-c", "exit 3"))
    running = installation.submit("sh", "-c", f"echo $$ > {installation.home.parent}/pid; sleep 600", retries=3)
    installation.until_state(running, "running")
    with installation.client() as client:
        client.submit({"command": ["true"], "cpu": "10m", "memory": "1Mi"}, key="k1")
        client.submit({"command": ["true"], "cpu": "10m", "memory": "1Mi", "after": [running]})
    installation.ok("node", "label", "small", "disk=ssd")
    installation.ok(
        "reservation", "create", "demo", "--project", "sales", "--from", "+300d", "--for", "1h", "--node", "small"
    )
    installation.ok("cron", "create", "nightly", "-", "--schedule", "0 3 * * *", input="command: ['true']\n")
    assert installation.stop() == 0


def assert_serves(installation: Installation) -> None:
    """All lists, every job in them, and new jobs work."""
    assert installation.request("GET", "/readyz").status == 200
    for path in ("jobs", "jobs?arrays=fold", "jobs?state=running", "jobs?label=a%3Db", "events", "audit", "nodes",
                 "reservations", "periodic", "info", "checks", "backends"):  # fmt: skip
        response = installation.request("GET", f"/api/v1/{path}")
        assert response.status == 200, f"{path}: {response.body!r}"
    for job in installation.request("GET", "/api/v1/jobs").json["jobs"]:
        assert installation.request("GET", f"/api/v1/jobs/{job['id']}").status == 200
        assert installation.request("GET", f"/api/v1/jobs/{job['id']}/why").status == 200
    for node in ("big", "small"):  # the node of a damaged record is cordoned
        installation.request("PATCH", f"/api/v1/nodes/{node}", b'{"cordon": false}')
    installation.works()


def damage_a_field(installation: Installation, table: str, rng: random.Random) -> str:
    """Damage one random field of one random row. Returns what was changed, "" if the table refuses such a value."""
    columns = [row[1] for row in installation.rows(f"PRAGMA table_info({table})")]
    keys = [row[1] for row in installation.rows(f"PRAGMA table_info({table})") if row[5]]
    row = rng.choice(installation.rows(f"SELECT {', '.join(keys)} FROM {table}") or [()])  # noqa: S608
    column, value = rng.choice(columns), rng.choice(_GARBAGE)
    place = "CAST(? AS TEXT)" if isinstance(value, bytes) else "?"
    wanted = " AND ".join(f"{key} = ?" for key in keys)
    try:
        sql = f"UPDATE OR IGNORE {table} SET {column} = {place} WHERE {wanted}"  # noqa: S608
        done = change(installation, sql, value, *row) if row else 0
    except sqlite3.Error:
        return ""
    return f"{table} {row} {column} = {value!r}" if done else ""


def test_a_server_with_any_damaged_field_starts_and_serves_the_other_records(installation: Installation) -> None:
    fill_every_table(installation)
    (pid,) = pids_in(installation.home.parent / "pid", 1)
    pristine, rng = installation.home.parent / "pristine.db", random.Random(os.environ.get("HODEI_SEED", "hodei"))
    shutil.copy(installation.home / "hodei.db", pristine)
    (epoch,) = installation.rows("SELECT epoch FROM meta")[0]
    total = 0
    for number in range(ROUNDS):
        shutil.copy(pristine, installation.home / "hodei.db")
        # This is an older store, and the agent refuses servers of an older epoch and run ids that it already knows.
        change(installation, "UPDATE meta SET epoch = ?, last_job = ?", epoch + number, 1000 * (number + 1))
        # Even rounds damage every table, odd rounds a single one, so that no damage masks another.
        tables = _TABLES if number % 2 == 0 else [rng.choice(_TABLES)]
        damages = [found for table in tables if (found := damage_a_field(installation, table, rng))]
        print(f"round {number}: {'; '.join(damages)}")
        total += len(damages)
        installation.up()
        assert_serves(installation)
        assert alive(pid), f"the run continues after {damages}"
        assert installation.stop() == 0
    print(f"{total} damages in {ROUNDS} rounds")


def test_a_running_job_with_a_damaged_record_continues_and_its_end_is_observed(
    installation: Installation,
) -> None:
    installation.configure(_NODES).up()
    go = installation.home.parent / "go"
    job = installation.submit("sh", "-c", f"while [ ! -e {go} ]; do sleep 0.05; done; exit 5")
    node = installation.until_state(job, "running").runs[0].node
    installation.kill()
    assert change(installation, "UPDATE spec SET body = '{garbage' WHERE job = ?", job) == 1
    installation.up()
    assert installation.state(job) == "running"
    assert "damaged since" in installation.ok("job", "show", str(job)).out
    assert "damaged since" in installation.ok("why", str(job)).out
    check = next(c for c in installation.ok("doctor", "-o", "json").json if c["name"] == "store records")
    assert check["level"] == "warning"
    assert f"job {job}" in check["found"]
    assert b"hodei_damaged_records 1.0" in installation.request("GET", "/metrics").body
    # Its resources are unknown now, so its node is cordoned; the other node still takes jobs.
    nodes = installation.request("GET", "/api/v1/nodes").json["nodes"]
    assert [found["name"] for found in nodes if found["state"] == "cordoned"] == [node]
    installation.works()
    go.touch()
    assert installation.ended(job)[0].job.exit_code == 5
    assert installation.rows("SELECT kind, job FROM quarantine") == [("job", job)]
    assert "{garbage" in installation.rows("SELECT body FROM quarantine")[0][0]


def test_a_run_whose_job_record_is_missing_is_restored_and_not_stopped(installation: Installation) -> None:
    installation.configure(_NODES).up()
    job = installation.submit("sh", "-c", f"echo $$ > {installation.home.parent}/pid; sleep 600")
    installation.until_state(job, "running")
    (pid,) = pids_in(installation.home.parent / "pid", 1)
    installation.kill()
    assert change(installation, "DELETE FROM job WHERE id = ?", job) == 1
    installation.up()
    until(lambda: installation.request("GET", f"/api/v1/jobs/{job}").status == 200, "the job is known again")
    assert "sleep 600" in str(installation.until_state(job, "running").spec)
    assert alive(pid)
    installation.ok("cancel", str(job))
    installation.ended(job)
    until(lambda: not alive(pid), "its run is stopped")


def test_a_run_without_a_record_continues_until_its_job_is_cancelled(installation: Installation) -> None:
    installation.configure(_NODES).up()
    job = installation.submit("sh", "-c", f"echo $$ > {installation.home.parent}/pid; sleep 600")
    installation.until_state(job, "running")
    (pid,) = pids_in(installation.home.parent / "pid", 1)
    installation.kill()
    assert change(installation, "DELETE FROM run WHERE job = ?", job) == 1
    installation.up()
    assert installation.state(job) == "held"
    until(lambda: "although its record is damaged" in installation.server_output(), "the server reports the run")
    assert alive(pid)
    refused = installation.hodei("release", str(job))
    assert refused.code != 0
    assert "may still be active" in refused.err
    installation.ok("cancel", str(job))
    until(lambda: not alive(pid), "its run is stopped")


def test_a_record_damaged_at_run_time_is_repaired_from_memory(installation: Installation) -> None:
    installation.up()
    job = installation.submit("sleep", "600")
    installation.until_state(job, "running")
    change(installation, "UPDATE spec SET body = 'x' WHERE job = ?", job)
    assert installation.request("GET", "/api/v1/jobs").status == 200
    until(lambda: installation.rows("SELECT 1 FROM quarantine"), "the damaged record is quarantined")
    assert "'sleep', '600'" in str(installation.job(job).spec)
    assert installation.state(job) == "running"
    installation.ok("cancel", str(job))
    installation.ended(job)


@pytest.mark.parametrize("sql", [
    "DELETE FROM job WHERE id = ?", "UPDATE job SET id = -1 WHERE id = ?", "DELETE FROM run WHERE job = ?",
])  # fmt: skip
def test_a_record_deleted_at_run_time_does_not_stop_the_server(
    installation: Installation, tmp_path: Path, sql: str
) -> None:
    installation.up()
    job = installation.submit(*wait_for_file(tmp_path / "gate", "exit 5"))
    installation.until_state(job, "running")
    change(installation, sql, job)
    (tmp_path / "gate").touch()
    until(lambda: installation.request("GET", f"/api/v1/jobs/{job}").status == 200, "the job is known again")
    assert installation.until_state(job, "failed").job.exit_code == 5
    installation.works()
    assert "written again from memory" in installation.hodei("doctor").out
    assert b"hodei_damaged_records 1.0" in installation.request("GET", "/metrics").body


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _overwrite_the_beginning(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * 200)


def _garbage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xa5" * 4096 * 4)


def test_a_damaged_database_file_is_a_clear_error_that_links_to_restoring_a_backup(installation: Installation) -> None:
    installation.up()
    installation.ended(installation.submit("true"))
    assert installation.stop() == 0
    store, pristine = installation.home / "hodei.db", installation.home.parent / "pristine.db"
    shutil.copy(store, pristine)
    for damage in (_truncate, _overwrite_the_beginning, _garbage):
        shutil.copy(pristine, store)
        damage(store)
        before = store.read_bytes()
        installation.start()
        assert installation.server is not None
        assert installation.server.wait(DEADLINE_S) in (1, 2)
        assert "error: " in installation.server_output()
        assert "run-as-a-service.md#restore" in installation.server_output()
        assert "Traceback" not in installation.server_output()
        assert store.read_bytes() == before
