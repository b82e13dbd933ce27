"""A real server with damaged records: it starts, serves all others, goes on with what runs, and says what it found.

`HODEI_ROUNDS` says how many rounds of random damage there are (default 2).
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from agent_host import alive
from real.house import House, pids_in, until, until_told

pytestmark = [pytest.mark.real, pytest.mark.slow]
ROUNDS = int(os.environ.get("HODEI_ROUNDS", "2"))
_GARBAGE = (b"\xff\xfe\x00garbage", "{", "[]", "null", "flying", "", -(2**62), 2**62, -1, 7)
_TABLES = (
    "job",
    "spec",
    "run",
    "event",
    "mark",
    "booking",
    "usage",
    "note",
    "periodic",
    "audit",
    "key",
    "tally",
    "awaits",
)
_NODES = '[[nodes]]\nname = "big"\ncpu = 4\nmemory = "2Gi"\n\n[[nodes]]\nname = "small"\ncpu = 4\nmemory = "2Gi"\n'


def change(house: House, sql: str, *values: object) -> int:
    db = sqlite3.connect(house.home / "hodei.db", isolation_level=None)
    try:
        return db.execute(sql, values).rowcount
    finally:
        db.close()


def a_used_house(house: House) -> dict[str, int]:
    """With a row in every table; stopped. The jobs by what they are."""
    house.configure(_NODES + '[scheduling.profiles.default]\nqueue = "fair"\n').up()
    jobs = {"ended": house.submit("sh", "-c", "exit 3")}
    house.ended(jobs["ended"])
    jobs["running"] = house.submit("sh", "-c", f"echo $$ > {house.home.parent}/pid; sleep 600", retries=3)
    house.until_state(jobs["running"], "running")
    with house.client() as client:
        jobs["held"] = client.submit({"command": ["true"], "cpu": "10m", "memory": "1Mi"}, key="k1").id
        jobs["waits"] = client.submit(
            {"command": ["true"], "cpu": "10m", "memory": "1Mi", "after": [jobs["running"]]}
        ).id
    house.ok("node", "label", "small", "disk=ssd")
    house.ok("reserve", "create", "demo", "--project", "sales", "--from", "+300d", "--for", "1h", "--node", "small")
    house.ok("cron", "add", "nightly", "--schedule", "0 3 * * *", "-f", "-", input="command: ['true']\n")
    assert house.stop() == 0
    return jobs


def serves(house: House) -> None:
    """The others are served: lists, one by one, and new work."""
    assert house.request("GET", "/readyz").status == 200
    for path in ("jobs", "jobs?arrays=fold", "jobs?state=running", "jobs?label=a%3Db", "events", "audit", "nodes",
                 "reservations", "periodic", "info", "checks", "backends"):  # fmt: skip
        answer = house.request("GET", f"/api/v1/{path}")
        assert answer.status == 200, f"{path}: {answer.body!r}"
    for job in house.request("GET", "/api/v1/jobs").json["jobs"]:
        assert house.request("GET", f"/api/v1/jobs/{job['id']}").status == 200
        assert house.request("GET", f"/api/v1/jobs/{job['id']}/why").status == 200
    for node in ("big", "small"):  # whichever was cordoned for safety
        house.request("PATCH", f"/api/v1/nodes/{node}", b'{"cordon": false}')
    house.works()


def damage_one_of(house: House, table: str, chance: random.Random) -> str:
    """One random field of one random row; what was done, "" if the table itself refuses such a value."""
    columns = [row[1] for row in house.rows(f"PRAGMA table_info({table})")]
    keys = [row[1] for row in house.rows(f"PRAGMA table_info({table})") if row[5]]
    row = chance.choice(house.rows(f"SELECT {', '.join(keys)} FROM {table}") or [()])  # noqa: S608
    column, value = chance.choice(columns), chance.choice(_GARBAGE)
    place = "CAST(? AS TEXT)" if isinstance(value, bytes) else "?"
    wanted = " AND ".join(f"{key} = ?" for key in keys)
    try:
        sql = f"UPDATE OR IGNORE {table} SET {column} = {place} WHERE {wanted}"  # noqa: S608
        done = change(house, sql, value, *row) if row else 0
    except sqlite3.Error:
        return ""
    return f"{table} {row} {column} = {value!r}" if done else ""


def test_any_field_of_any_table_may_be_damaged_and_the_server_starts_and_serves(house: House) -> None:
    a_used_house(house)
    (pid,) = pids_in(house.home.parent / "pid", 1)
    pristine, chance = house.home.parent / "pristine.db", random.Random(os.environ.get("HODEI_SEED", "hodei"))
    shutil.copy(house.home / "hodei.db", pristine)
    (epoch,) = house.rows("SELECT epoch FROM meta")[0]
    done = 0
    for number in range(ROUNDS):
        shutil.copy(pristine, house.home / "hodei.db")
        # The agent turns away servers of an older epoch and runs of numbers that it knows: this is an older store.
        change(house, "UPDATE meta SET epoch = ?, last_job = ?", epoch + number, 1000 * (number + 1))
        # Most rounds hit every table once; others only one, so that nothing hides behind something else.
        tables = _TABLES if number % 2 == 0 else [chance.choice(_TABLES)]
        damages = [found for table in tables if (found := damage_one_of(house, table, chance))]
        print(f"round {number}: {'; '.join(damages)}")
        done += len(damages)
        house.up()
        serves(house)
        assert alive(pid), f"the run goes on after {damages}"
        assert house.stop() == 0
    print(f"{done} damages in {ROUNDS} rounds")


def test_a_running_job_with_a_lost_description_goes_on_is_told_of_and_its_end_is_heard(house: House) -> None:
    house.configure(_NODES).up()
    go = house.home.parent / "go"
    job = house.submit("sh", "-c", f"while [ ! -e {go} ]; do sleep 0.05; done; exit 5")
    node = house.until_state(job, "running").runs[0].node
    house.kill()
    assert change(house, "UPDATE spec SET body = '{garbage' WHERE job = ?", job) == 1
    house.up()
    assert house.state(job) == "running"
    said = house.ok("job", "show", str(job)).out
    assert "damaged since" in said
    assert "damaged since" in house.ok("why", str(job)).out
    check = next(c for c in house.ok("doctor", "-o", "json").json if c["name"] == "store records")
    assert check["level"] == "warning"
    assert f"job {job}" in check["found"]
    assert b"hodei_damaged_records 1.0" in house.request("GET", "/metrics").body
    # How much it holds is not known any more, so nothing new goes to its node; the other one works.
    nodes = house.request("GET", "/api/v1/nodes").json["nodes"]
    assert [each["name"] for each in nodes if each["state"] == "cordoned"] == [node]
    house.works()
    go.touch()
    assert house.ended(job)[0].job.exit_code == 5
    assert house.rows("SELECT kind, job FROM quarantine") == [("job", job)]
    assert "{garbage" in house.rows("SELECT body FROM quarantine")[0][0]


def test_a_run_whose_job_is_gone_is_not_stopped_but_taken_in_again(house: House) -> None:
    house.configure(_NODES).up()
    job = house.submit("sh", "-c", f"echo $$ > {house.home.parent}/pid; sleep 600")
    house.until_state(job, "running")
    (pid,) = pids_in(house.home.parent / "pid", 1)
    house.kill()
    assert change(house, "DELETE FROM job WHERE id = ?", job) == 1
    house.up()
    until(lambda: house.request("GET", f"/api/v1/jobs/{job}").status == 200, "it is there again")
    assert "sleep 600" in str(house.until_state(job, "running").spec)
    assert alive(pid)
    house.ok("cancel", str(job))
    house.ended(job)
    until(lambda: not alive(pid), "its run is stopped when somebody wants it")


def test_a_run_whose_record_is_gone_is_left_alone_until_its_job_is_cancelled(house: House) -> None:
    house.configure(_NODES).up()
    job = house.submit("sh", "-c", f"echo $$ > {house.home.parent}/pid; sleep 600")
    house.until_state(job, "running")
    (pid,) = pids_in(house.home.parent / "pid", 1)
    house.kill()
    assert change(house, "DELETE FROM run WHERE job = ?", job) == 1
    house.up()
    assert house.state(job) == "held"
    until(lambda: "it is left alone" in house.said(), "the server has seen it")
    assert alive(pid)
    refused = house.hodei("release", str(job))
    assert refused.code != 0
    assert "may still be going on" in refused.err
    house.ok("cancel", str(job))
    until(lambda: not alive(pid), "its run is stopped when somebody wants it")


def test_damage_that_happens_while_the_server_runs_is_mended_from_memory(house: House) -> None:
    house.up()
    job = house.submit("sleep", "600")
    house.until_state(job, "running")
    change(house, "UPDATE spec SET body = 'x' WHERE job = ?", job)
    assert house.request("GET", "/api/v1/jobs").status == 200
    until(lambda: house.rows("SELECT 1 FROM quarantine"), "it is set aside")
    assert "'sleep', '600'" in str(house.job(job).spec)
    assert house.state(job) == "running"
    house.ok("cancel", str(job))
    house.ended(job)


@pytest.mark.parametrize("sql", [
    "DELETE FROM job WHERE id = ?", "UPDATE job SET id = -1 WHERE id = ?", "DELETE FROM run WHERE job = ?",
])  # fmt: skip
def test_a_record_that_vanishes_while_the_server_runs_does_not_end_it(house: House, tmp_path: Path, sql: str) -> None:
    house.up()
    job = house.submit(*until_told(tmp_path / "gate", "exit 5"))
    house.until_state(job, "running")
    change(house, sql, job)
    (tmp_path / "gate").touch()
    until(lambda: house.request("GET", f"/api/v1/jobs/{job}").status == 200, "it is there again")
    assert house.until_state(job, "failed").job.exit_code == 5
    house.works()
    assert "written anew from memory" in house.hodei("doctor").out
    assert b"hodei_damaged_records 1.0" in house.request("GET", "/metrics").body


def _cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _overwrite_the_beginning(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * 200)


def _garbage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xa5" * 4096 * 4)


def test_a_damaged_file_is_a_clear_error_with_the_way_to_the_backup(house: House) -> None:
    house.up()
    house.ended(house.submit("true"))
    assert house.stop() == 0
    store, pristine = house.home / "hodei.db", house.home.parent / "pristine.db"
    shutil.copy(store, pristine)
    for damage in (_cut_short, _overwrite_the_beginning, _garbage):
        shutil.copy(pristine, store)
        damage(store)
        before = store.read_bytes()
        house.start()
        assert house.server is not None
        assert house.server.wait(30) in (1, 2)
        assert "error: " in house.said()
        assert "run-as-a-service.md#restore" in house.said()
        assert "Traceback" not in house.said()
        assert store.read_bytes() == before
