"""The Helm chart makes the same objects as the plain manifests. Needs Helm, but no cluster.

`scripts/build-helm.sh` builds Helm once (`make kubernetes`). Without it the tests are skipped, except in CI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from real.kubernetes import binaries

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "hodei"
PLAIN = ROOT / "deploy" / "kubernetes"
BUILD = ROOT / "scripts" / "build-helm.sh"
DEFAULT = ("rbac", "config", "deployment", "service", "pdb", "networkpolicy")
EVERYTHING = (*DEFAULT, "rbac-forecast", "rbac-reclaim", "servicemonitor")
# Without this option, a Helm built from source assumes Kubernetes 1.20.
KUBE = "--kube-version=1.36.0"
ALL_ON = ("forecast.enabled=true", "reclaim.enabled=true", "serviceMonitor.enabled=true")


@pytest.fixture(scope="session")
def helm() -> str:
    found = re.search(r"(?m)^version=(\S+)$", BUILD.read_text())
    assert found, "the script names no version"
    program = binaries.folder().parent / f"helm-{found[1]}" / "helm"
    if not program.exists() and (os.environ.get("CI") or os.environ.get("HODEI_BUILD_KUBERNETES") == "1"):
        subprocess.run(["sh", str(BUILD)], check=False)  # a failure is reported below
    if not program.exists():
        why = f"no {program}; {binaries.NEXT}"
        if os.environ.get("CI"):
            pytest.fail(f"Helm is missing in CI: {why}")
        pytest.skip(why)
    return str(program)


def rendered(helm: str, *sets: str, namespace: str = "hodei-system") -> str:
    done = run(helm, *sets, namespace=namespace)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(helm: str, *sets: str, namespace: str = "hodei-system") -> subprocess.CompletedProcess[str]:
    values = [f"--set={one}" for one in sets]
    return subprocess.run(
        [helm, "template", "hodei", str(CHART), KUBE, f"--namespace={namespace}", *values],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def objects(*texts: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = [document for text in texts for document in yaml.safe_load_all(text) if document]
    named = {(document["kind"], document["metadata"]["name"]): document for document in found}
    assert len(named) == len(found)
    return named


def plain(*names: str) -> dict[tuple[str, str], dict[str, Any]]:
    return objects(*((PLAIN / f"{name}.yaml").read_text() for name in names))


def only(helm: str, kind: str, *sets: str) -> dict[str, Any]:
    (only_one,) = [
        document for (found_kind, _), document in objects(rendered(helm, *sets)).items() if found_kind == kind
    ]
    return only_one


def test_the_chart_with_default_values_makes_the_plain_manifests(helm: str) -> None:
    assert objects(rendered(helm)) == plain(*DEFAULT)


def with_forecasts(made: dict[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Add the option that belongs to the permission to write forecasts."""
    (container,) = made["Deployment", "hodei"]["spec"]["template"]["spec"]["containers"]
    container["args"].append("--forecast-annotation")
    return made


def test_the_chart_with_all_options_makes_the_optional_manifests_too(helm: str) -> None:
    assert objects(rendered(helm, *ALL_ON)) == with_forecasts(plain(*EVERYTHING))


@pytest.mark.parametrize("by", ["release", "value"], ids=["of the release", "by value"])
def test_another_namespace_is_used_in_all_objects(helm: str, by: str) -> None:
    chosen = ("team-a", ()) if by == "release" else ("default", ("namespace=team-a",))
    text = rendered(helm, *ALL_ON, *chosen[1], namespace=chosen[0])
    moved = objects(*((PLAIN / f"{name}.yaml").read_text().replace("hodei-system", "team-a") for name in EVERYTHING))
    assert objects(text) == with_forecasts(moved)


def test_values_reach_the_deployment(helm: str) -> None:
    made = only(
        helm, "Deployment", "image.repository=mine/hodei", "image.tag=1.2", "schedulerName=batch", "replicas=3",
        "resources.limits.memory=2Gi", "extraArgs={--events=failures,--one-pod-per-node}",
    )  # fmt: skip
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert made["spec"]["replicas"] == 3
    assert container["image"] == "mine/hodei:1.2"
    assert container["resources"]["limits"] == {"memory": "2Gi"}
    assert "--scheduler-name=batch" in container["args"]
    assert container["args"][-2:] == ["--events=failures", "--one-pod-per-node"]


def test_the_configuration_is_copied_into_the_config_map(helm: str) -> None:
    text = "[scheduling.shares]\nenabled = true"
    assert only(helm, "ConfigMap", f"config={text}")["data"]["hodei.toml"].strip() == text


def test_parts_can_be_left_out(helm: str) -> None:
    kinds = {kind for kind, _ in objects(rendered(helm, "networkPolicy.enabled=false"))}
    assert "NetworkPolicy" not in kinds
    assert "Deployment" in kinds


def test_the_name_of_the_default_scheduler_is_refused(helm: str) -> None:
    done = run(helm, "schedulerName=default-scheduler")
    assert done.returncode != 0
    assert "Hodei cannot place its own pods" in done.stderr


def test_helm_lint_finds_no_problems(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_notes_name_the_namespace_and_the_scheduler(helm: str, tmp_path: Path) -> None:
    """`helm template` omits the notes, so they are copied to a template that it renders."""
    chart = Path(shutil.copytree(CHART, tmp_path / "hodei"))
    notes = (chart / "templates" / "NOTES.txt").read_text()
    body = "".join(f"    {line}\n" for line in notes.splitlines())
    (chart / "templates" / "notes.yaml").write_text(
        f"apiVersion: v1\nkind: Notes\nmetadata: {{name: notes}}\ndata:\n  text: |\n{body}"
    )
    done = subprocess.run(
        [helm, "template", "hodei", str(chart), KUBE, "--namespace=team-a", "--set=schedulerName=batch"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = objects(done.stdout)["Notes", "notes"]["data"]["text"]
    assert "schedulerName: batch" in text
    assert "--namespace team-a" in text
