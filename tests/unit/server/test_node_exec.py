"""A command on a node over HTTP: for administrators, audited, and refused where the backend cannot."""

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

ASKED = {"command": ["uptime"], "timeout_s": 5}


@pytest.fixture
def live() -> Iterator[LiveApp]:
    made = LiveApp()
    yield made
    made.close()


def test_only_administrators_may_and_each_try_is_in_the_audit(live: LiveApp):
    asked = []

    async def execute_on(node, command, timeout_ms):
        asked.append((node, command, timeout_ms))
        return ExecResult(3, b"up\n", b"hm\n")

    live.backend.execute_on = execute_on
    assert live.refused("ana", "POST", "/nodes/n1/execute", ASKED) == "FORBIDDEN"
    assert asked == []
    got = live.ask("root", "POST", "/nodes/n1/execute", ASKED)
    assert got.status == 200
    assert got.json == {"node": "n1", "exit_code": 3, "stdout": "up\n", "stderr": "hm\n", "cut": False}
    assert asked == [("n1", ("uptime",), 5000)]
    rows = [row for row in live.store.audit(AuditQuery(target="n1")) if row.verb == "nodes.execute"]
    assert {(row.who, row.code) for row in rows} == {("ana", "FORBIDDEN"), ("root", "")}


def _rows(live: LiveApp, verb: str) -> list[tuple[str, str, str]]:
    """Oldest first: target, code, command."""
    rows = live.store.audit(AuditQuery(what=verb, after=0))
    return [(row.target, row.code, row.detail) for row in rows]


def _a_running_job(live: LiveApp) -> int:
    id = live.submit("ana")
    live.runs_go_on()
    return id


@pytest.mark.parametrize("where", ["node", "job"])
def test_the_row_with_the_command_is_stored_before_it_is_run(live: LiveApp, where: str):
    target = "n1" if where == "node" else str(_a_running_job(live))
    seen = []

    async def run(*_):
        seen.extend(_rows(live, f"{where}s.execute"))
        return ExecResult(0)

    live.backend.execute = live.backend.execute_on = run
    asked = {"command": ["sh", "-c", "kill -9 1", "API_TOKEN=s3cret", "--password=s3cret", "if=/dev/zero"]}
    assert live.ask("root", "POST", f"/{where}s/{target}/execute", asked).status == 200
    said = "sh -c 'kill -9 1' 'API_TOKEN=***' '--password=***' if=/dev/zero"
    assert seen == [(target, "", said)]
    assert _rows(live, f"{where}s.execute") == seen
    assert live.ask("root", "GET", "/audit?what=execute").json["entries"][0]["detail"] == said


@pytest.mark.parametrize("where", ["node", "job"])
def test_nothing_is_run_if_its_row_cannot_be_stored(live: LiveApp, where: str, monkeypatch: pytest.MonkeyPatch):
    target = "n1" if where == "node" else str(_a_running_job(live))
    asked = []

    async def run(*args):
        asked.append(args)
        return ExecResult(0)

    def full(saves):
        raise Unavailable("the disk is full")

    live.backend.execute = live.backend.execute_on = run
    with monkeypatch.context() as broken:
        broken.setattr(live.store, "commit", full)
        got = live.ask("root", "POST", f"/{where}s/{target}/execute", ASKED)
    assert (got.status, asked) == (503, [])


def test_a_command_that_the_backend_then_refuses_has_a_second_row(live: LiveApp):
    assert live.ask("root", "POST", "/nodes/n1/execute", ASKED).status == 501
    assert _rows(live, "nodes.execute") == [("n1", "", "uptime"), ("n1", "BACKEND_CANNOT", "uptime")]


def test_the_command_in_a_row_is_of_bounded_length():
    text = command_text(["x" * 10_000_000, *["y"] * 10_000])
    assert (len(text), text[-1]) == (COMMAND_LIMIT, "…")


def test_a_run_that_is_not_known_any_more_is_stopped_only_by_its_owner_and_after_the_row(live: LiveApp):
    id = _a_running_job(live)
    live.runs_go_on()
    orders = []
    live.service.backend_manager.orphans[f"{id}.0.9"] = "fake"
    live.service.backend_manager.binder.act = lambda stops: orders.append((list(stops), _rows(live, "jobs.cancel")))
    assert live.refused("bo", "POST", f"/jobs/{id}/cancel") == "NOT_OWNER"
    assert orders == []
    assert live.ask("ana", "POST", f"/jobs/{id}/cancel").status == 200
    [((stop,), rows)] = orders
    assert stop.run == f"{id}.0.9"
    assert [code for _, code, _ in rows] == ["NOT_OWNER", ""]


def test_a_backend_that_cannot_answers_501_with_what_to_do_instead(live: LiveApp):
    got = live.ask("root", "POST", "/nodes/n1/execute", ASKED)
    assert (got.status, got.code) == (501, "BACKEND_CANNOT")
    assert "backend fake (fake) cannot run a command on a node" in got.json["message"]
    assert got.json["hint"]


def test_unknown_nodes_and_commands_without_words_are_refused(live: LiveApp):
    assert live.ask("root", "POST", "/nodes/n7/execute", ASKED).status == 404
    assert live.ask("root", "POST", "/nodes/n1/execute", {"command": []}).status == 422
    assert live.ask("root", "POST", "/nodes/n1/execute", {"command": ["x"], "timeout_s": 301}).status == 422


def test_here_a_command_leaves_nothing_behind_and_what_it_says_is_cut(tmp_path: Path):
    pid_file = tmp_path / "pid"

    async def main() -> None:
        child = f"sleep 300 & echo $! > {pid_file}; sleep 300"
        assert (await execute(["/bin/sh", "-c", child], 2)).exit_code is None
        pid = int(pid_file.read_text())
        await until(lambda: not _lifecycle(pid))
        loud = await execute(["/bin/sh", "-c", "head -c 3000000 /dev/zero"], 20)
        assert (loud.exit_code, len(loud.stdout), loud.cut) == (0, OUTPUT_LIMIT, True)
        assert (await execute(["/no/such/program"], 20)).exit_code == 127
        assert (await execute(["/bin/sh", "-c", "kill -9 $$"], 20)).exit_code == 137

    asyncio.run(main())


def test_here_a_command_that_is_not_over_in_time_has_said_what_it_said():
    done = asyncio.run(execute(["/bin/sh", "-c", "echo begin; echo err >&2; sleep 300"], 2))
    assert (done.exit_code, done.stdout, done.stderr) == (None, b"begin\n", b"err\n")


@pytest.mark.parametrize("how", ["", "setsid "])
def test_here_the_answer_comes_when_the_command_is_over_and_what_it_left_is_ended(tmp_path: Path, how: str):
    pid_file = tmp_path / "pid"
    script = (
        f"{how}sh -c 'echo $$ > {pid_file}; exec sleep 300' & while [ ! -s {pid_file} ]; do sleep 0.01; done; echo bg"
    )
    done = asyncio.run(execute(["/bin/sh", "-c", script], 60))
    assert (done.exit_code, done.stdout) == (0, b"bg\n")
    assert not _lifecycle(int(pid_file.read_text()))


def test_here_a_command_does_not_get_the_servers_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HODEI_TOKEN", "secret")
    names = {line.split(b"=")[0] for line in asyncio.run(execute(["/usr/bin/env"], 20)).stdout.splitlines()}
    assert names <= {b"PATH", b"LANG", b"TZ", b"HOME", b"USER", b"LOGNAME"}


def _lifecycle(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
