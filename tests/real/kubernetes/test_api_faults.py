"""Faults between Hodei and the cluster: connections, the API server, rights, and faster schedulers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from real.kubernetes.binding_gate import BindingGate
from real.kubernetes.cluster import Cluster
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodScheduler, PodSchedulers
from real.kubernetes.proxy import Proxy

pytestmark = pytest.mark.real

ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterroles/hodei-scheduler"


@pytest.fixture
def proxy(plane: Plane) -> Iterator[Proxy]:
    made = Proxy(plane.server)
    yield made
    made.close()


def test_changes_during_an_outage_are_caught_up(
    cluster: Cluster, plane: Plane, proxy: Proxy, hodei_kube: PodSchedulers
):
    cluster.make_nodes(1, cpu="4")
    hodei_kube("far", [f"--kubeconfig={plane.kubeconfig('hodei', server=proxy.server)}"])
    cluster.make_pod("old", cpu="3", scheduler="far")
    cluster.until_bound("old")
    proxy.refusing = True
    assert proxy.cut() > 10  # all the watches
    cluster.delete_pod("old", grace=0)
    cluster.make_pod("new", cpu="3", scheduler="far")
    cluster.make_pod("short-lived", cpu="3", scheduler="far")
    cluster.delete_pod("short-lived", grace=0)
    proxy.refusing = False
    cluster.until_bound("new")
    proxy.cut()
    cluster.make_pod("small", cpu="1", scheduler="far")
    cluster.until_bound("small")


def test_the_apiserver_dies_in_the_middle_of_a_load(cluster: Cluster, plane: Plane, hodei_kube: PodSchedulers):
    """No pod is lost, and no node is given more than it has."""
    nodes = cluster.make_nodes(4, cpu="4")
    hodei_kube("steady")
    cluster.make_pods(40, cpu="500m", scheduler="steady", schedulingGates=[{"name": "example.com/go"}])

    half = threading.Event()
    restarted = threading.Event()

    def load() -> None:
        for at in range(40):
            if at == 20:
                half.set()
                restarted.wait(60)
            cluster.patch(f"{cluster.pods_path}/pod-{at}", {"spec": {"schedulingGates": None}})
        done.set()

    done = threading.Event()
    loading = threading.Thread(target=load)
    loading.start()
    half.wait(60)
    plane.restart_apiserver()
    restarted.set()
    loading.join()
    assert done.is_set()
    cluster.wait(lambda: len(cluster.bound()) == 32, "as many are bound as there is room for", 60)
    assert sorted(cluster.bound().values()) == sorted(nodes * 8)
    waiting = next(f"pod-{at}" for at in range(40) if f"pod-{at}" not in cluster.bound())
    cluster.until_condition(waiting, "PodScheduled", "False", "Unschedulable")


def test_a_token_that_is_replaced_is_read_again(
    cluster: Cluster, plane: Plane, hodei_kube: PodSchedulers, tmp_path: Path
):
    """Its own account's, tied to a Secret: with that, the token is void."""
    cluster.make_nodes(1)

    def issue(secret: str) -> str:
        paths = cluster.apply(
            [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret, "namespace": "hodei-system"}}]
        )
        tied = {"apiVersion": "v1", "kind": "Secret", "name": secret, "uid": cluster.get(paths[0])["metadata"]["uid"]}
        asked = {"spec": {"boundObjectRef": tied, "expirationSeconds": 3600}}
        path = "/api/v1/namespaces/hodei-system/serviceaccounts/hodei/token"
        return str(
            cluster.post(path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", **asked})["status"][
                "token"
            ]
        )

    token = tmp_path / "token"
    token.write_text(issue("first"))
    written = yaml.safe_load(plane.kubeconfig("hodei").read_text())
    written["users"][0]["user"] = {"tokenFile": str(token)}
    config = tmp_path / "kubeconfig"
    config.write_text(yaml.safe_dump(written))
    hodei_kube("tokened", [f"--kubeconfig={config}"])
    cluster.make_pod("one", scheduler="tokened")
    cluster.until_bound("one")
    token.write_text(issue("second"))
    cluster.delete("/api/v1/namespaces/hodei-system/secrets/first")
    plane.restart_apiserver()  # it remembers for a while whom it has let in
    cluster.make_pod("two", scheduler="tokened")
    cluster.until_bound("two")


def test_missing_rights_are_logged_and_waited_for(cluster: Cluster, hodei_kube: PodSchedulers):
    mine = hodei_kube("powerless", user="nobody", ready=False)

    def said_so() -> bool:
        return "/api/v1/nodes cannot be kept up to date" in mine.said()

    cluster.wait(said_so, "it has said what it may not")
    assert not mine.is_ready()
    assert "forbidden" in mine.said()
    assert mine.process is not None
    assert mine.process.poll() is None
    assert mine.get("/livez") == "ok"


def test_a_missing_right_is_reported_on_the_pod(cluster: Cluster, hodei: PodScheduler):
    cluster.make_nodes(1)
    role: dict[str, Any] = cluster.get(ROLE)
    rules = role["rules"]
    cluster.patch(ROLE, {"rules": [rule for rule in rules if "pods/binding" not in rule["resources"]]})
    try:
        cluster.make_pod("one")
        told = cluster.until_condition("one", "PodScheduled", "False", "SchedulerError")
        assert 'cannot create resource "pods/binding"' in told["message"]
        assert f"pod {cluster.namespace}/one was not bound" in hodei.said()
    finally:
        cluster.patch(ROLE, {"rules": rules})
    cluster.until_bound("one")


@pytest.fixture
def gate(cluster: Cluster, plane: Plane) -> Iterator[BindingGate]:
    made = BindingGate(cluster, plane.folder / "pki")
    yield made
    made.close()


def test_a_pod_bound_first_by_another_scheduler_counts_on_its_node(
    cluster: Cluster, gate: BindingGate, hodei: PodScheduler
):
    cluster.make_nodes(1, cpu="4", prefix="ours")
    cluster.make_pod("one", cpu="3")
    gate.until_waiting("one")
    cluster.make_nodes(1, cpu="4", prefix="theirs")
    cluster.bind("one", "theirs-0")
    gate.open()
    cluster.make_pods(2, cpu="2", prefix="next")
    assert set(cluster.until_bound("next-0", "next-1").values()) == {"ours-0"}
    assert cluster.bound_to("one") == "theirs-0"
    assert cluster.condition("one")["status"] == "True"
    assert cluster.events_of("one", "FailedScheduling") == []


def test_a_pod_that_is_deleted_while_it_is_bound_leaves_nothing_behind(
    cluster: Cluster, gate: BindingGate, hodei: PodScheduler
):
    cluster.make_nodes(1, cpu="4")
    cluster.make_pod("one", cpu="3")
    gate.until_waiting("one")
    cluster.delete_pod("one", grace=0)
    cluster.make_pod("one", cpu="4")  # another by the same name
    gate.open()
    cluster.until_bound("one")
    cluster.until_event("one", "Scheduled")


def test_a_node_deleted_during_a_binding_leaves_nothing_behind(
    cluster: Cluster, gate: BindingGate, hodei: PodScheduler
):
    """The API binds to what is not there. The pod is where the API says; when the node comes back, it counts on it."""
    cluster.make_nodes(1, cpu="4")
    cluster.make_pod("one", cpu="3")
    gate.until_waiting("one")
    cluster.delete("/api/v1/nodes/node-0")
    gate.open()
    cluster.until_bound("one")
    cluster.make_nodes(1, cpu="4")
    cluster.make_pod("two", cpu="3")
    cluster.until_condition("two", "PodScheduled", "False", "Unschedulable")
    cluster.delete_pod("one", grace=0)
    cluster.until_bound("two")


def test_a_gang_half_bound_by_a_killed_scheduler_is_completed_after_the_restart(
    cluster: Cluster, gate: BindingGate, hodei_kube: PodSchedulers
):
    """All bindings are under way when it dies; some are made by the API all the same."""
    cluster.make_nodes(2, cpu="4")
    mine = hodei_kube("mortal")
    said = {"pod-group": "ring", "pod-group-size": "4"}
    cluster.make_pods(4, cpu="2", prefix="ring", scheduler="mortal", annotations=said)
    gate.until_waiting(*[f"ring-{at}" for at in range(4)])
    assert cluster.bound() == {}
    mine.kill()
    gate.open()
    mine.start()
    assert sorted(cluster.until_bound().values()) == ["node-0", "node-0", "node-1", "node-1"]
