"""Escalation of jobs that wait too long: fallback profiles, relaxed rules, promotion to a higher class."""

from __future__ import annotations

from builders import a_node
from hodei.control.explain.why import why
from hodei.model.affinity import SpreadRule, parse_selector
from hodei.model.escalation_state import next_priority_class
from hodei.model.job import NOT_ESCALATED, BackendChoice, Escalation, GangRules
from unit.control.configured import ConfiguredHarness
from unit.control.harness import some_nodes

MINUTE = 60_000
FALLBACK = """
[scheduling.profiles.gpu]
nodes = "pool=gpu"
fallback = "default"
fallback_after = "10m"
"""


def escalation_steps(harness: ConfiguredHarness, job: int) -> list[str]:
    explanation = why(harness.controller, job, harness.now_ms)
    assert explanation is not None
    return [step.text for step in explanation.escalation_steps]


def test_a_job_that_fits_no_node_of_its_profile_moves_to_the_fallback() -> None:
    harness = ConfiguredHarness(FALLBACK, a_node("n1"))
    harness.submit(1, profile="gpu")
    assert harness.queue_of(1) == "gpu"
    harness.run_for(6000)
    assert harness.state(1) == "scheduled"
    assert harness.event_details("job.moved", 1) == [
        {"before": "gpu", "to": "default", "cause": "no node there could take it even when idle"}
    ]
    assert escalation_steps(harness, 1) == [
        "moved from profile gpu to default: no node there could take it even when idle"
    ]


def test_a_job_of_a_busy_profile_moves_to_the_fallback_after_fallback_after() -> None:
    harness = ConfiguredHarness(FALLBACK, a_node("n1", 1), a_node("n2", 1, labels={"pool": "gpu"}))
    harness.submit(1, profile="gpu")
    harness.submit(2, profile="gpu")
    assert escalation_steps(harness, 2) == ["goes to profile default after 10m or if no node of gpu could ever take it"]
    harness.run_for(9 * MINUTE)
    assert harness.queue_of(2) == "gpu"
    harness.run_for(MINUTE)
    assert harness.runs["2.0.1"].node == "n1"
    assert harness.event_details("job.moved", 2)[0]["cause"] == "it has waited there for 10m"


def test_a_job_stays_in_its_profile_while_nodes_may_still_join_after_a_restart() -> None:
    harness = ConfiguredHarness(FALLBACK, a_node("n1", 1))
    harness.submit(1, profile="gpu")
    harness.run_for(4000)
    harness.restart(a_node("n1", 1))
    harness.run_for(2000)
    harness.step()
    assert harness.queue_of(1) == "gpu"


def test_a_job_does_not_fall_back_to_a_profile_that_is_closed_to_its_project() -> None:
    closed = FALLBACK + '[scheduling.profiles.default]\nprojects = ["ours"]\n'
    harness = ConfiguredHarness(closed, a_node("n1"))
    harness.submit(1, profile="gpu", project="theirs")
    harness.run_for(20 * MINUTE)
    assert harness.queue_of(1) == "gpu"
    explanation = why(harness.controller, 1, harness.now_ms)
    assert explanation is not None
    assert explanation.status == "unsatisfiable"
    assert escalation_steps(harness, 1) == ["unschedulable: its profile gpu has no fallback that it could go to"]


def test_a_moved_job_stays_in_the_fallback_profile_after_a_restart() -> None:
    harness = ConfiguredHarness(FALLBACK, a_node("n1", 1))
    harness.submit(1)
    harness.submit(2, profile="gpu")
    harness.run_for(6000)
    assert harness.queue_of(2) == "default"
    assert harness.jobs[2].spec.profile == "gpu"  # the store keeps the submitted profile
    harness.restart(a_node("n1", 1))
    assert harness.queue_of(2) == "default"


def test_a_job_requeued_by_its_user_starts_again_in_its_own_profile() -> None:
    from hodei.model.facts import JobRequeued

    harness = ConfiguredHarness(FALLBACK, a_node("n1", 1))
    harness.submit(1, profile="gpu")
    harness.run_for(6000)
    harness.observe("1.0.1", "succeeded", 0)
    harness.step(JobRequeued(1, harness.jobs[1]))
    assert harness.queue_of(1) == "gpu"
    assert harness.jobs[1].escalation_state == NOT_ESCALATED


def test_a_rule_becomes_a_preference_after_relax_after() -> None:
    nodes = a_node("n1", labels={"row": "a"}), a_node("n2", "500m", labels={"row": "b"})
    harness = ConfiguredHarness('[scheduling.escalation]\nrelax = ["spread"]\nrelax_after = "10m"', *nodes)
    together = SpreadRule("row", selector=parse_selector("app=web"))
    harness.submit(1, count=2, labels={"app": "web"}, spread=(together,))
    assert harness.state(1) == "pending"
    harness.run_for(9 * MINUTE)
    assert harness.state(1) == "pending"
    harness.run_for(MINUTE)
    assert harness.state(1) == "scheduled"
    assert harness.event_details("job.relaxed", 1) == [{"rules": ["spread"], "cause": "it has waited for 10m"}]
    assert escalation_steps(harness, 1) == ["its spread rule relaxed to a preference"]


def test_only_named_rules_are_relaxed_and_a_job_may_name_its_own() -> None:
    harness = ConfiguredHarness('[scheduling.escalation]\nrelax = ["spread"]\nrelax_after = "1m"', *some_nodes(1, 1))
    apart = {"count": 2, "cpu": 1, "gang": GangRules(topology="kubernetes.io/hostname")}
    harness.submit(1, **apart)
    harness.submit(2, **apart, escalation=Escalation(relax=("topology",)))
    harness.run_for(2 * MINUTE)
    assert (harness.state(1), harness.state(2)) == ("pending", "scheduled")


def test_a_specific_backend_becomes_a_preferred_one() -> None:
    harness = ConfiguredHarness("", *some_nodes(1))
    elsewhere = BackendChoice("specific", ("moon",))
    harness.submit(1, backend=elsewhere, escalation=Escalation(relax=("backend",), relax_after_ms=MINUTE))
    harness.run_for(MINUTE)
    assert harness.runs["1.0.1"].node == "n1"


def test_a_job_is_promoted_one_class_at_a_time_up_to_the_cap() -> None:
    harness = ConfiguredHarness(
        '[scheduling.escalation]\npromote_after = "30m"\npromote_to = "medium"', a_node("n1", 1)
    )
    harness.submit(1, priority="critical")
    harness.submit(2, priority="scavenger")
    harness.run_for(30 * MINUTE)
    assert harness.controller.cluster.jobs[2].spec.priority == 100
    harness.run_for(30 * MINUTE)
    assert harness.controller.cluster.jobs[2].spec.priority == 250
    harness.run_for(300 * MINUTE)
    assert harness.controller.cluster.jobs[2].spec.priority == 500
    steps = [(event["before"], event["to"]) for event in harness.event_details("job.promoted", 2)]
    assert steps == [("scavenger", "batch"), ("batch", "low"), ("low", "medium")]
    assert escalation_steps(harness, 2) == ["promoted from scavenger to medium for its long wait"]


def test_a_job_cannot_raise_the_operators_cap_on_promotion() -> None:
    harness = ConfiguredHarness('[scheduling.escalation]\npromote_to = "low"', a_node("n1", 1))
    harness.submit(1, priority="critical")
    harness.submit(2, priority="batch", escalation=Escalation(promote_after_ms=1000, promote_to=1000))
    harness.run_for(MINUTE)
    assert harness.controller.cluster.jobs[2].spec.priority == 250


def test_a_promoted_job_keeps_its_class_after_a_restart() -> None:
    harness = ConfiguredHarness('[scheduling.escalation]\npromote_after = "30m"', a_node("n1", 1))
    harness.submit(1, priority="critical")
    harness.submit(2, priority="low")
    harness.run_for(30 * MINUTE)
    harness.restart(a_node("n1", 1))
    assert harness.controller.cluster.jobs[2].spec.priority == 500
    harness.run_for(29 * MINUTE)
    assert harness.controller.cluster.jobs[2].spec.priority == 500
    harness.run_for(2 * MINUTE)
    assert harness.controller.cluster.jobs[2].spec.priority == 750


def test_a_big_job_starved_by_small_ones_starts_after_its_promotion() -> None:
    """In a plain priority queue a stream of small jobs takes every freed core. After its promotion the big job is first in
    the queue and preempts lower classes."""
    starved = ConfiguredHarness("", a_node("n1", 4))
    promoted = ConfiguredHarness('[scheduling.escalation]\npromote_after = "20m"', a_node("n1", 4))
    for harness in (starved, promoted):
        harness.submit(1, cpu=1, estimate_ms=10 * MINUTE)
        harness.submit(1000, cpu=4)
        running, next_id = [1], 2
        for _ in range(60):
            for stopped in harness.stopped():
                harness.observe(stopped, "stopped", 143)
            ended = [
                id for id in running if f"{id}.0.1" in harness.runs and harness.runs[f"{id}.0.1"].state == "placed"
            ]
            harness.submit(next_id, next_id + 1, cpu=1)
            running += [next_id, next_id + 1]
            next_id += 2
            harness.run_for(MINUTE)
            for id in ended[:2]:
                harness.observe(f"{id}.0.1", "succeeded", 0)
    assert starved.state(1000) == "pending"
    assert promoted.jobs[1000].scheduled_ms > 0


def test_promotion_goes_to_the_next_class_and_not_above_the_cap() -> None:
    assert [next_priority_class(given, 750) for given in (0, 100, 250, 300, 500, 750, 1000)] == [
        100,
        250,
        500,
        500,
        750,
        750,
        1000,
    ]
    assert next_priority_class(500, 600) == 600


def test_without_configuration_no_escalation_is_scheduled() -> None:
    harness = ConfiguredHarness("", *some_nodes(1))
    harness.submit(*range(1, 50))
    assert harness.controller.profile_router.escalations.next_ms() is None
