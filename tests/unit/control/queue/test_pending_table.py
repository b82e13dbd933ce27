"""The columns of a line that promises starts, and those who wait beyond them."""

from __future__ import annotations

import random

import pytest

from hodei.control.queue import pending_table as rosters
from hodei.control.queue.pending_table import BIT, Gap, PendingTable
from hodei.engine.view import Gang, gang_of
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.resources import CPU, MEMORY
from hodei.plugins.batch import Batch


class Line:
    """Gangs of one member in a roster."""

    def __init__(self, **options) -> None:
        self.gangs: dict[int, Gang] = {}
        self.pending_table = PendingTable(Batch(**options), self.gangs)

    def come(
        self, id: int, *, at_ms: int | None = None, estimate_ms: int = 60_000, group: str = "", **request: int
    ) -> None:
        spec = JobSpec(
            name=f"job-{id}", tasks=(TaskSpec(request=request or {CPU: 1000}),), user="ann", estimate_ms=estimate_ms
        )
        gang = gang_of(id, spec, id * 1000 if at_ms is None else at_ms)
        gang.group = (group, tuple(request.items()))
        self.gangs[id] = gang
        self.pending_table.add(gang)

    def go(self, id: int) -> None:
        self.pending_table.remove(id)
        del self.gangs[id]

    def seated(self) -> list[int]:
        return [gang.id for gang in self.pending_table.in_order(0)]


def a_line(count: int, **options) -> Line:
    line = Line(**options)
    for id in range(1, count + 1):
        line.come(id)
    return line


def test_only_the_first_in_order_stand_in_the_columns_and_the_others_move_up():
    line = a_line(5, lookahead=2)
    assert line.seated() == [1, 2]
    line.go(1)
    assert line.seated() == [2, 3]
    assert len(line.pending_table) == 4


def test_a_new_gang_before_the_last_in_the_columns_takes_its_slot():
    line = a_line(3, lookahead=2, order="sjf")
    line.come(4, estimate_ms=1000)
    assert line.seated() == [4, 1]
    line.go(4)
    assert line.seated() == [1, 2]


def test_a_gang_removed_from_beyond_the_columns_is_skipped():
    line = a_line(4, lookahead=2)
    line.go(3)
    line.go(1)
    assert line.seated() == [2, 4]


def test_positions_continue_beyond_the_columns():
    line = a_line(5, lookahead=2)
    assert [line.pending_table.position(line.gangs[id], 0) for id in (1, 2, 3, 4, 5)] == [1, 2, 3, 4, 5]


def test_new_estimates_reorder_gangs_also_beyond_the_columns():
    line = a_line(4, lookahead=3, order="sjf")
    line.gangs[1].expected_ms = 90_000
    line.pending_table.reestimate({1: 90_000})
    assert line.seated() == [2, 3, 4]
    assert line.pending_table.position(line.gangs[1], 0) == 4


@pytest.mark.parametrize("count", [3, 60], ids=["few", "many"])
def test_more_known_of_all_at_once_is_as_one_by_one(count: int):
    draw = random.Random(count)
    together, apart = a_line(count, order="hodei"), a_line(count, order="hodei")
    known = {id: draw.choice([1000, 60_000, 3_600_000]) for id in together.gangs}
    together.pending_table.reestimate(known)
    for id, expected_ms in known.items():
        apart.pending_table.reestimate({id: expected_ms})
    assert together.seated() == apart.seated()


def test_where_the_order_changes_with_time_all_stand_in_the_columns():
    assert a_line(5, lookahead=2, order="wfp3").seated() != []
    assert len(a_line(5, lookahead=2, order="wfp3").seated()) == 5


def test_slots_are_reused_and_stay_consistent():
    line = a_line(6)
    for id in (1, 3, 6):
        line.go(id)
    line.pending_table.compact()
    assert line.pending_table.end == 3
    assert {line.pending_table.job_in(slot) for slot in range(3)} == {2, 4, 5}
    assert all(line.pending_table.job_in(slot) == id for id, slot in line.pending_table.slots.items())


def test_who_sleeps_is_woken_by_its_cure_and_by_no_other():
    line = a_line(3)
    line.pending_table.park(1, ["run_ended"], but=())
    assert not line.pending_table.wake(BIT["time"])
    assert not line.pending_table.active(line.pending_table.slots[1])
    assert line.pending_table.wake(BIT["run_ended"])
    assert line.pending_table.active(line.pending_table.slots[1])


def test_its_group_is_parked_but_for_shorter_gangs():
    line = Line()
    line.come(1, estimate_ms=5000)
    line.come(2, estimate_ms=9000)
    line.come(3, estimate_ms=1000)
    line.come(4, estimate_ms=9000, group="other")
    line.pending_table.park(1, ["run_ended"], but=())
    assert [line.pending_table.active(line.pending_table.slots[id]) for id in (1, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_few_are_judged_as_many_are(seed: int, monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(seed)
    line = Line()
    for id in range(1, draw.randint(2, 40)):
        line.come(id, estimate_ms=draw.choice([1, 5, 9]) * 1000, cpu=draw.randint(1, 9), memory=draw.randint(0, 3))
    for id in draw.sample(list(line.gangs), k=len(line.gangs) // 2):
        line.pending_table.park(id, draw.choice([["run_ended"], ["time"]]), but=())
    line.pending_table.wake(BIT["time"])
    amounts = [[draw.randint(1, 9), draw.randint(0, 3)] for _ in range(3)]
    elsewhere = draw.choice([None, amounts[2]])
    gap = draw.choice([None, Gap(5000, lambda: amounts[1], lambda: elsewhere)])
    assert list(line.pending_table.needs) == [CPU, MEMORY]
    few = line.pending_table.fitting(line.pending_table.all_but([1]), amounts[0], gap)
    monkeypatch.setattr(rosters, "_FEW_SLOTS", -1)
    assert list(line.pending_table.fitting(line.pending_table.all_but([1]), amounts[0], gap)) == list(few)
