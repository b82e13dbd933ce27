"""The example backend package: after `pip install` and one section of configuration, jobs run on it."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from real.installation import Installation

PROJECT = Path(__file__).parents[2] / "examples" / "hodei-backend-example"


def build_wheel(project: Path, directory: Path) -> Path:
    """Build with the project's build backend if it is installed. Otherwise write the wheel by hand, because the build
    backend would have to be downloaded."""
    if importlib.util.find_spec("hatchling"):
        _pip("wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={directory}", str(project))
        return next(directory.glob("*.whl"))
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    name = about["name"].replace("-", "_")
    entry_points = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in table.items())
        for group, table in about["entry-points"].items()
    )
    info = f"{name}-{about['version']}.dist-info"
    files = {
        f"{name}.py": (project / f"{name}.py").read_bytes(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points.encode(),
    }
    record = ""
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    wheel = directory / f"{name}-{about['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(path, data)
    return wheel


def _pip(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the installed package, for the PYTHONPATH of a server."""
    folder = tmp_path_factory.mktemp("package")
    wheel = build_wheel(PROJECT, folder)
    _pip("install", "--no-index", "--no-deps", f"--target={folder / 'site'}", str(wheel))
    return folder / "site"


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
