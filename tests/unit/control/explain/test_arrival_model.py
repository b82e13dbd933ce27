"""Who may come, drawn from who came: the same rate, the same jobs, in the same order, from any moment of the past on."""

from __future__ import annotations

import random
from itertools import pairwise

from builders import NOW_MS, a_job, a_job_spec
from hodei.control.explain.forecasts import ArrivalModel

MINUTE = 60_000


def some(count: int = 50, every_ms: int = MINUTE) -> ArrivalModel:
    """The last came one interval ago."""
    arrivals = ArrivalModel()
    for number in range(count):
        at_ms = NOW_MS - (count - number) * every_ms
        arrivals.arrived(a_job(number + 1, spec=a_job_spec(name=f"j{number}"), submitted_ms=at_ms))
    return arrivals


def test_they_come_as_often_as_before_and_in_the_same_order():
    drawn = list(some().draw(NOW_MS, 1000, 120, random.Random(1)))
    times = [at_ms for at_ms, _ in drawn]
    assert all(at_ms >= NOW_MS for at_ms in times)
    assert {after - before for before, after in pairwise(times)} == {MINUTE}
    numbers = [int(job.spec.name[1:]) for _, job in drawn]
    assert all(after == (before + 1) % 50 for before, after in pairwise(numbers))
    assert [job.id for _, job in drawn] == list(range(1000, 1120))


def test_the_moment_is_drawn_by_the_chance_that_is_given():
    def firsts(seed: int) -> str:
        return next(some().draw(NOW_MS, 1000, 1, random.Random(seed)))[1].spec.name

    assert firsts(1) == firsts(1)
    assert len({firsts(seed) for seed in range(20)}) > 5


def test_a_few_tell_nothing():
    assert list(some(5).draw(NOW_MS, 1000, 10, random.Random(1))) == []
    assert list(ArrivalModel().draw(NOW_MS, 1000, 10, random.Random(1))) == []


def test_a_job_is_learned_once_and_without_its_deadline():
    arrivals = some()
    again = a_job(50, spec=a_job_spec(name="again"), submitted_ms=NOW_MS)
    arrivals.arrived(again)
    for number in range(100, 130):
        arrivals.arrived(a_job(number, spec=a_job_spec(name="late", deadline_ms=NOW_MS), submitted_ms=NOW_MS))
    drawn = [job.spec for _, job in arrivals.draw(NOW_MS + 1, 1000, 200, random.Random(1))]
    assert "again" not in {spec.name for spec in drawn}
    assert {spec.deadline_ms for spec in drawn} == {0}
