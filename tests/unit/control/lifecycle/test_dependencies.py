"""Jobs that wait for others: who goes when, who can never go, and what they say meanwhile. The controller is real."""

from __future__ import annotations

from typing import Any

import pytest

from builders import a_job
from hodei.control.clone import clone_controller
from hodei.control.explain.why import why
from hodei.model.dependency import Dependencies, Dependency, DependencyStatus, On
from hodei.model.facts import (
    DataAppeared,
    JobCancelled,
    JobHeld,
    JobReleased,
    JobRequeued,
    JobRestored,
    JobSubmitted,
    NodeJoined,
)
from unit.control.house import House, a_house, some_nodes


def after(*jobs: int, on: On = "succeeded", need: int = 0, timeout_ms: int = 0) -> Dependencies:
    return Dependencies(tuple(Dependency(on, job=job, name=f"job-{job}") for job in jobs), need, timeout_ms)


def data(what: str = "/data/x", timeout_ms: int = 0) -> Dependencies:
    return Dependencies((Dependency("exists", what=what),), 0, timeout_ms)


def submit(house: House, *jobs: Any) -> None:
    house.learn(*(JobSubmitted(job) for job in jobs))


def job(house: House, id: int, wanted: Dependencies | None = None, **fields: Any) -> Any:
    return a_job(id, at_ms=house.now_ms, queued_ms=house.now_ms, after=wanted or Dependencies(), **fields)


def end(house: House, id: int, state: str = "succeeded", attempt: int = 1) -> None:
    house.see(f"{id}.0.{attempt}", "running")
    house.see(f"{id}.0.{attempt}", state, 0 if state == "succeeded" else 1)


@pytest.mark.parametrize(
    ("on", "ends", "then"),
    [
        pytest.param("succeeded", "succeeded", "scheduled", id="success was wanted and came"),
        pytest.param("succeeded", "failed", "failed", id="success was wanted and it failed"),
        pytest.param("succeeded", "cancelled", "failed", id="success was wanted and it was cancelled"),
        pytest.param("completed", "succeeded", "scheduled", id="an end was wanted and it succeeded"),
        pytest.param("completed", "failed", "scheduled", id="an end was wanted and it failed"),
        pytest.param("completed", "cancelled", "scheduled", id="an end was wanted and it was cancelled"),
        pytest.param("failed", "failed", "scheduled", id="failure was wanted and came"),
        pytest.param("failed", "succeeded", "failed", id="failure was wanted and it succeeded"),
        pytest.param("failed", "cancelled", "failed", id="failure was wanted and it was cancelled"),
        pytest.param("checkpointed", "succeeded", "scheduled", id="saved work was wanted and it succeeded"),
        pytest.param("checkpointed", "failed", "failed", id="saved work was wanted and it failed without"),
    ],
)
def test_an_end_meets_what_was_wanted_or_ends_who_wanted_it(on: On, ends: str, then: str) -> None:
    house = a_house(4)
    submit(house, job(house, 1), job(house, 2, after(1, on=on)))
    assert house.started() == ["1.0.1"]
    assert house.state(2) == "pending"
    if ends == "cancelled":
        house.see("1.0.1", "running")
        house.learn(JobCancelled(1))
        house.see("1.0.1", "stopped", 143)
    else:
        end(house, 1, ends)
    assert house.state(1) == ends
    assert house.state(2) == then
    if then == "failed":
        code, text = house.reason(2)
        assert code == "DEPENDENCY_NEVER_MET"
        assert "job 1 (job-1)" in text
        assert {"cancelled": "was cancelled"}.get(ends, f"that {ends}") in text


def test_who_waits_is_in_no_line_and_says_for_what() -> None:
    house = a_house(4)
    submit(house, job(house, 1), job(house, 2, after(1)))
    assert house.state(2) == "pending"
    assert house.reason(2) == ("WAITING_FOR", "waits for job 1 (job-1) to succeed")
    assert 2 not in house.controller.lines["default"].gangs
    assert house.controller.pending() == {"default": 1}
    assert (house.controller.dependencies.dependents(1), house.controller.dependencies.awaited(2)) == ([2], [1])
    end(house, 1)
    assert (house.state(2), house.jobs[2].queued_ms) == ("scheduled", house.now_ms)
    assert "job.dependencies_met" in house.kinds(2)
    assert not house.controller.dependencies.dependents(1)


def test_the_order_in_which_jobs_are_told_does_not_matter() -> None:
    house = a_house(4)
    submit(house, job(house, 1, after(3)), job(house, 2, after(1)), job(house, 3))
    assert house.started() == ["3.0.1"]
    end(house, 3)
    assert house.started() == ["1.0.1"]
    end(house, 1)
    assert house.started() == ["2.0.1"]


def test_a_failure_that_is_retried_is_not_an_end() -> None:
    house = a_house(4)
    submit(house, job(house, 1, retries=1), job(house, 2, after(1)), job(house, 3, after(1, on="failed")))
    end(house, 1, "failed")
    assert (house.state(2), house.state(3)) == ("pending", "pending")
    house.later(60_000)
    end(house, 1, "succeeded", attempt=2)
    assert (house.state(2), house.state(3)) == ("scheduled", "failed")


def test_saved_work_is_enough_for_whoever_waits_for_that() -> None:
    house = a_house(4)
    submit(house, job(house, 1), job(house, 2, after(1, on="checkpointed")), job(house, 3, after(1)))
    house.see("1.0.1", "running")
    assert house.state(2) == "pending"
    house.see("1.0.1", "running", checkpoint_ms=house.now_ms)
    assert (house.state(2), house.state(3)) == ("scheduled", "pending")
    submit(house, job(house, 4, after(1, on="checkpointed")))
    assert house.state(4) == "scheduled"


def test_some_of_many_are_enough_and_it_ends_when_too_few_are_left() -> None:
    house = a_house(16)
    some = [job(house, id) for id in range(1, 6)]
    submit(house, *some, job(house, 6, after(1, 2, 3, 4, 5, need=2)), job(house, 7, after(1, 2, 3, 4, 5, need=4)))
    assert house.reason(6)[1].startswith("waits for 2 of: job 1 (job-1) to succeed, job 2")
    end(house, 3, "failed")
    end(house, 4)
    assert (house.state(6), house.state(7)) == ("pending", "pending")
    assert house.reason(6)[1].startswith("waits for 1 of: ")
    end(house, 1, "failed")
    assert house.state(7) == "failed"
    assert house.reason(7)[1].startswith("needs 4 of 5 and 2 can never be met any more: it waited for job 3 (job-3)")
    end(house, 5)
    assert house.state(6) == "scheduled"


def test_data_that_appears_lets_everyone_go_who_waited_for_it() -> None:
    house = a_house(4)
    submit(house, job(house, 1, data()), job(house, 2, data()), job(house, 3, data("/data/y")))
    assert sorted(house.controller.dependencies.data) == ["/data/x", "/data/y"]
    assert house.reason(1) == ("WAITING_FOR", "waits for /data/x to appear")
    house.learn(DataAppeared("/data/x"))
    assert [house.state(id) for id in (1, 2, 3)] == ["scheduled", "scheduled", "pending"]
    house.learn(JobCancelled(3))
    assert list(house.controller.dependencies.data) == []


def test_patience_has_an_end() -> None:
    house = a_house(4)
    submit(house, job(house, 1, data(timeout_ms=5000)), job(house, 2, after(1, on="failed")))
    assert house.controller.next_wakeup_ms(house.now_ms) == house.now_ms + 5000
    house.later(4999)
    assert house.state(1) == "pending"
    house.later(1)
    assert (house.state(1), house.state(2)) == ("failed", "scheduled")
    assert house.reason(1) == ("DEPENDENCY_TIMEOUT", "after 5s it still waits for /data/x to appear")
    house.learn(JobRequeued(1, house.jobs[1]))
    assert house.state(1) == "pending"
    house.later(4999)
    assert house.state(1) == "pending"
    house.later(1)
    assert house.state(1) == "failed"


def test_a_long_chain_falls_as_one() -> None:
    house = a_house(4)
    length = 3000
    submit(house, job(house, 1), *(job(house, id, after(id - 1)) for id in range(2, length + 1)))
    end(house, 1, "failed")
    assert {house.state(id) for id in range(2, length + 1)} == {"failed"}
    assert "job 2999 (job-2999) to succeed, but that failed" in house.reason(length)[1]


def test_a_held_job_goes_on_waiting_and_stays_held_when_it_is_met() -> None:
    house = a_house(4)
    submit(house, job(house, 1), job(house, 2, after(1)), job(house, 3, after(1)))
    house.learn(JobHeld(2), JobHeld(3))
    house.learn(JobReleased(3))
    assert house.reason(3)[0] == "WAITING_FOR"
    end(house, 1)
    assert (house.state(2), house.state(3)) == ("held", "scheduled")
    house.learn(JobReleased(2))
    assert house.state(2) == "scheduled"


def test_a_dependency_once_met_is_not_asked_for_again() -> None:
    house = a_house(4)
    submit(house, job(house, 1), job(house, 2, after(1), retries=1))
    end(house, 1)
    house.learn(JobRequeued(1, house.jobs[1]))
    end(house, 2, "failed")
    house.later(60_000)
    assert house.jobs[2].attempt == 2


def test_a_requeued_job_waits_again_for_what_it_never_got() -> None:
    house = a_house(4)
    submit(house, job(house, 1), job(house, 2, after(1)))
    end(house, 1, "failed")
    assert house.state(2) == "failed"
    house.learn(JobRequeued(1, house.jobs[1]))
    house.learn(JobRequeued(2, house.jobs[2]))
    assert (house.state(1), house.state(2)) == ("scheduled", "pending")
    end(house, 1, attempt=2)
    assert house.state(2) == "scheduled"


def test_jobs_that_ended_before_are_told_with_the_fact() -> None:
    house = a_house(4)
    told = (DependencyStatus(1, "succeeded"), DependencyStatus(2, "failed", saved=True))
    house.learn(JobSubmitted(job(house, 5, after(1)), told), JobSubmitted(job(house, 6, after(2)), told))
    house.learn(JobSubmitted(job(house, 7, after(2, on="checkpointed")), told))
    assert [house.state(id) for id in (5, 6, 7)] == ["scheduled", "failed", "scheduled"]


def test_of_a_job_that_nobody_remembers_only_the_end_is_known() -> None:
    house = a_house(4)
    submit(house, job(house, 5, after(1, on="completed")), job(house, 6, after(1)))
    assert (house.state(5), house.state(6)) == ("scheduled", "failed")
    assert "is not known any more" in house.reason(6)[1]


def test_who_waited_before_a_restart_waits_after_it() -> None:
    house = a_house(1)
    submit(house, job(house, 1), job(house, 2, after(4)), job(house, 3, after(1, 4)), job(house, 4))
    end(house, 1)
    assert house.state(4) == "scheduled"
    house.controller = House().controller
    # In order of id, in parts, so that job 4 is not known yet when those come back who wait for it.
    for id in (2, 3, 4):
        runs = tuple(run for run in house.runs.values() if run.job == id)
        house.learn(
            JobRestored(house.jobs[id], runs, (DependencyStatus(1, "succeeded"), DependencyStatus(4, "scheduled")))
        )
    house.learn(*(NodeJoined(node) for node in some_nodes(1)))
    assert (house.state(2), house.state(3)) == ("pending", "pending")
    assert house.controller.dependencies.awaited(3) == [4]
    end(house, 4)
    assert house.started() == ["2.0.1"]
    assert "job.dependencies_met" in house.kinds(3)


def test_why_says_what_it_waits_for_and_why_that_waits() -> None:
    house = a_house(1)
    submit(house, job(house, 1, cpu=4), job(house, 2, after(1)), job(house, 3, after(2)))
    answer = why(house.controller, 2, house.now_ms)
    assert answer is not None
    assert (answer.status, answer.code) == ("waiting", "WAITING_FOR")
    assert answer.summary == "waits for job 1 (job-1) to succeed"
    assert any("Insufficient cpu" in blocker.text for blocker in answer.blockers), answer.blockers
    assert "hodei why 1" in answer.hint
    above = why(house.controller, 3, house.now_ms)
    assert above is not None
    assert any("waits for job 1 (job-1) to succeed" in blocker.text for blocker in above.blockers)


def test_a_twin_waits_on_its_own() -> None:
    house = a_house(4)
    submit(house, job(house, 1), job(house, 2, after(1)))
    other = House()
    other.controller, other.jobs, other.now_ms = clone_controller(house.controller), dict(house.jobs), house.now_ms
    end(other, 1)
    assert (other.state(2), house.state(2)) == ("scheduled", "pending")
    assert house.controller.dependencies.awaited(2) == [1]


def test_why_says_how_many_of_what_it_waits_for_are_not_listed() -> None:
    house = a_house(1)
    submit(house, *(job(house, id) for id in range(1, 31)), job(house, 99, after(*range(1, 31))))
    answer = why(house.controller, 99, house.now_ms)
    assert answer is not None
    assert len(answer.blockers) == 21
    assert answer.blockers[-1].text == "… and 10 more, not listed here"
