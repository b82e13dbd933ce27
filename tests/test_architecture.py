"""Import contracts, no clock or I/O below the runtime, a docstring in every module, no vague module names."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "hodei"
FILES = sorted(SOURCE.rglob("*.py"))
PURE = [path for path in FILES if path.relative_to(SOURCE).parts[0] in ("model", "engine", "plugins", "control")]
PURE.append(SOURCE / "ports.py")
# Below the runtime, time and random numbers are arguments, and no code waits.
FORBIDDEN = {"time", "random", "asyncio", "threading", "socket", "subprocess", "os", "uuid", "secrets"}
FORBIDDEN_CALLS = {"now", "utcnow", "today", "sleep", "urandom", "open"}

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
every_pure_file = pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(SOURCE)))


def test_import_contracts_hold():
    lint = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if lint is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run(
        [lint, "--config", str(ROOT / "pyproject.toml"), "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@every_file
def test_every_module_has_a_docstring(path):
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "it has no docstring"


@every_pure_file
def test_pure_packages_read_no_clock_draw_no_random_numbers_and_do_not_wait(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = {name.name.split(".")[0] for name in names} & FORBIDDEN
                assert not found, f"line {node.lineno} imports {found}"
            case ast.ImportFrom(module=str(module)):
                assert module.split(".")[0] not in FORBIDDEN, f"line {node.lineno} imports {module}"
            case ast.AsyncFunctionDef() | ast.Await() if path.name != "ports.py":
                raise AssertionError(f"line {node.lineno} waits")
            case ast.Call(func=ast.Attribute(attr=called)) | ast.Call(func=ast.Name(id=called)):
                assert called not in FORBIDDEN_CALLS, f"line {node.lineno} calls {called}"


def test_no_unfinished_code_is_checked_in():
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")
    found = [f"{path}: {word}" for path in FILES for word in words if word in path.read_text()]
    assert not found


def test_no_module_has_a_vague_name():
    vague = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
    assert not [path for path in FILES if vague & {path.stem, *path.relative_to(SOURCE).parts}]
