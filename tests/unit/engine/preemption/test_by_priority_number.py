"""Preemption search by priority number: with few distinct numbers, with thousands, and when that changes."""

from __future__ import annotations

import pytest

from builders import NOW_MS, a_job_spec, a_node
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.preemption.search import Preemptions
from hodei.engine.preemption.victims import STOPPING, Place, VictimCandidate, VictimIndex
from hodei.engine.view import Gang, View, gang_of
from hodei.plugins.registry import build_profile

VIEW = View(NOW_MS)


class Rows:
    """One node of one core per priority, with a running job of that priority."""

    def __init__(self, *priorities: int) -> None:
        self.table = Table(a_node(f"n{i:04}", 1, "64Gi") for i in range(len(priorities)))
        self.table.settle()
        self.profile = build_profile("default")
        self.engine = Engine(self.table, {"default": self.profile})
        self.victim_index = VictimIndex(self.table, "number")
        self.preemptions = Preemptions(self.engine, self.victim_index)
        for id, priority in enumerate(priorities):
            self.put(id, priority)

    def gang(self, id: int, priority: int, **fields: object) -> Gang:
        gang = gang_of(id, a_job_spec(cpu="1", memory="0", priority=priority, **fields), NOW_MS)
        self.profile.admit(gang)
        return gang

    def put(self, id: int, priority: int, **fields: object) -> None:
        gang, name = self.gang(id, priority), f"n{id:04}"
        grant = self.table.place_by_name(name, gang.members[0])
        self.victim_index.put(
            id, [VictimCandidate(id, gang.job, (Place(name, gang.members[0], grant),), NOW_MS - 1000, **fields)]
        )

    def remove(self, id: int) -> None:
        for place in self.victim_index.of_job[id][0].places:
            self.table.release_by_name(*place)
        self.victim_index.remove(id)

    def victims(self, priority: int, **fields: object) -> list[int] | None:
        found = self.preemptions.find(self.gang(9999, priority, **fields), VIEW)
        return None if found is None else sorted(victim.id for victim in found.victims)


def test_the_rank_of_a_victim_candidate_is_its_priority_number():
    rows = Rows(-5, 0, 2_000_001_000)
    assert [rows.victim_index.of_job[id][0].rank for id in range(3)] == [-5, 0, 2_000_001_000]
    assert rows.victim_index.ranks_below(2_000_001_000) == [-5, 0]


@pytest.mark.parametrize("step", [1, 1_000_003], ids=["adjacent", "far apart"])
def test_of_two_thousand_priority_numbers_the_lowest_is_preempted(step):
    numbers = [((i * 7919) % 2000 - 1000) * step for i in range(2000)]
    rows = Rows(*numbers)
    assert rows.victim_index.without_columns
    order = sorted(range(2000), key=lambda id: numbers[id])
    for turn, priority in enumerate((5 * step, 2 * step, 999 * step, -990 * step)):
        assert rows.victims(priority) == [order[turn]]
        rows.remove(order[turn])
        rows.put(order[turn], 10**9)  # a higher job takes the core
    assert rows.victims(-996 * step) is None
    assert rows.victims(numbers[order[4]]) is None
    assert rows.victims(numbers[order[4]] + 1) == [order[4]]
    assert rows.victims(0, count=3) == sorted(order[4:7])


def test_the_number_of_distinct_priorities_changes_no_answer():
    rows = Rows(*range(60))
    assert rows.victims(100) == [0]
    for id in range(50):
        rows.remove(id)
        rows.put(id, 1000 + id)
    assert not rows.victim_index.without_columns
    for id in range(50):
        rows.remove(id)
        rows.put(id, 2000 + 100 * id)
        assert rows.victims(100) == [50]
    rows = Rows(*range(100))
    assert rows.victim_index.without_columns
    assert rows.victims(1000) == [0]
    for id in range(80):
        rows.remove(id)
        rows.put(id, 5000)
        assert rows.victims(1000) == [id + 1]
    assert not rows.victim_index.without_columns
    assert rows.victims(1000, count=2) == [80, 81]


def test_columns_of_unused_priority_numbers_are_dropped():
    rows = Rows(0)
    for priority in range(1, 500):
        rows.remove(0)
        rows.put(0, priority)
        rows.victims(10_000)
    assert set(rows.victim_index._held) - {STOPPING} == {499}
    assert len(rows.victim_index._ranks) == 1


def test_preemptors_above_the_same_victims_share_cached_candidates():
    rows = Rows(0, 10)
    for priority in range(11, 400):
        assert rows.victims(priority) == [0]
    assert len(rows.preemptions._candidates._kept) == 1


def test_a_gang_without_lower_priority_victims_is_not_searched(monkeypatch):
    rows = Rows(0, 0)
    monkeypatch.setattr(rows.preemptions._candidates, "of", lambda *args: pytest.fail("candidates were searched"))
    assert rows.victims(0) is None
    assert rows.victims(-3) is None


def test_a_later_search_may_succeed_while_the_only_victim_is_protected():
    rows = Rows(5)
    rows.remove(0)
    rows.put(0, 0, protected_until_ms=NOW_MS + 5000)
    assert rows.victims(3) is None
    assert rows.preemptions.retry_later
    assert rows.victims(0) is None
    assert not rows.preemptions.retry_later


def test_a_later_search_may_succeed_also_with_many_priority_numbers():
    rows = Rows(*range(100, 300))
    rows.remove(0)
    rows.put(0, 0, protected_until_ms=NOW_MS + 5000)
    assert rows.victim_index.without_columns
    assert rows.victims(3) is None
    assert rows.preemptions.retry_later
