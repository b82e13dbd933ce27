"""Interning: equal specs and parts share one object."""

from __future__ import annotations

import gc

import msgspec
import pytest

from builders import a_job, a_job_spec
from hodei.engine.view import Gang, Member, gang_of
from hodei.model.array import ArrayElement, same_template
from hodei.model.effects import SaveJob
from hodei.model.interning import SpecInterner
from hodei.model.job import Job, JobSpec, TaskSpec
from hodei.plugins.registry import build_profile
from hodei.store.sqlite import SqliteStore


def _round_trip(spec):
    return msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec)


def _a_spec(name="it", **fields):
    return _round_trip(a_job_spec(name, labels={"team": "a"}, **fields))


def test_equal_specs_become_one_object():
    pool = SpecInterner()
    one = pool.spec(_a_spec())
    assert pool.spec(_a_spec()) is one
    assert one == _a_spec()


@pytest.mark.parametrize("change", [{"name": "other"}, {"priority": "low"}, {"annotations": {"a": "b"}}])
def test_different_specs_share_their_equal_parts(change):
    pool, changed = SpecInterner(), _a_spec(**change)
    one, other = pool.spec(_a_spec()), pool.spec(changed)
    assert other == changed != one
    assert other.tasks is one.tasks
    assert other.labels is one.labels


def test_mappings_in_another_order_stay_distinct():
    pool = SpecInterner()
    one, other = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    found = pool.spec(_a_spec(annotations=one)), pool.spec(_a_spec(annotations=other))
    assert [list(spec.annotations) for spec in found] == [["a", "b"], ["b", "a"]]


def test_array_elements_share_everything_except_their_index():
    pool = SpecInterner()
    first, second = (pool.spec(_a_spec(array=ArrayElement(7, index, 2))) for index in (0, 1))
    assert (first.array.index, second.array.index) == (0, 1)
    assert same_template(first, second)


def test_the_caches_are_bounded(monkeypatch):
    monkeypatch.setattr("hodei.model.interning._SPECS", 10)
    monkeypatch.setattr("hodei.model.interning._VALUES", 50)
    pool = SpecInterner()
    for number in range(200):
        assert pool.spec(_a_spec(f"job-{number}")).name == f"job-{number}"
    assert len(pool._specs) <= 10
    assert len(pool._values) <= 60


def test_gangs_of_one_spec_share_their_parts():
    profile, spec = build_profile("default", queue="multifactor"), _a_spec()
    one, other = gang_of(1, spec, 5), gang_of(2, spec, 6)
    for gang in (one, other):
        profile.admit(gang)
    for field in ("job", "members", "needed", "extra", "shapes", "group", "shape_key", "layout_plugins", "tenant"):
        assert getattr(one, field) is getattr(other, field), field
    assert one.order != other.order


def test_gangs_that_differ_only_in_name_share_their_shapes_and_groups():
    profile, pool = build_profile("default"), SpecInterner()
    one, other = (gang_of(id, pool.spec(_a_spec(f"job-{id}")), 5) for id in (1, 2))
    for gang in (one, other):
        profile.admit(gang)
    for field in ("shapes", "group", "shape_key", "layout_plugins"):
        assert getattr(one, field) is getattr(other, field), field
    assert one.members[0].job is one.job
    assert other.members[0].job is other.job


def test_jobs_read_from_the_store_share_like_submitted_ones(tmp_path):
    store = SqliteStore(tmp_path / "db")
    store.open()
    jobs = [a_job(id, spec=_a_spec(), at_ms=1_700_000_000_000, queued_ms=1_700_000_000_000) for id in range(1, 4)]
    jobs += [a_job(id, spec=_a_spec(array=ArrayElement(4, id - 4, 2))) for id in (4, 5)]
    store.commit([SaveJob(job, True) for job in jobs])
    read = [job for job, _ in store.active()]
    assert read == jobs
    assert read[0].spec is read[1].spec is read[2].spec
    assert read[0].submitted_ms is read[1].submitted_ms is read[1].queued_ms
    assert read[0].state is read[1].state
    assert same_template(read[3].spec, read[4].spec)
    store.close()


@pytest.mark.parametrize("kind", [Job, JobSpec, TaskSpec, Gang, Member, ArrayElement])
def test_pending_gangs_are_not_tracked_by_the_garbage_collector(kind):
    """These values have no reference cycles, and a full collection over 100,000 jobs took half a second."""
    assert not kind.__struct_config__.gc
    assert not gc.is_tracked(a_job(1))
    assert not gc.is_tracked(gang_of(1, _a_spec(), 0))
