"""`hodei node exec` and `hodei exec` on a real server: always audited, and ended with the server or at their timeout."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path

import pytest

from agent_host import alive
from real.installation import DEADLINE_S, Installation, pids_in, until

pytestmark = pytest.mark.real
EXECUTED = "SELECT target, code, detail FROM audit WHERE verb = 'nodes.execute'"


def only_node(installation: Installation) -> str:
    (node,) = [node.name for node in installation.client().nodes()]
    return node


def execute(installation: Installation, node: str, *command: str, timeout_s: int = 30) -> None:
    """Run a command that kills the server before it responds."""
    body = json.dumps({"command": command, "timeout_s": timeout_s}).encode()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        installation.request("POST", f"/api/v1/nodes/{node}/execute", body)


def test_a_command_that_kills_the_server_is_in_the_audit(installation: Installation) -> None:
    installation.up()
    node = only_node(installation)
    assert installation.server is not None
    script = f"kill -9 {installation.server.pid}"
    execute(installation, node, "sh", "-c", script)
    assert installation.rows(EXECUTED) == [(node, "", f"sh -c '{script}'")]


def test_a_command_ends_with_a_server_that_is_killed(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    node = only_node(installation)
    pids, kill = tmp_path / "pids", f"kill -9 {installation.server.pid if installation.server else 0}"
    # A child in another process group, one in another session, and the command itself.
    script = f"""
        sh -c 'echo $$ >> {pids}; exec sleep 779' &
        setsid sh -c 'echo $$ >> {pids}; exec sleep 779' &
        echo $$ >> {pids}
        while [ $(wc -l < {pids}) -lt 3 ]; do sleep 0.02; done
        {kill}
        sleep 779"""
    execute(installation, node, "sh", "-c", script, timeout_s=300)
    for pid in pids_in(pids, 3):
        until(lambda pid=pid: not alive(pid), f"process {pid} has exited")  # type: ignore[misc]


def test_a_command_ends_at_its_timeout_although_the_server_hangs(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    node = only_node(installation)
    assert installation.server is not None
    pids = tmp_path / "pids"
    command = installation.begin(
        "node", "exec", "--timeout", "5", node, "--", "sh", "-c", f"echo $$ > {pids}; sleep 779"
    )
    (pid,) = pids_in(pids, 1)
    installation.server.send_signal(signal.SIGSTOP)
    try:
        until(lambda: not alive(pid), "the command has exited")
    finally:
        installation.server.send_signal(signal.SIGCONT)
    assert command.wait(DEADLINE_S) == 124


def test_a_command_that_times_out_shows_its_output(installation: Installation) -> None:
    installation.up()
    node = only_node(installation)
    script = "echo begin; echo err >&2; sleep 300"
    done = installation.hodei("node", "exec", "--timeout", "3s", node, "--", "sh", "-c", script)
    assert (done.code, done.out) == (124, "begin\n")
    assert done.err == "err\nhodei: the command did not end within 3s\n"
    id = installation.submit("sleep", "600")
    installation.until_state(id, "running")
    in_job = installation.hodei("exec", "--timeout", "3s", str(id), "--", "sh", "-c", script)
    assert (in_job.code, in_job.out, in_job.err) == (124, done.out, done.err)
    # A background process of the command is killed and not waited for.
    left = installation.hodei("exec", "--timeout", "2m", str(id), "--", "sh", "-c", "sleep 779 & echo $!")
    assert left.code == 0
    until(lambda: not alive(int(left.out)), "the background process has exited")
    installation.ok("cancel", str(id))
    installation.ended(id)
