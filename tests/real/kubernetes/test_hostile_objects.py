"""Malformed objects in a real cluster: `hodei kube run` continues and reports what it cannot read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from property.kube_objects import KINDS, random_object
from real.kubernetes.api import ApiFailed
from real.kubernetes.cluster import Cluster
from real.kubernetes.group_kinds import served
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodScheduler, PodSchedulers
from real.kubernetes.test_gangs import PROJECTS, group_crd

pytestmark = pytest.mark.real

MAX_EXEC = "kueue.x-k8s.io/max-exec-time-seconds"
OBJECTS = int(os.environ.get("HODEI_HOSTILE_OBJECTS", "200"))


def test_an_invalid_annotation_does_not_stop_the_scheduler(cluster: Cluster, hodei_kube: PodSchedulers, tmp_path: Any):
    """On pods of this and of other schedulers, before and after the start."""
    cluster.make_nodes(1)
    batch = tmp_path / "hodei.toml"
    batch.write_text('[scheduling.profiles.default]\nqueue = "batch"\n')
    cluster.make_pod("others", scheduler="default-scheduler", annotations={MAX_EXEC: "²"})
    cluster.make_pod("long", scheduler="tested", annotations={MAX_EXEC: "9" * 25})
    scheduler = hodei_kube("tested", [f"--config={batch}"])
    cluster.until_bound("long")
    cluster.make_pod("odd", scheduler="tested", annotations={MAX_EXEC: "²"})
    condition = cluster.until_condition("odd", "PodScheduled", "False", "InvalidPod")
    assert MAX_EXEC in condition["message"]
    cluster.until_event("odd", "FailedScheduling")
    cluster.make_pod("sane", scheduler="tested")
    cluster.until_bound("sane")
    assert "pod " + cluster.namespace + "/odd is refused" in scheduler.output()
    assert scheduler.get("/livez") == "ok"
    assert re.search(r"/api/v1/pods: last contact \d+ s ago", scheduler.get("/livez?verbose"))
    assert 'hodei_kube_watch_age_seconds{resource="/api/v1/pods"}' in scheduler.get("/metrics")


@pytest.fixture(scope="module")
def other_pod_groups(plane: Plane) -> Iterator[None]:
    yield from served(plane, [group_crd(*one) for one in PROJECTS])


def test_an_unreadable_object_is_reported(other_pod_groups: None, cluster: Cluster, hodei_kube: PodSchedulers):
    cluster.make_nodes(1)
    scheduler = hodei_kube("tested")
    cluster.apply("""
        {apiVersion: scheduling.volcano.sh/v1beta1, kind: PodGroup, metadata: {name: odd}, spec: {minMember: many}}
    """)
    event = cluster.until_event("odd", "Refused")
    assert "Expected `int`, got `str` - at `$.spec.minMember`" in event["message"]
    assert event["involvedObject"]["kind"] == "PodGroup"
    metric = 'hodei_kube_refused_objects{resource="/apis/scheduling.volcano.sh/v1beta1/podgroups"}'
    assert f"{metric} 1.0" in scheduler.get("/metrics")
    cluster.make_pod("one", scheduler="tested", annotations={"scheduling.k8s.io/group-name": "odd"})
    cluster.until_condition("one", "PodScheduled", "False", "WaitingForPodGroup")
    cluster.make_pod("sane", scheduler="tested")
    cluster.until_bound("sane")
    cluster.apply("""
        {apiVersion: scheduling.volcano.sh/v1beta1, kind: PodGroup, metadata: {name: odd}, spec: {minMember: 1}}
    """)
    cluster.until_bound("one")
    assert f"{metric} 0.0" in scheduler.get("/metrics")


def test_no_accepted_object_stops_the_scheduler(other_pod_groups: None, cluster: Cluster, hodei_kube: PodSchedulers):
    """Generated as in tests/property/test_kube_objects.py; objects that the API server refuses are not counted."""
    scheduler = hodei_kube("hodei")
    try:
        tries, accepted = create_objects(cluster)
        check_scheduler(cluster, scheduler, accepted)
    finally:  # one by one: deleting all at once overloads the API server
        for path in reversed(cluster._created):
            cluster.delete(path, grace=0, missing_ok=True)
        for one in cluster.pods():
            cluster.delete(f"{cluster.pods_path}/{one['metadata']['name']}", grace=0, missing_ok=True)
    print(f"{tries} generated, accepted: {accepted}")


def create_objects(cluster: Cluster) -> tuple[int, dict[str, int]]:
    """The number of generated objects, and how many of each kind were accepted."""
    random, accepted, tries = Random(7), dict[str, int](), 0
    while sum(accepted.values()) < OBJECTS and tries < 40 * OBJECTS:
        tries += 1
        path, raw = random_object(random.randrange(2**48))
        if created := create_accepted_part(cluster, path, json.loads(raw), tries):
            accepted[created] = accepted.get(created, 0) + 1
    return tries, accepted


def check_scheduler(cluster: Cluster, scheduler: PodScheduler, accepted: dict[str, int]) -> None:
    assert sum(accepted.values()) >= OBJECTS, accepted
    assert {"/api/v1/pods", "/api/v1/nodes"} <= accepted.keys(), accepted
    cluster.make_nodes(1, cpu="8", labels={"only": "sane"}, prefix="sane")
    cluster.make_pod("sane", nodeSelector={"only": "sane"}, priority=None)
    cluster.until_bound("sane", timeout=60)
    scheduler.kill()
    scheduler.start()  # now all objects exist from the beginning
    cluster.make_pod("sane-too", nodeSelector={"only": "sane"})
    cluster.until_bound("sane-too", timeout=60)
    assert scheduler.get("/livez") == "ok"
    assert "has failed; it starts again" not in scheduler.output(100_000)


_VERSIONS = {path: "/".join(path.strip("/").split("/")[1:-1]) for path in KINDS}
_OWNED_BY_CONTROLLERS = ("/api/v1/namespaces", "/apis/apps/v1/replicasets", "/apis/apps/v1/statefulsets", "/api/v1/replicationcontrollers")  # fmt: skip


def create_accepted_part(cluster: Cluster, path: str, body: Any, number: int) -> str:
    """Create the object or the part of it that the API server accepts. Returns the path of its collection; "" if none is."""
    if not isinstance(body, dict) or path in _OWNED_BY_CONTROLLERS:
        return ""
    cluster_scoped = {
        "/api/v1/nodes",
        "/api/v1/persistentvolumes",
        "/apis/storage.k8s.io/v1/storageclasses",
        "/apis/storage.k8s.io/v1/csinodes",
    }
    name = f"hostile-{number}"
    meta = body.get("metadata") if isinstance(body.get("metadata"), dict) else {}
    labels = meta.get("labels") if isinstance(meta.get("labels"), dict) else {}
    valid_labels = {
        key: str(value) for key, value in labels.items() if re.fullmatch(r"[A-Za-z0-9.-]{0,50}", str(value))
    }
    annotations = meta.get("annotations") if isinstance(meta.get("annotations"), dict) else {}
    short_annotations = {
        key: value for key, value in annotations.items() if isinstance(value, str) and len(value) < 10_000
    }
    if path not in cluster_scoped:
        root, _, plural = path.rpartition("/")
        target = f"{root}/namespaces/{cluster.namespace}/{plural}"
    else:
        target = path
    for spec in _variants(path, body.get("spec")):
        wanted = {**{key: value for key, value in body.items() if key not in ("metadata", "spec")}, "spec": spec,
                  "metadata": {"name": name, "labels": valid_labels, "annotations": short_annotations}}  # fmt: skip
        if "podgroups" in path or "workloads" in path:
            kind = "Workload" if "workloads" in path else "PodGroup"
            wanted |= {"apiVersion": _VERSIONS[path], "kind": kind}
        try:
            cluster.post(target, wanted)
        except ApiFailed:
            continue
        if path in cluster_scoped:
            cluster._created.append(f"{target}/{name}")
        return path
    return ""


def _variants(path: str, spec: Any) -> Iterator[Any]:
    """The spec as it is, then with fewer fields that an API server validates."""
    yield spec
    spec = spec if isinstance(spec, dict) else {}
    if path == "/api/v1/pods":
        containers = [{"name": "main", "image": "x"}]
        yield {**spec, "containers": containers}
        keys = ("tolerations", "topologySpreadConstraints", "affinity", "nodeSelector", "schedulingGates", "overhead",
                "activeDeadlineSeconds", "terminationGracePeriodSeconds", "nodeName", "schedulingGroup", "preemptionPolicy")  # fmt: skip
        for key in keys:
            if key in spec:
                yield {"schedulerName": "hodei", "containers": containers, key: spec[key]}
        yield {"schedulerName": "hodei", "containers": containers}
    elif path == "/api/v1/nodes":
        yield {}


def test_unreadable_types_do_not_delay_pods(cluster: Cluster, hodei_kube: PodSchedulers):
    role = "/apis/rbac.authorization.k8s.io/v1/clusterroles/hodei-scheduler"
    rules = cluster.get(role)["rules"]
    fewer = [rule for rule in rules if "podgroups" not in rule["resources"] and "workloads" not in rule["resources"]]
    assert len(fewer) < len(rules)
    cluster.patch(role, {"rules": fewer})
    try:
        cluster.make_nodes(1)
        scheduler = hodei_kube("plain")
        cluster.make_pod("one", scheduler="plain")
        cluster.until_bound("one")
        lines = [line for line in scheduler.output(1000).splitlines() if "is treated as empty" in line]
        assert lines
        assert len(lines) == len(set(lines))
        assert all("podgroups" in line or "workloads" in line for line in lines)
    finally:
        cluster.patch(role, {"rules": rules})


def test_a_deleted_lease_is_created_again(cluster: Cluster, hodei_kube: PodSchedulers):
    namespace = ["--lease-namespace=hodei-system"]
    scheduler = hodei_kube("leading", namespace, elect=True)
    lease = "/apis/coordination.k8s.io/v1/namespaces/hodei-system/leases/hodei"

    def holder() -> str:
        return str(cluster.get(lease)["spec"]["holderIdentity"]) if cluster.api.exists(lease) else ""

    first = cluster.wait(holder, "the scheduler leads")
    for _ in range(2):
        cluster.delete(lease)
        assert cluster.wait(holder, "the lease exists again") == first
    cluster.make_nodes(1)
    cluster.make_pod("one", scheduler="leading")
    cluster.until_bound("one")
    assert "was deleted; it is created again" in scheduler.output()


def test_the_process_exits_with_an_error_when_a_watch_task_fails(cluster: Cluster, plane: Plane, tmp_path: Any):
    """The fault is injected into the program, because no known object causes it."""
    import subprocess
    import sys

    from ports import free_port

    broken = (
        "import asyncio, sys\n"
        "from hodei.kube.api import reflector\n"
        "original = reflector.Reflector.run\n"
        "async def run(self):\n"
        "    if self.path.endswith('/nodes'):\n"
        "        task = asyncio.create_task(original(self))\n"
        "        await self.synced.wait()\n"
        "        task.cancel()\n"
        "        raise ZeroDivisionError('injected')\n"
        "    await original(self)\n"
        "reflector.Reflector.run = run\n"
        "from hodei.kube.scheduler.commands import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", broken, "run", f"--kubeconfig={plane.kubeconfig('hodei')}", "--no-leader-elect",
               "--scheduler-name=broken", f"--listen=127.0.0.1:{free_port()}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the watch of /api/v1/nodes has ended unexpectedly: ZeroDivisionError: injected" in done.stderr


def test_the_shared_scheduler_still_works_at_the_end(hodei: PodScheduler, cluster: Cluster):
    cluster.make_nodes(1)
    cluster.make_pod("sane")
    cluster.until_bound("sane")
