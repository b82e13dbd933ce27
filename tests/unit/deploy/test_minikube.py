"""deploy/minikube.sh with minikube, docker and kubectl played (`played` says what that does not prove): no cluster is made
here. What it installs is shown on a real API server by tests/real/kubernetes/test_deploy.py."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from unit.deploy.played import played

SCRIPT = Path(__file__).parents[3] / "deploy" / "minikube.sh"
DOCKER = 'case "$1 $2" in "image inspect") echo sha256:0123456789abcdef ;; esac'
# Says with which configuration it was called; there is no namespace yet, and nothing else goes wrong.
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


def test_image_cluster_hodei_and_examples_come_in_this_order(bin: Path) -> None:
    calls = played(bin, minikube="", docker=DOCKER, kubectl=KUBECTL)
    done = run(bin, START="--driver=docker --cpus=2")
    assert done.returncode == 0, done.stderr
    root, said = SCRIPT.parents[1], calls()
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
    assert [said.index(step) for step in steps] == sorted(said.index(step) for step in steps)
    assert "image: hodei:0123456789ab" in (bin / "applied").read_text()
    assert "kubectl ELSEWHERE" not in said  # no other cluster was touched


def test_without_examples_only_hodei_is_installed(bin: Path) -> None:
    calls = played(bin, minikube="", docker=DOCKER, kubectl=KUBECTL)
    assert run(bin, EXAMPLES="0", NODES="5", PROFILE="mine").returncode == 0
    assert "minikube --profile mine start --nodes 5 --keep-context" in calls()
    assert not [call for call in calls() if "examples" in call]


def test_an_image_that_cannot_be_built_makes_no_cluster(bin: Path) -> None:
    calls = played(bin, minikube="", docker="exit 1", kubectl=KUBECTL)
    done = run(bin)
    assert done.returncode == 1
    assert "the image cannot be built; next: " in done.stderr
    assert [call.split()[0] for call in calls()] == ["docker"]


@pytest.mark.parametrize(
    ("minikube", "told", "last"),
    [
        ('[ "$3" != start ]', "the cluster did not start", "minikube"),
        ('[ "$3" != image ]', "the image cannot be loaded", "minikube"),
    ],
    ids=["start", "load"],
)
def test_a_cluster_that_fails_is_told_and_nothing_is_installed(bin: Path, minikube: str, told: str, last: str) -> None:
    calls = played(bin, minikube=minikube, docker=DOCKER, kubectl=KUBECTL)
    done = run(bin)
    assert done.returncode == 1
    assert f"{told}" in done.stderr
    assert "next: " in done.stderr
    assert calls()[-1].startswith(last)


def test_delete_takes_the_cluster_away_and_does_nothing_else(bin: Path) -> None:
    calls = played(bin, minikube="", docker=DOCKER, kubectl=KUBECTL)
    assert run(bin, "delete").returncode == 0
    assert calls() == ["minikube --profile hodei delete"]


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["remove"], {}), (["delete", "x"], {}), ([], {"PROFILE": "a b"}), ([], {"PROFILE": "-x"}), ([], {"NODES": "many"}),
        ([], {"NODES": "0"}), ([], {"NODES": "3;x"}),
    ],
)  # fmt: skip
def test_words_that_make_no_sense_are_refused_before_anything_is_done(
    bin: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    calls = played(bin, minikube="", docker=DOCKER, kubectl=KUBECTL)
    done = run(bin, *arguments, **environment)
    assert done.returncode == 1
    assert "; next: " in done.stderr
    assert calls() == []


@pytest.mark.parametrize("missing", ["minikube", "docker", "kubectl"])
def test_a_program_that_is_missing_is_named(bin: Path, tmp_path: Path, missing: str) -> None:
    there = {"minikube": "", "docker": DOCKER, "kubectl": KUBECTL}
    calls = played(bin, **{name: does for name, does in there.items() if name != missing})
    plain = tmp_path / "plain"  # the machine may have the real ones beside sh
    plain.mkdir()
    for name in ("sh", "dirname", "cut", "mktemp", "rm", "cat", "sed"):
        found = next(place for at in ("/usr/bin", "/bin") if (place := Path(at) / name).exists())
        (plain / name).symlink_to(found)
    done = run(bin, PATH=f"{bin}:{plain}")
    assert done.returncode == 1
    assert f"the command {missing} is not found; next: " in done.stderr
    assert calls() == []
