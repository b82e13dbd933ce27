"""`kill -9` in the middle of writing: every acknowledged batch is complete, and the file is intact."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from builders import a_job
from hodei.model.effects import SaveJob
from hodei.ports import JobQuery
from hodei.store import SqliteStore

TESTS = Path(__file__).parents[2]
WRITER = """
import sys
from pathlib import Path
from builders import a_job, a_record, a_run
from hodei.model.effects import SaveJob, SaveRun
from hodei.store import SqliteStore

store = SqliteStore(Path(sys.argv[1]))
batch = store.open().last_job // 10
while True:
    batch += 1
    ids = range(batch * 10 - 9, batch * 10 + 1)
    store.commit([save for id in ids for save in
                  (SaveJob(a_job(id), new=True), SaveRun(a_run(id), new=True), a_record(id, job=id))])
    store.commit([SaveJob(a_job(id, state="running", attempt=1)) for id in ids])
    print(batch, flush=True)
"""


def write_until_killed(path: Path, acknowledgements: int) -> int:
    """Kill a writing child process after so many acknowledgements; returns the last acknowledged number."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    assert child.stdout is not None
    last = 0
    try:
        for _ in range(acknowledgements):
            ready, _, _ = select.select([child.stdout], [], [], 30)
            assert ready, "the child does not write"
            last = int(child.stdout.readline())
    finally:
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().decode().split("\n")
        child.wait()
        child.stdout.close()
    # Lines written before the signal arrived count as well; a line cut by the kill does not.
    return max([last, *(int(line) for line in rest[:-1])])


@pytest.mark.real
def test_every_acknowledged_batch_survives_kill_9_completely(tmp_path: Path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "hodei.db"
    for _ in range(5):
        acknowledged = write_until_killed(path, rng.randrange(1, 60))
        store = SqliteStore(path)
        opened = store.open()
        assert opened.last_job >= acknowledged * 10
        assert opened.last_job % 10 == 0, "an incomplete batch"
        assert [text for name, ok, text in store.check() if name == "store integrity" and not ok] == []
        active = store.active()
        assert [job.id for job, _ in active] == list(range(1, opened.last_job + 1))
        for job, runs in active[: acknowledged * 10]:
            assert (job.state, [run.id for run in runs]) == ("running", [f"{job.id}.0.1"])
        assert len(store.events(limit=10**6)) == opened.last_event == opened.last_job
        states = Counter(job.state for job, _ in active)
        assert {state: count for state, count in store.counts().items() if count} == dict(states)
        assert store.jobs(JobQuery(limit=1)).jobs[0].id == opened.last_job
        store.close()
        if states["pending"]:
            # The next child continues after the last job; its incomplete jobs are completed here.
            finish(path)


def finish(path: Path) -> None:
    store = SqliteStore(path)
    store.open()
    store.commit([SaveJob(a_job(job.id, state="running", attempt=1)) for job, _ in store.active()])
    store.close()
