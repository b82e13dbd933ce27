"""The arrival model draws future jobs from past ones: same rate, same jobs, same order, from a random start."""

from __future__ import annotations

import random
from itertools import pairwise

from builders import NOW_MS, a_job, a_job_spec
from hodei.control.explain.forecasts import ArrivalModel

MINUTE = 60_000


def past_arrivals(count: int = 50, every_ms: int = MINUTE) -> ArrivalModel:
    """The last job arrived one interval ago."""
    arrivals = ArrivalModel()
    for number in range(count):
        at_ms = NOW_MS - (count - number) * every_ms
        arrivals.arrived(a_job(number + 1, spec=a_job_spec(name=f"j{number}"), submitted_ms=at_ms))
    return arrivals


def test_drawn_jobs_have_the_rate_and_the_order_of_past_ones():
    drawn = list(past_arrivals().draw(NOW_MS, 1000, 120, random.Random(1)))
    times = [at_ms for at_ms, _ in drawn]
    assert all(at_ms >= NOW_MS for at_ms in times)
    assert {after - before for before, after in pairwise(times)} == {MINUTE}
    numbers = [int(job.spec.name[1:]) for _, job in drawn]
    assert all(after == (before + 1) % 50 for before, after in pairwise(numbers))
    assert [job.id for _, job in drawn] == list(range(1000, 1120))


def test_the_start_is_drawn_by_the_given_random_generator():
    def first_name(seed: int) -> str:
        return next(past_arrivals().draw(NOW_MS, 1000, 1, random.Random(seed)))[1].spec.name

    assert first_name(1) == first_name(1)
    assert len({first_name(seed) for seed in range(20)}) > 5


def test_with_too_few_jobs_nothing_is_drawn():
    assert list(past_arrivals(5).draw(NOW_MS, 1000, 10, random.Random(1))) == []
    assert list(ArrivalModel().draw(NOW_MS, 1000, 10, random.Random(1))) == []


def test_a_job_is_recorded_once_and_without_its_deadline():
    arrivals = past_arrivals()
    duplicate = a_job(50, spec=a_job_spec(name="duplicate"), submitted_ms=NOW_MS)
    arrivals.arrived(duplicate)
    for number in range(100, 130):
        arrivals.arrived(a_job(number, spec=a_job_spec(name="late", deadline_ms=NOW_MS), submitted_ms=NOW_MS))
    drawn = [job.spec for _, job in arrivals.draw(NOW_MS + 1, 1000, 200, random.Random(1))]
    assert "duplicate" not in {spec.name for spec in drawn}
    assert {spec.deadline_ms for spec in drawn} == {0}
