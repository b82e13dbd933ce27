"""`up`, `down`, `replay`, `bench`: which program is started, and that only a Hodei server is stopped."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hodei.cli import serve
from hodei.process import DetachedProcess

# A fake server: writes server.json, answers /readyz and ends on TERM. It proves nothing about a real server.
SERVER = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "3"); self.end_headers(); self.wfile.write(b"ok\\n")
    def log_message(self, *args): pass
if "--host=bad" in sys.argv:
    sys.exit("cannot listen there")
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
home = next(a.split("=", 1)[1] for a in sys.argv if a.startswith("--home="))
with open(os.path.join(home, "server.json"), "w") as file:
    json.dump({"address": "http://127.0.0.1:%d" % server.server_address[1], "pid": os.getpid()}, file)
server.serve_forever()
"""


@pytest.fixture
def executed(monkeypatch):
    calls: list[list[str]] = []

    def execv(path: str, argv: list[str]) -> None:
        assert path == sys.executable
        calls.append(argv[1:])
        raise SystemExit(0)  # the real execv does not return

    monkeypatch.setattr(os, "execv", execv)
    return calls


def test_up_executes_the_server_with_its_options(hodei, executed):
    hodei("up", "--home", "/x", "--port", "0", "--instant", "--insecure", "--verbose", "--log-file", "/x/log")
    assert executed == [
        ["-m", "hodei.server", "--home=/x", "--port=0", "--instant", "--insecure", "--verbose", "--log-file=/x/log"]
    ]


def test_home_may_be_given_before_the_command(hodei, executed):
    hodei("--home", "/y", "up")
    assert executed == [["-m", "hodei.server", "--home=/y"]]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("bench", "benchmarks"),
        ("replay", "hodei.sim.replay"),
        ("sim", "hodei.sim"),
        ("kube", "hodei.kube"),
        ("test", "hodei.sim.scenario"),
    ],
)
def test_bench_kube_replay_sim_and_test_execute_their_own_programs(hodei, executed, name: str, module: str):
    hodei(name, "engine", "--nodes", "5", "--help")
    assert executed == [["-m", module, "engine", "--nodes", "5", "--help"]]


def test_benchmarks_without_a_source_checkout_are_refused(hodei, executed, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(serve, "__file__", str(tmp_path / "site-packages/hodei/cli/serve.py"))
    result = hodei("bench", "engine")
    assert result.exit_code == 2
    assert not executed
    assert "benchmarks are part of the source checkout" in result.stderr


def test_a_client_without_the_server_extra_names_what_to_install(hodei, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    result = hodei("up")
    assert result.exit_code == 2
    assert "pip install 'hodei[server]'" in result.stderr


def test_down_without_a_server_is_not_found(hodei, tmp_path: Path):
    assert hodei("down", "--home", str(tmp_path)).exit_code == 3


def test_down_does_not_stop_another_process_with_the_same_pid(hodei, tmp_path: Path):
    (tmp_path / "server.json").write_text(json.dumps({"address": "http://127.0.0.1:1", "pid": os.getpid()}))
    result = hodei("down", "--home", str(tmp_path))
    assert result.exit_code == 8
    assert "is not stopped" in result.stderr


@pytest.fixture
def fake_server(tmp_path: Path, monkeypatch):
    """`-m hodei.server` runs the fake server; started processes are ended by pid."""
    package = tmp_path / "path/hodei/server"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    started: list[DetachedProcess] = []

    class Recorded(DetachedProcess):
        def __init__(self, command: list[str], log: Path) -> None:
            super().__init__(command, log)
            started.append(self)

    monkeypatch.setattr("hodei.process.DetachedProcess", Recorded)
    yield started
    for process in started:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)


@pytest.mark.real
def test_up_waits_for_a_detached_server_and_down_stops_it(hodei, fake_server, tmp_path: Path):
    home = tmp_path / "home"
    result = hodei("up", "-d", "--home", str(home))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == json.loads((home / "server.json").read_text())["address"] + "\n"
    assert f"{home}/token" in result.stderr
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "server.log").stat().st_mode & 0o777 == 0o600
    assert os.getsid(fake_server[0].pid) == fake_server[0].pid
    assert "already running" in hodei("up", "-d", "--home", str(home)).stderr
    assert len(fake_server) == 1
    stopped = hodei("down", "--home", str(home))
    assert stopped.exit_code == 0, stopped.stderr
    assert not serve.is_alive(fake_server[0].pid)


@pytest.mark.real
def test_a_server_that_ends_at_once_is_reported_with_its_last_error(hodei, fake_server, tmp_path: Path):
    began = time.monotonic()
    result = hodei("up", "-d", "--home", str(tmp_path / "home"), "--host", "bad")
    assert result.exit_code == 1
    assert "exit code 1): cannot listen there" in result.stderr
    assert time.monotonic() - began < 20
