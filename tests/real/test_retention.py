"""Retention prunes many expired records without delaying submits for long.

`HODEI_JOBS` is the number of expired jobs (default 20,000).
"""

from __future__ import annotations

import os
import time

import pytest
from msgspec import structs

from builders import a_job, a_key, a_record, a_run
from hodei.model.effects import Save, SaveJob, SaveRun
from hodei.store import SqliteStore
from real.installation import DEADLINE_S, Installation, until

pytestmark = [pytest.mark.real, pytest.mark.slow]
_DAY_MS = 86_400_000


def _fill(installation: Installation, count: int) -> None:
    """Jobs that ended forty days ago, each with a run, events and a key."""
    installation.configure("")
    store = SqliteStore(installation.home / "hodei.db")
    store.open()
    at_ms = time.time_ns() // 1_000_000 - 40 * _DAY_MS
    job = a_job(1, state="succeeded", submitted_ms=at_ms, changed_ms=at_ms, finished_ms=at_ms)
    for first in range(1, count + 1, 1000):
        saves: list[Save] = []
        for id in range(first, first + 1000):
            saves += [SaveJob(structs.replace(job, id=id), new=True), SaveRun(a_run(id, state="succeeded"), new=True)]
            saves += [a_record(2 * id + one, job=id, at_ms=at_ms) for one in (0, 1)]
            saves.append(a_key(f"k{id}", at_ms=at_ms - 2 * _DAY_MS))
        store.commit(saves)
    store.close()


def test_expired_records_are_pruned_while_submits_continue(installation: Installation) -> None:
    count = int(os.environ.get("HODEI_JOBS", "20000"))
    _fill(installation, count)
    before = (installation.home / "hodei.db").stat().st_size
    installation.up("--instant", "--trust-clock")
    began, latencies = time.monotonic(), []
    with installation.client() as client:
        while "pruned " not in installation.server_output():
            submitted = time.monotonic()
            client.submit({"command": ["true"], "cpu": "10m", "memory": "1Mi"})
            latencies.append(time.monotonic() - submitted)
            assert time.monotonic() - began < 4 * DEADLINE_S
            time.sleep(0.01)
    took_s = time.monotonic() - began
    for table, column in (("job", "id"), ("spec", "job"), ("run", "job"), ("event", "job")):
        assert installation.rows(f"SELECT count(*) FROM {table} WHERE {column} BETWEEN 1 AND ?", count) == [(0,)]  # noqa: S608 (constants)
    assert installation.rows("SELECT count(*) FROM key WHERE key LIKE 'k%'") == [(0,)]
    latencies.sort()
    print(f"{count} jobs in {took_s:.1f} s; {len(latencies)} submits, median "
          f"{latencies[len(latencies) // 2] * 1000:.0f} ms, slowest {latencies[-1] * 1000:.0f} ms")  # fmt: skip
    assert latencies[-1] < max(5, took_s / 2), "no submit waits until everything is pruned"
    metrics = installation.request("GET", "/metrics").body
    assert f'hodei_pruned_total{{what="jobs"}} {float(count)}'.encode() in metrics
    until(
        lambda: (installation.home / "hodei.db").stat().st_size < before + (8 << 20),
        "the free space is used again",
    )
    assert installation.stop() == 0
    assert installation.rows("PRAGMA integrity_check") == [("ok",)]
