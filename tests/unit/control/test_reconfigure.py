"""Other settings while a controller is at work: nothing is lost, nothing that runs is touched."""

from __future__ import annotations

import msgspec

from builders import a_node
from hodei.control.clone import clone_controller
from hodei.model.config import SchedulingConfig
from hodei.model.facts import AnyFact, Reconfigured
from unit.control.configured import Configured, scheduling
from unit.control.house import some_nodes

TWO = '[scheduling.profiles.gpu]\n[scheduling.profiles.lab]\nqueue = "fifo"\n'


def test_those_who_wait_stand_in_line_again_by_the_new_order() -> None:
    house = Configured("", *some_nodes(1))
    house.submit(1)
    house.submit(2, priority="low")
    house.submit(3, priority="high")
    house.reconfigure('[scheduling.profiles.default]\nqueue = "fifo"')
    house.see("1.0.1", "succeeded", 0)
    assert house.started() == ["2.0.1"]


def test_what_runs_is_not_touched_and_ends_as_ever() -> None:
    house = Configured(TWO, *some_nodes(2))
    house.submit(1, profile="gpu")
    house.see("1.0.1", "running")
    done = house.reconfigure("")
    assert (done.acts, house.state(1)) == ([], "running")
    house.see("1.0.1", "succeeded", 0)
    assert house.state(1) == "succeeded"
    assert house.used() == {"n1": {}} or not any(house.used()["n1"].values())


def test_a_running_gang_whose_profile_is_gone_can_still_be_repaired() -> None:
    from hodei.model.job import GangRules

    house = Configured(TWO, *some_nodes(1, 1, 1))
    house.submit(1, profile="gpu", count=2, gang=GangRules(on_failure="repair"), retries=3)
    for run in ("1.0.1", "1.1.1"):
        house.see(run, "running")
    house.reconfigure("")
    house.see("1.1.1", "failed", 1)
    house.until(5000)
    assert "1.1.2" in house.runs


def test_a_job_whose_profile_is_gone_is_held_and_can_be_released_when_it_is_back() -> None:
    from hodei.model.facts import JobReleased

    house = Configured(TWO, *some_nodes(1))
    house.submit(1)
    house.submit(2, profile="gpu")
    house.reconfigure("")
    assert house.state(2) == "held"
    assert house.reason(2)[0] == "UNKNOWN_PROFILE"
    house.reconfigure(TWO)
    house.learn(JobReleased(2))
    assert house.where(2) == "gpu"


def test_room_that_is_being_made_for_someone_stays_his() -> None:
    house = Configured("", *some_nodes(1))
    house.submit(1, priority="low")
    house.see("1.0.1", "running")
    house.now_ms += 1000
    house.submit(2, priority="high")
    assert house.stopped() == ["1.0.1"]
    house.reconfigure('[scheduling.profiles.default]\nworker_selection = "bin_packing"')
    house.submit(3, priority="critical")
    house.see("1.0.1", "stopped", 143)
    assert house.started() == ["2.0.1"]


def test_tenants_who_take_turns_go_on_where_they_were() -> None:
    fair = '[scheduling.profiles.default]\nqueue = "fair"\n'
    house, other = Configured(fair, *some_nodes(1)), Configured(fair, *some_nodes(1))
    for each in (house, other):
        each.submit(1, 2, 3, project="a")
        each.submit(4, 5, 6, project="b")
    house.reconfigure(fair + "max_pending = 500\n")
    order = []
    for each in (house, other):
        starts, run = [], "1.0.1"
        for _ in range(5):
            each.see(run, "succeeded", 0)
            (run,) = each.started()
            starts.append(run)
        order.append(starts)
    assert order[0] == order[1]


def test_promises_are_made_anew_in_a_line_that_makes_some() -> None:
    batch = '[scheduling.profiles.default]\nqueue = "batch"\n'
    house = Configured("", *some_nodes(2))
    house.submit(1, cpu=1, estimate_ms=60_000)
    house.submit(2, cpu=2, estimate_ms=60_000)
    house.reconfigure(batch)
    assert list(house.controller.world.book.promises) == [2]
    house.reconfigure("")
    assert list(house.controller.world.book.promises) == []


def test_pauses_before_a_retry_are_kept() -> None:
    house = Configured("", *some_nodes(1))
    house.submit(1, retries=2)
    house.see("1.0.1", "failed", 1)
    waits_until = house.jobs[1].not_before_ms
    house.reconfigure('[scheduling.retry]\nbase = "1h"\nmax = "2h"')
    assert house.started() == []
    house.now_ms = waits_until
    house.learn()
    assert house.started() == ["1.0.2"]
    house.see("1.0.2", "failed", 1)
    assert house.jobs[1].not_before_ms - house.now_ms >= 3_600_000


def test_settings_that_cannot_be_used_change_nothing() -> None:
    house = Configured(TWO, *some_nodes(1))
    house.learn(Reconfigured(scheduling('[scheduling.profiles.default]\nqueue = "nonsense"')))
    assert house.told("config.refused")[0]["reason"].startswith("profile 'default': there is no queue 'nonsense'")
    house.submit(1, profile="gpu")
    assert house.started() == ["1.0.1"]


def test_the_event_says_what_came_and_what_went() -> None:
    house = Configured(TWO)
    house.reconfigure("[scheduling.profiles.new]\n")
    (said,) = house.told("config.changed")
    assert (said["new"], said["gone"], said["number"]) == (["new"], ["gpu", "lab"], 2)


def test_a_decision_log_can_carry_it() -> None:
    fact = Reconfigured(scheduling(TWO), number=3, how="reload", by="ann")
    assert msgspec.json.decode(msgspec.json.encode(fact), type=AnyFact) == fact


def test_a_twin_made_before_does_not_notice() -> None:
    house = Configured(TWO, a_node("n1", 1))
    house.submit(1, 2, profile="gpu")
    before = clone_controller(house.controller)
    house.reconfigure("")
    assert set(before.lines) == {"compute", "default", "gpu", "lab"}
    assert list(before.lines["gpu"].gangs) == [2]
    after = clone_controller(house.controller)
    after.step(house.now_ms, [Reconfigured(SchedulingConfig())])
    assert set(after.lines) == {"compute", "default"}
