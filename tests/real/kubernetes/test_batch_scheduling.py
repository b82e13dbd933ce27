"""Features that kube-scheduler does not have, in a real cluster: start reservations, durable fair share, reservations, and
forecasts on pods.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from real.kubernetes.cluster import Cluster, pod
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodSchedulers, kube_command

pytestmark = pytest.mark.real

BATCH = """
[scheduling.profiles.default]
queue = "batch"
"""
SHARES = """
[scheduling.profiles.default]
queue = "multifactor"

[scheduling.shares]
enabled = true
refresh = "1s"
"""
FORECAST_ROLE = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes" / "rbac-forecast.yaml"
ConfigOption = Callable[[str], str]


@pytest.fixture
def config(tmp_path: Path) -> ConfigOption:
    """`config(text)` writes a configuration file and returns the option that names it."""

    def write(text: str) -> str:
        file = tmp_path / "hodei.toml"
        file.write_text(text)
        return f"--config={file}"

    return write


def _estimate(duration: str, **annotations: str) -> dict[str, str]:
    return {"hodei.io/estimate": duration, **annotations}


def test_a_short_pod_is_backfilled_before_a_start_reservation_and_a_long_one_is_not(
    cluster: Cluster, plane: Plane, hodei_kube: PodSchedulers, config: ConfigOption
):
    cluster.make_nodes(1, cpu="4")
    batch = config(BATCH)
    hodei_kube(extra=[batch])
    cluster.make_pod("runs", cpu="3", annotations=_estimate("1h"))
    cluster.until_bound("runs")
    cluster.make_pod("first", cpu="4", annotations=_estimate("1h"))
    full = cluster.until_condition("first", "PodScheduled", "False", "Unschedulable")
    assert full["message"].startswith("0/1 nodes are available: 1 Insufficient cpu.")
    cluster.make_pod("long", cpu="1", annotations=_estimate("3h"))
    condition = cluster.until_condition("long", "PodScheduled", "False", "WaitingForTurn")
    assert (
        condition["message"]
        == f"it would delay pod {cluster.namespace}/first, which has a start reservation for this capacity"
    )
    cluster.make_pod("short", cpu="1", annotations=_estimate("10m"))
    cluster.until_bound("short")
    # The last core is used now, so the reason becomes the missing capacity.
    cluster.until_condition("long", "PodScheduled", "False", "Unschedulable")

    explanation = kube_command(plane, "why", f"{cluster.namespace}/first", batch)
    assert "start" in explanation
    assert "on node-0" in explanation
    cluster.delete_pod("runs", grace=0)
    cluster.delete_pod("short", grace=0)
    cluster.until_bound("first")
    assert cluster.bound_to("long") == ""


def test_run_times_are_learned_for_similar_pods(cluster: Cluster, hodei_kube: PodSchedulers, config: ConfigOption):
    cluster.make_nodes(1, cpu="4")
    learned = config(BATCH + '[scheduling.estimates]\nsource = "learned"\n')
    first = hodei_kube(extra=[learned])

    def nightly(number: int) -> None:
        made = pod("", "1", annotations={"hodei.test/runs-for": "1s"}, restartPolicy="Never")
        template = {"metadata": {"annotations": made["metadata"]["annotations"]}, "spec": made["spec"]}
        name = f"nightly-{number}"
        cluster.apply(
            [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": template}}]
        )

    for number in (1, 2, 3):
        nightly(number)
    cluster.wait(lambda: len(cluster.pods(fieldSelector="status.phase=Succeeded")) == 3, "three have succeeded")
    assert first.stop() == 0
    # A new scheduler learns the same history from the cluster.
    hodei_kube(extra=[learned])
    cluster.make_pod("runs", cpu="3", annotations=_estimate("1h"))
    cluster.until_bound("runs")
    cluster.make_pod("first", cpu="4", annotations=_estimate("1h"))
    cluster.until_condition("first", "PodScheduled", "False", "Unschedulable")
    cluster.make_pod("unknown", cpu="1", annotations=_estimate("90m"))
    cluster.until_condition("unknown", "PodScheduled", "False", "WaitingForTurn")
    nightly(4)
    selector = {"labelSelector": "batch.kubernetes.io/job-name=nightly-4"}
    cluster.wait(lambda: any("nodeName" in one["spec"] for one in cluster.pods(**selector)), "the fourth is bound")


def test_fair_share_survives_a_restart_and_a_change_of_leader(
    cluster: Cluster, plane: Plane, hodei_kube: PodSchedulers, config: ConfigOption
):
    cluster.make_nodes(1, cpu="4")
    greedy, modest = f"{cluster.namespace}-greedy", f"{cluster.namespace}-modest"
    for name in (greedy, modest):
        cluster.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}])

    def make(namespace: str, name: str, cpu: str, **annotations: str) -> None:
        cluster.post(f"/api/v1/namespaces/{namespace}/pods", pod(name, cpu, annotations=annotations))

    def node_of(namespace: str, name: str) -> str:
        return str(cluster.get(f"/api/v1/namespaces/{namespace}/pods/{name}")["spec"].get("nodeName", ""))

    usage_path = "/api/v1/namespaces/hodei-system/configmaps/hodei-usage"
    cluster.delete(usage_path, missing_ok=True)
    extra = [config(SHARES), "--lease-namespace=hodei-system", "--lease-name=hodei", "--lease-seconds=3"]
    one = hodei_kube(extra=extra, elect=True)
    make(greedy, "past", "4", **{"hodei.test/runs-for": "2s"})
    cluster.wait(lambda: node_of(greedy, "past"), "the first pod is bound")
    cluster.wait(
        lambda: cluster.get(f"/api/v1/namespaces/{greedy}/pods/past")["status"].get("phase") == "Succeeded",
        "the first pod has succeeded",
    )
    other = hodei_kube(extra=extra, elect=True)
    assert one.stop() == 0  # the usage is written before the lease is released
    assert cluster.get(usage_path)["binaryData"]["usage.json.gz"]
    cluster.wait(lambda: "read the usage of" in other.output(), "the other leads and has read the usage")

    cluster.make_pod("blocker", cpu="4")
    cluster.until_bound("blocker")
    make(greedy, "first-come", "3")
    made = cluster.get(f"/api/v1/namespaces/{greedy}/pods/first-come")["metadata"]["creationTimestamp"]
    # Ages of pods are in whole seconds, and the pod of the greedy account must be older.
    cluster.wait(lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) > made, "the next second")
    make(modest, "later", "3")
    cluster.wait(
        lambda: cluster.get(f"/api/v1/namespaces/{modest}/pods/later")["status"].get("conditions"), "both are pending"
    )
    # Factors are at most `refresh` old (1 s), so only later decisions know the usage of both accounts.
    refreshed = time.monotonic() + 1.1
    cluster.wait(lambda: time.monotonic() > refreshed, "a refresh of the factors is due")
    cluster.delete_pod("blocker", grace=0)
    cluster.wait(lambda: node_of(modest, "later"), "the account with less usage is served first")
    assert node_of(greedy, "first-come") == ""
    for namespace in (greedy, modest):
        cluster.delete(f"/api/v1/namespaces/{namespace}/pods", grace=0)
    assert other.stop() == 0


def test_reserved_capacity_is_for_its_namespace_only(
    cluster: Cluster, plane: Plane, hodei_kube: PodSchedulers, config: ConfigOption
):
    cluster.make_node("kept", cpu="4", labels={"pool": "kept"})
    owner = f"{cluster.namespace}-owner"
    cluster.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": owner}}])
    begins = datetime.fromtimestamp(time.time(), UTC) + timedelta(hours=1)
    reserved = f"""
[[reservations]]
name = "demo"
namespace = "{owner}"
from = {begins.isoformat(timespec="seconds")}
for = "2h"
selector = "pool=kept"
cpu = 3
"""
    named = config(reserved)
    hodei_kube(extra=[named])
    cluster.make_pod("endless", cpu="2")
    condition = cluster.until_condition("endless", "PodScheduled", "False", "WaitingForTurn")
    assert condition["message"].startswith(f"reservation demo of project {owner} has it until")
    assert f"kept for project {owner} (demo)" in kube_command(plane, "why", f"{cluster.namespace}/endless", named)
    cluster.make_pod("fits", cpu="1")
    cluster.make_pod("ends-before", cpu="2", annotations=_estimate("30m"))
    cluster.until_bound("fits", "ends-before")
    cluster.delete_pod("ends-before", grace=0)
    cluster.post(f"/api/v1/namespaces/{owner}/pods", pod("own", "3"))
    cluster.wait(
        lambda: cluster.get(f"/api/v1/namespaces/{owner}/pods/own")["spec"].get("nodeName") == "kept",
        "the pod of the owner is bound",
    )
    assert cluster.bound_to("endless") == ""
    cluster.delete(f"/api/v1/namespaces/{owner}/pods", grace=0)


def test_a_pending_pod_is_annotated_with_its_expected_start(
    cluster: Cluster, hodei_kube: PodSchedulers, config: ConfigOption
):
    cluster.allow_hodei(FORECAST_ROLE)
    cluster.make_nodes(1, cpu="4")
    hodei_kube(extra=[config(BATCH), "--forecast-annotation"])
    cluster.make_pod("runs", cpu="4", annotations=_estimate("1h"))
    cluster.until_bound("runs")
    bound = datetime.fromtimestamp(time.time(), UTC)
    cluster.make_pod("first", cpu="4", annotations=_estimate("2h"))
    cluster.make_pod("second", cpu="4", annotations=_estimate("1h"))

    def expected_start(name: str) -> dict[str, datetime] | None:
        found = cluster.pod(name)["metadata"]["annotations"]
        stamps = {key: datetime.fromisoformat(found[key]) for key in found if "expected-start" in key}
        return stamps or None

    first = cluster.wait(lambda: expected_start("first"), "the start reservation is on the pod", 30)
    assert abs(first["hodei.io/expected-start"] - (bound + timedelta(hours=1))) < timedelta(minutes=2)
    assert first["hodei.io/expected-start-latest"] >= first["hodei.io/expected-start"]
    second = cluster.wait(lambda: expected_start("second"), "the forecast is on the pod", 60)
    assert abs(second["hodei.io/expected-start"] - (bound + timedelta(hours=3))) < timedelta(minutes=2)
    cluster.delete_pod("runs", grace=0)
    cluster.until_bound("first")


def test_without_permission_to_annotate_pods_are_still_scheduled(
    cluster: Cluster, hodei_kube: PodSchedulers, config: ConfigOption
):
    cluster.make_nodes(1, cpu="4")
    hodei = hodei_kube(extra=[config(BATCH), "--forecast-annotation"])
    cluster.make_pod("runs", cpu="4", annotations=_estimate("1h"))
    cluster.make_pod("waits", cpu="4", annotations=_estimate("1h"))
    cluster.until_bound("runs")
    cluster.wait(lambda: "rbac-forecast.yaml" in hodei.output(), "the log names the missing permission", 30)
    cluster.delete_pod("runs", grace=0)
    cluster.until_bound("waits")
