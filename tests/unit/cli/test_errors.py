"""Errors: message, location, hint and code; and the documented exit codes."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from hodei.cli import errors
from hodei.client import Denied, ServerUnreachable, WaitTimedOut
from hodei.model.errors import Conflict, HodeiError, InvalidInput, NotFound, QueueFull, Unavailable
from unit.cli.stub import Answer, problem

API = "/api/v1"
DOCS = Path(__file__).parents[3] / "docs/reference/exit-codes.md"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HodeiError("x"), 1),
        (InvalidInput("x"), 1),
        (QueueFull("x"), 1),
        (Unavailable("x"), 1),
        (click.UsageError("x"), 2),
        (errors.UsageProblem("x"), 2),
        (NotFound("x"), 3),
        (Denied("x"), 4),
        (WaitTimedOut("x"), 6),
        (ServerUnreachable("x"), 7),
        (Conflict("x"), 8),
        (RuntimeError("x"), 1),
        (click.Abort(), 130),
    ],
)
def test_every_error_has_its_exit_code(error: Exception, code: int):
    assert errors.report(error) == code


def test_the_reference_lists_every_exit_code():
    text = DOCS.read_text()
    for code in (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 130, 141):
        assert f"| {code} |" in text


@pytest.mark.parametrize(
    "command",
    [["hodei.cli.main", "schema"], ["hodei.cli.main", "sim", "policies"], ["hodei.sim.scenario", "examples/scenarios"]],
)
def test_a_closed_pipe_has_its_exit_code_and_no_message(command: list[str]):
    """For commands in this process and for programs; the read end is closed before the command starts."""
    import os
    import subprocess
    import sys

    read, write = os.pipe()
    os.close(read)
    args = [sys.executable, "-m", *command]
    done = subprocess.run(args, stdout=write, stderr=subprocess.PIPE, cwd=DOCS.parents[2], check=False)
    wrong = subprocess.run([*args, "--wrong"], stdout=write, stderr=write, cwd=DOCS.parents[2], check=False)
    os.close(write)
    assert (done.returncode, done.stderr, wrong.returncode) == (141, b"", 141)


def test_an_error_has_a_message_problems_a_hint_and_a_code(hodei, stub):
    answer = problem(422, "INVALID", "2 mistakes", "see the schema", [("jobs[0].cpu", "negative"), ("", "no name")])
    stub.on("GET", f"{API}/nodes", answer)
    result = hodei("nodes")
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "error: 2 mistakes",
        "  jobs[0].cpu: negative",
        "  no name",
        "  next: see the schema",
        "[INVALID]",
    ]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (problem(404, "NOT_FOUND", "there is no job 9"), 3),
        (problem(401, "UNAUTHORIZED", "this needs a token"), 4),
        (problem(403, "FORBIDDEN", "not allowed"), 4),
        (problem(409, "CONFLICT", "it has ended"), 8),
        (problem(503, "NOT_READY", "starting"), 1),
        (Answer(b"<html>", 500), 1),
    ],
    ids=["not found", "no token", "forbidden", "conflict", "not ready", "not from hodei"],
)
def test_responses_become_exit_codes(hodei, stub, answer: Answer, code: int):
    stub.on("GET", f"{API}/jobs/9", answer)
    assert hodei("job", "show", "9").exit_code == code


def test_without_a_server_the_exit_code_is_7_and_the_hint_helps(hodei):
    result = hodei("jobs")
    assert result.exit_code == 7
    assert "next: start one with: hodei up" in result.stderr
    assert result.stderr.endswith("[UNREACHABLE]\n")


def test_usage_errors_name_the_help(hodei):
    result = hodei("jobs", "--frobnicate")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0].startswith("error: No such option")
    assert "next: hodei jobs --help" in result.stderr


def test_a_bug_is_one_line_unless_debugging(hodei, stub, monkeypatch, capsys):
    stub.on("GET", f"{API}/nodes", {"nodes": []})
    monkeypatch.setattr("hodei.cli.nodes.emit_list", lambda *a, **k: 1 / 0)
    result = hodei("nodes")
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    assert "[BUG]" in result.stderr
    monkeypatch.setenv("HODEI_DEBUG", "1")
    assert "Traceback" in hodei("nodes").stderr


def test_control_characters_in_messages_are_escaped(hodei, stub):
    stub.on("GET", f"{API}/nodes", problem(409, "CONFLICT", "evil \x1b[2J", "do \x07"))
    assert "\x1b" not in hodei("nodes").stderr
    assert r"evil \x1b[2J" in hodei("nodes").stderr


def test_a_single_problem_is_shown_once(capsys):
    text = "line 4: nodes[1].name: there are two nodes 'a'"
    problem = ("line 4: nodes[1].name", "there are two nodes 'a'")
    errors.report(InvalidInput(f"/etc/config.toml: {text}", problems=(problem,)))
    assert capsys.readouterr().err == f"error: /etc/config.toml: {text}\n[INVALID]\n"
