"""A command on a node over HTTP: for administrators, on record, and refused in words where the backend cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from hodei.backends.here import OUTPUT_LIMIT, run_here
from hodei.model.audit import AuditQuery
from hodei.model.backend import Executed
from unit.runtime.living import until
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
        return Executed(3, b"up\n", b"hm\n")

    live.backend.execute_on = execute_on
    assert live.refused("ana", "POST", "/nodes/n1/execute", ASKED) == "FORBIDDEN"
    assert asked == []
    got = live.ask("root", "POST", "/nodes/n1/execute", ASKED)
    assert got.status == 200
    assert got.json == {"node": "n1", "exit_code": 3, "stdout": "up\n", "stderr": "hm\n", "cut": False}
    assert asked == [("n1", ("uptime",), 5000)]
    rows = [row for row in live.store.audit(AuditQuery(target="n1")) if row.verb == "nodes.execute"]
    assert {(row.who, row.code) for row in rows} == {("ana", "FORBIDDEN"), ("root", "")}


def test_a_backend_that_cannot_answers_501_with_what_to_do_instead(live: LiveApp):
    got = live.ask("root", "POST", "/nodes/n1/execute", ASKED)
    assert (got.status, got.code) == (501, "BACKEND_CANNOT")
    assert "backend obedient (obedient) cannot run a command on a node" in got.json["message"]
    assert got.json["hint"]


def test_unknown_nodes_and_commands_without_words_are_refused(live: LiveApp):
    assert live.ask("root", "POST", "/nodes/n7/execute", ASKED).status == 404
    assert live.ask("root", "POST", "/nodes/n1/execute", {"command": []}).status == 422
    assert live.ask("root", "POST", "/nodes/n1/execute", {"command": ["x"], "timeout_s": 301}).status == 422


def test_here_a_command_leaves_nothing_behind_and_what_it_says_is_cut(tmp_path: Path):
    pid_file = tmp_path / "pid"

    async def main() -> None:
        child = f"sleep 300 & echo $! > {pid_file}; sleep 300"
        assert (await run_here(["/bin/sh", "-c", child], 0.5)).exit_code is None
        pid = int(pid_file.read_text())
        await until(lambda: not _lives(pid))
        loud = await run_here(["/bin/sh", "-c", "head -c 3000000 /dev/zero"], 20)
        assert (loud.exit_code, len(loud.stdout), loud.cut) == (0, OUTPUT_LIMIT, True)
        assert (await run_here(["/no/such/program"], 5)).exit_code == 127
        assert (await run_here(["/bin/sh", "-c", "kill -9 $$"], 5)).exit_code == 137

    asyncio.run(main())


def test_here_a_command_does_not_get_the_servers_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HODEI_TOKEN", "secret")
    assert b"secret" not in asyncio.run(run_here(["/usr/bin/env"], 5)).stdout


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
