"""Hodei with kube-scheduler on the same nodes, with pods of other schedulers, and with several instances of itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from real.kubernetes.cluster import Cluster
from real.kubernetes.pod_scheduler import PodScheduler, PodSchedulers

pytestmark = pytest.mark.real

SPACE = "hodei-system"  # where the shipped roles let it keep its Lease
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SPACE}/leases/hodei"


def used_mcpu(cluster: Cluster) -> dict[str, int]:
    """What the pods of each node ask for together, by the API."""
    used: dict[str, int] = {}
    for one in cluster.pods(fieldSelector="status.phase!=Failed"):
        node = one["spec"].get("nodeName")
        if node:
            said = one["spec"]["containers"][0]["resources"]["requests"]["cpu"]
            used[node] = used.get(node, 0) + (int(said[:-1]) if said.endswith("m") else int(said) * 1000)
    return used


def both_at_once(*actions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def refuse_what_is_too_much(cluster: Cluster, nodes: list[str]) -> bool:
    """As kubelets do, which have the last word: a pod for which there is no room ends as Failed, and whoever owned it makes
    another. Whether there was one."""
    used, found = used_mcpu(cluster), False
    for node in nodes:
        if used.get(node, 0) > 4000:
            late = max(name for name, where in cluster.holding().items() if where == node)
            said = cluster.pod(late)
            cluster.patch(f"{cluster.pods_path}/{late}/status", {"status": {"phase": "Failed", "reason": "OutOfcpu"}})
            cluster.make_pod(f"{late}-again", cpu="1", scheduler=said["spec"]["schedulerName"])
            found = True
    return found


def test_two_schedulers_fill_the_same_nodes_and_what_kubelets_refuse_finds_another_place(
    cluster: Cluster, hodei: PodScheduler, kube_scheduler: str
):
    """Nothing locks a node for one of them: two that decide in the same moment may both take the last place, as two
    kube-schedulers do. The kubelet refuses the second."""
    nodes = cluster.make_nodes(6, cpu="4")
    both_at_once(
        lambda: cluster.make_pods(16, cpu="1", prefix="ours"),
        lambda: cluster.make_pods(16, cpu="1", prefix="theirs", scheduler=kube_scheduler),
    )

    def in_order() -> bool:
        return not refuse_what_is_too_much(cluster, nodes) and len(cluster.holding()) == 24

    cluster.wait(in_order, "every place is taken once")
    owners = {name.partition("-")[0] for name in cluster.holding()}
    assert owners == {"ours", "theirs"}


def test_each_counts_what_the_other_has_bound(cluster: Cluster, hodei: PodScheduler, kube_scheduler: str):
    """One after the other, nothing is ever given twice."""
    cluster.make_nodes(2, cpu="4")
    for turn in range(4):
        scheduler = ("hodei", kube_scheduler)[turn % 2]
        cluster.make_pods(2, cpu="1", prefix=f"turn-{turn}", scheduler=scheduler)
        cluster.until_bound(f"turn-{turn}-0", f"turn-{turn}-1")
    assert used_mcpu(cluster) == {"node-0": 4000, "node-1": 4000}
    for scheduler in ("hodei", kube_scheduler):
        cluster.make_pod(f"late-{scheduler}", cpu="1", scheduler=scheduler)
        cluster.until_condition(f"late-{scheduler}", "PodScheduled", "False", "Unschedulable")


def test_pods_that_are_held_back_foreign_or_leaving_are_never_bound(cluster: Cluster, hodei: PodScheduler):
    cluster.make_pod("gated", schedulingGates=[{"name": "example.com/quota"}])
    cluster.make_pod("foreign", scheduler="somebody")
    cluster.make_pod("leaving")
    held = {"metadata": {"finalizers": ["example.com/last-word"]}}
    cluster.patch(f"{cluster.pods_path}/leaving", held)
    cluster.until_condition("leaving", "PodScheduled", "False", "Unschedulable")
    cluster.delete_pod("leaving")
    try:
        cluster.make_nodes(1)
        cluster.make_pod("ours")
        cluster.until_bound("ours")
        assert set(cluster.bound()) == {"ours"}
        gated = cluster.condition("gated")
        assert (gated["reason"], gated["status"]) == ("SchedulingGated", "False")
        cluster.patch(f"{cluster.pods_path}/gated", {"spec": {"schedulingGates": None}})
        cluster.until_bound("gated")
        assert set(cluster.bound()) == {"ours", "gated"}
    finally:
        cluster.patch(f"{cluster.pods_path}/leaving", {"metadata": {"finalizers": None}})


def test_only_the_leader_binds_and_another_follows_it(cluster: Cluster, hodei_kube: PodSchedulers):
    """Killed: when the lease has run out. Told to go: at once."""
    cluster.make_nodes(1)

    def contender(name: str) -> PodScheduler:
        extra = [f"--identity={name}", f"--lease-namespace={SPACE}", "--lease-seconds=4"]
        return hodei_kube("led", extra, elect=True)

    def leader() -> str:
        return str(cluster.get(LEASE)["spec"].get("holderIdentity", "")) if cluster.api.exists(LEASE) else ""

    def schedules(one: PodScheduler) -> bool:
        return "scheduling pods of led" in one.said()

    first = contender("first")
    cluster.wait(lambda: leader() == "first", "the first leads")
    second = contender("second")
    cluster.make_pod("one", scheduler="led")
    cluster.until_bound("one")
    assert schedules(first)
    assert not schedules(second)

    first.kill()
    cluster.make_pod("two", scheduler="led")
    cluster.until_bound("two")
    assert leader() == "second"

    third = contender("third")
    assert not schedules(third)
    transitions = cluster.get(LEASE)["spec"]["leaseTransitions"]
    assert second.stop() == 0
    assert cluster.get(LEASE)["spec"].get("holderIdentity", "") in ("", "third")  # given back, not left to run out
    cluster.make_pod("three", scheduler="led")
    cluster.until_bound("three")
    assert leader() == "third"
    assert cluster.get(LEASE)["spec"]["leaseTransitions"] > transitions
