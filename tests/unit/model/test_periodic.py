"""Due times of periodic jobs, and policies for missed ones."""

from __future__ import annotations

import pytest

from builders import a_job_spec, a_task
from hodei.model.cron import Periodic, due, job_due_at

MINUTE = 60_000
START = 1_767_225_600_000  # 2026-01-01T00:00Z


def every_five_minutes(**fields) -> Periodic:
    return Periodic("tick", "*/5 * * * *", a_job_spec("job"), handled_ms=START, **fields)


@pytest.mark.parametrize(
    ("minutes", "missed", "run", "dropped"),
    [
        pytest.param(4, "skip", [], 0, id="nothing yet"),
        pytest.param(5, "skip", [5], 0, id="on time"),
        pytest.param(5.9, "skip", [5], 0, id="within the minute"),
        pytest.param(23, "skip", [], 4, id="four missed and dropped"),
        pytest.param(25, "skip", [25], 4, id="four missed, and one on time"),
        pytest.param(23, "run_once", [20], 3, id="the latest replaces all"),
        pytest.param(25, "run_once", [25], 4, id="the one that is due replaces all"),
        pytest.param(23, "run_all", [10, 15, 20], 1, id="all, but no more than the limit"),
        pytest.param(25, "run_all", [10, 15, 20, 25], 1, id="all, and the one that is due"),
    ],
)
def test_missed_times_are_handled_by_the_policy(minutes: float, missed, run: list[int], dropped: int):
    found = due(every_five_minutes(missed=missed, missed_limit=3), START + round(minutes * MINUTE))
    assert [(at - START) // MINUTE for at in found.run] == run
    assert found.dropped == dropped
    assert found.handled_ms == START + int(minutes // 5) * 5 * MINUTE


def test_a_paused_periodic_job_is_never_due():
    paused = every_five_minutes(paused=True)
    assert due(paused, START + 60 * MINUTE).run == ()
    assert paused.next_ms() == 0


def test_years_of_minutes_are_handled_quickly():
    old = Periodic("tick", "* * * * *", a_job_spec("job"), handled_ms=START, missed="run_all", missed_limit=1000)
    found = due(old, START + 365 * 1440 * MINUTE)
    assert len(found.run) <= 1001
    assert found.run[-1] == found.handled_ms == START + 365 * 1440 * MINUTE
    assert found.dropped > 300


def test_a_job_carries_its_periodic_job_and_due_time():
    spec = a_job_spec("job", tasks=(a_task(env={"A": "1"}),), labels={"team": "x"}, deadline_ms=60_000)
    job = job_due_at(Periodic("tick", "@hourly", spec), START)
    assert job.tasks[0].env == {"A": "1", "HODEI_DUE_TIME": "2026-01-01T00:00:00Z"}
    assert job.labels == {"team": "x", "hodei/periodic": "tick"}
    assert job.annotations == {"hodei/due-time": "2026-01-01T00:00:00Z"}
    assert job.deadline_ms == START + 60_000
