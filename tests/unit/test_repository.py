"""Workflows, hooks and templates parse and call existing make targets; a release changes the changelog correctly."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hodei

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"(?m)^([a-z-]+):", MAKEFILE))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
HOOKS = ROOT / ".pre-commit-config.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
LOCK = (ROOT / "requirements-dev.lock").read_text()


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", [*sorted((ROOT / ".github").rglob("*.yml")), HOOKS], ids=lambda path: path.name)
def test_yaml_of_the_repository_parses(path: Path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_make_targets_and_nothing_else(path: Path):
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        targets = job.get("strategy", {}).get("matrix", {}).get("target", [])
        assert set(targets) <= TARGETS
        for step in job["steps"]:
            if command := step.get("run"):
                _, make, called = command.rpartition("make ")
                assert make, command
                assert called == "${{ matrix.target }}" or set(called.split()) <= TARGETS


def test_every_suite_has_a_workflow_job():
    called = " ".join(path.read_text() for path in WORKFLOWS)
    for target in ("lint", "unit", "real-local", "real-docker", "real-slurm", "real-kubernetes", "real-metal", "fuzz"):
        assert re.search(rf"[\[ ]{target}\b", called), target


def test_hooks_run_make_targets_in_stages_that_are_installed():
    hooks = yaml.safe_load(HOOKS.read_text())
    for repo in hooks["repos"]:
        assert repo["repo"] == "local"
        for hook in repo["hooks"]:
            make, target = hook["entry"].split()
            assert make == "make"
            assert target in TARGETS
            assert set(hook.get("stages", hooks["default_stages"])) <= set(hooks["default_install_hook_types"])


def test_help_shows_every_target():
    shown = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert {line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  ")} == TARGETS


def requirements(extra: str) -> Iterator[Requirement]:
    """What `hodei[EXTRA]` names, with the extras that it names in turn."""
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == "hodei":
            for inner in requirement.extras:
                yield from requirements(inner)
        else:
            yield requirement


def test_the_lock_pins_each_dependency_by_hash_and_names_no_index():
    assert "://" not in LOCK
    pins = re.findall(r"(?m)^\S+?==\S+ \\\n    --hash=sha256:", LOCK)
    assert len(pins) == LOCK.count("==") > 0


def test_the_lock_has_every_package_of_the_developers_in_a_version_that_is_allowed():
    locked = {canonicalize_name(name): version for name, version in re.findall(r"(?m)^(\S+?)==(\S+) ", LOCK)}
    needed = [*map(Requirement, PROJECT["project"]["dependencies"]), *requirements("dev")]
    assert {"click", "uvicorn", "pytest-xdist"} <= {requirement.name for requirement in needed}
    wrong = [
        f"{requirement}, locked: {version}"
        for requirement in needed
        if not requirement.specifier.contains(version := locked.get(canonicalize_name(requirement.name), "none"))
    ]
    assert not wrong, "run: make lock"


def test_every_dependency_has_a_lower_bound():
    texts = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"], *chain(*EXTRAS.values())]
    bounded = {clause.operator for text in texts for clause in Requirement(text).specifier}
    assert bounded == {">="}
    unbounded = [text for text in texts if not Requirement(text).specifier and Requirement(text).name != "hodei"]
    assert not unbounded


def test_the_package_is_marked_as_typed():
    assert (Path(hodei.__file__).parent / "py.typed").is_file()


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((ROOT / "deploy/helm/hodei/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == hodei.__version__


BEGINNING = "# Changelog\n\n## [Unreleased]\n"
OLDER = "\n## [0.1.0] - 2026-01-01\n\n- First.\n"


def test_a_release_turns_unreleased_changes_into_its_section():
    cut = script("release").cut_changelog(f"{BEGINNING}\n- New.\n{OLDER}", "0.2.0", "2026-02-02")
    assert cut == f"{BEGINNING}\n## [0.2.0] - 2026-02-02\n\n- New.\n{OLDER}"


def test_a_release_keeps_a_section_that_is_already_written():
    assert script("release").cut_changelog(BEGINNING + OLDER, "0.1.0", "2026-02-02") == BEGINNING + OLDER


@pytest.mark.parametrize(
    ("text", "version"),
    [(BEGINNING + OLDER, "0.2.0"), (f"{BEGINNING}\n- New.\n{OLDER}", "0.1.0"), ("# Changelog\n", "0.1.0")],
    ids=["nothing to release", "more than the section has", "no Unreleased"],
)
def test_a_release_without_a_clear_changelog_is_refused(text: str, version: str):
    with pytest.raises(ValueError, match=r"CHANGELOG\.md has"):
        script("release").cut_changelog(text, version, "2026-02-02")


@pytest.mark.parametrize("version", ["", "1.2", "v0.3.0", "0.3.0-rc1", "00.3.0", "0.3.0 ", "0.3.0\n"])
def test_a_malformed_version_is_refused(version: str):
    with pytest.raises(ValueError, match="is not a version"):
        script("release").check_version(version, [], [])


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.10.0", "the tag v0.10.0 exists"), ("0.9.0", "older than 0.10.0"), ("0.12.0", "the tag v0.12.0 exists")],
)
def test_a_version_that_exists_or_is_older_is_refused(version: str, message: str):
    with pytest.raises(ValueError, match=message):
        script("release").check_version(version, ["v0.10.0", "v0.12.0", "other"], ["v0.10.0", "other"])


def test_a_branch_gets_patches_older_than_the_newest_release():
    script("release").check_version("0.10.1", ["v0.10.0", "v0.12.0"], ["v0.10.0"])


def test_a_release_finds_each_place_of_the_version():
    release = script("release")
    for name in release.PLACES:
        assert "1.2.3" in release.set_version(name, (ROOT / name).read_text(), "1.2.3")
        with pytest.raises(ValueError, match="0 lines with a version"):
            release.set_version(name, "", "1.2.3")


def test_the_bill_of_materials_covers_every_extra_of_users():
    assert {*script("sbom").EXTRAS, "testing", "dev"} == set(EXTRAS)


def test_the_bill_of_materials_lists_what_users_install_and_no_developer_tools():
    content = script("sbom").bom()
    names = {component["name"] for component in content["components"]}
    assert {"click", "msgspec", "numpy", "starlette"} <= names
    assert not {"pytest", "ruff", "mypy", "hypothesis"} & names
    refs = {content["metadata"]["component"]["bom-ref"], *(entry["bom-ref"] for entry in content["components"])}
    assert {ref for entry in content["dependencies"] for ref in (entry["ref"], *entry["dependsOn"])} == refs
