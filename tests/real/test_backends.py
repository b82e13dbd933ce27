"""Backends of a real server through the command line: created, disabled, kept over a restart, deleted; and `exec`.

Both backends here are agents on this machine. Docker, Slurm and Kubernetes have their own tests.
"""

from __future__ import annotations

import pytest

from real.installation import Installation, until

pytestmark = pytest.mark.real


def state_of(installation: Installation, name: str) -> str:
    return next((b.state for b in installation.client().backends() if b.name == name), "")


def test_a_backend_is_created_used_disabled_and_deleted_and_audited(installation: Installation):
    installation.up()
    installation.ok("backend", "create", "second", "--kind", "local", "--set", "region=eu", "--set", "cost=1.5")
    until(lambda: state_of(installation, "second") == "ok", "the second backend is ok")
    id = installation.submit("/bin/sh", "-c", "echo $HODEI_NODE", backend="second")
    assert installation.ended(id)[0].job.state == "succeeded"
    assert installation.log_of(id) == "second\n"

    installation.ok("backend", "disable", "second")
    installation.stop()
    installation.up()
    assert state_of(installation, "second") == "disabled"
    pending = installation.submit("/bin/true", backend="second")
    why = installation.ok("why", str(pending)).out
    assert "BACKEND_DISABLED" in why
    assert "backend second is disabled since" in why
    installation.ok("backend", "enable", "second")
    assert installation.ended(pending)[0].job.state == "succeeded"

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


def test_a_configured_backend_has_its_settings_and_an_unknown_kind_prevents_the_start(installation: Installation):
    installation.configure('[backends.other]\nkind = "local"\nregion = "eu"\nlabels = {tier = "b"}\n').up()
    node = next(node for node in installation.client().nodes() if node.name == "other")
    assert node.labels["tier"] == "b"
    assert "configuration file" in installation.hodei("backend", "delete", "other").err
    installation.stop()
    installation.configure('[backends.other]\nkind = "locl"\n')
    refused = installation.hodei("up", "--port", "0")
    assert refused.code != 0
    assert "did you mean 'local'?" in refused.err + refused.out


def test_exec_runs_a_command_in_a_job_and_returns_its_exit_code(installation: Installation):
    installation.up()
    id = installation.submit("/bin/sh", "-c", "echo ready; sleep 300", env={"MINE": "yes"})
    until(lambda: "ready" in installation.log_of(id), "the job has started")
    done = installation.hodei(
        "exec", str(id), "--", "/bin/sh", "-c", 'echo "$MINE $1"; echo no >&2; exit 3', "sh", "$(id)"
    )
    assert (done.code, done.out, done.err) == (3, "yes $(id)\n", "no\n")
    assert installation.hodei("exec", "--timeout", "1", str(id), "--", "/bin/sleep", "300").code == 124
    refused = installation.hodei("exec", "--member", "3", str(id), "--", "/bin/true")
    assert (refused.code, f"there is no member 3 in job {id}" in refused.err) == (3, True)
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
