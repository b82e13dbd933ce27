"""A command on a node over HTTP: for administrators, audited, and refused if the backend cannot run it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from hodei.backends.machine import OUTPUT_LIMIT, execute
from hodei.model.audit import COMMAND_LIMIT, AuditQuery, command_text
from hodei.model.backend import ExecResult
from hodei.model.errors import Unavailable
from unit.runtime.harness import until
from unit.server.live_app import LiveApp

COMMAND = {"command": ["uptime"], "timeout_s": 5}


@pytest.fixture
def live() -> Iterator[LiveApp]:
    app = LiveApp()
    yield app
    app.close()


def test_only_administrators_may_run_commands_and_each_try_is_audited(live: LiveApp):
    calls = []

    async def execute_on(node, command, timeout_ms):
        calls.append((node, command, timeout_ms))
        return ExecResult(3, b"up\n", b"hm\n")

    live.backend.execute_on = execute_on
    assert live.refused("ana", "POST", "/nodes/n1/execute", COMMAND) == "FORBIDDEN"
    assert calls == []
    response = live.call("root", "POST", "/nodes/n1/execute", COMMAND)
    assert response.status == 200
    assert response.json == {"node": "n1", "exit_code": 3, "stdout": "up\n", "stderr": "hm\n", "cut": False}
    assert calls == [("n1", ("uptime",), 5000)]
    rows = [row for row in live.store.audit(AuditQuery(target="n1")) if row.verb == "nodes.execute"]
    assert {(row.who, row.code) for row in rows} == {("ana", "FORBIDDEN"), ("root", "")}


def _rows(live: LiveApp, verb: str) -> list[tuple[str, str, str]]:
    """Oldest first: target, code, command."""
    rows = live.store.audit(AuditQuery(what=verb, after=0))
    return [(row.target, row.code, row.detail) for row in rows]


def _a_running_job(live: LiveApp) -> int:
    id = live.submit("ana")
    live.advance_runs()
    return id


@pytest.mark.parametrize("where", ["node", "job"])
def test_the_audit_row_is_stored_before_the_command_runs(live: LiveApp, where: str):
    target = "n1" if where == "node" else str(_a_running_job(live))
    seen = []

    async def run(*_):
        seen.extend(_rows(live, f"{where}s.execute"))
        return ExecResult(0)

    live.backend.execute = live.backend.execute_on = run
    body = {"command": ["sh", "-c", "kill -9 1", "API_TOKEN=s3cret", "--password=s3cret", "if=/dev/zero"]}
    assert live.call("root", "POST", f"/{where}s/{target}/execute", body).status == 200
    command = "sh -c 'kill -9 1' 'API_TOKEN=***' '--password=***' if=/dev/zero"
    assert seen == [(target, "", command)]
    assert _rows(live, f"{where}s.execute") == seen
    assert live.call("root", "GET", "/audit?what=execute").json["entries"][0]["detail"] == command


@pytest.mark.parametrize("where", ["node", "job"])
def test_no_command_runs_if_its_audit_row_cannot_be_stored(live: LiveApp, where: str, monkeypatch: pytest.MonkeyPatch):
    target = "n1" if where == "node" else str(_a_running_job(live))
    calls = []

    async def run(*args):
        calls.append(args)
        return ExecResult(0)

    def full(saves):
        raise Unavailable("the disk is full")

    live.backend.execute = live.backend.execute_on = run
    with monkeypatch.context() as patch:
        patch.setattr(live.store, "commit", full)
        response = live.call("root", "POST", f"/{where}s/{target}/execute", COMMAND)
    assert (response.status, calls) == (503, [])


def test_a_command_that_the_backend_refuses_has_a_second_audit_row(live: LiveApp):
    assert live.call("root", "POST", "/nodes/n1/execute", COMMAND).status == 501
    assert _rows(live, "nodes.execute") == [("n1", "", "uptime"), ("n1", "BACKEND_CANNOT", "uptime")]


def test_the_command_in_an_audit_row_is_cut():
    text = command_text(["x" * 10_000_000, *["y"] * 10_000])
    assert (len(text), text[-1]) == (COMMAND_LIMIT, "…")


def test_an_orphaned_run_is_stopped_only_by_its_owner_and_after_the_audit_row(live: LiveApp):
    id = _a_running_job(live)
    live.advance_runs()
    orders = []
    live.service.backend_manager.orphans[f"{id}.0.9"] = "fake"
    live.service.backend_manager.binder.act = lambda stops: orders.append((list(stops), _rows(live, "jobs.cancel")))
    assert live.refused("bo", "POST", f"/jobs/{id}/cancel") == "NOT_OWNER"
    assert orders == []
    assert live.call("ana", "POST", f"/jobs/{id}/cancel").status == 200
    [((stop,), rows)] = orders
    assert stop.run == f"{id}.0.9"
    assert [code for _, code, _ in rows] == ["NOT_OWNER", ""]


def test_a_backend_that_cannot_run_commands_gives_501_with_a_hint(live: LiveApp):
    response = live.call("root", "POST", "/nodes/n1/execute", COMMAND)
    assert (response.status, response.code) == (501, "BACKEND_CANNOT")
    assert "backend fake (fake) cannot run a command on a node" in response.json["message"]
    assert response.json["hint"]


def test_unknown_nodes_and_empty_commands_are_refused(live: LiveApp):
    assert live.call("root", "POST", "/nodes/n7/execute", COMMAND).status == 404
    assert live.call("root", "POST", "/nodes/n1/execute", {"command": []}).status == 422
    assert live.call("root", "POST", "/nodes/n1/execute", {"command": ["x"], "timeout_s": 301}).status == 422


def test_a_local_command_leaves_no_process_and_its_output_is_cut(tmp_path: Path):
    pid_file = tmp_path / "pid"

    async def main() -> None:
        child = f"sleep 300 & echo $! > {pid_file}; sleep 300"
        assert (await execute(["/bin/sh", "-c", child], 2)).exit_code is None
        pid = int(pid_file.read_text())
        await until(lambda: not _is_alive(pid))
        large = await execute(["/bin/sh", "-c", "head -c 3000000 /dev/zero"], 20)
        assert (large.exit_code, len(large.stdout), large.cut) == (0, OUTPUT_LIMIT, True)
        assert (await execute(["/no/such/program"], 20)).exit_code == 127
        assert (await execute(["/bin/sh", "-c", "kill -9 $$"], 20)).exit_code == 137

    asyncio.run(main())


def test_a_local_command_that_times_out_returns_its_output_so_far():
    done = asyncio.run(execute(["/bin/sh", "-c", "echo begin; echo err >&2; sleep 300"], 2))
    assert (done.exit_code, done.stdout, done.stderr) == (None, b"begin\n", b"err\n")


@pytest.mark.parametrize("prefix", ["", "setsid "])
def test_a_local_command_returns_at_its_end_and_its_children_are_killed(tmp_path: Path, prefix: str):
    pid_file = tmp_path / "pid"
    script = f"{prefix}sh -c 'echo $$ > {pid_file}; exec sleep 300' & while [ ! -s {pid_file} ]; do sleep 0.01; done; echo bg"
    done = asyncio.run(execute(["/bin/sh", "-c", script], 60))
    assert (done.exit_code, done.stdout) == (0, b"bg\n")
    assert not _is_alive(int(pid_file.read_text()))


def test_a_local_command_does_not_get_the_environment_of_the_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HODEI_TOKEN", "secret")
    names = {line.split(b"=")[0] for line in asyncio.run(execute(["/usr/bin/env"], 20)).stdout.splitlines()}
    assert names <= {b"PATH", b"LANG", b"TZ", b"HOME", b"USER", b"LOGNAME"}


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
