"""What every store promises of who waits for whom."""

from __future__ import annotations

from builders import NOW_MS
from conformance.stores import Place, new
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.effects import SaveJob


def after(*jobs: int) -> Dependencies:
    return Dependencies((*(Dependency(job=job) for job in jobs), Dependency("exists", what="/data/x")))


def test_who_waits_for_a_job_is_found_by_the_job(place: Place):
    store = place.store()
    store.open()
    twice = Dependencies((Dependency("succeeded", job=1), Dependency("checkpointed", job=1)))
    store.commit([*new(1, 2), *new(3, 4, after=after(1, 2)), *new(5, after=after(3)), *new(6, after=twice)])
    assert store.dependents([1]) == [(1, 3), (1, 4), (1, 6)]
    assert store.dependents([3, 1, 9], limit=2) == [(1, 3), (1, 4)]
    assert store.dependents([2, 3]) == [(2, 3), (2, 4), (3, 5)]
    assert store.dependents([]) == []
    assert store.job(5).spec.after == after(3)


def test_a_job_that_is_forgotten_takes_it_along(place: Place):
    store = place.store()
    store.open()
    store.commit([*new(1, state="succeeded", at_ms=NOW_MS - 1000), *new(2, after=after(1))])
    assert store.prune(ended_before_ms=NOW_MS) == [1]
    assert store.dependents([1]) == []
    store.commit([SaveJob(store.job(2))])
