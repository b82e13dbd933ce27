"""The pending table of a backfill queue: gangs in its columns, gangs beyond the lookahead, parking and fitting."""

from __future__ import annotations

import random

import pytest

from hodei.control.queue import pending_table as module
from hodei.control.queue.pending_table import BIT, Gap, PendingTable
from hodei.engine.view import Gang, gang_of
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.resources import CPU, MEMORY
from hodei.plugins.batch import Batch


class Pending:
    """A pending table with gangs of one member."""

    def __init__(self, **options) -> None:
        self.gangs: dict[int, Gang] = {}
        self.table = PendingTable(Batch(**options), self.gangs)

    def add(
        self, id: int, *, at_ms: int | None = None, estimate_ms: int = 60_000, group: str = "", **request: int
    ) -> None:
        spec = JobSpec(
            name=f"job-{id}", tasks=(TaskSpec(request=request or {CPU: 1000}),), user="ann", estimate_ms=estimate_ms
        )
        gang = gang_of(id, spec, id * 1000 if at_ms is None else at_ms)
        gang.group = (group, tuple(request.items()))
        self.gangs[id] = gang
        self.table.add(gang)

    def remove(self, id: int) -> None:
        self.table.remove(id)
        del self.gangs[id]

    def in_columns(self) -> list[int]:
        return [gang.id for gang in self.table.in_order(0)]


def a_table(count: int, **options) -> Pending:
    pending = Pending(**options)
    for id in range(1, count + 1):
        pending.add(id)
    return pending


def test_only_the_first_gangs_are_in_the_columns_and_the_others_move_up():
    pending = a_table(5, lookahead=2)
    assert pending.in_columns() == [1, 2]
    pending.remove(1)
    assert pending.in_columns() == [2, 3]
    assert len(pending.table) == 4


def test_a_new_gang_before_the_last_in_the_columns_takes_its_slot():
    pending = a_table(3, lookahead=2, order="sjf")
    pending.add(4, estimate_ms=1000)
    assert pending.in_columns() == [4, 1]
    pending.remove(4)
    assert pending.in_columns() == [1, 2]


def test_a_gang_removed_from_beyond_the_columns_is_skipped():
    pending = a_table(4, lookahead=2)
    pending.remove(3)
    pending.remove(1)
    assert pending.in_columns() == [2, 4]


def test_positions_continue_beyond_the_columns():
    pending = a_table(5, lookahead=2)
    assert [pending.table.position(pending.gangs[id], 0) for id in (1, 2, 3, 4, 5)] == [1, 2, 3, 4, 5]


def test_new_estimates_reorder_gangs_also_beyond_the_columns():
    pending = a_table(4, lookahead=3, order="sjf")
    pending.gangs[1].expected_ms = 90_000
    pending.table.reestimate({1: 90_000})
    assert pending.in_columns() == [2, 3, 4]
    assert pending.table.position(pending.gangs[1], 0) == 4


@pytest.mark.parametrize("count", [3, 60], ids=["few", "many"])
def test_new_estimates_at_once_or_one_by_one_give_the_same_order(count: int):
    draw = random.Random(count)
    at_once, one_by_one = a_table(count, order="hodei"), a_table(count, order="hodei")
    known = {id: draw.choice([1000, 60_000, 3_600_000]) for id in at_once.gangs}
    at_once.table.reestimate(known)
    for id, expected_ms in known.items():
        one_by_one.table.reestimate({id: expected_ms})
    assert at_once.in_columns() == one_by_one.in_columns()


def test_all_gangs_are_in_the_columns_if_the_order_changes_with_time():
    assert a_table(5, lookahead=2, order="wfp3").in_columns() != []
    assert len(a_table(5, lookahead=2, order="wfp3").in_columns()) == 5


def test_slots_are_reused_and_stay_consistent():
    pending = a_table(6)
    for id in (1, 3, 6):
        pending.remove(id)
    pending.table.compact()
    assert pending.table.end == 3
    assert {pending.table.job_in(slot) for slot in range(3)} == {2, 4, 5}
    assert all(pending.table.job_in(slot) == id for id, slot in pending.table.slots.items())


def test_a_parked_gang_is_retried_by_its_own_trigger_only():
    pending = a_table(3)
    pending.table.park(1, ["run_ended"], but=())
    assert not pending.table.wake(BIT["time"])
    assert not pending.table.active(pending.table.slots[1])
    assert pending.table.wake(BIT["run_ended"])
    assert pending.table.active(pending.table.slots[1])


def test_a_group_is_parked_except_for_shorter_gangs():
    pending = Pending()
    pending.add(1, estimate_ms=5000)
    pending.add(2, estimate_ms=9000)
    pending.add(3, estimate_ms=1000)
    pending.add(4, estimate_ms=9000, group="other")
    pending.table.park(1, ["run_ended"], but=())
    assert [pending.table.active(pending.table.slots[id]) for id in (1, 2, 3, 4)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_few_and_many_slots_are_filtered_alike(seed: int, monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(seed)
    pending = Pending()
    for id in range(1, draw.randint(2, 40)):
        pending.add(id, estimate_ms=draw.choice([1, 5, 9]) * 1000, cpu=draw.randint(1, 9), memory=draw.randint(0, 3))
    for id in draw.sample(list(pending.gangs), k=len(pending.gangs) // 2):
        pending.table.park(id, draw.choice([["run_ended"], ["time"]]), but=())
    pending.table.wake(BIT["time"])
    amounts = [[draw.randint(1, 9), draw.randint(0, 3)] for _ in range(3)]
    elsewhere = draw.choice([None, amounts[2]])
    gap = draw.choice([None, Gap(5000, lambda: amounts[1], lambda: elsewhere)])
    assert list(pending.table.needs) == [CPU, MEMORY]
    few = pending.table.fitting(pending.table.all_but([1]), amounts[0], gap)
    monkeypatch.setattr(module, "_FEW_SLOTS", -1)
    assert list(pending.table.fitting(pending.table.all_but([1]), amounts[0], gap)) == list(few)
