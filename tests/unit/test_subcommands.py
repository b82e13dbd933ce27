"""`hodei sim`, `hodei bench` and `hodei kube` at first use: without arguments they print help, and a mistyped command gets a suggestion."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main as bench
from hodei.kube.scheduler.commands import main as kube
from hodei.sim.__main__ import main as sim

PROGRAMS = {"sim": (sim, "repaly", "replay"), "bench": (bench, "enigne", "engine"), "kube": (kube, "wyh", "why")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_without_arguments_prints_its_help(name: str, capsys: pytest.CaptureFixture[str]):
    assert PROGRAMS[name][0]([]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out.startswith(f"Usage: hodei {name}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unknown_subcommand_gets_a_suggestion(name: str, capsys: pytest.CaptureFixture[str]):
    main, mistyped, suggested = PROGRAMS[name]
    for word, message in (
        (mistyped, f"{mistyped!r}; did you mean 'hodei {name} {suggested}'?"),
        ("qqqq", "'qqqq'; there are: "),
    ):
        assert main([word]) == 2
        stderr = capsys.readouterr().err
        assert f"error: no such command: {message}" in stderr
        assert stderr.endswith(f"\n  next: hodei {name} --help\n[USAGE]\n")


def test_other_mistakes_are_reported_with_the_option(capsys: pytest.CaptureFixture[str]):
    assert sim(["replay", "x.swf", "--policy", "easy", "--estimates", "guessed"]) == 2
    assert "error: Invalid value for '--estimates': 'guessed' is not one of" in capsys.readouterr().err
