"""A new configuration for a live controller: no job is lost and no run is touched."""

from __future__ import annotations

import msgspec

from builders import a_node
from hodei.control.clone import clone_controller
from hodei.model.config import SchedulingConfig
from hodei.model.facts import AnyFact, Reconfigured
from unit.control.configured import ConfiguredHarness, scheduling
from unit.control.harness import some_nodes

TWO = '[scheduling.profiles.gpu]\n[scheduling.profiles.lab]\nqueue = "fifo"\n'


def test_pending_jobs_are_queued_in_the_new_order() -> None:
    harness = ConfiguredHarness("", *some_nodes(1))
    harness.submit(1)
    harness.submit(2, priority="low")
    harness.submit(3, priority="high")
    harness.reconfigure('[scheduling.profiles.default]\nqueue = "fifo"')
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.started() == ["2.0.1"]


def test_a_running_job_of_a_removed_profile_continues() -> None:
    harness = ConfiguredHarness(TWO, *some_nodes(2))
    harness.submit(1, profile="gpu")
    harness.observe("1.0.1", "running")
    done = harness.reconfigure("")
    assert (done.acts, harness.state(1)) == ([], "running")
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.state(1) == "succeeded"
    assert harness.used() == {"n1": {}} or not any(harness.used()["n1"].values())


def test_a_running_gang_of_a_removed_profile_can_still_be_repaired() -> None:
    from hodei.model.job import GangRules

    harness = ConfiguredHarness(TWO, *some_nodes(1, 1, 1))
    harness.submit(1, profile="gpu", count=2, gang=GangRules(on_failure="repair"), retries=3)
    for run in ("1.0.1", "1.1.1"):
        harness.observe(run, "running")
    harness.reconfigure("")
    harness.observe("1.1.1", "failed", 1)
    harness.run_for(5000)
    assert "1.1.2" in harness.runs


def test_a_job_of_a_removed_profile_is_held_and_can_be_released_when_it_is_back() -> None:
    from hodei.model.facts import JobReleased

    harness = ConfiguredHarness(TWO, *some_nodes(1))
    harness.submit(1)
    harness.submit(2, profile="gpu")
    harness.reconfigure("")
    assert harness.state(2) == "held"
    assert harness.reason(2)[0] == "UNKNOWN_PROFILE"
    harness.reconfigure(TWO)
    harness.step(JobReleased(2))
    assert harness.queue_of(2) == "gpu"


def test_holds_of_preemptors_are_kept() -> None:
    harness = ConfiguredHarness("", *some_nodes(1))
    harness.submit(1, priority="low")
    harness.observe("1.0.1", "running")
    harness.now_ms += 1000
    harness.submit(2, priority="high")
    assert harness.stopped() == ["1.0.1"]
    harness.reconfigure('[scheduling.profiles.default]\nworker_selection = "bin_packing"')
    harness.submit(3, priority="critical")
    harness.observe("1.0.1", "stopped", 143)
    assert harness.started() == ["2.0.1"]


def test_tenants_of_a_fair_queue_keep_their_turns() -> None:
    fair = '[scheduling.profiles.default]\nqueue = "fair"\n'
    harness, other = ConfiguredHarness(fair, *some_nodes(1)), ConfiguredHarness(fair, *some_nodes(1))
    for each in (harness, other):
        each.submit(1, 2, 3, project="a")
        each.submit(4, 5, 6, project="b")
    harness.reconfigure(fair + "max_pending = 500\n")
    order = []
    for each in (harness, other):
        starts, run = [], "1.0.1"
        for _ in range(5):
            each.observe(run, "succeeded", 0)
            (run,) = each.started()
            starts.append(run)
        order.append(starts)
    assert order[0] == order[1]


def test_start_reservations_are_made_again_in_a_new_backfill_queue() -> None:
    batch = '[scheduling.profiles.default]\nqueue = "batch"\n'
    harness = ConfiguredHarness("", *some_nodes(2))
    harness.submit(1, cpu=1, estimate_ms=60_000)
    harness.submit(2, cpu=2, estimate_ms=60_000)
    harness.reconfigure(batch)
    assert list(harness.controller.cluster.availability.start_reservations) == [2]
    harness.reconfigure("")
    assert list(harness.controller.cluster.availability.start_reservations) == []


def test_backoff_is_kept() -> None:
    harness = ConfiguredHarness("", *some_nodes(1))
    harness.submit(1, retries=2)
    harness.observe("1.0.1", "failed", 1)
    retry_ms = harness.jobs[1].not_before_ms
    harness.reconfigure('[scheduling.retry]\nbase = "1h"\nmax = "2h"')
    assert harness.started() == []
    harness.now_ms = retry_ms
    harness.step()
    assert harness.started() == ["1.0.2"]
    harness.observe("1.0.2", "failed", 1)
    assert harness.jobs[1].not_before_ms - harness.now_ms >= 3_600_000


def test_invalid_settings_change_nothing() -> None:
    harness = ConfiguredHarness(TWO, *some_nodes(1))
    harness.step(Reconfigured(scheduling('[scheduling.profiles.default]\nqueue = "nonsense"')))
    assert harness.event_details("config.rejected")[0]["reason"].startswith(
        "profile 'default': there is no queue 'nonsense'"
    )
    harness.submit(1, profile="gpu")
    assert harness.started() == ["1.0.1"]


def test_the_event_lists_added_and_removed_profiles() -> None:
    harness = ConfiguredHarness(TWO)
    harness.reconfigure("[scheduling.profiles.new]\n")
    (detail,) = harness.event_details("config.changed")
    assert (detail["added"], detail["removed"], detail["number"]) == (["new"], ["gpu", "lab"], 2)


def test_a_new_configuration_can_be_read_back_from_a_decision_log() -> None:
    fact = Reconfigured(scheduling(TWO), number=3, how="reload", by="ann")
    assert msgspec.json.decode(msgspec.json.encode(fact), type=AnyFact) == fact


def test_an_earlier_clone_is_not_affected() -> None:
    harness = ConfiguredHarness(TWO, a_node("n1", 1))
    harness.submit(1, 2, profile="gpu")
    before = clone_controller(harness.controller)
    harness.reconfigure("")
    assert set(before.queues) == {"compute", "default", "gpu", "lab"}
    assert list(before.queues["gpu"].gangs) == [2]
    after = clone_controller(harness.controller)
    after.step(harness.now_ms, [Reconfigured(SchedulingConfig())])
    assert set(after.queues) == {"compute", "default"}
