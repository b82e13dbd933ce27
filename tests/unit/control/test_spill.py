"""Spill in the controller: when a job spills, at what cost, and never against a data rule."""

from __future__ import annotations

import msgspec
import pytest

from builders import a_node
from hodei.control.clone import clone_controller
from hodei.control.explain.why import why
from hodei.model.facts import AnyFact, StartsForecast
from hodei.model.job import BackendChoice
from hodei.model.node import Location
from unit.control.configured import ConfiguredHarness

MINUTE_MS, HOUR_MS = 60_000, 3_600_000
RULES = """
[scheduling.admission]
oversized = "wait"

[[scheduling.spill]]
to = "cloud"
only_if_wait_over = "30m"
max_cost = 20
from = ["onprem"]

[[scheduling.data_rules]]
dataset = "patients"
stay_in = ["eu"]
"""
ONPREM = a_node("onprem-1", 4, "64Gi", backend="onprem", location=Location("eu"))
CLOUD = a_node("cloud-1", 64, "640Gi", backend="cloud", cost_milli=5000, location=Location("us"))


def a_full_cluster(estimate_ms: int = 10 * HOUR_MS) -> ConfiguredHarness:
    """Job 1 holds all of onprem for `estimate_ms`."""
    harness = ConfiguredHarness(RULES, ONPREM, CLOUD)
    harness.submit(1, cpu="4", estimate_ms=estimate_ms)
    assert harness.runs["1.0.1"].node == "onprem-1"
    return harness


def node_of(harness: ConfiguredHarness, job: int) -> str:
    return harness.runs[f"{job}.0.1"].node if f"{job}.0.1" in harness.runs else ""


def explanation_of(harness: ConfiguredHarness, job: int) -> str:
    return repr(why(harness.controller, job, harness.now_ms))


def test_a_job_spills_at_once_if_it_would_wait_too_long_on_premises():
    harness = a_full_cluster()
    harness.submit(2, cpu="4", estimate_ms=HOUR_MS)
    assert node_of(harness, 2) == "cloud-1"


def test_a_job_with_a_short_wait_does_not_spill_and_why_names_the_rule():
    harness = a_full_cluster(20 * MINUTE_MS)
    harness.submit(2, cpu="4", estimate_ms=HOUR_MS)
    assert node_of(harness, 2) == ""
    assert "kept off backend cloud: elsewhere it waits 20m, and it spills only if that exceeds 30m" in explanation_of(
        harness, 2
    )
    assert "SPILL_NOT_YET" in explanation_of(harness, 2)
    harness.observe("1.0.1", "running")
    harness.now_ms += 20 * MINUTE_MS
    harness.observe("1.0.1", "succeeded", 0)
    assert node_of(harness, 2) == "onprem-1"


def test_a_job_spills_when_its_wait_becomes_too_long():
    harness = a_full_cluster(20 * MINUTE_MS)
    harness.observe("1.0.1", "running")
    harness.submit(2, cpu="4", estimate_ms=HOUR_MS)
    harness.run_for(29 * MINUTE_MS)
    harness.run_for(2 * MINUTE_MS)
    assert node_of(harness, 2) == "cloud-1"


def test_a_job_over_the_cost_limit_does_not_spill():
    harness = a_full_cluster()
    harness.submit(2, cpu="4", estimate_ms=5 * HOUR_MS)
    harness.run_for(2 * HOUR_MS)
    assert node_of(harness, 2) == ""
    assert "it would cost 25.00, over 20.00" in explanation_of(harness, 2)


def test_a_data_rule_prevents_spill():
    harness = a_full_cluster()
    harness.submit(2, cpu="4", estimate_ms=HOUR_MS, inputs=("patients",))
    harness.run_for(2 * HOUR_MS)
    assert node_of(harness, 2) == ""
    assert "data set patients must stay in eu" in explanation_of(harness, 2)


def test_a_data_rule_holds_for_a_job_that_names_the_cloud():
    harness = ConfiguredHarness(RULES, ONPREM, CLOUD)
    choice = BackendChoice("specific", ("cloud",))
    harness.submit(2, cpu="4", estimate_ms=HOUR_MS, inputs=("patients",), backend=choice)
    assert node_of(harness, 2) == ""


def test_a_job_far_back_in_the_queue_spills_by_its_forecast():
    harness = a_full_cluster(20 * MINUTE_MS)
    harness.submit(2, cpu="4", estimate_ms=20 * MINUTE_MS)
    harness.submit(3, cpu="4", estimate_ms=25 * MINUTE_MS)
    assert node_of(harness, 2) == node_of(harness, 3) == ""
    harness.step(StartsForecast({2: harness.now_ms + 20 * MINUTE_MS, 3: harness.now_ms + 40 * MINUTE_MS}))
    harness.run_for(1000)
    assert (node_of(harness, 2), node_of(harness, 3)) == ("", "cloud-1")


def test_a_clone_has_its_own_copy_of_the_forecasts():
    harness = a_full_cluster(20 * MINUTE_MS)
    harness.step(StartsForecast({7: 1}))
    other = clone_controller(harness.controller)
    assert other.cluster.availability.forecasts == {7: 1}
    other.step(harness.now_ms, [StartsForecast({8: 2})])
    assert harness.controller.cluster.availability.forecasts == {7: 1}


def test_forecasts_can_be_read_back_from_a_decision_log():
    fact = StartsForecast({7: 1})
    assert msgspec.json.decode(msgspec.json.encode(fact), type=AnyFact) == fact


@pytest.mark.parametrize("policy", ["cost_optimized", "performance", "locality"])
def test_a_backend_policy_chooses_the_backend_and_the_scores_the_node(policy):
    harness = ConfiguredHarness(
        f'[scheduling.profiles.default]\nbackend_policy = "{policy}"',
        a_node("a1", 4, "64Gi", backend="a", cost_milli=100),
        a_node("a2", 64, "640Gi", backend="a", cost_milli=100),
        a_node("b1", 64, "640Gi", backend="b", cost_milli=900, data=("imagenet",)),
    )
    harness.submit(1, cpu="2", memory="1Gi", inputs=("imagenet",))
    assert node_of(harness, 1) == {"cost_optimized": "a2", "performance": "b1", "locality": "b1"}[policy]
