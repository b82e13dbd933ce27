"""Backfilling by the real scheduler against the reference simulator, job by job, on many small workloads."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from property.examples import PERCENT
from sim.machines import pool, run, waits_s
from sim.reference import Job, conservative, easy

Simulator = Callable[[list[Job], int], dict[int, int]]


def by_estimate(job: Job) -> tuple[float, ...]:
    return job.estimate, job.submit, job.id


def by_area(job: Job) -> tuple[float, ...]:
    return job.estimate * job.procs, job.submit, job.id


REFERENCE: dict[str, Simulator] = {
    "easy": easy,
    "easy-sjbf": lambda jobs, procs: easy(jobs, procs, fill=by_estimate),
    "sjf": lambda jobs, procs: easy(jobs, procs, order=by_estimate),
    "saf": lambda jobs, procs: easy(jobs, procs, order=by_area),
    "conservative": conservative,
}


def small_workload(seed: int, most: int = 14) -> tuple[list[Job], int]:
    """Many events at the same second, and 40% exact estimates: there the rules differ."""
    draw = random.Random(seed)
    procs, submit, jobs = draw.choice([4, 8, 10]), 0, []
    for id in range(1, draw.randint(2, most) + 1):
        submit += draw.choice([0, 0, 1, 1, 2, 3, 5])
        estimate = draw.choice([1, 2, 3, 4, 5, 8, 10, 20])
        run_s = estimate if draw.random() < 0.4 else draw.randint(1, estimate)
        jobs.append(Job(id, submit, run_s, estimate, draw.randint(1, procs)))
    return jobs, procs


def differing(name: str, seeds: range, most: int = 14) -> list[int]:
    out = []
    for seed in seeds:
        jobs, procs = small_workload(seed, most)
        if waits_s(run(pool(jobs, procs), name)) != REFERENCE[name](jobs, procs):
            out.append(seed)
    return out


@pytest.mark.parametrize("name", REFERENCE)
def test_every_wait_equals_that_of_the_reference_simulator(name: str):
    assert differing(name, range(150)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCE)
def test_every_wait_of_longer_workloads_equals_that_of_the_reference_simulator(name: str):
    assert differing(name, range(150, 150 + 2350 * PERCENT // 100)) == []
    assert differing(name, range(20 * PERCENT // 100), most=200) == []


KNOWN = {
    "an early end and an expected one at the same second, in order of their starts": (
        "easy",
        8,
        [(1, 1, 20, 20, 7), (2, 1, 1, 1, 5), (3, 3, 1, 4, 3), (5, 9, 1, 1, 8), (7, 16, 2, 2, 2)],
        {1: 0, 2: 20, 3: 18, 5: 15, 7: 6},
    ),
    "a former head does not block the new head": (
        "sjf",
        8,
        [(8, 16, 5, 5, 1), (9, 16, 1, 10, 8), (10, 21, 8, 8, 6)],
        {8: 0, 9: 13, 10: 0},
    ),
    "a new head may leave capacity that the former head did not": (
        "sjf",
        4,
        [(1, 3, 7, 8, 3), (2, 5, 3, 10, 4), (3, 5, 9, 20, 1), (5, 10, 5, 5, 3)],
        {1: 0, 2: 14, 3: 5, 5: 0},
    ),
    "a start reservation does not block its own job": (
        "conservative",
        4,
        [(6, 14, 20, 20, 3), (8, 18, 2, 20, 2), (9, 19, 1, 1, 4), (11, 24, 5, 5, 2), (12, 25, 10, 10, 2), (13, 26, 1, 1, 4)],
        {6: 0, 8: 16, 9: 28, 11: 10, 12: 11, 13: 20},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KNOWN)
def test_known_regressions(case: str):
    name, procs, rows, expected = KNOWN[case]
    jobs = [Job(*row) for row in rows]
    assert waits_s(run(pool(jobs, procs), name)) == expected == REFERENCE[name](jobs, procs)


def test_the_seeds_of_these_tests_contain_delayed_jobs():
    """A comparison on workloads without waits would prove nothing."""
    waits = [wait for seed in range(150) for wait in easy(*small_workload(seed)).values()]
    assert sum(wait > 0 for wait in waits) > len(waits) / 2
    drawn = [small_workload(seed) for seed in range(150)]
    assert sum(easy(*each) != conservative(*each) for each in drawn) > 5
