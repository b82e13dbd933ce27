"""`make demo` installs only the server, `make test` adds the developer tools; the installer shows short progress."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from real.installation import until

ROOT = Path(__file__).resolve().parent.parent
INSTALLER = "scripts/install.py"
# Packages that `make demo` does not install: for developers, Kubernetes, Docker or pictures.
NOT_IN_A_SERVER = ("pytest", "hypothesis", "kubernetes", "matplotlib", "mypy", "ruff")

pytestmark = pytest.mark.real


def installed_extras(target: str, venv: Path) -> list[str]:
    """The extras that `make TARGET` would install, in order."""
    done = subprocess.run(
        ["make", "-n", target, f"VENV={venv}"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return [line.split()[-1] for line in done.stdout.splitlines() if INSTALLER in line]


def touch_stamps(venv: Path, *names: str) -> None:
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    for name in names:
        (venv / "bin" / name).touch()


def test_a_demo_installs_the_server_and_tests_add_the_tools_once(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    assert installed_extras("demo", venv) == ["server"]
    assert installed_extras("test", venv) == ["dev"]
    touch_stamps(venv, ".server")
    assert installed_extras("demo", venv) == []
    assert installed_extras("test", venv) == ["dev"]
    touch_stamps(venv, ".ready")
    assert installed_extras("test", venv) == installed_extras("demo", venv) == []


def load_installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / INSTALLER)
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
def test_a_line_of_pip_output_is_shortened_or_dropped(line: str, shown: str) -> None:
    assert load_installer().progress(line) == shown


def test_the_output_of_a_failed_pip_is_shown_in_full(tmp_path: Path) -> None:
    # A fake pip that fails.
    (tmp_path / "pip.py").write_text("import sys\nprint('no network here')\nsys.exit(3)\n")
    done = subprocess.run(
        [sys.executable, ROOT / INSTALLER, "server"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "installing hodei[server]" in done.stdout
    assert "no network here" in done.stderr
    assert "exit code 3" in done.stderr


@pytest.mark.slow
def test_the_demo_needs_only_the_packages_of_a_server(tmp_path: Path) -> None:
    # Hide packages that `make demo` does not install from each Python process of the demo.
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        f"import sys\nfor name in {NOT_IN_A_SERVER!r}:\n    sys.modules[name] = None\n"
    )
    homes = tmp_path / "homes"
    homes.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HODEI_")}
    done = subprocess.run(
        ["sh", ROOT / "scripts" / "demo.sh", Path(sys.executable).parent],
        env={**inherited, "PYTHONPATH": str(hidden), "TMPDIR": str(homes)},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything ran to its end" in done.stdout
    assert "$ hodei why patient" in done.stdout
    assert "\033" not in done.stdout
    # The agent ends after its server, and removes the directory of its socket.
    until(lambda: not list(homes.iterdir()), "the demo and its agent have removed their directories")
