"""Texts of `why` beyond capacity: protected victims, earlier preemptions, spill, timeouts."""

from __future__ import annotations

from builders import a_node
from hodei.control.explain.why import StartProgress, why
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.resources import format_time
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness, a_harness


def _why(harness: Harness, job: int = 1):
    found = why(harness.controller, job, harness.now_ms)
    assert found is not None
    return found


def _with_low_job(**policy: int) -> Harness:
    harness = a_harness(4, preemption=PreemptionPolicy(**policy))
    harness.submit(1, cpu="4", name="low", priority=100)
    harness.observe("1.0.1", "running")
    return harness


def test_victims_protected_for_a_while_are_named_with_the_end_of_the_protection():
    harness = _with_low_job(min_runtime_ms=60_000)
    started = harness.now_ms
    harness.now_ms += 1000
    harness.submit(2, cpu="4", priority=1000)
    explanation = _why(harness, 2)
    assert explanation.code == "VICTIMS_PROTECTED"
    until = f"victims are protected until {format_time(started + 60_000)} (min_runtime)"
    assert explanation.summary.startswith(f"it could preempt job 1 (low), but {until}")
    assert explanation.next_attempt_ms == started + 60_000
    harness.advance(60_000)
    assert _why(harness, 2).code == "PREEMPTING"


def test_a_victim_that_was_preempted_too_often_is_protected_permanently():
    harness = _with_low_job(max_per_job=0)
    harness.advance(1000)
    harness.submit(2, cpu="4", priority=1000)
    explanation = _why(harness, 2)
    assert explanation.code == "VICTIMS_PROTECTED"
    assert "protected permanently (max_per_job)" in explanation.summary


def test_an_exhausted_preemption_budget_is_reported():
    harness = a_harness(4, 4, preemption=PreemptionPolicy(budget=1, interval_ms=60_000))
    for job in (1, 2):
        harness.submit(job, cpu="4", priority=100)
        harness.observe(f"{job}.0.1", "running")
    harness.advance(1000)
    harness.submit(3, cpu="4", priority=1000)
    spent = harness.now_ms
    harness.submit(4, cpu="4", priority=1000)
    explanation = _why(harness, 4)
    assert explanation.code == "VICTIMS_PROTECTED"
    assert f"no more jobs are preempted until {format_time(spent + 60_000)} (budget)" in explanation.summary


def test_a_job_that_may_not_preempt_has_its_shortage_as_reason():
    harness = _with_low_job(min_runtime_ms=60_000)
    harness.submit(2, cpu="4", priority=100)
    assert _why(harness, 2).code == "INSUFFICIENT_CPU"


def test_a_pending_preempted_job_names_its_preemptor_and_no_node():
    harness = _with_low_job()
    harness.advance(1000)
    harness.submit(2, cpu="4", name="urgent", priority=1000)
    harness.observe("1.0.1", "stopped")
    assert harness.state(2) == "scheduled"
    assert (harness.state(1), harness.jobs[1].nodes) == ("pending", "")
    text = "preempted by job 2 (urgent, priority 1000); 0/1 nodes are available: 1 Insufficient cpu"
    assert harness.reason(1) == ("INSUFFICIENT_CPU", text)
    assert _why(harness).summary == text
    harness.advance(1000)
    assert _why(harness).summary == text  # the preemption is named once, however often the job is refused
    harness.observe("2.0.1", "succeeded", 0)
    assert harness.jobs[1].nodes == "n1"


def test_a_spilled_job_is_explained_with_its_wait():
    rules = [{"to": "cloud", "wait_ms": 60_000}]
    profile = build_profile("default", plugins=("spill",), arguments={"spill": {"rules": rules}})
    harness = Harness(a_node("n1", 4), a_node("c1", 4, backend="cloud"), profiles={"default": profile})
    harness.submit(1, cpu="4")
    harness.submit(2, cpu="4")
    assert harness.state(2) == "pending"
    harness.advance(61_000)
    explanation = _why(harness, 2)
    assert (
        explanation.summary
        == "placed on c1, about to start; spilled to backend cloud: elsewhere it would wait longer than 1m"
    )
    assert "spilled" not in _why(harness, 1).summary


def test_a_start_in_doubt_is_reported():
    harness = a_harness(4)
    harness.submit(1)
    explanation = why(harness.controller, 1, harness.now_ms, StartProgress(("slurm1",)))
    assert explanation is not None
    assert explanation.code == "START_IN_DOUBT"
    assert explanation.summary.startswith(
        "placed on n1; it is not known whether it has started: backend slurm1 has not answered"
    )


def test_a_timeout_reads_the_same_whichever_backend_stopped_the_run():
    for reason in ("it ran longer than 60 s", "it reached the time limit that it had in Slurm", "DeadlineExceeded"):
        harness = a_harness(4)
        harness.submit(1, timeout_ms=60_000)
        harness.observe("1.0.1", "running")
        harness.now_ms += 60_000
        harness.observe("1.0.1", "failed", 143, reason_code="timeout", reason=reason)
        assert harness.reason() == ("TIMEOUT", "it ran longer than its timeout of 60s")


def test_a_limit_of_the_backend_keeps_its_text():
    for timeout_ms in (0, 600_000):
        harness = a_harness(4)
        harness.submit(1, timeout_ms=timeout_ms)
        harness.observe("1.0.1", "running")
        harness.now_ms += 60_000
        harness.observe("1.0.1", "failed", reason_code="timeout", reason="it used up the CPU time that it had in PBS")
        assert harness.reason() == ("TIMEOUT", "it used up the CPU time that it had in PBS")
