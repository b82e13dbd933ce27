"""Which reason a pod's condition has: `Unschedulable` buys nodes, so only what a node could cure is called that."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hodei.kube.scheduler.build import Options
from hodei.kube.scheduler.status_reporter import StatusReporter
from hodei.model.config import SchedulingConfig
from unit.kube.podding import a_pod
from unit.kube.town import Town

TERM = {"labelSelector": {"matchLabels": {"a": "-"}}, "topologyKey": "zone"}
NAMED = [{"key": "metadata.name", "operator": "In", "values": [name]} for name in ("a", "b")]
AFFINITY = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": NAMED}]}}


def reason_of(town: Town, name: str) -> str:
    telling = StatusReporter(town.harness.controller, town.harness.pods, None, town.harness.explainer)  # type: ignore[arg-type]
    list(telling.after(town.step(), town.now_ms))
    entry = town.harness.pods.entries[f"uid-{name}"]
    assert entry.told
    return entry.told_reason


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
def test_a_pod_that_waits_has_the_reason_of_what_it_waits_for(fields: dict[str, Any], reason: str):
    town = Town()
    town.node("a")
    town.pod("x", **fields)
    assert reason_of(town, "x") == reason


def test_who_is_beyond_its_quota_does_not_ask_for_nodes():
    quotas = {"quotas": {"ns": {"hard": {"cpu": 2}}}}
    town = Town(Options(scheduling=msgspec.convert(quotas, SchedulingConfig)))
    town.node("a", cpu="8")
    town.pod("first", cpu="2")
    town.step()
    town.pod("x", cpu="2")
    assert reason_of(town, "x") == "WaitingForQuota"


def test_who_could_not_be_read_and_who_waits_for_storage_besides_does_not_ask_for_nodes():
    town = Town()
    town.node("a")
    both = {
        "volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "d"}}],
        "resourceClaims": [{"name": "gpu"}],
    }
    town.move(a_pod("x", requests={"cpu": "1"}, schedulerName="hodei", **both))
    assert reason_of(town, "x") == "UnsupportedFeature"
