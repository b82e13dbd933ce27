"""Arrays: at most `at_most` elements are active, the others wait outside the queue in order, also after a restart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import NOW_MS, a_job, a_job_spec, a_node
from hodei.control.explain.why import why
from hodei.model.array import ArrayElement, array_environment, count_jobs, first_ids, iter_expanded, same_template
from hodei.model.errors import InvalidInput
from hodei.model.facts import JobCancelled, JobHeld, JobReleased, JobRequeued, JobSubmitted
from hodei.model.job import Job
from unit.control.harness import Harness


def an_array(count: int, at_most: int = 0, first: int = 1, **fields) -> list[JobSubmitted]:
    template = a_job_spec("sweep", array=ArrayElement(0, 0, count, at_most), **fields)
    return [JobSubmitted(a_job(id, spec=spec)) for id, spec in enumerate(iter_expanded([template], first), first)]


def states(harness: Harness) -> str:
    """One letter for each job: p(ending), w(aiting outside), s(cheduled), r(unning), h(eld), or how it ended."""
    return "".join(
        "w" if job.reason_code == "ARRAY_LIMIT" and job.state == "pending" else job.state[0]
        for _, job in sorted(harness.jobs.items())
    )


def test_no_more_than_at_most_elements_are_placed_on_an_idle_cluster():
    harness = Harness(a_node("big", 64, "64Gi"))
    harness.step(*an_array(5, at_most=2))
    assert states(harness) == "sswww"
    code, reason = harness.reason(3)
    assert (code, reason) == ("ARRAY_LIMIT", "at most 2 of the 5 elements of its array at once")


def test_without_a_limit_all_elements_are_placed_at_once():
    harness = Harness(a_node("big", 64, "64Gi"))
    harness.step(*an_array(5))
    assert states(harness) == "sssss"


def test_the_next_element_is_queued_when_one_ends():
    harness = Harness(a_node("big", 64, "64Gi"))
    harness.step(*an_array(5, at_most=2))
    harness.observe("2.0.1", "running")
    harness.observe("2.0.1", "succeeded", 0)
    assert states(harness) == "sssww"
    harness.observe("1.0.1", "failed", 1)
    assert states(harness) == "fsssw"


def test_a_retried_element_stays_active():
    harness = Harness(a_node("big", 64, "64Gi"))
    harness.step(*an_array(3, at_most=1, retries=3))
    harness.observe("1.0.1", "failed", 1)
    assert states(harness) == "pww"
    harness.advance(60_000)
    assert states(harness) == "sww"


@pytest.mark.parametrize("how", ["held", "cancelled"])
def test_the_next_element_is_queued_when_a_pending_one_is_held_or_cancelled(how: str):
    harness = Harness()
    harness.step(*an_array(3, at_most=1))
    assert states(harness) == "pww"
    harness.step(JobHeld(1) if how == "held" else JobCancelled(1))
    assert states(harness) == how[0] + "pw"


def test_a_released_element_waits_its_turn_again():
    harness = Harness(a_node("big", 64, "64Gi"))
    harness.step(*an_array(4, at_most=1))
    harness.step(JobHeld(2))
    assert states(harness) == "shww"
    harness.step(JobReleased(2))
    assert states(harness) == "swww"
    harness.step(JobCancelled(1))
    harness.observe("1.0.1", "stopped", 143)
    assert states(harness) == "csww"


def test_an_element_held_and_released_in_one_step_stays_active():
    harness = Harness()
    harness.step(*an_array(2, at_most=1))
    harness.step(JobHeld(1), JobReleased(1))
    assert states(harness) == "pw"


def test_an_ended_element_that_is_requeued_waits_if_the_array_is_full():
    harness = Harness(a_node("big", 64, "64Gi"))
    harness.step(*an_array(3, at_most=1))
    harness.observe("1.0.1", "failed", 1)
    assert states(harness) == "fsw"
    harness.step(JobRequeued(1, harness.jobs[1]))
    assert states(harness) == "wsw"


def test_the_order_of_elements_survives_a_restart():
    big = a_node("big", 64, "64Gi")
    harness = Harness(big)
    harness.step(*an_array(6, at_most=2))
    harness.step(JobHeld(1) if harness.state(1) == "pending" else JobHeld(3), JobHeld(4))
    harness.step(JobReleased(3), JobReleased(4))
    before = states(harness)
    harness.restart(big)
    assert states(harness) == before == "sswwww"
    harness.observe("1.0.1", "succeeded", 0)
    assert states(harness) == "ssswww"


def test_the_limits_of_two_arrays_are_independent():
    harness = Harness(a_node("big", 64, "64Gi"))
    harness.step(*an_array(2, at_most=1), *an_array(2, at_most=1, first=3))
    assert states(harness) == "swsw"


def test_why_names_the_active_elements_and_those_ahead():
    harness = Harness(a_node("big", 64, "64Gi"))
    harness.step(*an_array(5, at_most=2))
    found = why(harness.controller, 5, NOW_MS)
    assert found is not None
    assert found.code == "ARRAY_LIMIT"
    assert "2 are active, 2 others go first" in found.summary


def test_elements_outside_the_queue_count_as_pending():
    harness = Harness()
    harness.step(*an_array(5, at_most=2))
    assert harness.controller.pending() == {"default": 5}
    harness.step(JobCancelled(5))
    assert harness.controller.pending() == {"default": 4}


def test_a_scheduling_timeout_starts_when_an_element_is_queued():
    harness = Harness()
    harness.step(*an_array(2, at_most=1, scheduling_timeout_ms=1000))
    harness.advance(1000)
    assert states(harness) == "fp"
    harness.advance(999)
    assert states(harness) == "fp"
    harness.advance(1)
    assert states(harness) == "ff"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["hold", "release", "cancel", "requeue", "end", "restart"]), st.integers(1, 8))),
)
def test_the_limit_of_an_array_always_holds_and_is_used(at_most: int, acts):
    big = a_node("big", 64, "64Gi")
    harness = Harness(big)
    harness.step(*an_array(8, at_most=at_most))
    for act, id in acts:
        job = harness.jobs[id]
        if act == "restart":
            harness.restart(big)
        elif act == "end":
            harness.observe(f"{id}.0.{job.attempt}", "succeeded", 0)
        else:
            record = job if job.finished_ms else None
            fact = {"hold": JobHeld(id), "release": JobReleased(id), "cancel": JobCancelled(id)}.get(act)
            harness.step(fact or JobRequeued(id, record))
        active = sum(job.state in ("scheduled", "running") for job in harness.jobs.values())
        assert active <= at_most
        if "w" in states(harness):
            assert active == at_most


def test_elements_share_everything_but_their_index():
    template = a_job_spec("sweep", array=ArrayElement(0, 4, 3, 0, 4, 2))
    plain = a_job_spec("plain")
    expanded = list(iter_expanded([plain, template, plain], 10))
    assert [spec.array and (spec.array.first, spec.array.index) for spec in expanded] == [
        None, (11, 4), (11, 6), (11, 8), None,
    ]  # fmt: skip
    assert first_ids([plain, template, plain], 10) == (10, 11, 14)
    assert expanded[1].tasks is expanded[3].tasks
    assert same_template(expanded[1], expanded[3])
    assert not same_template(expanded[1], expanded[0])
    assert array_environment(expanded[2]) == {
        "HODEI_ARRAY_INDEX": "6",
        "HODEI_ARRAY_COUNT": "3",
        "HODEI_ARRAY_JOB": "11",
    }
    assert array_environment(plain) == {}


def test_the_id_of_an_element_follows_from_its_index():
    element = ArrayElement(100, 0, 4, 0, 10, 5)
    assert [element.job_of(index) for index in (10, 15, 25)] == [100, 101, 103]
    with pytest.raises(InvalidInput, match="no element 11"):
        element.job_of(11)


def test_too_many_jobs_in_one_submission_are_refused():
    template = a_job_spec("sweep", array=ArrayElement(0, 0, 60_000))
    with pytest.raises(InvalidInput, match="120000 jobs at once"):
        count_jobs([template, template])


def test_an_array_spec_that_was_not_expanded_is_a_plain_job():
    harness = Harness(a_node("big", 64, "64Gi"))
    harness.step(JobSubmitted(Job(1, a_job_spec("sweep", array=ArrayElement(0, 0, 9, 1)), "pending", NOW_MS, NOW_MS)))
    assert states(harness) == "s"


def test_the_hint_for_a_held_first_element_names_only_that_element():
    harness = Harness(a_node("small", 1, "1Gi"))
    harness.step(*an_array(3, cpu=2))
    harness.step(JobHeld(1), JobHeld(2))
    explanations = [why(harness.controller, job, NOW_MS) for job in (1, 2)]
    assert [one.hint for one in explanations if one is not None] == ["hodei release '1[0]'", "hodei release 2"]
