"""The manifests: restricted containers, no more rights than needed, and files that are consistent.

tests/real/kubernetes/test_deploy.py proves that an API server accepts them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import convert

from hodei.configuration import load_config
from hodei.kube.api.objects import Pod
from hodei.kube.scheduler.gangs import Membership, membership
from hodei.kube.scheduler.translate import estimate_ms

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
PLAIN = DEPLOY / "kubernetes"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))
MANIFESTS = sorted([*PLAIN.glob("*.yaml"), *(PLAIN / "only-scheduler").glob("*.yaml")])
SCRIPTS = sorted([*DEPLOY.glob("*.sh"), ROOT / "scripts" / "build-helm.sh"])
WATCH = {"list", "watch"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def only_document(path: Path, kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents(path) if document["kind"] == kind]
    return found


def pods_in(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and pod template (metadata and spec) of everything that has pods."""
    for document in documents(path):
        if document["kind"] == "Pod":
            yield document["metadata"]["name"], document
        elif document["kind"] in ("Deployment", "Job"):
            yield document["metadata"]["name"], document["spec"]["template"]


PODS = [pytest.param(pod, id=f"{path.name}:{name}") for path in [*MANIFESTS, *EXAMPLES] for name, pod in pods_in(path)]
EXAMPLE_PODS = [pytest.param(path, pod, id=f"{path.name}:{name}") for path in EXAMPLES for name, pod in pods_in(path)]


def rights(*paths: Path) -> dict[tuple[str, str], set[str]]:
    """(group, resource) to verbs, of all cluster roles."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in paths:
        for role in documents(path):
            for rule in role.get("rules", []) if role["kind"] == "ClusterRole" else []:
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


@pytest.mark.parametrize("pod", PODS)
def test_every_container_is_locked_down(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        registry, slash, _ = container["image"].partition("/")
        assert not slash or "." not in registry, "an image of the repository names no host"


def test_the_role_of_the_scheduler_has_exactly_the_needed_rights() -> None:
    """Most were found in the audit log of the tests in tests/real/kubernetes (`permissions.py`), the rest in the code."""
    read = {
        "": ("nodes", "namespaces", "services", "replicationcontrollers"),
        "apps": ("replicasets", "statefulsets"),
        "batch": ("jobs",),
        "policy": ("poddisruptionbudgets",),
        "storage.k8s.io": ("csinodes", "csidrivers", "csistoragecapacities", "storageclasses"),
        "scheduling.k8s.io": ("podgroups", "workloads"),
        "scheduling.x-k8s.io": ("podgroups",),
    }
    expected = {(group, resource): WATCH for group, resources in read.items() for resource in resources}
    expected |= {
        ("events.k8s.io", "events"): {"create"},
        ("", "pods"): WATCH | {"get", "delete"},
        ("", "pods/binding"): {"create"},
        ("", "pods/status"): {"patch"},
        ("", "persistentvolumes"): WATCH | {"patch"},
        ("", "persistentvolumeclaims"): WATCH | {"patch"},
        ("scheduling.k8s.io", "podgroups/status"): {"patch"},
        ("scheduling.x-k8s.io", "podgroups/status"): {"patch"},
        ("scheduling.volcano.sh", "podgroups/status"): {"patch"},
        ("scheduling.volcano.sh", "podgroups"): WATCH | {"patch"},
        ("batch.volcano.sh", "jobs"): {"get"},
    }
    assert rights(PLAIN / "rbac.yaml") == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("forecast", {("", "pods"): {"patch"}}), ("reclaim", {("", "pods/eviction"): {"create"}})],
    ids=["the forecast may patch pods", "reclaim may evict"],
)
def test_an_optional_right_has_its_own_role(name: str, expected: dict[tuple[str, str], set[str]]) -> None:
    path = PLAIN / f"rbac-{name}.yaml"
    assert rights(path) == expected
    assert only_document(path, "ClusterRole")["metadata"]["name"] == f"hodei-{name}"
    assert path.name not in documents(PLAIN / "kustomization.yaml")[0]["resources"]


def test_no_role_has_a_wildcard() -> None:
    for path in MANIFESTS:
        for document in documents(path):
            for rule in document.get("rules", []):
                assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], path


def test_the_namespaced_role_allows_one_lease_and_one_configmap() -> None:
    rules = only_document(PLAIN / "rbac.yaml", "Role")["rules"]
    assert [(rule["resources"], rule.get("resourceNames"), rule["verbs"]) for rule in rules] == [
        (["leases"], None, ["create"]),
        (["leases"], ["hodei"], ["get", "update"]),
        (["configmaps"], None, ["create"]),
        (["configmaps"], ["hodei-usage"], ["get", "update"]),
    ]


def test_namespaced_objects_are_in_one_namespace() -> None:
    clusterwide = {"Namespace", "ClusterRole", "ClusterRoleBinding", "Kustomization"}
    for path in PLAIN.glob("*.yaml"):
        for document in documents(path):
            if document["kind"] not in clusterwide:
                assert document["metadata"]["namespace"] == "hodei-system", path
            for subject in document.get("subjects", []):
                assert subject == {"kind": "ServiceAccount", "name": "hodei", "namespace": "hodei-system"}, path
    assert only_document(PLAIN / "namespace.yaml", "Namespace")["metadata"]["name"] == "hodei-system"


def test_every_binding_names_an_existing_role() -> None:
    for folder in (PLAIN, PLAIN / "only-scheduler"):
        roles = {
            (d["kind"], d["metadata"]["name"])
            for path in folder.glob("*.yaml")
            for d in documents(path)
            if "rules" in d
        }
        roles |= {("ClusterRole", d["metadata"]["name"]) for d in documents(PLAIN / "rbac.yaml") if "rules" in d}
        for path in folder.glob("*.yaml"):
            for document in documents(path):
                if "roleRef" in document:
                    assert (document["roleRef"]["kind"], document["roleRef"]["name"]) in roles, path


def test_service_budget_policy_and_monitor_select_the_pods_of_the_deployment() -> None:
    deployment = only_document(PLAIN / "deployment.yaml", "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    service = only_document(PLAIN / "service.yaml", "Service")
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["selector"] == labels
    assert only_document(PLAIN / "pdb.yaml", "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    policy = only_document(PLAIN / "networkpolicy.yaml", "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    monitor = only_document(PLAIN / "servicemonitor.yaml", "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    (served,) = service["spec"]["ports"]
    assert port["containerPort"] == served["port"] == policy["ingress"][0]["ports"][0]["port"] == 10259
    assert port["name"] == served["name"] == served["targetPort"] == monitor["endpoints"][0]["port"]
    assert "--listen=0.0.0.0:10259" in container["args"]


def test_the_scheduler_is_not_placed_by_itself() -> None:
    spec = only_document(PLAIN / "deployment.yaml", "Deployment")["spec"]["template"]["spec"]
    assert spec["schedulerName"] == "default-scheduler"
    assert "--scheduler-name=hodei" in spec["containers"][0]["args"]
    # As the only scheduler it is a static pod, which needs no scheduler.
    static = only_document(PLAIN / "only-scheduler" / "static-pod.yaml", "Pod")["spec"]
    assert "--scheduler-name=default-scheduler" in static["containers"][0]["args"]


def test_the_deployment_has_two_replicas_and_probes() -> None:
    spec = only_document(PLAIN / "deployment.yaml", "Deployment")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["replicas"] == 2
    assert "--leader-elect" in container["args"]
    assert spec["template"]["spec"]["priorityClassName"] == "system-cluster-critical"
    assert "podAntiAffinity" in spec["template"]["spec"]["affinity"]
    paths = [container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert paths == ["/livez", "/livez", "/readyz"]


def test_the_configuration_is_valid_with_and_without_its_comments(tmp_path: Path) -> None:
    written = only_document(PLAIN / "config.yaml", "ConfigMap")["data"]["hodei.toml"]
    path = tmp_path / "hodei.toml"
    path.write_text(written)
    load_config(path)
    path.write_text(re.sub(r"(?m)^# ?((?:\[|\w+ = ).*)$", r"\1", written))
    assert tomllib.loads(path.read_text())
    assert load_config(path).scheduling.shares.enabled


def test_the_kustomization_has_all_files_except_the_optional_ones() -> None:
    listed = set(documents(PLAIN / "kustomization.yaml")[0]["resources"])
    optional = {"rbac-forecast.yaml", "rbac-reclaim.yaml", "servicemonitor.yaml"}
    assert listed | optional | {"kustomization.yaml"} == {path.name for path in PLAIN.glob("*.yaml")}
    assert not listed & optional


def test_what_the_scripts_replace_has_one_spelling() -> None:
    """setup.sh replaces `namespace: hodei-system` and `image: hodei:latest`; other spellings would not be replaced."""
    for path in PLAIN.glob("*.yaml"):
        if path.name in ("namespace.yaml", "kustomization.yaml"):
            continue
        text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
        assert text.count("hodei-system") == len(re.findall(r"(?m)^\s+namespace: hodei-system$", text)), path
        assert text.count("image:") == text.count("image: hodei:latest"), path


@pytest.mark.parametrize(("path", "pod"), EXAMPLE_PODS)
def test_examples_name_hodei_as_their_scheduler(path: Path, pod: dict[str, Any]) -> None:
    assert pod["spec"]["schedulerName"] == "hodei"
    classes = {document["metadata"]["name"] for document in documents(DEPLOY / "examples" / "priorityclasses.yaml")}
    assert pod["spec"].get("priorityClassName") in classes | {None}


@pytest.mark.parametrize(
    "convention", ["kubernetes", "scheduler-plugins", "volcano", "kueue", "yunikorn", "annotation"]
)
def test_there_is_an_example_of_each_convention_of_gangs(convention: str) -> None:
    path = DEPLOY / "examples" / f"gang-{convention}.yaml"
    members = [membership(convert({"metadata": {"name": name}, **pod}, Pod)) for name, pod in pods_in(path)]
    jobs = [document for document in documents(path) if document["kind"] == "Job"]
    groups = [document for document in documents(path) if document["kind"] == "PodGroup"]
    assert {m.convention for m in members if isinstance(m, Membership)} == {convention}
    assert len({m.name for m in members if isinstance(m, Membership)}) == 1
    sizes = {m.min_count for m in members if isinstance(m, Membership)} - {0}
    sizes |= {g["spec"].get("minMember") or g["spec"]["schedulingPolicy"]["gang"]["minCount"] for g in groups}
    assert sizes == {sum(job["spec"]["parallelism"] for job in jobs)}
    for group in groups:
        assert group["metadata"]["name"] == next(m.name for m in members if isinstance(m, Membership))


def test_the_pods_of_the_backfill_example_have_estimates() -> None:
    pods = dict(pods_in(DEPLOY / "examples" / "backfill.yaml"))
    estimates = {name: estimate_ms(convert({"metadata": {"name": name}, **pod}, Pod)) for name, pod in pods.items()}
    assert estimates == {"backfill-large": 2 * 3_600_000, "backfill-short": 5 * 60_000}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_shell_script_is_valid_and_stops_at_errors(script: Path) -> None:
    shell = shutil.which("dash") or "sh"
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\nset -eu\n" in script.read_text()


@pytest.mark.parametrize(
    "arguments",
    [["Big"], ["a b"], ["-x"], ["x|y"], ["ns", "image with spaces"], ["ns", "a|b"], ["ns", "-q"], ["a", "b", "c"]],
    ids=lambda arguments: " ".join(arguments),
)
def test_setup_refuses_invalid_arguments_before_any_call(arguments: list[str]) -> None:
    done = subprocess.run(
        ["sh", str(DEPLOY / "setup.sh"), *arguments], env={"PATH": "/usr/bin:/bin", "KUBECTL": "/nowhere/kubectl"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "; next: " in done.stderr
    assert "/nowhere/kubectl" not in done.stderr


def test_the_image_runs_hodei_kube_as_the_user_of_the_manifests() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    user = only_document(PLAIN / "deployment.yaml", "Deployment")["spec"]["template"]["spec"]["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in lines
    assert lines[-2:] == ['ENTRYPOINT ["hodei"]', 'CMD ["kube", "run"]']
    assert [line for line in lines if line.startswith("FROM")] == ["FROM ${PYTHON} AS build", "FROM ${PYTHON}"]
    args = only_document(PLAIN / "deployment.yaml", "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[:2] == ["kube", "run"]


def test_the_image_is_built_from_what_the_wheel_needs() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text())
    assert {path for line in copied for path in line.split()} == allowed
