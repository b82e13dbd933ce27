"""`hodei sim`, `hodei bench` and `hodei kube` at first use: called alone they print help, a slip gets a suggestion."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main as bench
from hodei.kube.scheduler.commands import main as kube
from hodei.sim.__main__ import main as sim

PROGRAMS = {"sim": (sim, "repaly", "replay"), "bench": (bench, "enigne", "engine"), "kube": (kube, "wyh", "why")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_called_alone_it_prints_its_help(name: str, capsys: pytest.CaptureFixture[str]):
    assert PROGRAMS[name][0]([]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith(f"Usage: hodei {name}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_word_that_is_no_subcommand_gets_a_suggestion(name: str, capsys: pytest.CaptureFixture[str]):
    main, slip, meant = PROGRAMS[name]
    for word, told in ((slip, f"{slip!r}; did you mean 'hodei {name} {meant}'?"), ("qqqq", "'qqqq'; there are: ")):
        assert main([word]) == 2
        said = capsys.readouterr().err
        assert f"error: no such command: {told}" in said
        assert said.endswith(f"\n  next: hodei {name} --help\n[USAGE]\n")


def test_other_mistakes_are_reported_with_the_option(capsys: pytest.CaptureFixture[str]):
    assert sim(["replay", "x.swf", "--policy", "easy", "--estimates", "guessed"]) == 2
    assert "error: Invalid value for '--estimates': 'guessed' is not one of" in capsys.readouterr().err
