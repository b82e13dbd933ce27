"""Malformed objects in a real cluster: `hodei kube run` continues, and names what it cannot use."""

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
from real.kubernetes.test_gangs import OTHERS, group_crd

pytestmark = pytest.mark.real

MAX_EXEC = "kueue.x-k8s.io/max-exec-time-seconds"
OBJECTS = int(os.environ.get("HODEI_HOSTILE_OBJECTS", "200"))


def test_one_annotation_stops_nothing(cluster: Cluster, hodei_kube: PodSchedulers, tmp_path: Any):
    """Neither on a pod of ours nor on another's, neither at the start nor later."""
    cluster.make_nodes(1)
    batch = tmp_path / "hodei.toml"
    batch.write_text('[scheduling.profiles.default]\nqueue = "batch"\n')
    cluster.make_pod("others", scheduler="default-scheduler", annotations={MAX_EXEC: "²"})
    cluster.make_pod("long", scheduler="wary", annotations={MAX_EXEC: "9" * 25})
    mine = hodei_kube("wary", [f"--config={batch}"])
    cluster.until_bound("long")
    cluster.make_pod("odd", scheduler="wary", annotations={MAX_EXEC: "²"})
    told = cluster.until_condition("odd", "PodScheduled", "False", "InvalidPod")
    assert MAX_EXEC in told["message"]
    cluster.until_event("odd", "FailedScheduling")
    cluster.make_pod("sane", scheduler="wary")
    cluster.until_bound("sane")
    assert "pod " + cluster.namespace + "/odd is refused" in mine.said()
    assert mine.get("/livez") == "ok"
    assert re.search(r"/api/v1/pods: last contact \d+ s ago", mine.get("/livez?verbose"))
    assert 'hodei_kube_watch_age_seconds{resource="/api/v1/pods"}' in mine.get("/metrics")


@pytest.fixture(scope="module")
def groups_of_others(plane: Plane) -> Iterator[None]:
    yield from served(plane, [group_crd(*one) for one in OTHERS])


def test_an_object_that_cannot_be_read_is_named(groups_of_others: None, cluster: Cluster, hodei_kube: PodSchedulers):
    cluster.make_nodes(1)
    mine = hodei_kube("wary")
    cluster.apply("""
        {apiVersion: scheduling.volcano.sh/v1beta1, kind: PodGroup, metadata: {name: odd}, spec: {minMember: many}}
    """)
    event = cluster.until_event("odd", "Refused")
    assert "Expected `int`, got `str` - at `$.spec.minMember`" in event["message"]
    assert event["involvedObject"]["kind"] == "PodGroup"
    metric = 'hodei_kube_refused_objects{resource="/apis/scheduling.volcano.sh/v1beta1/podgroups"}'
    assert f"{metric} 1.0" in mine.get("/metrics")
    cluster.make_pod("one", scheduler="wary", annotations={"scheduling.k8s.io/group-name": "odd"})
    cluster.until_condition("one", "PodScheduled", "False", "WaitingForPodGroup")
    cluster.make_pod("sane", scheduler="wary")
    cluster.until_bound("sane")
    cluster.apply("""
        {apiVersion: scheduling.volcano.sh/v1beta1, kind: PodGroup, metadata: {name: odd}, spec: {minMember: 1}}
    """)
    cluster.until_bound("one")
    assert f"{metric} 0.0" in mine.get("/metrics")


def test_no_accepted_object_stops_the_scheduler(groups_of_others: None, cluster: Cluster, hodei_kube: PodSchedulers):
    """Generated as in tests/property/test_kube_objects.py; what the API server itself refuses is not counted."""
    mine = hodei_kube("hodei")
    try:
        tries, accepted = make_many(cluster)
        judge(cluster, mine, accepted)
    finally:  # one by one: all at once is more than an API server likes to delete
        for path in reversed(cluster._made):
            cluster.delete(path, grace=0, missing_ok=True)
        for one in cluster.pods():
            cluster.delete(f"{cluster.pods_path}/{one['metadata']['name']}", grace=0, missing_ok=True)
    print(f"{tries} generated, accepted: {accepted}")


def make_many(cluster: Cluster) -> tuple[int, dict[str, int]]:
    """How many were tried, and how many of each kind were accepted."""
    random, accepted, tries = Random(7), dict[str, int](), 0
    while sum(accepted.values()) < OBJECTS and tries < 40 * OBJECTS:
        tries += 1
        path, raw = random_object(random.randrange(2**48))
        if made := made_into(cluster, path, json.loads(raw), tries):
            accepted[made] = accepted.get(made, 0) + 1
    return tries, accepted


def judge(cluster: Cluster, mine: PodScheduler, accepted: dict[str, int]) -> None:
    assert sum(accepted.values()) >= OBJECTS, accepted
    assert {"/api/v1/pods", "/api/v1/nodes"} <= accepted.keys(), accepted
    cluster.make_nodes(1, cpu="8", labels={"only": "sane"}, prefix="sane")
    cluster.make_pod("sane", nodeSelector={"only": "sane"}, priority=None)
    cluster.until_bound("sane", timeout=60)
    mine.kill()
    mine.start()  # with all of it there from the beginning
    cluster.make_pod("sane-too", nodeSelector={"only": "sane"})
    cluster.until_bound("sane-too", timeout=60)
    assert mine.get("/livez") == "ok"
    assert "has failed; it starts again" not in mine.said(100_000)


_VERSIONS = {path: "/".join(path.strip("/").split("/")[1:-1]) for path in KINDS}
_MADE_BY_CONTROLLERS = ("/api/v1/namespaces", "/apis/apps/v1/replicasets", "/apis/apps/v1/statefulsets", "/api/v1/replicationcontrollers")  # fmt: skip


def made_into(cluster: Cluster, path: str, body: Any, number: int) -> str:
    """The object, or the part of it that the API server accepts; the path of its collection, or "" if it does not at all."""
    if not isinstance(body, dict) or path in _MADE_BY_CONTROLLERS:
        return ""
    plain = {
        "/api/v1/nodes",
        "/api/v1/persistentvolumes",
        "/apis/storage.k8s.io/v1/storageclasses",
        "/apis/storage.k8s.io/v1/csinodes",
    }
    name = f"hostile-{number}"
    meta = body.get("metadata") if isinstance(body.get("metadata"), dict) else {}
    labels = meta.get("labels") if isinstance(meta.get("labels"), dict) else {}
    kept = {key: str(value) for key, value in labels.items() if re.fullmatch(r"[A-Za-z0-9.-]{0,50}", str(value))}
    annotations = meta.get("annotations") if isinstance(meta.get("annotations"), dict) else {}
    said = {key: value for key, value in annotations.items() if isinstance(value, str) and len(value) < 10_000}
    if path not in plain:
        where = path.rpartition("/")
        target = f"{where[0]}/namespaces/{cluster.namespace}/{where[2]}"
    else:
        target = path
    for spec in _milder(path, body.get("spec")):
        wanted = {**{key: value for key, value in body.items() if key not in ("metadata", "spec")}, "spec": spec,
                  "metadata": {"name": name, "labels": kept, "annotations": said}}  # fmt: skip
        if "podgroups" in path or "workloads" in path:
            kind = "Workload" if "workloads" in path else "PodGroup"
            wanted |= {"apiVersion": _VERSIONS[path], "kind": kind}
        try:
            cluster.post(target, wanted)
        except ApiFailed:
            continue
        if path in plain:
            cluster._made.append(f"{target}/{name}")
        return path
    return ""


def _milder(path: str, spec: Any) -> Iterator[Any]:
    """As it is, and with less and less of what an API server checks."""
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
        mine = hodei_kube("plain")
        cluster.make_pod("one", scheduler="plain")
        cluster.until_bound("one")
        lines = [line for line in mine.said(1000).splitlines() if "is treated as empty" in line]
        assert lines
        assert len(lines) == len(set(lines))
        assert all("podgroups" in line or "workloads" in line for line in lines)
    finally:
        cluster.patch(role, {"rules": rules})


def test_a_deleted_lease_is_created_again(cluster: Cluster, hodei_kube: PodSchedulers):
    space = ["--lease-namespace=hodei-system"]
    mine = hodei_kube("leading", space, elect=True)
    lease = "/apis/coordination.k8s.io/v1/namespaces/hodei-system/leases/hodei"

    def holder() -> str:
        return str(cluster.get(lease)["spec"]["holderIdentity"]) if cluster.api.exists(lease) else ""

    first = cluster.wait(holder, "it leads")
    for _ in range(2):
        cluster.delete(lease)
        assert cluster.wait(holder, "the lease is there again") == first
    cluster.make_nodes(1)
    cluster.make_pod("one", scheduler="leading")
    cluster.until_bound("one")
    assert "was deleted; it is created again" in mine.said()


def test_a_watch_that_ends_ends_the_process_loudly(cluster: Cluster, plane: Plane, tmp_path: Any):
    """A fault is put into the program: no object is known that could do it."""
    import subprocess
    import sys

    from ports import free_port

    broken = (
        "import asyncio, sys\n"
        "from hodei.kube.api import reflector\n"
        "whole = reflector.Reflector.run\n"
        "async def run(self):\n"
        "    if self.path.endswith('/nodes'):\n"
        "        task = asyncio.create_task(whole(self))\n"
        "        await self.synced.wait()\n"
        "        await asyncio.sleep(1)\n"
        "        task.cancel()\n"
        "        raise ZeroDivisionError('of all things')\n"
        "    await whole(self)\n"
        "reflector.Reflector.run = run\n"
        "from hodei.kube.scheduler.commands import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", broken, "run", f"--kubeconfig={plane.kubeconfig('hodei')}", "--no-leader-elect",
               "--scheduler-name=broken", f"--listen=127.0.0.1:{free_port()}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the watch of /api/v1/nodes has ended unexpectedly: ZeroDivisionError: of all things" in done.stderr


def test_the_scheduler_is_the_same_after_all_this(hodei: PodScheduler, cluster: Cluster):
    cluster.make_nodes(1)
    cluster.make_pod("sane")
    cluster.until_bound("sane")
