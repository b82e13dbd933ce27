"""When the store cannot write: callers wait or are told, nothing that was acknowledged is lost, and all goes on afterwards."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hodei.client import ServerUnreachable
from hodei.model.errors import Unavailable
from real.house import DEADLINE_S, House, until, until_told

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[House]:
    """A house on a disk of a few megabytes."""
    house = House(tmp_path / "home")
    house.home.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m,mode=0700", "tmpfs", str(house.home)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield house
    finally:
        try:
            house.close()
        finally:
            subprocess.run(["umount", str(house.home)], check=True)


def fill(disk: Path) -> Path:
    """Take all the room there is."""
    filler = disk / "filler"
    fd = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    os.write(fd, b"x" * size)
            except OSError:
                continue
    finally:
        os.close(fd)
    return filler


class Callers:
    """Several clients that keep handing in jobs, each with its own key, until they are acknowledged."""

    def __init__(self, house: House, count: int) -> None:
        self.acknowledged: dict[int, int] = {}
        self.refused = 0
        self._house = house
        self._threads = [threading.Thread(target=self._submit, args=(n,), daemon=True) for n in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _submit(self, number: int) -> None:
        with self._house.client(timeout_s=5) as client:
            while number not in self.acknowledged:
                try:
                    # Something to write, so that the room that is left in the last pages does not do.
                    long = {"note": "n" * 20_000}
                    job = {
                        "command": ["sh", "-c", f"exit {number}"],
                        "cpu": "10m",
                        "memory": "1Mi",
                        "annotations": long,
                    }
                    self.acknowledged[number] = client.submit(job, key=f"full-{number}").id
                except (Unavailable, ServerUnreachable):
                    self.refused += 1
                    time.sleep(0.1)


def test_a_full_disk_holds_things_up_and_loses_nothing(small_disk: House, tmp_path: Path) -> None:
    house = small_disk.up("--decision-log", "decisions.jsonl")
    before = [house.submit("sh", "-c", f"exit {n}") for n in range(3)]
    house.ended(*before)
    running = house.submit(*until_told(tmp_path / "go", f"touch {tmp_path}/ended; exit 33"))
    house.until_state(running, "running")
    filler = fill(house.home)
    callers = Callers(house, 5)
    callers.start()
    until(lambda: "cannot write to the store" in house.said(), "the server notices")
    asked = len(callers.acknowledged)
    # It is held up, not gone: it answers, and what is known can be read.
    assert house.request("GET", "/livez").status == 200
    ready = house.request("GET", "/readyz")
    assert (ready.status, ready.json["code"]) == (503, "NOT_READY")
    assert int(ready.headers["retry-after"]) >= 1
    refused = house.request("POST", "/api/v1/jobs", b'{"command": ["true"]}')
    assert refused.status == 503
    assert refused.seconds < 30, "it is refused, not kept waiting"
    assert int(refused.headers["retry-after"]) >= 1
    # What is no job, and could not go on record, is refused too.
    (node,) = [node.name for node in house.client().nodes()]
    made = tmp_path / "made"
    command = json.dumps({"command": ["touch", str(made)]}).encode()
    for path in (f"nodes/{node}", f"jobs/{running}"):
        assert house.request("POST", f"/api/v1/{path}/execute", command).status == 503
    assert not made.exists()
    assert house.request("GET", f"/api/v1/jobs/{before[2]}").json["job"]["exit_code"] == 2
    (tmp_path / "go").touch()  # the running job ends now, and can be written down nowhere
    until((tmp_path / "ended").exists, "it has ended")
    assert len(callers.acknowledged) == asked
    filler.unlink()
    callers.join()
    ids = [callers.acknowledged[number] for number in range(5)]
    details = house.ended(*ids, running)
    assert [detail.job.exit_code for detail in details] == [0, 1, 2, 3, 4, 33]
    assert len(set(ids)) == 5
    print(f"{callers.refused} requests were refused or gave up meanwhile")
    until(lambda: house.request("GET", "/readyz").status == 200, "it is ready again")
    house.works()
    assert house.stop() == 0
    assert house.rows("PRAGMA integrity_check") == [("ok",)]
    assert house.rows("SELECT count(*) FROM job") == [(3 + 1 + 5 + 1,)]
    house.ok("replay", str(house.home / "decisions.jsonl"))  # as far as it could be written


def test_a_full_disk_is_seen_by_readyz_before_anything_is_written(small_disk: House) -> None:
    house = small_disk.up()
    assert house.request("GET", "/readyz").status == 200
    filler = fill(house.home)
    ready = house.request("GET", "/readyz")
    assert (ready.status, ready.json["code"]) == (503, "NOT_READY")
    assert "full" in ready.json["message"]
    assert int(ready.headers["retry-after"]) >= 1
    filler.unlink()
    until(lambda: house.request("GET", "/readyz").status == 200, "it is ready again")
    house.works()


@pytest.mark.parametrize("how", ["kill", "stop"], ids=["killed", "told to stop"])
def test_a_server_that_goes_down_on_a_full_disk_comes_back_when_there_is_room(
    small_disk: House, tmp_path: Path, how: str
) -> None:
    house = small_disk.up()
    running = house.submit(*until_told(tmp_path / "go", f"touch {tmp_path}/ended; exit 33"))
    house.until_state(running, "running")
    filler = fill(house.home)
    callers = Callers(house, 3)
    callers.start()
    until(lambda: "cannot write to the store" in house.said(), "the server notices")
    began = time.monotonic()
    getattr(house, how)()
    assert time.monotonic() - began < DEADLINE_S
    (tmp_path / "go").touch()
    until((tmp_path / "ended").exists, "it has ended")
    house.start()
    server = house.server
    assert server is not None
    until(
        lambda: server.poll() is not None or "is up at" in house.said() or "cannot write" in house.said(),
        "it says what is wrong, or finds room for its first words",
    )
    ended = server.poll() is not None
    assert "is up at" in house.said() or "free some disk space" in house.said()
    filler.unlink()
    if ended:
        assert "error: " in house.said()
        house.start()
    house.until_up()
    callers.join()
    details = house.ended(*(callers.acknowledged[number] for number in range(3)), running)
    assert [detail.job.exit_code for detail in details] == [0, 1, 2, 33]
    assert house.stop() == 0
    assert house.rows("PRAGMA integrity_check") == [("ok",)]


def test_a_program_that_holds_the_store_makes_callers_wait_and_readers_do_not(house: House) -> None:
    house.up()
    known = house.submit("true")
    house.ended(known)
    db = sqlite3.connect(house.home / "hodei.db", isolation_level=None)
    try:
        db.execute("BEGIN IMMEDIATE")
        made: list[int] = []
        caller = threading.Thread(target=lambda: made.append(house.submit("sh", "-c", "exit 5")))
        caller.start()
        ends = time.monotonic() + 1.5
        slowest = 0.0
        while time.monotonic() < ends:
            answer = house.request("GET", f"/api/v1/jobs/{known}")
            # One that waited for the lock would give up: the lock is not let go before the loop ends.
            assert answer.status == 200
            slowest = max(slowest, answer.seconds)
        assert made == []
        db.execute("COMMIT")
    finally:
        db.close()
    caller.join(DEADLINE_S)
    assert house.ended(*made)[0].job.exit_code == 5
    print(f"slowest read meanwhile {slowest * 1000:.0f} ms")


def test_a_store_that_is_not_one_is_refused_and_left_alone(house: House) -> None:
    house.configure("")
    (house.home / "hodei.db").write_bytes(b"this is not a database" * 100)
    house.start()
    assert house.server is not None
    assert house.server.wait(20) in (1, 2)
    assert "error: " in house.said()
    assert "next: " in house.said()
    assert (house.home / "hodei.db").read_bytes() == b"this is not a database" * 100


def test_a_store_that_is_gone_is_a_question_and_a_fresh_start_works(house: House) -> None:
    house.up()
    house.ended(house.submit("true"))
    assert house.stop() == 0
    until(lambda: not house.agent() or os.kill(house.agent(), 15), "the agent has left")
    for name in ("hodei.db", "hodei.db-wal", "hodei.db-shm"):
        (house.home / name).unlink(missing_ok=True)
    said = house.hodei("up", "-d")
    assert said.code != 0
    assert "is missing" in said.err
    assert "--fresh" in said.err
    assert not (house.home / "hodei.db").exists()
    house.up("--fresh")
    assert house.ended(house.submit("sh", "-c", "exit 7"))[0].job.exit_code == 7
    assert list(house.home.glob("agent.before-*"))
