"""Export of an incident: the earlier cluster and its facts, from the current nodes and the events."""

from __future__ import annotations

from typing import Any

from hodei.api.views import NodeView
from hodei.client.incident import IncidentNodes
from hodei.control.controller import Controller
from hodei.jobfile.render import node_view
from hodei.model.config import SchedulingConfig
from hodei.model.effects import Event, SaveEvent
from hodei.model.facts import Fact, NodeJoined, NodeLost, NodeOverridden
from hodei.model.node import Node, Taint
from hodei.wiring import make_controller

BEGAN_MS = 1_000_000
DOWN = Taint("down", "", "NoExecute")
BAD = Taint("disk", "bad", "NoSchedule")


def node(name: str, **fields: Any) -> Node:
    return Node(name, "local", capacity={"cpu": 4000, "memory": 2**30}, **fields)


def history(controller: Controller, *steps: tuple[int, Fact]) -> list[Event]:
    """The events that the controller emits for these facts, at these ms after the start."""
    out = []
    for at_ms, fact in steps:
        saves = controller.step(BEGAN_MS + at_ms, [fact]).saves
        out += [save.event for save in saves if isinstance(save, SaveEvent)]
    return out


def node_views(controller: Controller) -> list[NodeView]:
    cluster = controller.cluster
    cluster.table.settle()
    return [node_view(each, {}, 0) for each in cluster.table.nodes]


def incident(
    before: list[Fact], *steps: tuple[int, Fact], end_ms: int = 60_000
) -> tuple[dict[str, dict[str, Any]], list[tuple[int, dict[str, Any]]]]:
    """The cluster and the facts of an incident that starts after `before`."""
    controller = make_controller(SchedulingConfig())
    history(controller, *((-1000, fact) for fact in before))
    events = history(controller, *steps)
    nodes = IncidentNodes(node_views(controller), events, BEGAN_MS, BEGAN_MS + end_ms, set())
    return {entry["name"]: entry for entry in nodes.cluster()}, nodes.facts()


def test_a_removed_node_is_described_by_its_last_event():
    cluster, facts = incident(
        [NodeJoined(node("a")), NodeJoined(node("b", labels={"disk": "ssd"}, taints=(BAD,)))], (10, NodeLost("b"))
    )
    assert cluster["b"] == {
        "name": "b", "cpu": 4, "memory": "1Gi", "labels": {"disk": "ssd"}, "taints": ["disk=bad:NoSchedule"]
    }  # fmt: skip
    assert facts == [(10, {"lose": "b"})]


def test_a_node_that_joined_later_is_absent_at_the_start():
    cluster, facts = incident([NodeJoined(node("a"))], (10, NodeJoined(node("b"))))
    assert "there" not in cluster["a"]
    assert cluster["b"]["there"] is False
    assert facts == [(10, {"join": "b"})]


def test_a_node_that_joined_after_the_end_is_absent():
    cluster, facts = incident([NodeJoined(node("a"))], (70_000, NodeJoined(node("b"))))
    assert [*cluster] == ["a"]
    assert facts == []


def test_an_earlier_cordon_is_a_fact_at_the_start():
    _, facts = incident(
        [NodeJoined(node("a")), NodeOverridden("a", cordon=True)], (20, NodeOverridden("a", cordon=False))
    )
    assert facts == [(0, {"cordon": "a"}), (20, {"uncordon": "a"})]


def test_node_overrides_after_the_end_are_reverted():
    late = 70_000
    cluster, facts = incident(
        [NodeJoined(node("a", taints=(BAD,)))],
        (late, NodeOverridden("a", drain=True)),
        (late, NodeOverridden("a", add_taints=(DOWN,), remove_taints=(BAD,))),
    )
    assert cluster["a"]["taints"] == ["disk=bad:NoSchedule"]
    assert facts == []


def test_drains_and_taints_of_a_cordoned_node_are_facts():
    _, facts = incident(
        [NodeJoined(node("a"))],
        (1, NodeOverridden("a", cordon=True)),
        (2, NodeOverridden("a", drain=True)),
        (3, NodeOverridden("a", add_taints=(DOWN,))),
    )
    assert facts == [(1, {"cordon": "a"}), (2, {"drain": "a"}), (3, {"taint": "a", "as": "down:NoExecute"})]


def test_nodes_that_join_again_after_a_restart_are_present_before():
    def event(kind: str, at_ms: int, node: str = "") -> Event:
        return Event(at_ms, BEGAN_MS + at_ms, kind, node=node)

    events = [
        event("node.joined", 5, "c"),
        event("server.restarted", 10), *(event("node.joined", 11, name) for name in "abc"),
        event("node.lost", 30, "b"),
        event("server.restarted", 70_000), *(event("node.joined", 70_001, name) for name in "abc"),
    ]  # fmt: skip
    views = [node_view(node(name), {}, 0) for name in "abc"]
    nodes = IncidentNodes(views, events, BEGAN_MS, BEGAN_MS + 60_000, set())
    assert [(entry["name"], entry.get("there", True)) for entry in nodes.cluster()] == [
        ("a", True), ("b", True), ("c", False)
    ]  # fmt: skip
    assert nodes.facts() == [(5, {"join": "c"}), (30, {"lose": "b"})]
