"""The reason of a pod's condition: autoscalers add nodes for `Unschedulable`, so only what a node could solve has it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hodei.kube.scheduler.run import Options
from hodei.kube.scheduler.status_reporter import StatusReporter
from hodei.model.config import SchedulingConfig
from unit.kube.fake_cluster import FakeCluster
from unit.kube.pod_factory import a_pod

TERM = {"labelSelector": {"matchLabels": {"a": "-"}}, "topologyKey": "zone"}
NAMED = [{"key": "metadata.name", "operator": "In", "values": [name]} for name in ("a", "b")]
AFFINITY = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": NAMED}]}}


def reason_of(cluster: FakeCluster, name: str) -> str:
    reporter = StatusReporter(cluster.parts.controller, cluster.parts.pods, None, cluster.parts.explainer)  # type: ignore[arg-type]
    list(reporter.reports_for(cluster.step(), cluster.now_ms))
    entry = cluster.parts.pods.entries[f"uid-{name}"]
    assert entry.reported
    return entry.reported_reason


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cpu": "64"}, "Unschedulable"),
        ({"nodeSelector": {"disk": "tape"}}, "Unschedulable"),
        ({"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "d"}}]}, "Unschedulable"),
        ({"cpu": "-1"}, "InvalidPod"),
        ({"annotations": {"hodei.io/estimate": "soon"}}, "InvalidPod"),
        ({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}}}, "InvalidPod"),
        ({"affinity": {"nodeAffinity": AFFINITY}}, "InvalidPod"),
        ({"resourceClaims": [{"name": "gpu"}]}, "UnsupportedFeature"),
        ({"tolerations": [{"operator": "Near"}]}, "UnsupportedFeature"),
        ({"annotations": {"pod-group": "ring", "pod-group-size": "2"}}, "WaitingForPodGroup"),
        ({"annotations": {"pod-group": "ring"}}, "WaitingForPodGroup"),
        ({"annotations": {"pod-group": "ring", "pod-group-size": "²"}}, "InvalidPodGroup"),
        ({"annotations": {"scheduling.k8s.io/group-name": "ring"}}, "WaitingForPodGroup"),
    ],
)  # fmt: skip
def test_a_pending_pod_has_the_reason_of_its_obstacle(fields: dict[str, Any], reason: str):
    cluster = FakeCluster()
    cluster.node("a")
    cluster.pod("x", **fields)
    assert reason_of(cluster, "x") == reason


def test_a_pod_over_its_quota_is_not_unschedulable():
    quotas = {"quotas": {"ns": {"hard": {"cpu": 2}}}}
    cluster = FakeCluster(Options(scheduling=msgspec.convert(quotas, SchedulingConfig)))
    cluster.node("a", cpu="8")
    cluster.pod("first", cpu="2")
    cluster.step()
    cluster.pod("x", cpu="2")
    assert reason_of(cluster, "x") == "WaitingForQuota"


def test_an_unreadable_pod_that_also_waits_for_storage_is_not_unschedulable():
    cluster = FakeCluster()
    cluster.node("a")
    both = {
        "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "d"}}],
        "resourceClaims": [{"name": "gpu"}],
    }
    cluster.update(a_pod("x", requests={"cpu": "1"}, schedulerName="hodei", **both))
    assert reason_of(cluster, "x") == "UnsupportedFeature"
