"""deploy/minikube.sh with fake minikube, docker and kubectl (`fake_programs` says what they do not prove).
tests/real/kubernetes/test_deploy.py installs the same on a real API server."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from unit.deploy.fake_programs import record_calls

SCRIPT = Path(__file__).parents[3] / "deploy" / "minikube.sh"
DOCKER = 'case "$1 $2" in "image inspect") echo sha256:0123456789abcdef ;; esac'
# Reports calls with another configuration; there is no namespace yet, and all else succeeds.
KUBECTL = """case "$*" in
*"config view"*) echo "only this cluster" ;;
"get namespace"* | "get customresourcedefinition"*) exit 1 ;;
*) [ "$(cat "$KUBECONFIG")" = "only this cluster" ] || echo "kubectl ELSEWHERE" >>"$(dirname "$0")/calls" ;;
esac
[ "$*" != "apply -f -" ] || cat >>"$(dirname "$0")/applied"
"""
Calls = Callable[[], list[str]]


@pytest.fixture
def bin(tmp_path: Path) -> Path:
    return tmp_path / "bin"


def run(bin: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{bin}:/usr/bin:/bin", "HOME": str(bin), "KUBECONFIG": str(bin / "everything"), **environment}
    command = ["sh", str(SCRIPT), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_image_cluster_hodei_and_examples_are_installed_in_this_order(bin: Path) -> None:
    calls = record_calls(bin, minikube="", docker=DOCKER, kubectl=KUBECTL)
    done = run(bin, START="--driver=docker --cpus=2")
    assert done.returncode == 0, done.stderr
    root, recorded = SCRIPT.parents[1], calls()
    steps = [
        f"docker build --file {root}/deploy/Dockerfile --tag hodei:latest {root}/deploy/..",
        "docker tag hodei:latest hodei:0123456789ab",
        "minikube --profile hodei start --nodes 3 --keep-context --driver=docker --cpus=2",
        "minikube --profile hodei image load hodei:0123456789ab",
        "kubectl --context hodei config view --minify --flatten",
        "kubectl wait --for=condition=Ready nodes --all --timeout=300s",
        "kubectl apply -f -",
        "kubectl --namespace hodei-system rollout status deployment/hodei --timeout=300s",
        f"kubectl apply -f {root}/deploy/examples/priorityclasses.yaml -f {root}/deploy/examples/workloads.yaml"
        f" -f {root}/deploy/examples/gang-owner.yaml",
        "kubectl rollout status deployment/high-priority --timeout=300s",
    ]
    assert [recorded.index(step) for step in steps] == sorted(recorded.index(step) for step in steps)
    assert "image: hodei:0123456789ab" in (bin / "applied").read_text()
    assert "kubectl ELSEWHERE" not in recorded  # no other cluster was called


def test_without_examples_only_hodei_is_installed(bin: Path) -> None:
    calls = record_calls(bin, minikube="", docker=DOCKER, kubectl=KUBECTL)
    assert run(bin, EXAMPLES="0", NODES="5", PROFILE="own").returncode == 0
    assert "minikube --profile own start --nodes 5 --keep-context" in calls()
    assert not [call for call in calls() if "examples" in call]


def test_no_cluster_is_created_if_the_image_cannot_be_built(bin: Path) -> None:
    calls = record_calls(bin, minikube="", docker="exit 1", kubectl=KUBECTL)
    done = run(bin)
    assert done.returncode == 1
    assert "the image cannot be built; next: " in done.stderr
    assert [call.split()[0] for call in calls()] == ["docker"]


@pytest.mark.parametrize(
    ("minikube", "message", "last"),
    [
        ('[ "$3" != start ]', "the cluster did not start", "minikube"),
        ('[ "$3" != image ]', "the image cannot be loaded", "minikube"),
    ],
    ids=["start", "load"],
)
def test_nothing_is_installed_if_the_cluster_fails(bin: Path, minikube: str, message: str, last: str) -> None:
    calls = record_calls(bin, minikube=minikube, docker=DOCKER, kubectl=KUBECTL)
    done = run(bin)
    assert done.returncode == 1
    assert message in done.stderr
    assert "next: " in done.stderr
    assert calls()[-1].startswith(last)


def test_delete_only_deletes_the_cluster(bin: Path) -> None:
    calls = record_calls(bin, minikube="", docker=DOCKER, kubectl=KUBECTL)
    assert run(bin, "delete").returncode == 0
    assert calls() == ["minikube --profile hodei delete"]


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["remove"], {}), (["delete", "x"], {}), ([], {"PROFILE": "a b"}), ([], {"PROFILE": "-x"}), ([], {"NODES": "many"}),
        ([], {"NODES": "0"}), ([], {"NODES": "3;x"}),
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused_before_any_call(
    bin: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    calls = record_calls(bin, minikube="", docker=DOCKER, kubectl=KUBECTL)
    done = run(bin, *arguments, **environment)
    assert done.returncode == 1
    assert "; next: " in done.stderr
    assert calls() == []


@pytest.mark.parametrize("missing", ["minikube", "docker", "kubectl"])
def test_a_missing_program_is_named(bin: Path, tmp_path: Path, missing: str) -> None:
    programs = {"minikube": "", "docker": DOCKER, "kubectl": KUBECTL}
    calls = record_calls(bin, **{name: body for name, body in programs.items() if name != missing})
    plain = tmp_path / "plain"  # the machine may have the real programs in the directory of sh
    plain.mkdir()
    for name in ("sh", "dirname", "cut", "mktemp", "rm", "cat", "sed"):
        found = next(path for folder in ("/usr/bin", "/bin") if (path := Path(folder) / name).exists())
        (plain / name).symlink_to(found)
    done = run(bin, PATH=f"{bin}:{plain}")
    assert done.returncode == 1
    assert f"the command {missing} is not found; next: " in done.stderr
    assert calls() == []
