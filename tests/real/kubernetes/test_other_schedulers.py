"""Hodei with kube-scheduler on the same nodes, with pods of other schedulers, and with several instances of itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from real.kubernetes.cluster import Cluster
from real.kubernetes.pod_scheduler import PodScheduler, PodSchedulers

pytestmark = pytest.mark.real

NAMESPACE = "hodei-system"  # where the shipped roles allow its Lease
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/hodei"


def used_mcpu(cluster: Cluster) -> dict[str, int]:
    """The CPU requests of the pods on each node, from the API."""
    used: dict[str, int] = {}
    for one in cluster.pods(fieldSelector="status.phase!=Failed"):
        node = one["spec"].get("nodeName")
        if node:
            request = one["spec"]["containers"][0]["resources"]["requests"]["cpu"]
            used[node] = used.get(node, 0) + (int(request[:-1]) if request.endswith("m") else int(request) * 1000)
    return used


def both_at_once(*actions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def reject_overcommitted(cluster: Cluster, nodes: list[str]) -> bool:
    """Act as the kubelets: a pod that does not fit becomes Failed, and its owner creates another. Returns whether there was
    one."""
    used, found = used_mcpu(cluster), False
    for node in nodes:
        if used.get(node, 0) > 4000:
            late = max(name for name, host in cluster.holding().items() if host == node)
            rejected = cluster.pod(late)
            cluster.patch(f"{cluster.pods_path}/{late}/status", {"status": {"phase": "Failed", "reason": "OutOfcpu"}})
            cluster.make_pod(f"{late}-again", cpu="1", scheduler=rejected["spec"]["schedulerName"])
            found = True
    return found


def test_two_schedulers_fill_the_same_nodes_and_pods_rejected_by_kubelets_are_placed_elsewhere(
    cluster: Cluster, hodei: PodScheduler, kube_scheduler: str
):
    """Schedulers do not lock nodes: two that decide at the same time may both use the last capacity, as two kube-schedulers
    would. The kubelet rejects the second pod."""
    nodes = cluster.make_nodes(6, cpu="4")
    both_at_once(
        lambda: cluster.make_pods(16, cpu="1", prefix="ours"),
        lambda: cluster.make_pods(16, cpu="1", prefix="theirs", scheduler=kube_scheduler),
    )

    def settled() -> bool:
        return not reject_overcommitted(cluster, nodes) and len(cluster.holding()) == 24

    cluster.wait(settled, "all nodes are full and none is overcommitted")
    owners = {name.partition("-")[0] for name in cluster.holding()}
    assert owners == {"ours", "theirs"}


def test_each_scheduler_counts_the_pods_of_the_other(cluster: Cluster, hodei: PodScheduler, kube_scheduler: str):
    """When they take turns, no capacity is allocated twice."""
    cluster.make_nodes(2, cpu="4")
    for turn in range(4):
        scheduler = ("hodei", kube_scheduler)[turn % 2]
        cluster.make_pods(2, cpu="1", prefix=f"turn-{turn}", scheduler=scheduler)
        cluster.until_bound(f"turn-{turn}-0", f"turn-{turn}-1")
    assert used_mcpu(cluster) == {"node-0": 4000, "node-1": 4000}
    for scheduler in ("hodei", kube_scheduler):
        cluster.make_pod(f"late-{scheduler}", cpu="1", scheduler=scheduler)
        cluster.until_condition(f"late-{scheduler}", "PodScheduled", "False", "Unschedulable")


def test_gated_foreign_and_terminating_pods_are_not_bound(cluster: Cluster, hodei: PodScheduler):
    cluster.make_pod("gated", schedulingGates=[{"name": "example.com/quota"}])
    cluster.make_pod("foreign", scheduler="other")
    cluster.make_pod("terminating")
    held = {"metadata": {"finalizers": ["example.com/cleanup"]}}
    cluster.patch(f"{cluster.pods_path}/terminating", held)
    cluster.until_condition("terminating", "PodScheduled", "False", "Unschedulable")
    cluster.delete_pod("terminating")
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
        cluster.patch(f"{cluster.pods_path}/terminating", {"metadata": {"finalizers": None}})


def test_only_the_leader_binds_and_another_takes_over(cluster: Cluster, hodei_kube: PodSchedulers):
    """After a kill, when the lease has expired; after SIGTERM, at once."""
    cluster.make_nodes(1)

    def contender(name: str) -> PodScheduler:
        extra = [f"--identity={name}", f"--lease-namespace={NAMESPACE}", "--lease-seconds=4"]
        return hodei_kube("led", extra, elect=True)

    def leader() -> str:
        return str(cluster.get(LEASE)["spec"].get("holderIdentity", "")) if cluster.api.exists(LEASE) else ""

    def schedules(one: PodScheduler) -> bool:
        return "scheduling pods of led" in one.output()

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
    assert cluster.get(LEASE)["spec"].get("holderIdentity", "") in ("", "third")  # released, not expired
    cluster.make_pod("three", scheduler="led")
    cluster.until_bound("three")
    assert leader() == "third"
    assert cluster.get(LEASE)["spec"]["leaseTransitions"] > transitions
