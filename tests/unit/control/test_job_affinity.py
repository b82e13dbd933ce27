"""Job affinity and anti-affinity in the queue: which gangs share a group, and what triggers a retry."""

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


def _queue(*labels: dict[str, str]) -> SchedulingQueue:
    queue = SchedulingQueue(build_profile("default"))
    for number, own in enumerate(labels, 1):
        queue.add(gang_of(number, a_job_spec(f"job-{number}", labels=own), number))
    return queue


def _try_all(queue: SchedulingQueue, code: str, refused_app: str) -> list[int]:
    """Refuses every job with that label value; the others start. Returns the tried ids."""
    tried = []
    for gang in queue.ready():
        tried.append(gang.id)
        if gang.job.labels.get("app") == refused_app:
            queue.refused(gang, Refusal(gang.id, (Verdict(Reason("x", code, "no")),), requeue_on=("run_ended",)))
        else:
            queue.started(gang)
    return tried


def test_a_job_refused_for_its_labels_does_not_block_its_group():
    queue = _queue({"app": "web"}, {}, {"app": "db"})
    assert _try_all(queue, EXISTING_ANTI_AFFINITY, "web") == [1, 2, 3]
    assert list(queue.gangs) == [1]


def test_jobs_refused_for_equal_labels_form_a_group():
    queue = _queue({"app": "web"}, {"app": "web"}, {})
    assert _try_all(queue, EXISTING_ANTI_AFFINITY, "web") == [1, 2, 3]
    queue.wake("run_ended")
    assert _try_all(queue, EXISTING_ANTI_AFFINITY, "web") == [1]
    queue.wake("run_ended")
    assert _try_all(queue, EXISTING_ANTI_AFFINITY, "none") == [1, 2]
    assert not queue.gangs


def test_any_other_refusal_parks_the_whole_group():
    queue = _queue({"app": "web"}, {}, {})
    assert _try_all(queue, "INSUFFICIENT_CPU", "web") == [1]


def test_a_job_in_a_separate_group_can_be_removed():
    queue = _queue({"app": "web"}, {"app": "web"})
    _try_all(queue, EXISTING_ANTI_AFFINITY, "web")
    queue.remove(1)
    queue.wake("run_ended")
    assert _try_all(queue, EXISTING_ANTI_AFFINITY, "web") == [2]


def test_a_job_with_affinity_is_retried_when_a_matching_job_is_placed():
    harness = a_harness(4)
    near_web = JobAffinity((JobTerm("host", parse_selector("app=web")),))
    harness.submit(1, job_affinity=near_web)
    assert harness.reason(1)[0] == "JOB_AFFINITY"
    explanation = why(harness.controller, 1, harness.now_ms)
    assert explanation is not None
    assert (explanation.status, explanation.code) == ("waiting", "JOB_AFFINITY")
    assert "another job is placed" in explanation.next_trigger
    harness.submit(2, labels={"app": "web"})
    harness.observe("2.0.1", "running")
    assert harness.state(1) == "scheduled"


def test_a_job_blocked_by_anti_affinity_is_retried_when_the_other_job_ends():
    harness = a_harness(4)
    alone = JobAffinity((JobTerm("host", parse_selector("app=web")),))
    harness.submit(1, job_anti_affinity=alone)
    harness.submit(2, labels={"app": "web"})
    harness.submit(3, labels={"app": "db"})
    assert harness.reason(2)[0] == "EXISTING_ANTI_AFFINITY"
    assert harness.state(3) == "scheduled"
    harness.observe("1.0.1", "running")
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.state(2) == "scheduled"
