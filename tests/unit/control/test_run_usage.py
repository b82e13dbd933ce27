"""The usage that a backend reports with the end of a run: stored once, and used to explain an ended job."""

from __future__ import annotations

from hodei.control.explain.why import explain_placement
from hodei.model.effects import SaveRun
from hodei.model.facts import RunObserved
from hodei.model.usage import RunUsage
from unit.control.harness import Harness, a_harness

USED = RunUsage(cpu_ms=100_000, peak_memory=2**20)


def ended(**fields: object) -> Harness:
    harness = a_harness(4)
    harness.submit(cpu=4, **fields)
    harness.observe("1.0.1", "running")
    harness.now_ms += 100_000
    harness.step(RunObserved("1.0.1", "succeeded", harness.now_ms, 0, usage=USED))
    return harness


def test_the_usage_is_kept_with_the_run_that_ended():
    assert ended().runs["1.0.1"].usage == USED


def test_usage_in_an_observation_of_a_running_run_saves_nothing():
    harness = a_harness(4)
    harness.submit()
    harness.observe("1.0.1", "running")
    step = harness.step(RunObserved("1.0.1", "running", harness.now_ms, usage=USED))
    assert not [save for save in step.saves if isinstance(save, SaveRun)]
    assert harness.runs["1.0.1"].usage is None


def test_a_repeated_end_does_not_change_the_usage():
    harness = ended()
    harness.step(RunObserved("1.0.1", "succeeded", harness.now_ms, 0, usage=RunUsage(cpu_ms=7)))
    assert harness.runs["1.0.1"].usage == USED


def test_why_of_an_ended_job_names_a_request_far_above_the_use():
    harness = ended(memory="1Gi")
    found = explain_placement(harness.jobs[1], list(harness.runs.values()), harness.now_ms)
    assert found.hint == "it used at most 1 MiB of 1 GiB of memory; a smaller request can start sooner"
