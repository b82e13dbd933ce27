"""The life of an ordered node: started, idle, released; and what goes wrong."""

from __future__ import annotations

from msgspec import structs

from hodei.control.capacity.scaling import GroupPolicy, cost_milli
from hodei.model.effects import ReleaseNodes, WantNodes
from hodei.model.facts import NodeJoined
from unit.control.capacity.cloud import BOOT_MS, HOUR_MS, STOP_MS, Cloud, groups, potential, some_potential

IDLE_MS = 120_000
QUICK = GroupPolicy(idle_ms=IDLE_MS, boot_timeout_ms=200_000, tries=2, pause_ms=HOUR_MS)


def cloud_of(count: int, **changes) -> Cloud:
    return Cloud(*some_potential(count), policy=groups(small=structs.replace(QUICK, **changes)))


def test_a_node_is_released_when_it_was_idle_for_the_configured_time():
    cloud = cloud_of(3)
    cloud.runs_for(60_000, 1)
    cloud.submit(1, cpu="4")
    cloud.run(BOOT_MS + 60_000 + IDLE_MS - 6_000)
    assert (cloud.phases(), cloud.state()) == ({"small-1": "ready"}, "succeeded")
    cloud.run(12_000)
    assert cloud.phases() == {"small-1": "stopping"}
    cloud.run(STOP_MS)
    assert (cloud.phases(), cloud.orders, cloud.released) == ({}, {}, ["small-1"])
    (stopped,) = [event for event in cloud.events if event.kind == "node.stopped"]
    paid_ms = stopped.detail["paid_ms"]
    assert BOOT_MS + 60_000 + IDLE_MS < paid_ms < BOOT_MS + 60_000 + IDLE_MS + 30_000
    assert stopped.detail["cost_milli"] == cost_milli(potential("x"), paid_ms)


def test_the_minimum_and_warm_nodes_of_a_group_stay():
    cloud = cloud_of(5, min=1, warm=1)
    cloud.run(2 * BOOT_MS)
    assert len(cloud.phases()) == 1
    cloud.submit(1, cpu="4")
    cloud.run(2 * BOOT_MS + 2 * IDLE_MS)
    assert sorted(cloud.phases().values()) == ["ready", "ready"], "one is used, one is warm"
    cloud.observe("1.0.1", "succeeded", 0)
    cloud.run(IDLE_MS + STOP_MS + 20_000)
    assert len(cloud.phases()) == 1


def test_a_node_that_does_not_start_is_set_aside_and_another_one_is_used():
    cloud = cloud_of(2, tries=1)
    cloud.broken.add("small-1")
    cloud.runs_for(1000, 1)
    cloud.submit(1, cpu="4")
    cloud.run(200_000 + 2 * BOOT_MS)
    assert cloud.wanted == ["small-1", "small-2"]
    assert (cloud.state(), cloud.jobs[1].failures, cloud.jobs[1].losses) == ("succeeded", 0, 0)
    found = cloud.controller.scaling.problem(cloud.controller.cluster.nodes["small-1"], cloud.now_ms)
    assert found is not None
    assert (found.code, found.reason) == ("BOOT_TIMEOUT", "it was not ready after 3 min")
    assert "small-1" not in cloud.orders, "and it is off"


def test_a_node_that_did_not_start_is_tried_again_before_it_is_set_aside():
    cloud = cloud_of(1)
    cloud.broken.add("small-1")
    cloud.submit(1, cpu="4")
    cloud.run(4 * 200_000)
    assert cloud.wanted == ["small-1", "small-1"]
    assert cloud.state() == "pending"


def test_an_order_is_sent_again_after_a_restart_and_no_second_node_is_ordered():
    cloud = cloud_of(3)
    cloud.submit(1, cpu="4")
    cloud.plan()
    assert cloud.wanted == ["small-1"]
    nodes = [structs.replace(node, phase="potential") for node in cloud.offered.values()]
    cloud.acts.clear()
    cloud.restart()
    assert cloud.acts == []
    cloud.step(*(NodeJoined(node) for node in nodes))
    cloud.plan()
    assert cloud.wanted == ["small-1", "small-1"], "the same node: the first order may not have arrived"
    cloud.run(2 * BOOT_MS)
    assert cloud.runs["1.0.1"].node == "small-1"


def test_a_running_node_without_an_order_is_adopted_and_released_when_idle():
    cloud = cloud_of(1)
    cloud.step(NodeJoined(structs.replace(cloud.offered["small-1"], phase="ready")))
    assert cloud.phases() == {"small-1": "ready"}
    cloud.run(IDLE_MS + STOP_MS + 10_000)
    assert (cloud.phases(), cloud.released) == ({}, ["small-1"])


def test_a_job_on_a_reclaimed_node_is_placed_again_at_once_and_nothing_is_counted():
    cloud = Cloud(*some_potential(2, spot=True), policy=groups(small=QUICK))
    cloud.submit(1, cpu="4")
    cloud.run(2 * BOOT_MS)
    node = cloud.runs["1.0.1"].node
    cloud.lose(node, reclaimed=True)
    assert cloud.runs["1.0.1"].state == "stopped"
    assert (cloud.state(), cloud.reason()[0]) == ("pending", "NODE_RECLAIMED") or cloud.reason()[0] == "NO_NODES"
    job = cloud.jobs[1]
    assert (job.failures, job.losses, job.preemptions) == (0, 0, 0)
    cloud.run(2 * BOOT_MS)
    assert cloud.runs["1.0.2"].node != node


def test_a_node_that_is_switched_off_loses_its_runs():
    cloud = cloud_of(2)
    cloud.submit(1, cpu="4")
    cloud.run(2 * BOOT_MS)
    cloud.step(NodeJoined(cloud.offered["small-1"]))
    assert (cloud.runs["1.0.1"].state, cloud.jobs[1].losses) == ("lost", 1)
    assert cloud.orders == {}


def test_a_node_that_keeps_running_after_its_release_is_told_again():
    cloud = cloud_of(1)
    cloud.runs_for(1000, 1)
    cloud.submit(1, cpu="4")
    cloud.run(BOOT_MS + 20_000)
    cloud._due.clear()
    cloud.now_ms += IDLE_MS
    cloud.step()
    assert cloud.acts == [ReleaseNodes("cloud", ("small-1",))]
    cloud._due.clear()
    cloud.now_ms += 300_000
    cloud.step()
    assert cloud.acts == [ReleaseNodes("cloud", ("small-1",))]
    assert cloud.events[-1].kind == "node.still_running"


def test_nothing_is_placed_on_a_node_that_is_being_stopped():
    cloud = cloud_of(1)
    cloud.runs_for(1000, 1)
    cloud.submit(1, cpu="4")
    cloud.run(BOOT_MS + 20_000)
    cloud._due.clear()
    cloud.now_ms += IDLE_MS
    cloud.step()
    cloud.submit(2, cpu="4")
    assert cloud.state(2) == "pending"
    assert not any(isinstance(act, WantNodes) for act in cloud.acts)


def test_an_idle_node_stays_while_a_gang_waits_for_another_one():
    cloud = cloud_of(2, boot_timeout_ms=400_000)
    cloud.broken.add("small-2")
    cloud.submit(1, cpu="4", count=2)
    cloud.run(BOOT_MS + IDLE_MS - 12_000)
    cloud.broken.clear()
    cloud.run(20_000)
    assert cloud.phases() == {"small-1": "ready", "small-2": "starting"}, "idle for longer, but needed"
    cloud.step(NodeJoined(structs.replace(cloud.offered["small-2"], phase="ready")))
    assert cloud.state() == "scheduled"


def test_an_order_that_never_arrived_ends_after_its_release():
    cloud = cloud_of(1)
    cloud.submit(1, cpu="4")
    cloud.plan()
    cloud._due.clear()  # the order is lost
    cloud.step(NodeJoined(cloud.offered["small-1"]))
    assert cloud.phases() == {"small-1": "starting"}
    cloud.advance(200_000)
    assert cloud.phases() == {"small-1": "stopping"}
    cloud._due.clear()  # its backend repeats no report
    cloud.advance(300_000)
    assert (cloud.phases(), cloud.orders) == ({}, {})
