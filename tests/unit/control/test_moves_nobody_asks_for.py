"""What has moved since somebody last asked is kept for whoever takes others' places, and does not grow for ever."""

from __future__ import annotations

from hodei.control import state
from hodei.control.lifecycle.preemption import PreemptionPolicy
from unit.control.harness import a_harness


def test_where_nobody_preempts_moves_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(state, "_MOVES_KEPT", 10)
    harness = a_harness(1, preemption=PreemptionPolicy(enabled=False))
    for id in range(1, 100):
        harness.submit(id, cpu="1")
        harness.see(f"{id}.0.1", "running")
        harness.see(f"{id}.0.1", "succeeded", 0)
    assert len(harness.controller.cluster._moved) <= 10


def test_who_asks_after_that_learns_all_that_has_come_and_gone(monkeypatch):
    monkeypatch.setattr(state, "_MOVES_KEPT", 10)
    harness = a_harness(1, 1)
    harness.submit(1, 2, cpu="1", priority="low")
    harness.now_ms += 60_000
    harness.submit(900, cpu="2", priority="high")  # is refused, and looks
    harness.see("1.0.1", "running")
    harness.see("1.0.1", "succeeded", 0)
    for id in range(3, 60):
        harness.submit(id, cpu="1", priority="low")
        harness.see(f"{id}.0.1", "running")
        harness.see(f"{id}.0.1", "succeeded", 0)
    assert len(harness.controller.cluster._moved) <= 10
    harness.submit(60, cpu="1", priority="low")
    harness.now_ms += 60_000
    harness.submit(901, 902, cpu="1", priority="high")
    assert sorted(harness.stopped()) == ["2.0.1", "60.0.1"]
