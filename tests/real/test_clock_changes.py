"""The clock of a real server is set ahead and back: nothing is deleted, runs continue, and times are right afterwards.

Only the clock of the server and its agent is changed, by a `sitecustomize` module; the clock of the machine is not.
"""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from real.installation import Installation, until

pytestmark = [pytest.mark.real, pytest.mark.slow]

_YEAR_S = 365 * 86_400
_SHIFT = """
import time
_time_ns = time.time_ns

def _offset_ns():
    try:
        with open({path!r}) as file:
            return int(file.read() or 0) * 1_000_000_000
    except OSError:
        return 0

time.time_ns = lambda: _time_ns() + _offset_ns()
time.time = lambda: time.time_ns() / 1e9
"""


class SetClock:
    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._offset = directory / "offset"
        (directory / "sitecustomize.py").write_text(_SHIFT.format(path=str(self._offset)))
        self.env = {"PYTHONPATH": os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))}

    def set(self, seconds: int) -> None:
        part = self._offset.with_suffix(".part")
        part.write_text(str(seconds))
        part.replace(self._offset)


def _ahead_s(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp() - time.time()


def test_a_clock_that_is_set_ahead_and_back_deletes_nothing_and_times_are_right_again(
    installation: Installation, tmp_path: Path
) -> None:
    clock = SetClock(tmp_path / "clock")
    installation.configure('[[nodes]]\nname = "small"\ncpu = 1\nmemory = "1Gi"\n').up(env=clock.env)
    old = installation.submit("sh", "-c", "exit 3")
    installation.ended(old)
    running = installation.submit("sleep", "600")
    installation.until_state(running, "running")
    clock.set(_YEAR_S)
    ahead = installation.submit("sleep", "600", cpu=1)  # pending, because the first job uses a part of the node
    assert _ahead_s(installation.job(ahead).job.submitted_at) > _YEAR_S / 2
    clock.set(0)
    until(lambda: "restarting because the clock" in installation.server_output(), "the server notices the clock change")
    until(lambda: installation.server_output().count("is up at") == 2, "the server is up again")
    assert installation.server is not None
    assert installation.server.poll() is None
    now = installation.submit("true")
    assert installation.ended(now)[0].job.state == "succeeded"
    for job in (now, ahead, running):
        detail = installation.job(job)
        assert abs(_ahead_s(detail.job.submitted_at)) < 3600
        for run in detail.runs:
            if run.finished_at:
                assert run.finished_at >= run.started_at
    assert installation.job(old).job.exit_code == 3
    assert installation.state(running) == "running"
    assert installation.state(ahead) == "pending"
    installation.ok("cancel", str(running))
    installation.ended(running)


def test_a_wrong_clock_at_the_start_holds_retention_and_is_reported(installation: Installation, tmp_path: Path) -> None:
    clock = SetClock(tmp_path / "clock")
    installation.configure('[server]\nretention = "30d"\naudit_retention = "30d"\n')
    installation.up(env=clock.env)
    old = installation.submit("sh", "-c", "echo hello; exit 3")
    installation.ended(old)
    assert installation.stop() == 0
    clock.set(_YEAR_S)
    for _ in range(2):  # a restart does not confirm the clock
        installation.kill_agent()
        installation.up(env=clock.env)
        assert installation.log_of(old) == "hello\n"
        found = until(
            lambda: next(
                (c for c in installation.ok("doctor", "-o", "json").json if c["name"] == "retention" and c["fix"]), None
            ),
            "doctor reports that retention is held",
        )
        assert found["level"] == "warning"
        assert "--trust-clock" in found["fix"]
        assert b"hodei_retention_held 1.0" in installation.request("GET", "/metrics").body
        assert installation.job(old).job.exit_code == 3
        assert installation.ok("audit", "-o", "json").json
        assert installation.stop() == 0
    installation.up("--trust-clock", env=clock.env)
    until(lambda: not installation.rows("SELECT 1 FROM job WHERE id = ?", old), "the expired job is deleted")
