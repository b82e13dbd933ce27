"""Preemption in a real cluster: with grace periods and disruption budgets, and only if the preemptor fits afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from real.kubernetes.cluster import Cluster
from real.kubernetes.pod_scheduler import PodScheduler

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("hodei")]

SLOW = {"annotations": {"hodei.test/stops-after": "2s"}, "terminationGracePeriodSeconds": 30}


@pytest.fixture(autouse=True)
def priorities(cluster: Cluster) -> None:
    cluster.apply("""
        {apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: one}, value: 1}
        ---
        {apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: five}, value: 5}
        ---
        {apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: nine}, value: 9}
        ---
        {apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: never-preempts}, value: 9, preemptionPolicy: Never}
    """)


def occupy(cluster: Cluster, name: str, node: str, **fields: Any) -> None:
    """Bind a running pod of another scheduler, which fills the node."""
    cluster.make_pod(name, cpu="3", **{"scheduler": "other", **fields})
    cluster.bind(name, node)
    cluster.until_phase(name, "Running")


def budget(cluster: Cluster, app: str, least: int, allowed: int) -> None:
    """Create a budget and wait until it allows `allowed` disruptions."""
    cluster.apply([{
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": app},
        "spec": {"minAvailable": least, "selector": {"matchLabels": {"app": app}}},
    }])  # fmt: skip
    path = f"/apis/policy/v1/namespaces/{cluster.namespace}/poddisruptionbudgets/{app}"

    def computed() -> bool:
        status = cluster.get(path).get("status", {})
        return status.get("currentHealthy", 0) >= least and status.get("disruptionsAllowed") == allowed

    cluster.wait(computed, f"the budget of {app} is computed")


def is_stopping(cluster: Cluster, name: str) -> bool:
    return any(one["metadata"]["name"] == name and "deletionTimestamp" in one["metadata"] for one in cluster.pods())


def has_ended(cluster: Cluster, name: str) -> bool:
    """It holds no capacity: deleted, or Failed, as for a moment before its deletion."""
    return name not in cluster.holding()


def nominated(cluster: Cluster, name: str) -> str:
    return str(cluster.pod(name)["status"].get("nominatedNodeName", ""))


def test_a_victim_gets_a_condition_and_its_grace_period_and_holds_capacity_until_it_ends(
    cluster: Cluster, hodei: PodScheduler
):
    cluster.make_nodes(1)
    cluster.make_pod("low", cpu="3", **SLOW)
    cluster.until_bound("low")
    cluster.until_phase("low", "Running")
    cluster.make_pod("high", cpu="3", priorityClassName="five")
    cluster.wait(lambda: nominated(cluster, "high") == "node-0", "the node is nominated")
    condition = cluster.until_condition("low", "DisruptionTarget", "True")
    assert (condition["reason"], condition["message"]) == (
        "PreemptionByScheduler",
        "hodei: preempting to accommodate a higher priority pod",
    )
    cluster.wait(lambda: is_stopping(cluster, "low"), "the victim is being deleted")
    low = cluster.pod("low")
    assert low["metadata"]["deletionGracePeriodSeconds"] == 30
    assert cluster.bound_to("high") == ""
    message = cluster.until_condition("high", "PodScheduled", "False", "Unschedulable")["message"]
    assert message.startswith("0/1 nodes are available: 1 Insufficient cpu.")
    cluster.until_bound("high")
    assert has_ended(cluster, "low")
    assert "scheduler_preemption_attempts_total" in hodei.get("/metrics")


def test_other_pods_may_use_capacity_that_is_not_held_for_a_preemptor(cluster: Cluster):
    cluster.make_nodes(2)
    occupy(cluster, "low", "node-0", **SLOW)
    occupy(cluster, "other", "node-1", priorityClassName="nine")
    cluster.make_pod("high", cpu="3", priorityClassName="five")
    cluster.wait(lambda: nominated(cluster, "high") == "node-0", "the node is nominated")
    cluster.make_pod("small", cpu="1")
    assert cluster.until_bound("small") == {"small": "node-1"}
    cluster.until_bound("high")


def test_victims_without_a_budget_are_preferred(cluster: Cluster):
    """Even if their priority is higher."""
    cluster.make_nodes(2)
    occupy(cluster, "guarded", "node-0", labels={"app": "guarded"})
    occupy(cluster, "free", "node-1", priorityClassName="one")
    budget(cluster, "guarded", least=1, allowed=0)
    cluster.make_pod("high", cpu="3", priorityClassName="five")
    assert cluster.until_bound("high") == {"high": "node-1"}
    assert not is_stopping(cluster, "guarded")


def test_a_budget_is_violated_if_no_other_victims_help(cluster: Cluster):
    cluster.make_nodes(1)
    occupy(cluster, "guarded", "node-0", labels={"app": "guarded"})
    budget(cluster, "guarded", least=1, allowed=0)
    cluster.make_pod("high", cpu="3", priorityClassName="five")
    cluster.until_bound("high")
    assert has_ended(cluster, "guarded")


def test_only_as_many_pods_of_a_budget_are_preempted_as_it_allows(cluster: Cluster):
    cluster.make_nodes(2)
    occupy(cluster, "guarded-0", "node-0", labels={"app": "guarded"})
    occupy(cluster, "guarded-1", "node-1", labels={"app": "guarded"})
    budget(cluster, "guarded", least=1, allowed=1)
    cluster.make_pod("high", cpu="3", priorityClassName="five")
    cluster.until_bound("high")
    assert len([name for name in cluster.holding() if name.startswith("guarded")]) == 1


def test_the_node_whose_highest_victim_is_lowest_is_chosen(cluster: Cluster):
    cluster.make_nodes(3)
    occupy(cluster, "five", "node-0", priorityClassName="five")
    occupy(cluster, "zero", "node-1")
    occupy(cluster, "one", "node-2", priorityClassName="one")
    cluster.make_pod("high", cpu="3", priorityClassName="nine")
    assert cluster.until_bound("high") == {"high": "node-1"}


def test_no_unnecessary_pods_are_preempted(cluster: Cluster):
    cluster.make_nodes(1)
    for name, cpu in (("small", "1"), ("large", "2")):
        cluster.make_pod(name, cpu=cpu, scheduler="other")
        cluster.bind(name, "node-0")
    cluster.make_pod("high", cpu="2", priorityClassName="five")
    cluster.until_bound("high")
    assert set(cluster.holding()) == {"small", "high"}


def test_a_pod_that_never_preempts_waits(cluster: Cluster):
    cluster.make_nodes(1)
    occupy(cluster, "low", "node-0")
    cluster.make_pod("never-preempts", cpu="3", priorityClassName="never-preempts")
    message = cluster.until_condition("never-preempts", "PodScheduled", "False", "Unschedulable")["message"]
    assert message.endswith("preemption: not eligible due to preemptionPolicy=Never.")
    cluster.make_pod("equal", cpu="3")
    message = cluster.until_condition("equal", "PodScheduled", "False", "Unschedulable")["message"]
    assert message.endswith("preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.")
    assert not is_stopping(cluster, "low")
    cluster.delete_pod("low")
    cluster.until_bound("never-preempts")  # the higher priority of the two
    assert cluster.bound_to("equal") == ""


def test_a_nomination_passes_to_a_pod_of_higher_priority(cluster: Cluster):
    cluster.make_nodes(1)
    occupy(cluster, "low", "node-0", **SLOW)
    cluster.make_pod("mid", cpu="3", priorityClassName="five")
    cluster.wait(lambda: nominated(cluster, "mid") == "node-0", "the node is nominated")
    cluster.make_pod("top", cpu="3", priorityClassName="nine")
    cluster.wait(lambda: nominated(cluster, "mid") == "", "the nomination is removed")
    cluster.until_bound("top")
    assert has_ended(cluster, "low")
    assert cluster.bound_to("mid") == ""
    cluster.delete_pod("top", grace=0)
    cluster.until_bound("mid")


def test_a_deleted_preemptor_leaves_its_node_to_the_next_pod(cluster: Cluster):
    cluster.make_nodes(1)
    occupy(cluster, "low", "node-0", **SLOW)
    cluster.make_pod("high", cpu="3", priorityClassName="five")
    cluster.wait(lambda: nominated(cluster, "high") == "node-0", "the node is nominated")
    cluster.make_pod("next", cpu="3")
    cluster.until_condition("next", "PodScheduled", "False", "Unschedulable")
    cluster.delete_pod("high", grace=0)
    cluster.until_bound("next")
    assert has_ended(cluster, "low")


VERY_SLOW = {"annotations": {"hodei.test/stops-after": "60s"}, "terminationGracePeriodSeconds": 90}


def test_a_preemptor_takes_a_node_that_joins_while_its_victim_still_stops(cluster: Cluster):
    cluster.make_nodes(1)
    occupy(cluster, "low", "node-0", **VERY_SLOW)
    cluster.make_pod("high", cpu="3", priorityClassName="five")
    cluster.wait(lambda: nominated(cluster, "high") == "node-0", "the node is nominated")
    cluster.wait(lambda: is_stopping(cluster, "low"), "the victim is being deleted")
    cluster.make_node("new")
    assert cluster.until_bound("high") == {"high": "new"}
    assert "low" in cluster.holding()  # it is still stopping, and no pod waits for it
    assert nominated(cluster, "high") in ("", "new")
    cluster.make_pod("next", cpu="3")
    cluster.until_condition("next", "PodScheduled", "False", "Unschedulable")
    cluster.delete_pod("low", grace=0)
    # No capacity is held for the pod that went to the new node.
    assert cluster.until_bound("next") == {"next": "node-0"}


def test_a_preemptor_uses_capacity_that_is_freed_first(cluster: Cluster):
    cluster.make_nodes(2)
    occupy(cluster, "low", "node-0", **VERY_SLOW)
    occupy(cluster, "equal", "node-1", priorityClassName="five")
    cluster.make_pod("high", cpu="3", priorityClassName="five")
    cluster.wait(lambda: nominated(cluster, "high") == "node-0", "the node is nominated")
    cluster.delete_pod("equal", grace=0)
    assert cluster.until_bound("high") == {"high": "node-1"}
    assert "low" in cluster.holding()


def test_a_preemptor_takes_a_node_that_is_uncordoned(cluster: Cluster):
    cluster.make_nodes(2)
    cluster.patch("/api/v1/nodes/node-1", {"spec": {"unschedulable": True}})
    occupy(cluster, "low", "node-0", **VERY_SLOW)
    cluster.make_pod("high", cpu="3", priorityClassName="five")
    cluster.wait(lambda: nominated(cluster, "high") == "node-0", "the node is nominated")
    cluster.patch("/api/v1/nodes/node-1", {"spec": {"unschedulable": None}})
    assert cluster.until_bound("high") == {"high": "node-1"}
