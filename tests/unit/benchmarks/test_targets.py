"""`hodei bench targets` measures every target. Times depend on the machine, so only figures that do not are asserted."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.fragmentation import MIXES
from benchmarks.targets import PARTS, Figure, engine, phases, pods, simulation


def test_a_figure_passes_below_its_limit_or_from_its_minimum() -> None:
    assert Figure("wait", 2, 1.99, "s", "x").passed
    assert not Figure("wait", 2, 2, "s", "x").passed
    assert Figure("use", 85, 85, "%", "x", least=True).passed
    assert not Figure("use", 85, 84.9, "%", "x", least=True).passed


@pytest.mark.slow
def test_pods_phases_simulation_and_fragmentation_give_a_figure_for_each_target() -> None:
    found = {figure.name: figure for part in (pods, phases, simulation, engine) for figure in part(10)}
    assert len(found) == 13
    assert all(figure.figure > 0 for figure in found.values())
    # Simulated time and a fixed seed: the same on every machine.
    assert found["utilisation"].figure > 80
    assert found["jobs that were scheduled"].figure == 100
    assert found["fragmentation of a full cluster"].note.count(",") == len(MIXES) - 1


def test_the_exit_code_is_1_if_a_figure_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(divide: int) -> list[Figure]:
        return [Figure("a", 1, 2.5, "s", "fake")]

    monkeypatch.setitem(PARTS, "fake", slow)
    assert main(["targets", "--only", "fake"]) == 1
    assert "FAIL" in capsys.readouterr().out
    assert main(["targets", "--only", "fake", "-o", "json"]) == 1
    [row] = json.loads(capsys.readouterr().out)["targets"]
    assert (row["figure"], row["pass"]) == (2.5, False)
    monkeypatch.setitem(PARTS, "fake", lambda divide: [Figure("a", 1, 0.5, "s", "fake")])
    assert main(["targets", "--only", "fake"]) == 0
    with pytest.raises(SystemExit, match="there is no kind of measurement 'x'"):
        main(["targets", "--only", "x"])


@pytest.mark.real
@pytest.mark.slow
def test_the_parts_with_a_real_server_report_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    main(["targets", "--quick", "--only", "server,processes", "-o", "json"])
    rows = {row["target"]: row for row in json.loads(capsys.readouterr().out)["targets"]}
    assert rows["jobs that ended well"]["figure"] == 100
    assert rows["jobs at once"]["pass"]
    assert rows["preemptions that succeed"]["figure"] == 100
