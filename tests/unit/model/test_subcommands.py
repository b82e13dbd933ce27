"""`hodei sim`, `hodei bench` and `hodei kube` at first use: called alone they print help, a slip gets a suggestion."""

from __future__ import annotations

import pytest

from hodei.bench.__main__ import main as bench
from hodei.kube.scheduler.commands import main as kube
from hodei.sim.__main__ import main as sim

PROGRAMS = {"sim": (sim, "repaly", "replay"), "bench": (bench, "enigne", "engine"), "kube": (kube, "wyh", "why")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_called_alone_it_prints_its_help(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[name][0]([])
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    assert said.out.startswith(f"usage: hodei {name}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_word_that_is_no_subcommand_gets_a_suggestion(name: str, capsys: pytest.CaptureFixture[str]):
    main, slip, meant = PROGRAMS[name]
    for word, told in ((slip, f"{slip!r} (did you mean {meant!r}?)"), ("qqqq", "'qqqq'; there are: ")):
        with pytest.raises(SystemExit) as ended:
            main([word])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert f"error: no such command: {told}" in said
        assert said.endswith(f"\n  next: hodei {name} --help\n[USAGE]\n")


def test_other_mistakes_are_told_as_they_are(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        sim(["replay", "x.swf", "--policy", "easy", "--estimates", "guessed"])
    assert "error: argument --estimates: invalid choice: 'guessed'" in capsys.readouterr().err
