"""Faults between Hodei and the cluster: connections, the API server, permissions, and races with other schedulers."""

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
    assert proxy.cut() > 10  # all watches
    cluster.delete_pod("old", grace=0)
    cluster.make_pod("new", cpu="3", scheduler="far")
    cluster.make_pod("short-lived", cpu="3", scheduler="far")
    cluster.delete_pod("short-lived", grace=0)
    proxy.refusing = False
    cluster.until_bound("new")
    proxy.cut()
    cluster.make_pod("small", cpu="1", scheduler="far")
    cluster.until_bound("small")


def test_no_pod_is_lost_when_the_apiserver_is_killed_under_load(
    cluster: Cluster, plane: Plane, hodei_kube: PodSchedulers
):
    """Every pod is bound or pending, and no node is overcommitted."""
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
    cluster.wait(lambda: len(cluster.bound()) == 32, "as many are bound as fit", 60)
    assert sorted(cluster.bound().values()) == sorted(nodes * 8)
    pending = next(f"pod-{at}" for at in range(40) if f"pod-{at}" not in cluster.bound())
    cluster.until_condition(pending, "PodScheduled", "False", "Unschedulable")


def test_a_token_that_is_replaced_is_read_again(
    cluster: Cluster, plane: Plane, hodei_kube: PodSchedulers, tmp_path: Path
):
    """A token of its service account is bound to a Secret; deleting the Secret invalidates it."""
    cluster.make_nodes(1)

    def issue(secret: str) -> str:
        paths = cluster.apply(
            [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret, "namespace": "hodei-system"}}]
        )
        secret_reference = {
            "apiVersion": "v1",
            "kind": "Secret",
            "name": secret,
            "uid": cluster.get(paths[0])["metadata"]["uid"],
        }
        request = {"spec": {"boundObjectRef": secret_reference, "expirationSeconds": 3600}}
        path = "/api/v1/namespaces/hodei-system/serviceaccounts/hodei/token"
        return str(
            cluster.post(path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", **request})["status"][
                "token"
            ]
        )

    token = tmp_path / "token"
    token.write_text(issue("first"))
    kubeconfig = yaml.safe_load(plane.kubeconfig("hodei").read_text())
    kubeconfig["users"][0]["user"] = {"tokenFile": str(token)}
    config = tmp_path / "kubeconfig"
    config.write_text(yaml.safe_dump(kubeconfig))
    hodei_kube("token-file", [f"--kubeconfig={config}"])
    cluster.make_pod("one", scheduler="token-file")
    cluster.until_bound("one")
    token.write_text(issue("second"))
    cluster.delete("/api/v1/namespaces/hodei-system/secrets/first")
    plane.restart_apiserver()  # it caches authenticated tokens for a while
    cluster.make_pod("two", scheduler="token-file")
    cluster.until_bound("two")


def test_missing_permissions_are_logged_and_waited_for(cluster: Cluster, hodei_kube: PodSchedulers):
    scheduler = hodei_kube("unprivileged", user="unprivileged", ready=False)

    def logged() -> bool:
        return "/api/v1/nodes cannot be kept up to date" in scheduler.output()

    cluster.wait(logged, "the missing permission is logged")
    assert not scheduler.is_ready()
    assert "forbidden" in scheduler.output()
    assert scheduler.process is not None
    assert scheduler.process.poll() is None
    assert scheduler.get("/livez") == "ok"


def test_a_missing_permission_is_reported_on_the_pod(cluster: Cluster, hodei: PodScheduler):
    cluster.make_nodes(1)
    role: dict[str, Any] = cluster.get(ROLE)
    rules = role["rules"]
    cluster.patch(ROLE, {"rules": [rule for rule in rules if "pods/binding" not in rule["resources"]]})
    try:
        cluster.make_pod("one")
        condition = cluster.until_condition("one", "PodScheduled", "False", "SchedulerError")
        assert 'cannot create resource "pods/binding"' in condition["message"]
        assert f"pod {cluster.namespace}/one was not bound" in hodei.output()
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
    cluster.make_nodes(1, cpu="4", prefix="first")
    cluster.make_pod("one", cpu="3")
    gate.until_waiting("one")
    cluster.make_nodes(1, cpu="4", prefix="second")
    cluster.bind("one", "second-0")
    gate.open()
    cluster.make_pods(2, cpu="2", prefix="next")
    assert set(cluster.until_bound("next-0", "next-1").values()) == {"first-0"}
    assert cluster.bound_to("one") == "second-0"
    assert cluster.condition("one")["status"] == "True"
    assert cluster.events_of("one", "FailedScheduling") == []


def test_a_pod_deleted_during_its_binding_holds_no_capacity(cluster: Cluster, gate: BindingGate, hodei: PodScheduler):
    cluster.make_nodes(1, cpu="4")
    cluster.make_pod("one", cpu="3")
    gate.until_waiting("one")
    cluster.delete_pod("one", grace=0)
    cluster.make_pod("one", cpu="4")  # another pod of the same name
    gate.open()
    cluster.until_bound("one")
    cluster.until_event("one", "Scheduled")


def test_a_pod_bound_to_a_deleted_node_counts_when_the_node_returns(
    cluster: Cluster, gate: BindingGate, hodei: PodScheduler
):
    """The API accepts bindings to deleted nodes. When the node returns, the pod takes its capacity."""
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
    """All bindings are in progress when the scheduler is killed; the API still completes some."""
    cluster.make_nodes(2, cpu="4")
    scheduler = hodei_kube("killed")
    annotations = {"pod-group": "ring", "pod-group-size": "4"}
    cluster.make_pods(4, cpu="2", prefix="ring", scheduler="killed", annotations=annotations)
    gate.until_waiting(*[f"ring-{at}" for at in range(4)])
    assert cluster.bound() == {}
    scheduler.kill()
    gate.open()
    scheduler.start()
    assert sorted(cluster.until_bound().values()) == ["node-0", "node-0", "node-1", "node-1"]
