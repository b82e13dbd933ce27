"""Which words of `hodei exec` and `hodei node exec` are options, and which are the command."""

from __future__ import annotations

import click
import pytest

from hodei.cli.exec import exec_in_job, exec_on_node

both = pytest.mark.parametrize("command", [exec_in_job, exec_on_node], ids=["exec", "node exec"])


def words(command: click.Command, *args: str) -> tuple[str, tuple[str, ...]]:
    """The timeout, and the command without its `--`."""
    # As the root has them: click keeps the help option of the first context that a command is seen in.
    params = command.make_context("exec", list(args), help_option_names=["-h", "--help"]).params
    found = params["command"]
    return params["timeout"], found[1:] if found[0] == "--" else found


@both
def test_options_may_stand_on_either_side_of_where_it_is_run(command):
    expected = ("2s", ("CMD", "--timeout", "9s"))
    assert words(command, "--timeout", "2s", "n1", "--", "CMD", "--timeout", "9s") == expected
    assert words(command, "n1", "--timeout", "2s", "--", "CMD", "--timeout", "9s") == expected
    assert words(command, "n1", "--timeout=2s", "--", "CMD", "--timeout", "9s") == expected


@both
def test_the_words_of_a_command_are_left_alone(command):
    assert words(command, "n1", "ps", "--timeout", "x", "--", "-a") == ("30s", ("ps", "--timeout", "x", "--", "-a"))
    assert words(command, "n1", "--", "--odd", "-x") == ("30s", ("--odd", "-x"))


@both
def test_an_option_that_is_not_known_is_no_program(command):
    with pytest.raises(click.NoSuchOption, match="--tiemout"):
        words(command, "n1", "--tiemout", "2s", "--", "CMD")
