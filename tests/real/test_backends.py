"""Backends of a real server through the command line: added, disabled, kept over a restart, removed; commands beside runs.

Both backends here are agents on this machine; what Docker, Slurm and others do is shown by their own tests.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_host import agent_pid
from real.house import House, until

pytestmark = pytest.mark.real


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """Its further agents are ended too; each would leave by itself half a minute after its server."""
    made = House(tmp_path / "home")
    try:
        yield made
    finally:
        if made.server is not None and made.server.poll() is None:
            made.stop()
        for lock in (made.home / "backends").glob("*/lock"):
            if pid := agent_pid(lock.parent):
                os.kill(pid, signal.SIGTERM)
        made.close()


def state_of(house: House, name: str) -> str:
    return next((b.state for b in house.client().backends() if b.name == name), "")


def test_a_backend_is_added_used_disabled_and_removed_and_the_audit_knows(house: House):
    house.up()
    house.ok("backend", "add", "second", "--kind", "local", "--set", "region=eu", "--set", "cost=1.5")
    until(lambda: state_of(house, "second") == "ok" or None, "the second backend to be up")
    id = house.submit("/bin/sh", "-c", "echo $HODEI_NODE", backend="second")
    assert house.ended(id)[0].job.state == "succeeded"
    assert house.log_of(id) == "second\n"

    house.ok("backend", "disable", "second")
    house.stop()
    house.up()
    assert state_of(house, "second") == "disabled"
    waits = house.submit("/bin/true", backend="second")
    said = house.ok("why", str(waits)).out
    assert "BACKEND_DISABLED" in said
    assert "backend second is disabled since" in said
    house.ok("backend", "enable", "second")
    assert house.ended(waits)[0].job.state == "succeeded"

    house.ok("backend", "remove", "second")
    assert state_of(house, "second") == ""
    assert "no backend 'second'" in house.hodei("backend", "show", "second").err
    verbs = [(entry.verb, entry.target) for entry in house.client().audit(what="backends")]
    assert verbs[::-1] == [
        ("backends.create", "second"),
        ("backends.disable", "second"),
        ("backends.enable", "second"),
        ("backends.delete", "second"),
    ]


def test_a_backend_of_the_file_has_its_settings_and_a_wrong_one_stops_the_start(house: House):
    house.configure('[backends.other]\nkind = "local"\nregion = "eu"\nlabels = {tier = "b"}\n').up()
    node = next(node for node in house.client().nodes() if node.name == "other")
    assert node.labels["tier"] == "b"
    assert "configuration file" in house.hodei("backend", "remove", "other").err
    house.stop()
    house.configure('[backends.other]\nkind = "locl"\n')
    said = house.hodei("up", "--port", "0")
    assert said.code != 0
    assert "did you mean 'local'?" in said.err + said.out


def test_a_command_is_run_beside_a_job_and_its_code_comes_back(house: House):
    house.up()
    id = house.submit("/bin/sh", "-c", "echo ready; sleep 300", env={"MINE": "yes"})
    until(lambda: "ready" in house.log_of(id) or None, "the job to have begun")
    done = house.hodei("exec", str(id), "--", "/bin/sh", "-c", 'echo "$MINE $1"; echo no >&2; exit 3', "sh", "$(id)")
    assert (done.code, done.out, done.err) == (3, "yes $(id)\n", "no\n")
    assert house.hodei("exec", "--timeout", "1", str(id), "--", "/bin/sleep", "300").code == 124
    nobody = house.hodei("exec", "--member", "3", str(id), "--", "/bin/true")
    assert (nobody.code, f"there is no member 3 in job {id}" in nobody.err) == (3, True)
    house.ok("cancel", str(id))
    house.ended(id)
    assert "NOT_RUNNING" in house.hodei("exec", str(id), "--", "/bin/true").err


def test_an_administrator_runs_a_command_on_a_node_and_it_is_in_the_audit(house: House):
    house.up()
    (node,) = [node.name for node in house.client().nodes()]
    done = house.hodei(
        "node", "exec", node, "--", "/bin/sh", "-c", 'echo "here $1"; echo no >&2; exit 3', "sh", "$(id)"
    )
    assert (done.code, done.out, done.err) == (3, "here $(id)\n", "no\n")
    assert house.hodei("node", "exec", "--timeout", "1", node, "--", "/bin/sleep", "300").code == 124
    assert "NOT_FOUND" in house.hodei("node", "exec", "nowhere", "--", "/bin/true").err
    assert f"nodes.execute {node}" in " ".join(house.ok("audit").out.split())
