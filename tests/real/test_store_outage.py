"""The store is not writable: callers wait or get an error, no acknowledged job is lost, and the server recovers."""

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

from real.installation import DEADLINE_S, Installation, until, wait_for_file
from real.submitters import Submitters

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Installation]:
    """An installation on a disk of a few megabytes."""
    installation = Installation(tmp_path / "home")
    installation.home.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m,mode=0700", "tmpfs", str(installation.home)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield installation
    finally:
        try:
            installation.close()
        finally:
            subprocess.run(["umount", str(installation.home)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk completely."""
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


def submitters(installation: Installation, count: int) -> Submitters:
    """One client for each of `count` jobs, which have their number as exit code."""
    large = {"note": "n" * 20_000}  # does not fit into the free space of the last pages
    fields = {"cpu": "10m", "memory": "1Mi", "annotations": large}
    jobs = [{"command": ["sh", "-c", f"exit {number}"], **fields} for number in range(count)]
    return Submitters(installation, jobs, clients=count, timeout_s=5)


def test_a_full_disk_delays_and_loses_nothing(small_disk: Installation, tmp_path: Path) -> None:
    installation = small_disk.up("--decision-log", "decisions.jsonl")
    before = [installation.submit("sh", "-c", f"exit {n}") for n in range(3)]
    installation.ended(*before)
    running = installation.submit(*wait_for_file(tmp_path / "go", f"touch {tmp_path}/ended; exit 33"))
    installation.until_state(running, "running")
    filler = fill(installation.home)
    callers = submitters(installation, 5)
    until(lambda: "cannot write to the store" in installation.server_output(), "the server notices the full disk")
    acknowledged = callers.acknowledged
    # Only writes wait: the server responds, and reads work.
    assert installation.request("GET", "/livez").status == 200
    ready = installation.request("GET", "/readyz")
    assert (ready.status, ready.json["code"]) == (503, "NOT_READY")
    assert int(ready.headers["retry-after"]) >= 1
    refused = installation.request("POST", "/api/v1/jobs", b'{"command": ["true"]}')
    assert refused.status == 503
    assert refused.seconds < 30, "it is refused and does not wait for the disk"
    assert int(refused.headers["retry-after"]) >= 1
    # Commands on nodes and in jobs are refused too, because they could not be audited.
    (node,) = [node.name for node in installation.client().nodes()]
    executed = tmp_path / "executed"
    command = json.dumps({"command": ["touch", str(executed)]}).encode()
    for path in (f"nodes/{node}", f"jobs/{running}"):
        assert installation.request("POST", f"/api/v1/{path}/execute", command).status == 503
    assert not executed.exists()
    assert installation.request("GET", f"/api/v1/jobs/{before[2]}").json["job"]["exit_code"] == 2
    (tmp_path / "go").touch()  # the running job ends while its end cannot be stored
    until((tmp_path / "ended").exists, "the job has ended")
    assert callers.acknowledged == acknowledged
    filler.unlink()
    details = installation.ended(*callers.ids(), running)
    assert [detail.job.exit_code for detail in details] == [0, 1, 2, 3, 4, 33]
    print(f"{callers.refused} requests were refused or timed out meanwhile")
    until(lambda: installation.request("GET", "/readyz").status == 200, "the server is ready again")
    installation.works()
    assert installation.stop() == 0
    assert installation.rows("PRAGMA integrity_check") == [("ok",)]
    assert installation.rows("SELECT count(*) FROM job") == [(3 + 1 + 5 + 1,)]
    installation.ok("replay", str(installation.home / "decisions.jsonl"))


def test_a_full_disk_is_seen_by_readyz_before_anything_is_written(small_disk: Installation) -> None:
    installation = small_disk.up()
    assert installation.request("GET", "/readyz").status == 200
    filler = fill(installation.home)
    ready = installation.request("GET", "/readyz")
    assert (ready.status, ready.json["code"]) == (503, "NOT_READY")
    assert "full" in ready.json["message"]
    assert int(ready.headers["retry-after"]) >= 1
    filler.unlink()
    until(lambda: installation.request("GET", "/readyz").status == 200, "the server is ready again")
    installation.works()


@pytest.mark.parametrize("signal", ["kill", "stop"], ids=["killed", "terminated"])
def test_a_server_that_ended_on_a_full_disk_starts_again_when_there_is_space(
    small_disk: Installation, tmp_path: Path, signal: str
) -> None:
    installation = small_disk.up()
    running = installation.submit(*wait_for_file(tmp_path / "go", f"touch {tmp_path}/ended; exit 33"))
    installation.until_state(running, "running")
    filler = fill(installation.home)
    callers = submitters(installation, 3)
    until(lambda: "cannot write to the store" in installation.server_output(), "the server notices the full disk")
    getattr(installation, signal)()
    (tmp_path / "go").touch()
    until((tmp_path / "ended").exists, "the job has ended")
    installation.start()
    server = installation.server
    assert server is not None
    until(
        lambda: (
            server.poll() is not None
            or "is up at" in installation.server_output()
            or "cannot write" in installation.server_output()
        ),
        "the server is up or reports the full disk",
    )
    ended = server.poll() is not None
    assert "is up at" in installation.server_output() or "free some disk space" in installation.server_output()
    filler.unlink()
    if ended:
        assert "error: " in installation.server_output()
        installation.start()
    installation.until_up()
    details = installation.ended(*callers.ids(), running)
    assert [detail.job.exit_code for detail in details] == [0, 1, 2, 33]
    assert installation.stop() == 0
    assert installation.rows("PRAGMA integrity_check") == [("ok",)]


def test_a_locked_store_delays_writers_but_not_readers(installation: Installation) -> None:
    installation.up()
    known = installation.submit("true")
    installation.ended(known)
    db = sqlite3.connect(installation.home / "hodei.db", isolation_level=None)
    try:
        db.execute("BEGIN IMMEDIATE")
        made: list[int] = []
        caller = threading.Thread(target=lambda: made.append(installation.submit("sh", "-c", "exit 5")))
        caller.start()
        ends = time.monotonic() + 1.5
        slowest = 0.0
        while time.monotonic() < ends:
            answer = installation.request("GET", f"/api/v1/jobs/{known}")
            # A read that waited for the lock would time out: it is held until the loop ends.
            assert answer.status == 200
            slowest = max(slowest, answer.seconds)
        assert made == []
        db.execute("COMMIT")
    finally:
        db.close()
    caller.join(DEADLINE_S)
    assert installation.ended(*made)[0].job.exit_code == 5
    print(f"slowest read meanwhile {slowest * 1000:.0f} ms")


def test_a_file_that_is_not_a_store_is_refused_and_not_changed(installation: Installation) -> None:
    installation.configure("")
    (installation.home / "hodei.db").write_bytes(b"this is not a database" * 100)
    installation.start()
    assert installation.server is not None
    assert installation.server.wait(DEADLINE_S) in (1, 2)
    assert "error: " in installation.server_output()
    assert "next: " in installation.server_output()
    assert (installation.home / "hodei.db").read_bytes() == b"this is not a database" * 100


def test_a_missing_store_prevents_the_start_unless_fresh(installation: Installation) -> None:
    installation.up()
    installation.ended(installation.submit("true"))
    assert installation.stop() == 0
    until(installation.agents_stopped, "the agent has stopped")
    for name in ("hodei.db", "hodei.db-wal", "hodei.db-shm"):
        (installation.home / name).unlink(missing_ok=True)
    refused = installation.hodei("up", "-d")
    assert refused.code != 0
    assert "is missing" in refused.err
    assert "--fresh" in refused.err
    assert not (installation.home / "hodei.db").exists()
    installation.up("--fresh")
    assert installation.ended(installation.submit("sh", "-c", "exit 7"))[0].job.exit_code == 7
    assert list(installation.home.glob("agent.before-*"))
