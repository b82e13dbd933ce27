"""The bundled agent, and what `hodei host add` makes of its arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hodei import __version__
from hodei.agent.bundle import bundle, write_bundle
from hodei.cli.ssh_install import Installation
from hodei.model.errors import InvalidInput


def test_the_bundle_runs_alone_and_is_always_the_same(tmp_path):
    path = tmp_path / "agent.pyz"
    assert write_bundle(path) == len(bundle()) == path.stat().st_size
    assert path.read_bytes() == bundle()
    run = [sys.executable, "-I", "-S", str(path)]
    done = subprocess.run([*run, "join", "--version"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == __version__
    wrong = subprocess.run(
        [*run, "http://10.0.0.7", "--home", str(tmp_path / "home"), "--token-file", "-"],
        input="hode_x", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (wrong.returncode, "plain HTTP" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["https://h", "--label", "x"], "not KEY=VALUE"),
        (["https://h", "--taint", "x"], "not KEY=VALUE:EFFECT"),
        (["https://h", "--offline-ok", "long"], "not a duration"),
        (["https://h"], "a new host needs a token"),
        ([], "the address of the server is missing"),
    ],
    ids=["label", "taint", "duration", "no token", "no address"],
)
def test_mistakes_are_named_before_anything_is_sent(tmp_path, monkeypatch, capsys, options, problem):
    from hodei.agent.join import join

    monkeypatch.delenv("HODEI_ENROL_TOKEN", raising=False)
    assert join([*options, "--home", str(tmp_path / "home")]) == 2
    assert problem in capsys.readouterr().err


def test_a_target_is_a_user_and_a_machine():
    plan = Installation("ops@Lab_7.example", "https://server", label=("a=b",), offline_ok="4h", ca="ca.pem")
    assert (plan.user, plan.machine, plan.node) == ("ops", "Lab_7.example", "lab-7.example")
    assert plan.join_words() == [
        "--home", ".hodei-agent", "--label", "a=b", "--offline-ok", "4h", "--ca", ".hodei-agent/server-ca.pem",
    ]  # fmt: skip
    for wrong in ("-oProxyCommand=x", "a b", "u@", "$(id)@h", ""):
        with pytest.raises(InvalidInput):
            Installation(wrong, "https://server")
