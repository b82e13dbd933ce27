"""First commands and mistyped ones, on a real terminal (a pty)."""

from __future__ import annotations

import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
from fcntl import ioctl

import pytest

from hodei.backends.registry import settings_of
from hodei.cli import serve
from hodei.cli.output import Column, _fit_widths, shorten, table
from unit.cli.stub import job

API = "/api/v1"


@pytest.mark.parametrize(
    "words", [[], ["job"], ["node"], ["backend"], ["cron"], ["reservation"], ["config"]], ids=" ".join
)
def test_a_bare_command_prints_its_help(hodei, words: list[str]):
    result = hodei(*words)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.startswith(f"Usage: {' '.join(['hodei', *words])}")
    assert result.stdout.count("\n") > 5
    assert "\\x0a" not in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jbo"], "did you mean 'job'?"),
        (["squeue"], "did you mean 'jobs'?"),
        (["delete", "3"], "did you mean 'cancel'?"),
        (["job", "shw", "3"], "did you mean 'hodei job show'?"),
        (["node", "ls"], "did you mean 'hodei node list'?"),
        (["backend", "add", "x"], "did you mean 'hodei backend create'?"),
        (["node", "cancel", "3"], "did you mean 'hodei cancel'?"),
        (["cron", "zzz"], "there are: "),
        (["node", "drian", "a"], "did you mean 'hodei node drain'?"),
    ],
)
def test_an_unknown_command_gets_a_suggestion(hodei, words: list[str], message: str):
    result = hodei(*words)
    assert result.exit_code == 2
    assert message in result.stderr


def at_a_terminal(*args: str, columns: int = 80, **env: str) -> str:
    """What the command writes to a terminal of that width."""
    controller, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-m", "hodei.cli.main", *args], stdin=terminal, stdout=terminal, stderr=terminal,
        env={**environment, "TERM": "xterm", **env},
    ) as command:  # fmt: skip
        os.close(terminal)
        out = b""
        try:
            while data := os.read(controller, 65536):
                out += data
        except OSError:  # the terminal side is closed
            pass
        command.wait(30)
    os.close(controller)
    return out.decode().replace("\r\n", "\n")


@pytest.mark.real
def test_errors_are_coloured_at_a_terminal_that_wants_colours():
    output = at_a_terminal("frobnicate")
    assert output.startswith("\x1b[31m\x1b[1merror: \x1b[0m")
    assert "\x1b[36m  next: \x1b[0m" in output
    for plain in (at_a_terminal("frobnicate", NO_COLOR="1"), at_a_terminal("frobnicate", TERM="dumb")):
        assert "\x1b" not in plain
        assert plain.startswith("error: ")


@pytest.mark.real
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_table_is_no_wider_than_the_terminal(stub, columns: int):
    long = [
        job(n, "pending", name=f"a-rather-long-name-of-an-experiment-{n}", project="department-of-long-words",
            reason="no node has 400 GiB of memory free, and this text continues for a while", nodes=["node-with-a-name"])
        for n in (1, 22)
    ]  # fmt: skip
    stub.on("GET", f"{API}/jobs", {"jobs": long, "next_after": 0})
    lines = at_a_terminal("jobs", columns=columns, NO_COLOR="1").splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= columns
    assert [line.split()[0] for line in lines] == ["ID", "1", "22"]
    assert all("pending" in line for line in lines[1:])
    wide = at_a_terminal("jobs", "-o", "wide", columns=columns, NO_COLOR="1")
    assert "continues for a while" in wide


def test_the_widest_columns_are_cut_and_identifiers_are_not():
    assert _fit_widths([4, 30, 20], 40, [True, False, False]) == [4, 18, 18]
    assert _fit_widths([30, 8], 20, [True, False]) == [30, 4]
    assert _fit_widths([4, 5], 40, [False, False]) == [4, 5]
    assert (shorten("日本語テキスト", 7), shorten("abc", 3), shorten("abcd", 3)) == ("日本語…", "abc", "ab…")
    columns = [Column("NAME", lambda row: row)]
    assert table(["x" * 500], columns).splitlines()[1] == "x" * 500  # not cut without a terminal


@pytest.mark.parametrize("command", ["bench", "replay", "sim", "test", "up"])
def test_a_command_without_its_extra_names_what_to_install(hodei, monkeypatch, command: str):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "numpy" else object())
    monkeypatch.setattr(serve, "run_program", lambda *_: pytest.fail("it was started"))
    result = hodei(command)
    assert result.exit_code == 2
    assert "pip install 'hodei[server]'" in result.stderr
    assert "'server'" in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n\ncommand: [echo]\nmemroy: 1Gi\n", "FILE:4: memroy: unknown key 'memroy'; did you mean 'memory'?"),
        ("command: [echo]\n---\n# two\ncommand: [echo]\ncpus: 1\n", "FILE:5: cpus: unknown key"),
        ("- command: [echo]\n- command: [echo]\n  cpus: 1\n", "FILE:3: cpus: unknown key"),
        ('{\n"jobs": [{"command": ["x"]},\n{"command": ["x"],\n"cpus": 1}]}', "FILE:4: cpus: unknown key"),
        ('{"command": ["x"]}\n\n{"command": ["x"], "cpus": 1}\n', "FILE:3: cpus: unknown key"),
        ("command: [echo]\ncpu: 1\nhealth:\n  command: [x]\n  evry: 5s\n", "FILE:5: health.evry: unknown key"),
        ("command: [echo]\nafter:\n  - x\n  - {}\n", "FILE:4: after[1]: "),
        ("command: [echo]\ncpu: -1\n", "FILE:2: cpu: "),
        ("cpu: 1\n", "FILE: "),
    ],
    ids=[
        "flat",
        "second document",
        "list",
        "jobs",
        "lines of json",
        "deep",
        "in a list",
        "a value",
        "no line",
    ],
)
def test_a_mistake_is_shown_with_its_line(hodei, stub, tmp_path, text: str, message: str):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    result = hodei("submit", str(file))
    assert result.exit_code != 0
    assert message.replace("FILE", str(file)) in result.stderr
    assert not stub.requests


def test_yaml_aliases_do_not_slow_down_the_search_for_lines(hodei, stub, tmp_path):
    levels = "".join(f"  l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9) if n else 'x'}]\n" for n in range(12))
    file = tmp_path / "job.yaml"
    file.write_text(f"command: [echo]\nx:\n{levels}")
    assert hodei("submit", str(file)).exit_code != 0


def test_exec_takes_names_and_durations(hodei, stub):
    stub.on("GET", f"{API}/jobs", {"jobs": [job(7, "running", name="train")], "next_after": 0})
    stub.on(
        "POST", f"{API}/jobs/7/execute", {"run": "7.0.1", "exit_code": 3, "stdout": "out\n", "stderr": "", "cut": False}
    )
    for duration, seconds in (("2m", 120), ("45", 45), ("1500ms", 2)):
        result = hodei("exec", "--timeout", duration, "train", "--", "ls", "--all")
        assert (result.exit_code, result.stdout) == (3, "out\n")
        sent = stub.sent("POST", f"{API}/jobs/7/execute")[-1].json()
        assert (sent["command"], sent["timeout_s"]) == (["ls", "--all"], seconds)
    for wrong in ("6m", "0s", "soon"):
        assert hodei("exec", "--timeout", wrong, "train", "--", "ls").exit_code in (1, 2)
    assert hodei("exec", "last", "--", "ls").exit_code == 3


def test_the_docker_example_in_the_help_is_valid(stub, hodei):
    shown = hodei("backend", "create", "--help").stdout
    (words,) = (shlex.split(line) for line in shown.splitlines() if "--kind docker" in line)
    hodei(*words[1:])
    sent = stub.sent("POST", f"{API}/backends")[0].json()
    assert settings_of(sent["name"], {"kind": sent["kind"], **sent["settings"]})
