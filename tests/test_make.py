"""What `make demo` and `make test` set up: the server for users, the tools on top for developers, and progress on the way."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETS_UP = "scripts/install.py"
# What only developers, the Kubernetes and Docker parts, or pictures need: `make demo` does not install it.
NOT_IN_A_SERVER = ("pytest", "hypothesis", "kubernetes", "matplotlib", "mypy", "ruff")

pytestmark = pytest.mark.real


def planned(target: str, venv: Path) -> list[str]:
    """The extras that `make TARGET` would install, in order."""
    done = subprocess.run(
        ["make", "-n", target, f"VENV={venv}"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return [line.split()[-1] for line in done.stdout.splitlines() if SETS_UP in line]


def stamp(venv: Path, *names: str) -> None:
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    for name in names:
        (venv / "bin" / name).touch()


def test_a_demo_installs_the_server_and_tests_add_the_tools_once(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    assert planned("demo", venv) == ["server"]
    assert planned("test", venv) == ["dev"]
    stamp(venv, ".server")
    assert planned("demo", venv) == []
    assert planned("test", venv) == ["dev"]
    stamp(venv, ".ready")
    assert planned("test", venv) == planned("demo", venv) == []


def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / SETS_UP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("  Downloading numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (16.9 MB)\n", "numpy 2.4.6 (16.9 MB)"),
        ("  Using cached click-8.5.1-py3-none-any.whl (126 kB)\n", "click 8.5.1 (126 kB)"),
        ("Downloading h11-0.16.0-py3-none-any.whl (37 kB)\n", "h11 0.16.0 (37 kB)"),
        ("Installing collected packages: uvloop, numpy, hodei\n", "writing 3 packages"),
        ("  Installing build dependencies: started\n", "fetching the build tools"),
        ("Requirement already satisfied: click>=8.1.7 in ./.venv/lib (from hodei==0.1.0) (8.5.1)\n", ""),
    ],
)
def test_a_line_of_pip_becomes_a_short_one_or_none(line: str, shown: str) -> None:
    assert installer().progress(line) == shown


def test_a_pip_that_fails_is_shown_in_full(tmp_path: Path) -> None:
    # A stand-in for pip: it proves that a failure is reported, not that pip fails in this way.
    (tmp_path / "pip.py").write_text("import sys\nprint('no network here')\nsys.exit(3)\n")
    done = subprocess.run(
        [sys.executable, ROOT / SETS_UP, "server"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "installing hodei[server]" in done.stdout
    assert "no network here" in done.stderr
    assert "exit code 3" in done.stderr


@pytest.mark.slow
def test_the_demo_runs_to_its_end_with_the_packages_of_a_server(tmp_path: Path) -> None:
    # Everything that `make demo` does not install is hidden from each Python that the demo starts.
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        f"import sys\nfor name in {NOT_IN_A_SERVER!r}:\n    sys.modules[name] = None\n"
    )
    homes = tmp_path / "homes"
    homes.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HODEI_")}
    done = subprocess.run(
        ["sh", ROOT / "scripts" / "demo.sh", Path(sys.executable).parent],
        env={**kept, "PYTHONPATH": str(hidden), "TMPDIR": str(homes)},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything ran to its end" in done.stdout
    assert "$ hodei why patient" in done.stdout
    assert "\033" not in done.stdout
    deadline = (
        time.monotonic() + 60
    )  # the agent ends a moment after its server, and removes the directory of its socket
    while list(homes.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not list(homes.glob("hodei-demo.*")), "the demo removes its directory"
