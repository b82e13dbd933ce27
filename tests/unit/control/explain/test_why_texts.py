"""What `why` says besides free room: protected victims, what happened to a job before."""

from __future__ import annotations

from builders import a_node
from hodei.control.explain.why import explain_start_in_doubt, why
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.model.resources import format_time
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness, a_harness


def _why(harness: Harness, job: int = 1):
    found = why(harness.controller, job, harness.now_ms)
    assert found is not None
    return found


def _guarded(**policy: int) -> Harness:
    harness = a_harness(4, preemption=PreemptionPolicy(**policy))
    harness.submit(1, cpu="4", name="low", priority=100)
    harness.see("1.0.1", "running")
    return harness


def test_victims_that_are_protected_for_a_while_are_named_with_the_moment():
    harness = _guarded(min_runtime_ms=60_000)
    started = harness.now_ms
    harness.now_ms += 1000
    harness.submit(2, cpu="4", priority=1000)
    said = _why(harness, 2)
    assert said.code == "VICTIMS_PROTECTED"
    until = f"victims are protected until {format_time(started + 60_000)} (min_runtime)"
    assert said.summary.startswith(f"it could preempt job 1 (low), but {until}")
    assert said.next_attempt_ms == started + 60_000
    harness.later(60_000)
    assert _why(harness, 2).code == "PREEMPTING"


def test_a_victim_that_was_sent_away_too_often_is_protected_for_good():
    harness = _guarded(max_per_job=0)
    harness.later(1000)
    harness.submit(2, cpu="4", priority=1000)
    said = _why(harness, 2)
    assert said.code == "VICTIMS_PROTECTED"
    assert "protected permanently (max_per_job)" in said.summary


def test_an_exhausted_preemption_budget_is_reported():
    harness = a_harness(4, 4, preemption=PreemptionPolicy(budget=1, interval_ms=60_000))
    for job in (1, 2):
        harness.submit(job, cpu="4", priority=100)
        harness.see(f"{job}.0.1", "running")
    harness.later(1000)
    harness.submit(3, cpu="4", priority=1000)
    spent = harness.now_ms
    harness.submit(4, cpu="4", priority=1000)
    said = _why(harness, 4)
    assert said.code == "VICTIMS_PROTECTED"
    assert f"no more jobs are preempted until {format_time(spent + 60_000)} (budget)" in said.summary


def test_a_job_that_no_preemption_helps_is_told_its_shortage():
    harness = _guarded(min_runtime_ms=60_000)
    harness.submit(2, cpu="4", priority=100)
    assert _why(harness, 2).code == "INSUFFICIENT_CPU"


def test_a_preempted_job_that_waits_says_so_and_names_no_node():
    harness = _guarded()
    harness.later(1000)
    harness.submit(2, cpu="4", name="urgent", priority=1000)
    harness.see("1.0.1", "stopped")
    assert harness.state(2) == "scheduled"
    assert (harness.state(1), harness.jobs[1].nodes) == ("pending", "")
    told = "preempted by job 2 (urgent, priority 1000); 0/1 nodes are available: 1 Insufficient cpu"
    assert harness.reason(1) == ("INSUFFICIENT_CPU", told)
    assert _why(harness).summary == told
    harness.later(1000)
    assert _why(harness).summary == told  # said once, however often it is refused
    harness.see("2.0.1", "succeeded", 0)
    assert harness.jobs[1].nodes == "n1"


def test_a_job_that_spilled_says_so():
    rules = [{"to": "cloud", "wait_ms": 60_000}]
    profile = build_profile("default", plugins=("spill",), arguments={"spill": {"rules": rules}})
    harness = Harness(a_node("n1", 4), a_node("c1", 4, backend="cloud"), profiles={"default": profile})
    harness.submit(1, cpu="4")
    harness.submit(2, cpu="4")
    assert harness.state(2) == "pending"
    harness.later(61_000)
    said = _why(harness, 2)
    assert (
        said.summary == "placed on c1, about to start; spilled to backend cloud: elsewhere it would wait longer than 1m"
    )
    assert "spilled" not in _why(harness, 1).summary


def test_a_start_in_doubt_is_reported():
    harness = a_harness(4)
    harness.submit(1)
    said = explain_start_in_doubt(_why(harness), ["slurm1"])
    assert said.code == "START_IN_DOUBT"
    assert said.summary.startswith(
        "placed on n1; it is not known whether it has started: backend slurm1 has not answered"
    )


def test_a_timeout_reads_the_same_whichever_backend_stopped_the_run():
    for words in ("it ran longer than 60 s", "it reached the time limit that it had in Slurm", "DeadlineExceeded"):
        harness = a_harness(4)
        harness.submit(1, timeout_ms=60_000)
        harness.see("1.0.1", "running")
        harness.now_ms += 60_000
        harness.see("1.0.1", "failed", 143, reason_code="timeout", reason=words)
        assert harness.reason() == ("TIMEOUT", "it ran longer than its timeout of 60s")


def test_a_limit_of_the_backend_keeps_its_text():
    for timeout_ms in (0, 600_000):
        harness = a_harness(4)
        harness.submit(1, timeout_ms=timeout_ms)
        harness.see("1.0.1", "running")
        harness.now_ms += 60_000
        harness.see("1.0.1", "failed", reason_code="timeout", reason="it used up the CPU time that it had in PBS")
        assert harness.reason() == ("TIMEOUT", "it used up the CPU time that it had in PBS")
