"""Features that kube-scheduler does not have, in a real cluster: start reservations, durable fair share, reservations, and
forecasts on pods.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from real.kubernetes.cluster import Cluster, pod
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import HODEI, PodSchedulers

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
Told = Callable[[str], str]


@pytest.fixture
def config(tmp_path: Path) -> Told:
    """`config(text)`: the option that names a file with it."""

    def written(text: str) -> str:
        file = tmp_path / "hodei.toml"
        file.write_text(text)
        return f"--config={file}"

    return written


def _lasts(duration: str, **annotations: str) -> dict[str, str]:
    return {"hodei.io/estimate": duration, **annotations}


def _ask(plane: Plane, *words: object) -> str:
    command = [HODEI, "kube", *map(str, words), f"--kubeconfig={plane.kubeconfig('hodei')}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_short_pod_is_backfilled_before_a_start_reservation_and_a_long_one_is_not(
    cluster: Cluster, plane: Plane, hodei_kube: PodSchedulers, config: Told
):
    cluster.make_nodes(1, cpu="4")
    batch = config(BATCH)
    hodei_kube(extra=[batch])
    cluster.make_pod("runs", cpu="3", annotations=_lasts("1h"))
    cluster.until_bound("runs")
    cluster.make_pod("first", cpu="4", annotations=_lasts("1h"))
    full = cluster.until_condition("first", "PodScheduled", "False", "Unschedulable")
    assert full["message"].startswith("0/1 nodes are available: 1 Insufficient cpu.")
    cluster.make_pod("long", cpu="1", annotations=_lasts("3h"))
    told = cluster.until_condition("long", "PodScheduled", "False", "WaitingForTurn")
    assert (
        told["message"]
        == f"it would delay pod {cluster.namespace}/first, which has a start reservation for this capacity"
    )
    cluster.make_pod("short", cpu="1", annotations=_lasts("10m"))
    cluster.until_bound("short")
    # With the last core gone it is room that is missing, also for whoever waits for a turn.
    cluster.until_condition("long", "PodScheduled", "False", "Unschedulable")

    promised = _ask(plane, "why", f"{cluster.namespace}/first", batch)
    assert "start" in promised
    assert "on node-0" in promised
    cluster.delete_pod("runs", grace=0)
    cluster.delete_pod("short", grace=0)
    cluster.until_bound("first")
    assert cluster.bound_to("long") == ""


def test_run_times_are_learned_for_similar_pods(cluster: Cluster, hodei_kube: PodSchedulers, config: Told):
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
    cluster.wait(lambda: len(cluster.pods(fieldSelector="status.phase=Succeeded")) == 3, "three are over")
    assert first.stop() == 0
    # One that begins later has the same history: it is in the cluster.
    hodei_kube(extra=[learned])
    cluster.make_pod("runs", cpu="3", annotations=_lasts("1h"))
    cluster.until_bound("runs")
    cluster.make_pod("first", cpu="4", annotations=_lasts("1h"))
    cluster.until_condition("first", "PodScheduled", "False", "Unschedulable")
    cluster.make_pod("unknown", cpu="1", annotations=_lasts("90m"))
    cluster.until_condition("unknown", "PodScheduled", "False", "WaitingForTurn")
    nightly(4)
    of_it = {"labelSelector": "batch.kubernetes.io/job-name=nightly-4"}
    cluster.wait(lambda: any("nodeName" in one["spec"] for one in cluster.pods(**of_it)), "the fourth is bound")


def test_fair_share_survives_a_restart_and_a_change_of_leader(
    cluster: Cluster, plane: Plane, hodei_kube: PodSchedulers, config: Told
):
    cluster.make_nodes(1, cpu="4")
    greedy, modest = f"{cluster.namespace}-greedy", f"{cluster.namespace}-modest"
    for name in (greedy, modest):
        cluster.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}])

    def make(namespace: str, name: str, cpu: str, **said: str) -> None:
        cluster.post(f"/api/v1/namespaces/{namespace}/pods", pod(name, cpu, annotations=said))

    def where(namespace: str, name: str) -> str:
        return str(cluster.get(f"/api/v1/namespaces/{namespace}/pods/{name}")["spec"].get("nodeName", ""))

    kept = "/api/v1/namespaces/hodei-system/configmaps/hodei-usage"
    cluster.delete(kept, missing_ok=True)
    extra = [config(SHARES), "--lease-namespace=hodei-system", "--lease-name=hodei", "--lease-seconds=3"]
    one = hodei_kube(extra=extra, elect=True)
    make(greedy, "past", "4", **{"hodei.test/runs-for": "2s"})
    cluster.wait(lambda: where(greedy, "past"), "the first pod is bound")
    cluster.wait(
        lambda: cluster.get(f"/api/v1/namespaces/{greedy}/pods/past")["status"].get("phase") == "Succeeded",
        "it is over",
    )
    other = hodei_kube(extra=extra, elect=True)
    assert one.stop() == 0  # what was used is written before the lead is given back
    assert cluster.get(kept)["binaryData"]["usage.json.gz"]
    cluster.wait(lambda: "read the usage of" in other.said(), "the other leads, and remembers")

    cluster.make_pod("blocker", cpu="4")
    cluster.until_bound("blocker")
    make(greedy, "first-come", "3")
    made = cluster.get(f"/api/v1/namespaces/{greedy}/pods/first-come")["metadata"]["creationTimestamp"]
    # A pod's age is in whole seconds, and the greedy one must be older.
    cluster.wait(lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) > made, "the next second")
    make(modest, "later", "3")
    cluster.wait(
        lambda: cluster.get(f"/api/v1/namespaces/{modest}/pods/later")["status"].get("conditions"), "both wait"
    )
    # Factors are at most `refresh` old (1 s), so the next decision knows both accounts only after that.
    refreshed = time.monotonic() + 1.1
    cluster.wait(lambda: time.monotonic() > refreshed, "a refresh of the factors is due")
    cluster.delete_pod("blocker", grace=0)
    cluster.wait(lambda: where(modest, "later"), "who has had less has got it")
    assert where(greedy, "first-come") == ""
    for namespace in (greedy, modest):
        cluster.delete(f"/api/v1/namespaces/{namespace}/pods", grace=0)
    assert other.stop() == 0


def test_reserved_capacity_is_for_its_namespace_only(
    cluster: Cluster, plane: Plane, hodei_kube: PodSchedulers, config: Told
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
    told = cluster.until_condition("endless", "PodScheduled", "False", "WaitingForTurn")
    assert told["message"].startswith(f"reservation demo of project {owner} has it until")
    assert f"kept for project {owner} (demo)" in _ask(plane, "why", f"{cluster.namespace}/endless", named)
    cluster.make_pod("beside", cpu="1")
    cluster.make_pod("over-by-then", cpu="2", annotations=_lasts("30m"))
    cluster.until_bound("beside", "over-by-then")
    cluster.delete_pod("over-by-then", grace=0)
    cluster.post(f"/api/v1/namespaces/{owner}/pods", pod("own", "3"))
    cluster.wait(
        lambda: cluster.get(f"/api/v1/namespaces/{owner}/pods/own")["spec"].get("nodeName") == "kept", "the owner is in"
    )
    assert cluster.bound_to("endless") == ""
    cluster.delete(f"/api/v1/namespaces/{owner}/pods", grace=0)


def test_a_pending_pod_is_annotated_with_its_expected_start(cluster: Cluster, hodei_kube: PodSchedulers, config: Told):
    cluster.allow_hodei(FORECAST_ROLE)
    cluster.make_nodes(1, cpu="4")
    hodei_kube(extra=[config(BATCH), "--forecast-annotation"])
    cluster.make_pod("runs", cpu="4", annotations=_lasts("1h"))
    cluster.until_bound("runs")
    bound = datetime.fromtimestamp(time.time(), UTC)
    cluster.make_pod("first", cpu="4", annotations=_lasts("2h"))
    cluster.make_pod("second", cpu="4", annotations=_lasts("1h"))

    def said(name: str) -> dict[str, datetime] | None:
        found = cluster.pod(name)["metadata"]["annotations"]
        stamps = {key: datetime.fromisoformat(found[key]) for key in found if "expected-start" in key}
        return stamps or None

    first = cluster.wait(lambda: said("first"), "the promise is on the pod", 30)
    assert abs(first["hodei.io/expected-start"] - (bound + timedelta(hours=1))) < timedelta(minutes=2)
    assert first["hodei.io/expected-start-latest"] >= first["hodei.io/expected-start"]
    second = cluster.wait(lambda: said("second"), "the forecast is on the pod", 60)
    assert abs(second["hodei.io/expected-start"] - (bound + timedelta(hours=3))) < timedelta(minutes=2)
    cluster.delete_pod("runs", grace=0)
    cluster.until_bound("first")


def test_without_the_right_pods_are_scheduled_all_the_same(cluster: Cluster, hodei_kube: PodSchedulers, config: Told):
    cluster.make_nodes(1, cpu="4")
    hodei = hodei_kube(extra=[config(BATCH), "--forecast-annotation"])
    cluster.make_pod("runs", cpu="4", annotations=_lasts("1h"))
    cluster.make_pod("waits", cpu="4", annotations=_lasts("1h"))
    cluster.until_bound("runs")
    cluster.wait(lambda: "rbac-forecast.yaml" in hodei.said(), "the log names the right that is missing", 30)
    cluster.delete_pod("runs", grace=0)
    cluster.until_bound("waits")
