"""The availability profile: what is free when, with start reservations and reservations."""

from __future__ import annotations

import pytest

from builders import a_node, amounts
from hodei.engine.availability import AvailabilityProfile, StartReservation
from hodei.engine.nodes import Table
from hodei.engine.view import Member
from hodei.model.job import JobSpec, TaskSpec
from hodei.model.reservation import Reservation
from hodei.model.resources import Resources

FOUR, TWO, ONE = amounts(4), amounts(2), amounts(1)


def _member(request: Resources) -> Member:
    task = TaskSpec(request=request)
    return Member(JobSpec("job", (task,)), task)


class SingleNode:
    """One node of 4 cores with its table and its availability profile."""

    def __init__(self) -> None:
        self.table = Table()
        self.table.put(a_node("n1", 4))
        self.table.settle()
        self.availability = AvailabilityProfile(self.table)

    def add_run(self, run: str, request: dict, start: int, estimate: int, project: str = "p") -> None:
        self.table.place_by_name("n1", _member(request))
        self.availability.started(run, "n1", request, start, estimate, project)

    def reserve(self, start: int, end: int, request: dict = FOUR, project: str = "ours", name: str = "b") -> None:
        self.availability.add_reservation(Reservation(name, project, start, end, (("n1", request),)))

    def first_conflict(self, request: dict, until: int, project: str = "p", now: int = 0) -> bool:
        return self.availability.first_conflict("n1", request, now, until, 99, project) is not None

    def earliest(self, request: dict, duration: int, project: str = "p", now: int = 0) -> int | None:
        return self.availability.earliest("n1", request, duration, now, 99, project)


@pytest.fixture
def node() -> SingleNode:
    return SingleNode()


@pytest.mark.parametrize(
    ("until", "project", "first_conflict"),
    [
        pytest.param(100, "p", False, id="ends when the window starts"),
        pytest.param(101, "p", True, id="ends a moment later"),
        pytest.param(101, "ours", False, id="a run of the project itself"),
    ],
)
def test_a_run_that_does_not_end_in_time_may_not_start_on_reserved_capacity(node, until, project, first_conflict):
    node.reserve(100, 200)
    assert node.first_conflict(ONE, until, project) == first_conflict


def test_capacity_outside_a_partial_reservation_has_no_time_limit(node):
    node.reserve(100, 200, TWO)
    assert not node.first_conflict(TWO, 1000)
    assert node.first_conflict(amounts(3), 1000)


def test_capacity_that_the_project_already_holds_is_not_reserved_twice(node):
    node.reserve(0, 200, TWO)
    node.add_run("1.0.1", TWO, 0, 150, "ours")
    assert not node.first_conflict(TWO, 1000), "the project already holds its 2; 2 are left for others"
    assert node.first_conflict(amounts(3), 1000)


def test_capacity_stays_reserved_when_a_run_of_the_project_ends(node):
    node.reserve(0, 200, TWO)
    node.add_run("1.0.1", TWO, 0, 150, "ours")
    assert node.earliest(amounts(3), 10) == 200
    assert node.earliest(TWO, 10) == 0


def test_the_earliest_time_skips_gaps_that_are_too_short(node):
    node.reserve(100, 200)
    assert node.earliest(ONE, 100) == 0
    assert node.earliest(ONE, 101) == 200
    node.reserve(250, 300, name="c")
    assert node.earliest(ONE, 60) == 0
    assert node.earliest(ONE, 101) == 300


def test_capacity_of_a_hypothetically_removed_run_is_counted_once(node):
    node.add_run("1.0.1", TWO, 0, 100)
    node.add_run("2.0.1", TWO, 0, 500)
    node.availability.add_start_reservation(StartReservation(5, 100, 300, (("n1", TWO),)))
    node.table.release_by_name("n1", _member(TWO))  # a trial without run 1; the profile still has it
    assert node.first_conflict(TWO, 200), "at 100 two cores are free, and they are reserved"


def test_an_overdue_start_reservation_is_reported_once(node):
    node.availability.add_start_reservation(StartReservation(5, 100, 300, (("n1", TWO),)))
    assert node.availability.overdue(100) == []
    assert [start_reservation.job for start_reservation in node.availability.overdue(101)] == [5]
    assert node.availability.overdue(102) == []


def test_a_moved_or_removed_start_reservation_is_not_overdue(node):
    node.availability.add_start_reservation(StartReservation(5, 100, 300, (("n1", TWO),)))
    node.availability.add_start_reservation(StartReservation(5, 90, 300, (("n1", TWO),)))
    assert [start_reservation.start_ms for start_reservation in node.availability.overdue(200)] == [90]
    node.availability.add_start_reservation(StartReservation(6, 250, 300, (("n1", TWO),)))
    node.availability.remove_start_reservation(6)
    assert node.availability.overdue(1000) == []
