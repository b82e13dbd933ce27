"""Jobs that wait for company, or because of it: who is woken, and who waits behind whom."""

from __future__ import annotations

from builders import a_job_spec
from hodei.control.explain.why import why
from hodei.control.queue.base import SchedulingQueue
from hodei.engine.plan import EXISTING_ANTI_AFFINITY, Refusal
from hodei.engine.view import gang_of
from hodei.model.affinity import JobAffinity, JobTerm, parse_selector
from hodei.model.job import Reason, Verdict
from hodei.plugins.registry import build_profile
from unit.control.harness import a_harness


def _line(*labels: dict[str, str]) -> SchedulingQueue:
    line = SchedulingQueue(build_profile("default"))
    for number, own in enumerate(labels, 1):
        line.add(gang_of(number, a_job_spec(f"job-{number}", labels=own), number))
    return line


def _try_all(line: SchedulingQueue, code: str, kept_off: str) -> list[int]:
    """Refuses every job with that label value; the others start. Returns who was tried."""
    tried = []
    for gang in line.ready():
        tried.append(gang.id)
        if gang.job.labels.get("app") == kept_off:
            line.refused(gang, Refusal(gang.id, (Verdict(Reason("x", code, "no")),), requeue_on=("run_ended",)))
        else:
            line.started(gang)
    return tried


def test_a_job_that_residents_keep_off_by_its_labels_does_not_hold_up_its_equals_in_shape():
    line = _line({"app": "web"}, {}, {"app": "db"})
    assert _try_all(line, EXISTING_ANTI_AFFINITY, "web") == [1, 2, 3]
    assert list(line.gangs) == [1]


def test_separated_jobs_with_equal_labels_form_a_group():
    line = _line({"app": "web"}, {"app": "web"}, {})
    assert _try_all(line, EXISTING_ANTI_AFFINITY, "web") == [1, 2, 3]
    line.wake("run_ended")
    assert _try_all(line, EXISTING_ANTI_AFFINITY, "web") == [1]
    line.wake("run_ended")
    assert _try_all(line, EXISTING_ANTI_AFFINITY, "nobody") == [1, 2]
    assert not line.gangs


def test_any_other_refusal_is_that_of_the_whole_group():
    line = _line({"app": "web"}, {}, {})
    assert _try_all(line, "INSUFFICIENT_CPU", "web") == [1]


def test_one_that_was_set_apart_can_be_taken_out():
    line = _line({"app": "web"}, {"app": "web"})
    _try_all(line, EXISTING_ANTI_AFFINITY, "web")
    line.remove(1)
    line.wake("run_ended")
    assert _try_all(line, EXISTING_ANTI_AFFINITY, "web") == [2]


def test_a_job_with_affinity_is_retried_when_a_matching_job_is_placed():
    harness = a_harness(4)
    near_web = JobAffinity((JobTerm("host", parse_selector("app=web")),))
    harness.submit(1, job_affinity=near_web)
    assert harness.reason(1)[0] == "JOB_AFFINITY"
    told = why(harness.controller, 1, harness.now_ms)
    assert told is not None
    assert (told.status, told.code) == ("waiting", "JOB_AFFINITY")
    assert "another job is placed" in told.next_trigger
    harness.submit(2, labels={"app": "web"})
    harness.see("2.0.1", "running")
    assert harness.state(1) == "scheduled"


def test_a_job_that_a_resident_keeps_off_is_tried_again_when_it_ends():
    harness = a_harness(4)
    alone = JobAffinity((JobTerm("host", parse_selector("app=web")),))
    harness.submit(1, job_anti_affinity=alone)
    harness.submit(2, labels={"app": "web"})
    harness.submit(3, labels={"app": "db"})
    assert harness.reason(2)[0] == "EXISTING_ANTI_AFFINITY"
    assert harness.state(3) == "scheduled"
    harness.see("1.0.1", "running")
    harness.see("1.0.1", "succeeded", 0)
    assert harness.state(2) == "scheduled"
