"""Backends of a real server through the command line: added, disabled, kept over a restart, removed; commands beside runs.

Both backends here are agents on this machine; what Docker, Slurm and others do is shown by their own tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_host import agent_pid
from real.installation import Installation, until

pytestmark = pytest.mark.real


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    """Its further agents are ended too; each would leave by itself half a minute after its server."""
    made = Installation(tmp_path / "home")
    try:
        yield made
    finally:
        if made.server is not None and made.server.poll() is None:
            made.stop()
        for lock in (made.home / "backends").glob("*/lock"):
            if pid := agent_pid(lock.parent):
                with contextlib.suppress(ProcessLookupError):  # it left by itself since we looked
                    os.kill(pid, signal.SIGTERM)
        made.close()


def state_of(installation: Installation, name: str) -> str:
    return next((b.state for b in installation.client().backends() if b.name == name), "")


def test_a_backend_is_added_used_disabled_and_removed_and_audited(installation: Installation):
    installation.up()
    installation.ok("backend", "create", "second", "--kind", "local", "--set", "region=eu", "--set", "cost=1.5")
    until(lambda: state_of(installation, "second") == "ok" or None, "the second backend to be up")
    id = installation.submit("/bin/sh", "-c", "echo $HODEI_NODE", backend="second")
    assert installation.ended(id)[0].job.state == "succeeded"
    assert installation.log_of(id) == "second\n"

    installation.ok("backend", "disable", "second")
    installation.stop()
    installation.up()
    assert state_of(installation, "second") == "disabled"
    waits = installation.submit("/bin/true", backend="second")
    said = installation.ok("why", str(waits)).out
    assert "BACKEND_DISABLED" in said
    assert "backend second is disabled since" in said
    installation.ok("backend", "enable", "second")
    assert installation.ended(waits)[0].job.state == "succeeded"

    installation.ok("backend", "delete", "second")
    assert state_of(installation, "second") == ""
    assert "no backend 'second'" in installation.hodei("backend", "show", "second").err
    verbs = [(entry.verb, entry.target) for entry in installation.client().audit(what="backends")]
    assert verbs[::-1] == [
        ("backends.create", "second"),
        ("backends.disable", "second"),
        ("backends.enable", "second"),
        ("backends.delete", "second"),
    ]


def test_a_configured_backend_has_its_settings_and_a_wrong_one_prevents_the_start(installation: Installation):
    installation.configure('[backends.other]\nkind = "local"\nregion = "eu"\nlabels = {tier = "b"}\n').up()
    node = next(node for node in installation.client().nodes() if node.name == "other")
    assert node.labels["tier"] == "b"
    assert "configuration file" in installation.hodei("backend", "delete", "other").err
    installation.stop()
    installation.configure('[backends.other]\nkind = "locl"\n')
    said = installation.hodei("up", "--port", "0")
    assert said.code != 0
    assert "did you mean 'local'?" in said.err + said.out


def test_exec_runs_a_command_in_a_job_and_returns_its_exit_code(installation: Installation):
    installation.up()
    id = installation.submit("/bin/sh", "-c", "echo ready; sleep 300", env={"MINE": "yes"})
    until(lambda: "ready" in installation.log_of(id) or None, "the job to have begun")
    done = installation.hodei(
        "exec", str(id), "--", "/bin/sh", "-c", 'echo "$MINE $1"; echo no >&2; exit 3', "sh", "$(id)"
    )
    assert (done.code, done.out, done.err) == (3, "yes $(id)\n", "no\n")
    assert installation.hodei("exec", "--timeout", "1", str(id), "--", "/bin/sleep", "300").code == 124
    nobody = installation.hodei("exec", "--member", "3", str(id), "--", "/bin/true")
    assert (nobody.code, f"there is no member 3 in job {id}" in nobody.err) == (3, True)
    installation.ok("cancel", str(id))
    installation.ended(id)
    assert "NOT_RUNNING" in installation.hodei("exec", str(id), "--", "/bin/true").err


def test_a_command_on_a_node_by_an_administrator_is_audited(installation: Installation):
    installation.up()
    (node,) = [node.name for node in installation.client().nodes()]
    done = installation.hodei(
        "node", "exec", node, "--", "/bin/sh", "-c", 'echo "here $1"; echo no >&2; exit 3', "sh", "$(id)"
    )
    assert (done.code, done.out, done.err) == (3, "here $(id)\n", "no\n")
    assert installation.hodei("node", "exec", "--timeout", "1", node, "--", "/bin/sleep", "300").code == 124
    assert "NOT_FOUND" in installation.hodei("node", "exec", "nowhere", "--", "/bin/true").err
    assert f"nodes.execute {node}" in " ".join(installation.ok("audit").out.split())
