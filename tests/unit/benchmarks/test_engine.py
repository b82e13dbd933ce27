"""`hodei bench engine`: its output, not the speed of this machine."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main


def test_without_placements_there_is_a_note_and_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--nodes", "2", "--jobs", "5", "--shapes", "1", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["placed"] == 0
    assert not {"decisions_per_s", "p50_ms", "kube_scheduler_floor"} & set(found)
    assert found["note"].startswith("nothing was placed, so there is no rate: the 1,000 members")


def test_with_placements_there_is_a_rate_and_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--nodes", "40", "--jobs", "5", "--shapes", "1", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["placed"] == 5
    assert {"decisions_per_s", "p50_ms", "kube_scheduler_floor"} <= set(found)
    assert "note" not in found
