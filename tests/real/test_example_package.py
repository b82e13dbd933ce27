"""The example backend package: after `pip install` and one section of configuration, jobs run on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from real.installation import Installation

PROJECT = Path(__file__).parents[2] / "examples" / "hodei-backend-example"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the installed package, for the PYTHONPATH of a server. hatchling of this environment builds it, so
    nothing is downloaded."""
    folder = tmp_path_factory.mktemp("package") / "site"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", f"--target={folder}"]
    command += ["--no-index", "--no-deps", "--no-build-isolation", str(PROJECT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_an_installed_backend_needs_one_section_of_configuration(installation: Installation, site: Path) -> None:
    installation.configure('[backends.desk]\nkind = "example"\ncpus = 2\n')
    up = installation.hodei("up", "-d", env={"PYTHONPATH": str(site)})
    assert up.code == 0, up.out + up.err
    with installation.client() as client:
        assert [(one.name, one.kind) for one in client.backends() if one.name == "desk"] == [("desk", "example")]
    good = installation.submit("sh", "-c", "echo hello from $HODEI_RUN_ID", backend="desk")
    bad = installation.submit("sh", "-c", "exit 7", backend="desk")
    ended = installation.ended(good, bad)
    assert [(detail.job.state, detail.job.exit_code) for detail in ended] == [("succeeded", 0), ("failed", 7)]
    assert ended[0].runs[0].backend == "desk"
    assert installation.log_of(good) == f"hello from {good}.0.1\n"
    forever = installation.submit("sleep", "300", backend="desk")
    installation.until_state(forever, "running")
    installation.ok("cancel", str(forever))
    assert installation.ended(forever)[0].job.state == "cancelled"
    installation.ok("down")


def test_without_the_package_the_error_names_the_missing_kind(installation: Installation) -> None:
    installation.configure('[backends.desk]\nkind = "example"\n')
    refused = installation.hodei("up")
    assert refused.code != 0
    assert "there is no kind 'example'" in refused.out + refused.err
    assert "entry point group hodei.backends" in refused.out + refused.err


@pytest.mark.slow
def test_the_package_passes_the_conformance_suite(site: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", os.devnull]
    command += [f"--rootdir={PROJECT}", f"--basetemp={tmp_path / 'runs'}", str(PROJECT)]
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
