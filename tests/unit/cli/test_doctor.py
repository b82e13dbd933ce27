from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import hodei
from hodei.api.views import Check
from hodei.cli import times
from unit.cli.stub import Answer, problem

API = "/api/v1"
INFO = {
    "version": "0.1.0", "api": "v1", "installation": "i", "address": "a", "epoch": 1, "started_at": "", "ready": True,
    "profiles": [], "backends": [], "jobs": {},
}  # fmt: skip


@pytest.fixture
def healthy(stub, monkeypatch, tmp_path: Path):
    monkeypatch.undo()
    monkeypatch.setenv("HODEI_SERVER", stub.address)
    monkeypatch.setenv("HODEI_HOME", str(tmp_path / "home"))
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "token").write_text("hod_x")
    (home / "token").chmod(0o600)
    stub.on("GET", "/livez", b"ok\n")
    stub.on("GET", f"{API}/info", INFO)
    stub.on("GET", f"{API}/checks", {"checks": [{"name": "store", "level": "ok", "found": "WAL"}]})
    return stub


def levels(hodei) -> tuple[dict[str, str], int]:
    result = hodei("doctor", "-o", "json")
    found = msgspec.json.decode(result.stdout, type=list[Check])
    assert all(check.fix for check in found if check.level != "ok")
    return {check.name: check.level for check in found}, result.exit_code


def test_a_healthy_installation_is_all_ok(hodei, healthy):
    found, code = levels(hodei)
    names = ("python", "home", "token", "disk", "server", "clock", "version", "store")
    assert (found, code) == (dict.fromkeys(names, "ok"), 0)


def test_open_modes_are_found(hodei, healthy, tmp_path: Path):
    (tmp_path / "home").chmod(0o755)
    (tmp_path / "home/token").chmod(0o644)
    found, code = levels(hodei)
    assert (found["home"], found["token"], code) == ("warning", "problem", 1)


def test_different_versions_and_clocks_are_warnings(hodei, healthy, monkeypatch):
    healthy.on("GET", f"{API}/info", INFO | {"version": "9.9.9"})
    monkeypatch.setattr("hodei.cli.doctor.now_ms", lambda: times.now_ms() + 60_000)
    found, code = levels(hodei)
    assert (found["version"], found["clock"], code) == ("warning", "warning", 0)


def test_an_unreachable_server_is_a_problem_with_a_fix(hodei, healthy):
    healthy.stop()
    found, code = levels(hodei)
    assert (found["server"], code) == ("problem", 1)
    assert "hodei up" in hodei("doctor").stdout


def test_a_wrong_token_is_a_problem(hodei, healthy):
    healthy.on("GET", f"{API}/info", problem(401, "UNAUTHORIZED", "the token is not known here", "see HODEI_TOKEN"))
    found, code = levels(hodei)
    assert (found["login"], code) == ("problem", 1)


def test_problems_reported_by_the_server_count(hodei, healthy):
    healthy.on("GET", f"{API}/checks", Answer({"checks": [Check("store", "problem", "read-only", "remount it")]}))
    found, code = levels(hodei)
    assert (found["store"], code) == ("problem", 1)


@pytest.mark.parametrize("path", ["runtime/service.py", "runtime/loop.py"])
def test_no_error_of_the_server_recommends_the_doctor_that_shows_it(path: str):
    source = (Path(hodei.__file__).parent / path).read_text()
    assert "run `hodei doctor`" not in source
