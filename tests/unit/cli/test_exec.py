"""`hodei exec` and `hodei node exec`: which arguments are options, and how results are printed."""

from __future__ import annotations

import json

import click
import pytest

from hodei.cli.exec import exec_in_job, exec_on_node

both = pytest.mark.parametrize("command", [exec_in_job, exec_on_node], ids=["exec", "node exec"])


def parse(command: click.Command, *args: str) -> tuple[str, tuple[str, ...]]:
    """The timeout, and the command without its `--`."""
    # With the names of the root command: click keeps the help option of the first context that a command sees.
    params = command.make_context("exec", list(args), help_option_names=["-h", "--help"]).params
    found = params["command"]
    return params["timeout"], found[1:] if found[0] == "--" else found


@both
def test_options_are_parsed_before_and_after_the_target(command):
    expected = ("2s", ("CMD", "--timeout", "9s"))
    assert parse(command, "--timeout", "2s", "n1", "--", "CMD", "--timeout", "9s") == expected
    assert parse(command, "n1", "--timeout", "2s", "--", "CMD", "--timeout", "9s") == expected
    assert parse(command, "n1", "--timeout=2s", "--", "CMD", "--timeout", "9s") == expected


@both
def test_the_arguments_of_a_command_are_not_parsed(command):
    assert parse(command, "n1", "ps", "--timeout", "x", "--", "-a") == ("30s", ("ps", "--timeout", "x", "--", "-a"))
    assert parse(command, "n1", "--", "--odd", "-x") == ("30s", ("--odd", "-x"))


@both
def test_an_unknown_option_is_not_taken_for_a_program(command):
    with pytest.raises(click.NoSuchOption, match="--tiemout"):
        parse(command, "n1", "--tiemout", "2s", "--", "CMD")


@pytest.mark.parametrize(
    ("path", "words"), [("jobs/7", ["exec", "7"]), ("nodes/n1", ["node", "exec", "n1"])], ids=["exec", "node exec"]
)
def test_the_result_is_passed_through_or_one_object(hodei, stub, path, words):
    target = {"run": "7.0.1"} if "jobs" in path else {"node": "n1"}
    result = {**target, "exit_code": 3, "stdout": "out\n", "stderr": "err\n", "cut": False}
    stub.on("POST", f"/api/v1/{path}/execute", result)
    result_as_text = hodei(*words, "--", "true")
    assert (result_as_text.exit_code, result_as_text.stdout, result_as_text.stderr) == (3, "out\n", "err\n")
    result_as_json = hodei(*words, "-o", "json", "--", "true")
    assert (result_as_json.exit_code, json.loads(result_as_json.stdout)) == (3, result)
