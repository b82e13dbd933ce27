"""What is done about jobs that wait too long: another profile, rules that count as wishes, a higher class."""

from __future__ import annotations

from builders import a_node
from hodei.control.explain.why import why
from hodei.model.escalation import Escalation
from hodei.model.escalation_state import next_class
from hodei.model.job import BackendChoice, GangRules
from hodei.model.job_affinity import SpreadRule
from hodei.model.selector import parse_selector
from unit.control.configured import Configured
from unit.control.house import some_nodes

MINUTE = 60_000
FALLBACK = """
[scheduling.profiles.gpu]
nodes = "pool=gpu"
fallback = "default"
fallback_after = "10m"
"""


def measures(house: Configured, job: int) -> list[str]:
    said = why(house.controller, job, house.now_ms)
    assert said is not None
    return [measure.text for measure in said.measures]


# ------------------------------------------------------------------------------------------------- fallback


def test_a_job_that_no_node_of_its_profile_could_ever_take_goes_to_the_fallback() -> None:
    house = Configured(FALLBACK, a_node("n1"))
    house.submit(1, profile="gpu")
    assert house.where(1) == "gpu"
    house.until(6000)
    assert house.state(1) == "scheduled"
    assert house.told("job.moved", 1) == [
        {"before": "gpu", "to": "default", "cause": "no node there could take it even when idle"}
    ]
    assert measures(house, 1) == ["moved from profile gpu to default: no node there could take it even when idle"]


def test_a_job_that_waits_for_a_busy_profile_goes_to_the_fallback_after_its_time() -> None:
    house = Configured(FALLBACK, a_node("n1", 1), a_node("n2", 1, labels={"pool": "gpu"}))
    house.submit(1, profile="gpu")
    house.submit(2, profile="gpu")
    assert measures(house, 2) == ["goes to profile default after 10m or if no node of gpu could ever take it"]
    house.until(9 * MINUTE)
    assert house.where(2) == "gpu"
    house.until(MINUTE)
    assert house.runs["2.0.1"].node == "n1"
    assert house.told("job.moved", 2)[0]["cause"] == "it has waited there for 10m"


def test_nodes_are_given_time_to_come_before_none_counts_as_able() -> None:
    house = Configured(FALLBACK, a_node("n1", 1))
    house.submit(1, profile="gpu")
    house.until(4000)
    house.restart(a_node("n1", 1))
    house.until(2000)
    house.learn()
    assert house.where(1) == "gpu"


def test_a_job_does_not_fall_back_to_a_profile_that_is_closed_to_its_project() -> None:
    closed = FALLBACK + '[scheduling.profiles.default]\nprojects = ["ours"]\n'
    house = Configured(closed, a_node("n1"))
    house.submit(1, profile="gpu", project="theirs")
    house.until(20 * MINUTE)
    assert house.where(1) == "gpu"
    said = why(house.controller, 1, house.now_ms)
    assert said is not None
    assert said.status == "unsatisfiable"
    assert measures(house, 1) == ["unschedulable: its profile gpu has no fallback that it could go to"]


def test_a_job_that_has_moved_is_found_there_after_a_restart() -> None:
    house = Configured(FALLBACK, a_node("n1", 1))
    house.submit(1)
    house.submit(2, profile="gpu")
    house.until(6000)
    assert house.where(2) == "default"
    assert house.jobs[2].spec.profile == "gpu"  # the store keeps what the user wrote
    house.restart(a_node("n1", 1))
    assert house.where(2) == "default"


def test_a_job_requeued_by_its_user_begins_again_as_he_wrote_it() -> None:
    from hodei.model.facts import JobRequeued

    house = Configured(FALLBACK, a_node("n1", 1))
    house.submit(1, profile="gpu")
    house.until(6000)
    house.see("1.0.1", "succeeded", 0)
    house.learn(JobRequeued(1, house.jobs[1]))
    assert house.where(1) == "gpu"
    assert house.jobs[1].recourse == ""


# ------------------------------------------------------------------------------------------------ relaxing


def test_a_rule_that_may_be_relaxed_counts_as_a_wish_after_its_time() -> None:
    nodes = a_node("n1", labels={"row": "a"}), a_node("n2", "500m", labels={"row": "b"})
    house = Configured('[scheduling.recovery]\nrelax = ["spread"]\nrelax_after = "10m"', *nodes)
    together = SpreadRule("row", selector=parse_selector("app=web"))
    house.submit(1, count=2, labels={"app": "web"}, spread=(together,))
    assert house.state(1) == "pending"
    house.until(9 * MINUTE)
    assert house.state(1) == "pending"
    house.until(MINUTE)
    assert house.state(1) == "scheduled"
    assert house.told("job.relaxed", 1) == [{"rules": ["spread"], "cause": "it has waited for 10m"}]
    assert measures(house, 1) == ["its rule about spreading counts as a wish since then"]


def test_only_the_rules_that_are_named_are_relaxed_and_a_job_names_its_own() -> None:
    house = Configured('[scheduling.recovery]\nrelax = ["spread"]\nrelax_after = "1m"', *some_nodes(1, 1))
    apart = {"count": 2, "cpu": 1, "gang": GangRules(topology="kubernetes.io/hostname")}
    house.submit(1, **apart)
    house.submit(2, **apart, recovery=Escalation(relax=("topology",)))
    house.until(2 * MINUTE)
    assert (house.state(1), house.state(2)) == ("pending", "scheduled")


def test_a_specific_backend_becomes_a_preferred_one() -> None:
    house = Configured("", *some_nodes(1))
    elsewhere = BackendChoice("specific", ("moon",))
    house.submit(1, backend=elsewhere, recovery=Escalation(relax=("backend",), relax_after_ms=MINUTE))
    house.until(MINUTE)
    assert house.runs["1.0.1"].node == "n1"


# ------------------------------------------------------------------------------------------------ promotion


def test_a_job_goes_up_one_class_at_a_time_as_far_as_the_cap() -> None:
    house = Configured('[scheduling.recovery]\npromote_after = "30m"\npromote_to = "medium"', a_node("n1", 1))
    house.submit(1, priority="critical")
    house.submit(2, priority="scavenger")
    house.until(30 * MINUTE)
    assert house.controller.world.jobs[2].spec.priority == 100
    house.until(30 * MINUTE)
    assert house.controller.world.jobs[2].spec.priority == 250
    house.until(300 * MINUTE)
    assert house.controller.world.jobs[2].spec.priority == 500
    steps = [(told["before"], told["to"]) for told in house.told("job.promoted", 2)]
    assert steps == [("scavenger", "batch"), ("batch", "low"), ("low", "medium")]
    assert measures(house, 2) == ["promoted from scavenger to medium for its long wait"]


def test_a_job_cannot_ask_to_go_higher_than_the_operator_lets_it() -> None:
    house = Configured('[scheduling.recovery]\npromote_to = "low"', a_node("n1", 1))
    house.submit(1, priority="critical")
    house.submit(2, priority="batch", recovery=Escalation(promote_after_ms=1000, promote_to=1000))
    house.until(MINUTE)
    assert house.controller.world.jobs[2].spec.priority == 250


def test_a_promoted_job_keeps_its_class_after_a_restart() -> None:
    house = Configured('[scheduling.recovery]\npromote_after = "30m"', a_node("n1", 1))
    house.submit(1, priority="critical")
    house.submit(2, priority="low")
    house.until(30 * MINUTE)
    house.restart(a_node("n1", 1))
    assert house.controller.world.jobs[2].spec.priority == 500
    house.until(29 * MINUTE)
    assert house.controller.world.jobs[2].spec.priority == 500
    house.until(2 * MINUTE)
    assert house.controller.world.jobs[2].spec.priority == 750


def test_a_big_job_starved_by_small_ones_starts_once_it_was_promoted() -> None:
    """In a plain priority line small jobs that keep coming take every core that is freed; promoted, the big one is first
    in line, lower classes make room for it, and it starts."""
    starved = Configured("", a_node("n1", 4))
    helped = Configured('[scheduling.recovery]\npromote_after = "20m"', a_node("n1", 4))
    for house in (starved, helped):
        house.submit(1, cpu=1, estimate_ms=10 * MINUTE)
        house.submit(1000, cpu=4)
        running, next_id = [1], 2
        for _ in range(60):
            for stopped in house.stopped():
                house.see(stopped, "stopped", 143)
            ended = [id for id in running if f"{id}.0.1" in house.runs and house.runs[f"{id}.0.1"].state == "placed"]
            house.submit(next_id, next_id + 1, cpu=1)
            running += [next_id, next_id + 1]
            next_id += 2
            house.until(MINUTE)
            for id in ended[:2]:
                house.see(f"{id}.0.1", "succeeded", 0)
    assert starved.state(1000) == "pending"
    assert helped.jobs[1000].scheduled_ms > 0


def test_the_ladder_of_classes() -> None:
    assert [next_class(given, 750) for given in (0, 100, 250, 300, 500, 750, 1000)] == [
        100,
        250,
        500,
        500,
        750,
        750,
        1000,
    ]
    assert next_class(500, 600) == 600


# ------------------------------------------------------------------------------------------------- the cost


def test_nothing_is_watched_that_is_not_configured() -> None:
    house = Configured("", *some_nodes(1))
    house.submit(*range(1, 50))
    assert house.controller.steering.recourses.next_ms() is None
