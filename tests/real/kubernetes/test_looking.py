"""`hodei kube why` and `plan` against the live cluster, with the rights of the shipped role and no scheduler of ours running."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from real.kubernetes.cluster import Cluster, pod
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import HODEI

pytestmark = pytest.mark.real


def _ask(plane: Plane, *words: object) -> str:
    command = [HODEI, "kube", *map(str, words), f"--kubeconfig={plane.kubeconfig('hodei')}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_why_tells_what_a_pod_lacks_and_what_would_help(cluster: Cluster, plane: Plane):
    cluster.make_nodes(2, cpu="4")
    cluster.make_pod("large", cpu="6")
    said = _ask(plane, "why", f"{cluster.namespace}/large")
    assert f"pod {cluster.namespace}/large can never start as things are" in said
    assert "0/2 nodes are available: 2 Insufficient cpu." in said
    assert cluster.condition("large") == {}


def test_why_tells_where_a_pod_is(cluster: Cluster, plane: Plane):
    cluster.make_nodes(1, cpu="4")
    cluster.make_pod("there", cpu="1")
    cluster.bind("there", "node-0")
    assert "it is on node node-0" in _ask(plane, "why", f"{cluster.namespace}/there")


def test_plan_tells_where_a_pod_would_go_and_creates_nothing(cluster: Cluster, plane: Plane, tmp_path: Path):
    cluster.make_nodes(2, cpu="4", labels={"disk": "ssd"})
    wanted = tmp_path / "pod.yaml"
    wanted.write_text(json.dumps(pod("later", "2", nodeSelector={"disk": "ssd"})))
    (answer,) = json.loads(_ask(plane, "plan", "-f", wanted, "-o", "json"))
    assert answer["explanation"]["status"] == "placed"
    wanted.write_text(json.dumps(pod("later", "2", nodeSelector={"disk": "tape"})))
    assert "later can never start as it is" in _ask(plane, "plan", "-f", wanted)
    assert cluster.pods() == []
