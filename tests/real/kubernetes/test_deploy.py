"""The shipped manifests and scripts against a real API server: it accepts the manifests unchanged, the scripts do what they
document, and the permissions are those that are needed and no others.

kwok simulates the kubelets, so these tests do not prove that the image starts. kube-scheduler places the pods of Hodei itself,
as in a cluster.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from real.kubernetes import binaries
from real.kubernetes.api import wait
from real.kubernetes.cluster import Cluster, node
from real.kubernetes.plane import Plane
from real.kubernetes.pod_scheduler import PodScheduler
from unit.deploy.fake_programs import record_calls

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
PLAIN = DEPLOY / "kubernetes"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))
NODES = ("worker-0", "worker-1", "worker-2")
GROUPS = {  # types of other projects that examples and manifests use
    "podgroups.scheduling.x-k8s.io": ("PodGroup", "v1alpha1"),
    "podgroups.scheduling.volcano.sh": ("PodGroup", "v1beta1"),
    "servicemonitors.monitoring.coreos.com": ("ServiceMonitor", "v1"),
}


class Bare(Plane):
    """A control plane without the roles of Hodei: the scripts under test install and remove what the other tests share."""

    def allow_hodei(self) -> None:
        pass


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    binaries.require()
    made = Bare(tmp_path_factory.mktemp("deploy") / "plane")
    try:
        made.start()
        made.controllers()
        made.kwok()
        made.kube_scheduler()
        for name in NODES:
            made.api.post("/api/v1/nodes", node(name))
        made.api.apply([definition(name, kind, version) for name, (kind, version) in GROUPS.items()])
        yield made
    finally:
        made.stop()


def definition(name: str, kind: str, version: str) -> dict[str, Any]:
    """A type with any content. Groups below k8s.io need the annotation."""
    plural, _, group = name.partition(".")
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name, "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"}},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [served],
        },
    }


def script(plane: Plane, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    defaults = {
        "PATH": os.environ["PATH"],
        "HOME": str(plane.folder),
        "KUBECONFIG": str(plane.kubeconfig("admin")),
        "KUBECTL": str(plane.bin / "kubectl"),
    }
    return subprocess.run(
        ["sh", str(DEPLOY / name), *arguments], env={**defaults, **environment},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, f"{done.args} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def names(plane: Plane, kinds: str, *arguments: str) -> set[str]:
    return set(plane.kubectl("get", kinds, "--output=name", *arguments).split())


def can(plane: Plane, account: str, verb: str, resource: str, *, name: str = "", namespace: str = "") -> bool:
    """Like `kubectl auth can-i --as`. `resource` is PLURAL[.GROUP][/SUBRESOURCE]; no namespace means all."""
    kind, _, sub = resource.partition("/")
    plural, _, group = kind.partition(".")
    attributes = {
        "verb": verb,
        "resource": plural,
        "group": group,
        "subresource": sub,
        "name": name,
        "namespace": namespace,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": f"system:serviceaccount:{account}:hodei", "resourceAttributes": attributes},
    }
    answer = plane.api.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


@pytest.fixture
def installed(bare: Bare) -> Iterator[str]:
    """Installed by setup.sh in its own namespace with a chosen image; removed by cleanup.sh."""
    succeeded(script(bare, "setup.sh", "hodei-test", "mine/hodei:1.2"))
    yield "hodei-test"
    succeeded(script(bare, "cleanup.sh", "hodei-test"))


def test_the_api_server_accepts_the_manifests(bare: Bare) -> None:
    """With Pod Security "restricted" and strict validation, which finds misspelt fields."""
    bare.kubectl("create", "namespace", "hodei-system")
    try:
        strict = ("apply", "--server-side", "--dry-run=server", "--validate=strict")
        bare.kubectl(*strict, f"--kustomize={PLAIN}")
        for name in (
            "rbac-forecast",
            "rbac-reclaim",
            "servicemonitor",
            "only-scheduler/rbac",
            "only-scheduler/static-pod",
        ):
            bare.kubectl(*strict, f"--filename={PLAIN / name}.yaml")
    finally:
        bare.kubectl("delete", "namespace", "hodei-system")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_accepted_without_warnings(bare: Bare, path: Path) -> None:
    """In a namespace with Pod Security "restricted", enforced and as a warning: templates of pods are only checked by warnings."""
    bare.api.apply([{
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": "examples", "labels": {
            "pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted",
        }},
    }])  # fmt: skip
    done = subprocess.run(
        [bare.bin / "kubectl", f"--kubeconfig={bare.kubeconfig()}", "--namespace=examples", "apply", "--server-side",
         "--dry-run=server", "--validate=strict", f"--filename={path}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_the_example_workloads_create_their_pods(bare: Bare) -> None:
    """The Deployments create their pods, with priorities resolved, and the pods wait for Hodei."""
    bare.api.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "workloads"}}])
    for name in ("priorityclasses", "workloads"):
        bare.kubectl("apply", "--namespace=workloads", f"--filename={DEPLOY / 'examples' / name}.yaml")
    bare.kubectl(
        "wait", "--namespace=workloads", "--for=jsonpath={.status.unavailableReplicas}=3", "deployment/group-a",
        "--timeout=30s",
    )  # fmt: skip
    pods = bare.api.items("/api/v1/namespaces/workloads/pods", labelSelector="app=group-a")
    assert {(pod["spec"]["schedulerName"], pod["spec"]["priority"]) for pod in pods} == {("hodei", 50)}
    bare.kubectl("delete", "namespace", "workloads")
    bare.kubectl("delete", f"--filename={DEPLOY / 'examples' / 'priorityclasses.yaml'}")


def test_setup_installs_with_the_chosen_namespace_and_image_and_cleanup_leaves_nothing(bare: Bare) -> None:
    before = names(bare, "namespaces,clusterroles,clusterrolebindings")
    output = succeeded(script(bare, "setup.sh", "hodei-test", "mine/hodei:1.2", FORECAST="1", RECLAIM="1"))
    assert "Hodei runs in namespace hodei-test" in output
    deployment = bare.api.get("/apis/apps/v1/namespaces/hodei-test/deployments/hodei")
    assert deployment["status"]["readyReplicas"] == 2
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "mine/hodei:1.2"
    assert container["args"][-1] == "--forecast-annotation"
    pods = bare.api.items("/api/v1/namespaces/hodei-test/pods")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2, "replicas run on different nodes"
    assert names(bare, "servicemonitors.monitoring.coreos.com", "--namespace=hodei-test")
    roles = {f"clusterrole.rbac.authorization.k8s.io/hodei-{one}" for one in ("scheduler", "forecast", "reclaim")}
    assert roles <= names(bare, "clusterroles")

    succeeded(script(bare, "cleanup.sh", "hodei-test"))
    assert names(bare, "namespaces,clusterroles,clusterrolebindings") == before


def test_setup_can_be_repeated_for_another_image_and_optional_permissions(bare: Bare, installed: str) -> None:
    optional = (("patch", "pods"), ("create", "pods/eviction"))
    assert [can(bare, installed, *one) for one in optional] == [False, False]
    succeeded(script(bare, "setup.sh", installed, "mine/hodei:1.3", FORECAST="1", RECLAIM="1"))
    assert [can(bare, installed, *one) for one in optional] == [True, True]
    assert not can(bare, installed, "create", "pods")
    pods = bare.api.items(f"/api/v1/namespaces/{installed}/pods")
    assert {pod["spec"]["containers"][0]["image"] for pod in pods if "deletionTimestamp" not in pod["metadata"]} == {
        "mine/hodei:1.3"
    }


def test_repeated_setup_does_not_claim_an_existing_namespace(bare: Bare) -> None:
    """cleanup.sh never deletes a namespace that existed before setup.sh, even if that ran twice."""
    bare.kubectl("create", "namespace", "existing")
    for _ in range(2):
        succeeded(script(bare, "setup.sh", "existing"))
    output = succeeded(script(bare, "cleanup.sh", "existing"))
    assert "was not created by setup.sh and is kept" in output
    assert bare.api.get("/api/v1/namespaces/existing")["status"]["phase"] == "Active"
    assert names(bare, "deployments,services,serviceaccounts,leases", "--namespace=existing") == {
        "serviceaccount/default"
    }


def test_a_namespace_with_other_objects_is_not_deleted(bare: Bare) -> None:
    succeeded(script(bare, "setup.sh", "shared"))
    bare.kubectl("create", "configmap", "precious", "--namespace=shared")
    output = succeeded(script(bare, "cleanup.sh", "shared"))
    assert "configmap/precious" in output
    assert names(bare, "configmaps", "--namespace=shared") >= {"configmap/precious"}
    bare.kubectl("delete", "configmap", "precious", "--namespace=shared")
    succeeded(script(bare, "cleanup.sh", "shared"))
    assert "namespace/shared" not in names(bare, "namespaces")


def test_cleanup_of_the_wrong_namespace_changes_nothing(bare: Bare, installed: str) -> None:
    done = script(bare, "cleanup.sh", "default")
    assert done.returncode == 1
    assert f"next: cleanup.sh {installed}" in done.stderr
    assert bare.api.get(f"/apis/apps/v1/namespaces/{installed}/deployments/hodei")["status"]["readyReplicas"] == 2


def test_setup_has_a_hint_when_hodei_does_not_start(bare: Bare) -> None:
    for name in NODES:
        bare.kubectl("cordon", name)
    try:
        done = script(bare, "setup.sh", "stuck", WAIT="3s")
    finally:
        for name in NODES:
            bare.kubectl("uncordon", name)
    assert done.returncode == 1
    assert "did not start within 3s; next:" in done.stderr
    succeeded(script(bare, "cleanup.sh", "stuck"))


READ = ("list", "watch")
NEEDED = {
    "events.events.k8s.io": ("create",),
    "pods": (*READ, "get", "delete"),
    "pods/binding": ("create",),
    "pods/status": ("patch",),
    "persistentvolumes": (*READ, "patch"),
    "persistentvolumeclaims": (*READ, "patch"),
    "podgroups.scheduling.k8s.io": READ,
    "podgroups.scheduling.k8s.io/status": ("patch",),
    "podgroups.scheduling.x-k8s.io": READ,
    "podgroups.scheduling.volcano.sh": READ,
} | dict.fromkeys(
    ("nodes", "namespaces", "services", "replicationcontrollers", "replicasets.apps", "statefulsets.apps", "jobs.batch",
     "poddisruptionbudgets.policy", "csinodes.storage.k8s.io", "csidrivers.storage.k8s.io",
     "csistoragecapacities.storage.k8s.io", "storageclasses.storage.k8s.io", "workloads.scheduling.k8s.io"),
    READ,
)  # fmt: skip
FORBIDDEN = (
    ("create", "pods"), ("patch", "pods"), ("update", "pods"), ("create", "pods/eviction"), ("create", "pods/exec"),
    ("get", "secrets"), ("list", "secrets"), ("create", "secrets"), ("get", "configmaps"), ("patch", "nodes"),
    ("delete", "nodes"), ("create", "serviceaccounts/token"), ("impersonate", "users"), ("delete", "namespaces"),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io"), ("escalate", "clusterroles.rbac.authorization.k8s.io"),
    ("update", "leases.coordination.k8s.io"), ("delete", "persistentvolumeclaims"), ("create", "events"),
    ("update", "events.events.k8s.io"), ("update", "pods/status"), ("update", "persistentvolumeclaims"),
    ("list", "volumeattachments.storage.k8s.io"), ("list", "priorityclasses.scheduling.k8s.io"), ("get", "nodes"),
)  # fmt: skip


def test_the_account_has_the_permissions_of_a_scheduler_and_no_others(bare: Bare, installed: str) -> None:
    needed = [(verb, resource) for resource, verbs in NEEDED.items() for verb in verbs]
    assert [one for one in needed if not can(bare, installed, *one)] == []
    assert [one for one in FORBIDDEN if can(bare, installed, *one)] == []


def test_the_role_allows_only_its_own_lease(bare: Bare, installed: str) -> None:
    leases = "leases.coordination.k8s.io"
    assert can(bare, installed, "create", leases, namespace=installed)
    assert not can(bare, installed, "create", leases, namespace="kube-system")
    for verb in ("get", "update"):
        assert can(bare, installed, verb, leases, name="hodei", namespace=installed)
        assert not can(bare, installed, verb, leases, name="kube-scheduler", namespace=installed)
        assert not can(bare, installed, verb, leases, name="hodei", namespace="kube-system")


def test_the_role_allows_only_the_usage_configmap(bare: Bare, installed: str) -> None:
    assert can(bare, installed, "create", "configmaps", namespace=installed)
    assert not can(bare, installed, "create", "configmaps", namespace="kube-system")
    for verb in ("get", "update"):
        assert can(bare, installed, verb, "configmaps", name="hodei-usage", namespace=installed)
        assert not can(bare, installed, verb, "configmaps", name="hodei", namespace=installed)
        assert not can(bare, installed, verb, "configmaps", name="hodei-usage", namespace="kube-system")
    for verb in ("list", "watch", "delete", "patch"):
        assert not can(bare, installed, verb, "configmaps", name="hodei-usage", namespace=installed)


@pytest.fixture
def running_scheduler(bare: Bare, installed: str, tmp_path: Path) -> Iterator[PodScheduler]:
    """Runs outside of the cluster, because kwok runs no containers, with the token of the shipped service account."""
    token = bare.kubectl("create", "token", "hodei", f"--namespace={installed}").strip()
    kubeconfig = yaml.safe_load(bare.kubeconfig("admin").read_text())
    kubeconfig["users"][0]["user"] = {"token": token}
    config = tmp_path / "account.kubeconfig"
    config.write_text(yaml.safe_dump(kubeconfig))
    lease = f"--lease-namespace={installed}"
    hodei = PodScheduler(bare, tmp_path, "hodei", [f"--kubeconfig={config}", lease], "admin", elect=True)
    try:
        yield hodei.start()
    finally:
        hodei.close()


def test_the_preemption_demo_shows_all_steps_and_cleans_up(bare: Bare, running_scheduler: PodScheduler) -> None:
    output = succeeded(script(bare, "demo-preemption.sh"))
    assert f"one on each of {len(NODES)} node(s)" in output
    assert "Preempted by" in output
    assert "FailedScheduling" in output
    bare.kubectl("wait", "--for=delete", "namespace/hodei-demo", "--timeout=60s")
    assert "priorityclass.scheduling.k8s.io/hodei-example-low" not in names(bare, "priorityclasses")


def test_the_minikube_script_installs_from_the_built_image_and_runs_the_examples(bare: Bare, tmp_path: Path) -> None:
    """minikube and docker are fakes that do nothing, so this does not prove that a cluster is created or an image built and
    loaded. The rest is done by the real kubectl on a real API server."""
    calls = record_calls(tmp_path / "bin", minikube="", docker="[ $1 != image ] || echo sha256:0123456789abcdef")
    (tmp_path / "bin" / "kubectl").symlink_to(bare.bin / "kubectl")
    hodei = PodScheduler(bare, tmp_path, "hodei", [], "admin", elect=False)
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    try:
        hodei.start()
        output = succeeded(script(bare, "minikube.sh", PATH=path, PROFILE="test", WAIT="60s"))
        assert "Hodei schedules pods" in output
        assert [call for call in calls() if call.startswith("minikube")] == [
            "minikube --profile test start --nodes 3 --keep-context",
            "minikube --profile test image load hodei:0123456789ab",
        ]
        (deployed,) = bare.kubectl(
            "get", "deployments", "--namespace=hodei-system", "--output=jsonpath={.items[*].spec.template.spec.containers[*].image}"
        ).split()  # fmt: skip
        assert deployed == "hodei:0123456789ab"

        def gang_runs() -> bool:
            label = "--selector=batch.kubernetes.io/job-name=gang-owner"
            return len(bare.kubectl("get", "pods", label, "--output=jsonpath={.items[*].spec.nodeName}").split()) == 3

        wait(gang_runs, "the gang of the example is bound", 60)
        succeeded(
            script(bare, "minikube.sh", PATH=path, PROFILE="test", WAIT="60s", EXAMPLES="0")
        )  # it can be repeated
    finally:
        hodei.close()
        for name in ("gang-owner", "workloads", "priorityclasses"):
            bare.kubectl("delete", "--ignore-not-found", f"--filename={DEPLOY / 'examples' / name}.yaml")
        succeeded(script(bare, "cleanup.sh"))


def test_every_example_does_what_it_documents(bare: Bare, running_scheduler: PodScheduler) -> None:
    cluster = Cluster(bare, "running-examples")
    try:
        cluster.make_node("worker-3")
        examples = {path.stem: f"--filename={path}" for path in EXAMPLES}
        cluster.kubectl("apply", examples["priorityclasses"], examples["workloads"])
        # On four nodes the gang preempts the pod of low priority, in whatever order they were created.
        for app, count in (("high-priority", 1), ("group-a", 3)):
            until_bound(cluster, f"app={app}", count)
        (low,) = cluster.wait(
            lambda: [p for p in cluster.pods(labelSelector="app=low-priority") if "nodeName" not in p["spec"]],
            "the pod of low priority is created again and pending",
        )
        cluster.until_condition(low["metadata"]["name"], "PodScheduled", "False", "Unschedulable")
        cluster.kubectl("delete", examples["workloads"])

        for name in [name for name in examples if name.startswith("gang-")]:
            cluster.kubectl("apply", examples[name])
            until_bound(cluster, "batch.kubernetes.io/job-name", 3)
            cluster.kubectl("delete", examples[name])
            cluster.wait(lambda: not cluster.pods(), f"the pods of {name} are deleted")
        cluster.kubectl("apply", examples["backfill"])
        until_bound(cluster, "batch.kubernetes.io/job-name", 4)
    finally:
        cluster.kubectl("delete", examples["priorityclasses"])
        cluster.close()


def until_bound(cluster: Cluster, selector: str, count: int) -> None:
    def bound() -> bool:
        return sum("nodeName" in pod["spec"] for pod in cluster.pods(labelSelector=selector)) == count

    try:
        cluster.wait(bound, f"{count} pods with {selector} are bound")
    except AssertionError as error:
        raise AssertionError(f"{error}: {cluster.pod_states()}") from None
