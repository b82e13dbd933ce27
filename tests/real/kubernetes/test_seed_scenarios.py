"""One pod per node, with priorities and gangs by annotation, as simple custom schedulers do it: the options
`--one-pod-per-node` and `--priority-annotation`. Pods have no requests; a gang declares its size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from real.kubernetes.cluster import Cluster, pod
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodSchedulers

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("custom_scheduler")]

NAME = "custom-scheduler"


@pytest.fixture(scope="module")
def custom_scheduler(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    made = PodSchedulers(plane, tmp_path_factory.mktemp("custom"))
    try:
        made(NAME, ["--one-pod-per-node", "--priority-annotation=priority"])
        yield
    finally:
        made.close()


@pytest.fixture
def three(cluster: Cluster) -> Cluster:
    """A cluster of three nodes."""
    cluster.make_nodes(3)
    return cluster


def of(priority: int, group: str = "", size: int = 0) -> dict[str, Any]:
    annotations = {"priority": str(priority)}
    if group:
        annotations |= {"pod-group": group, "pod-group-size": str(size)}
    return {"scheduler": NAME, "cpu": "", "memory": "", "annotations": annotations}


def fill(cluster: Cluster, *priorities: int) -> list[str]:
    names = [f"there-{at}" for at in range(len(priorities))]
    for name, priority in zip(names, priorities, strict=True):
        cluster.make_pod(name, **of(priority))
    if names:
        cluster.until_bound(*names)
    return names


def unscheduled(cluster: Cluster, *names: str) -> None:
    """The pods are reported as unschedulable and have no node."""
    for name in names:
        cluster.until_condition(name, "PodScheduled", "False", "Unschedulable")
        assert cluster.bound_to(name) == ""


def test_a_node_takes_one_pod(three: Cluster):
    fill(three, 1, 1, 1)
    assert sorted(three.bound().values()) == ["node-0", "node-1", "node-2"]
    three.make_pod("fourth", **of(1))
    unscheduled(three, "fourth")
    assert len(three.bound()) == 3


def test_pods_of_other_schedulers_do_not_count(three: Cluster):
    for at in range(3):
        three.make_pod(f"daemon-{at}", scheduler="other")
        three.bind(f"daemon-{at}", f"node-{at}")
    fill(three, 1, 1, 1)


def test_a_pod_of_higher_priority_preempts_one_of_lower_priority(three: Cluster):
    fill(three, 10, 10, 10)
    three.make_pod("high-1", **of(100))
    three.until_bound("high-1")
    three.until_event("high-1", "Scheduled")
    assert len(three.holding()) == 3


def test_the_lowest_priority_is_preempted_first(three: Cluster):
    fill(three, 30, 10, 20)
    three.make_pod("high", **of(100))
    three.until_bound("high")
    assert set(three.holding()) == {"there-0", "there-2", "high"}


def test_no_pod_is_preempted_for_one_of_equal_priority(three: Cluster):
    there = fill(three, 50, 50, 60)
    three.make_pod("equal", **of(50))
    unscheduled(three, "equal")
    assert set(three.holding()) == set(there)


def test_a_free_node_is_used_before_preemption(three: Cluster):
    there = fill(three, 10, 10)
    three.make_pod("high", **of(100))
    three.until_bound("high")
    assert set(three.holding()) == {*there, "high"}


def test_a_gang_that_fits_is_placed_as_a_whole(three: Cluster):
    for at in range(3):
        three.make_pod(f"gang-success-{at}", **of(50, "success-group", 3))
    assert len(set(three.until_bound().values())) == 3


@pytest.mark.parametrize(
    ("there", "size"), [((100, 100, 100), 3), ((), 4), ((100, 10), 3)], ids=["full", "too large", "one short"]
)
def test_a_gang_that_does_not_fit_is_not_placed_and_preempts_no_pod(three: Cluster, there: tuple[int, ...], size: int):
    names = fill(three, *there)
    gang = [f"gang-{at}" for at in range(size)]
    for name in gang:
        three.make_pod(name, **of(50, "failure-group", size))
    unscheduled(three, *gang)
    assert set(three.holding()) == set(names)


def test_a_gang_preempts_pods_of_lower_priority(three: Cluster):
    fill(three, 10, 100, 10)
    for at in range(2):
        three.make_pod(f"gang-{at}", **of(50, "pushing-group", 2))
    three.until_bound("gang-0", "gang-1")
    assert set(three.holding()) == {"there-1", "gang-0", "gang-1"}


def test_a_pod_that_is_deleted_leaves_its_node_to_the_next(three: Cluster):
    fill(three, 10, 10, 10)
    node = three.bound_to("there-1")
    three.make_pod("next", **of(10))
    unscheduled(three, "next")
    three.delete_pod("there-1")
    assert three.until_bound("next") == {"next": node}


def test_a_pod_of_a_gang_that_is_deleted_before_it_is_placed_is_waited_for(three: Cluster):
    three.make_pod("gang-0", **of(50, "group", 2))
    three.until_condition("gang-0", "PodScheduled", "False", "WaitingForPodGroup")
    three.delete_pod("gang-0")
    three.until_deleted("gang-0")
    three.make_pod("gang-1", **of(50, "group", 2))
    three.until_condition("gang-1", "PodScheduled", "False", "WaitingForPodGroup")
    three.make_pod("gang-2", **of(50, "group", 2))
    three.until_bound("gang-1", "gang-2")


def test_pending_pods_are_placed_in_order_of_priority(three: Cluster):
    there = fill(three, 500, 500, 500)
    for priority in (10, 100, 50):
        three.make_pod(f"waits-{priority}", **of(priority))
    unscheduled(three, "waits-10", "waits-100", "waits-50")
    for name, expected in zip(there, (100, 50, 10), strict=True):
        three.delete_pod(name)
        three.until_bound(f"waits-{expected}")
        assert {one for one in three.holding() if one.startswith("waits")} == {
            f"waits-{priority}" for priority in (100, 50, 10) if priority >= expected
        }


def test_a_pod_with_an_owner_is_created_again_and_waits(three: Cluster):
    fill(three, 100, 100)
    template = pod("low", **of(10))
    three.apply([{
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "low"},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "low"}}, "template": {
            "metadata": {"labels": {"app": "low"}, "annotations": template["metadata"]["annotations"]}, "spec": template["spec"],
        }},
    }])  # fmt: skip

    def of_owner(bound: bool) -> str:
        found = [one for one in three.pods(labelSelector="app=low") if ("nodeName" in one["spec"]) == bound]
        return found[0]["metadata"]["name"] if len(found) == 1 else ""

    first = three.wait(lambda: of_owner(True), "the owner's pod is bound")
    three.make_pod("high", **of(100))
    three.until_bound("high")
    second = three.wait(lambda: of_owner(False), "the owner has created another")
    assert second != first
    unscheduled(three, second)


def test_without_the_option_the_priority_annotation_is_ignored(three: Cluster, hodei_kube: PodSchedulers):
    """Else every user who can create pods could choose their priority."""
    hodei_kube("plain", ["--one-pod-per-node"])
    for at in range(3):
        three.make_pod(f"there-{at}", scheduler="plain")
    three.until_bound()
    three.make_pod("high", scheduler="plain", annotations={"priority": "100"})
    unscheduled(three, "high")
