"""Keys in order, counted without a walk over all of them; and places in line that are told by it."""

from __future__ import annotations

import random

import pytest

from builders import a_job_spec
from hodei.control.queue.backfill import BackfillQueue
from hodei.control.queue.base import SchedulingQueue
from hodei.control.queue.multifactor import MultifactorQueue
from hodei.control.queue.sorted_keys import SortedKeys
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.view import View, gang_of
from hodei.plugins.registry import build_profile


@pytest.mark.parametrize("seed", range(10))
def test_counts_are_those_of_a_sorted_list(seed, monkeypatch):
    monkeypatch.setattr("hodei.control.queue.sorted_keys._CHUNK", 4)
    draw, kept, weights = random.Random(seed), SortedKeys(), {}
    for _ in range(400):
        key = draw.randrange(150)
        if key in weights and draw.random() < 0.6:
            kept.remove(key)
            del weights[key]
        elif key not in weights:
            weights[key] = draw.choice((0, 1, 5)) if seed % 2 else 0
            kept.add(key, weights[key])
        there = sorted(weights)
        assert list(kept) == there
        assert len(kept) == len(there)
        probe = draw.randrange(150)
        assert (probe in kept) == (probe in weights)
        assert kept.before(probe) == sum(key < probe for key in there)
        assert kept.weight_before(probe) == sum(weights[key] for key in there if key < probe)
        least, sums = draw.randrange(-1, 60), [sum(weights[k] for k in there[:i]) for i in range(len(there))]
        assert kept.lighter(least, or_equal=False) == sum(behind < least for behind in sums)
        assert kept.lighter(least, or_equal=True) == sum(behind <= least for behind in sums)
    while kept:
        assert kept.pop_first() == there.pop(0)


def test_what_is_not_there_cannot_go():
    kept = SortedKeys()
    for key in (None, 5):
        if key is not None:
            kept.add(key)
        for other in (1, 9):
            with pytest.raises(KeyError):
                kept.remove(other)


class _NoWalk(dict):
    """The gangs of a line, of which only one may be looked at at a time."""

    def _refuse(self, *_):
        raise AssertionError("all who wait were walked over")

    __iter__ = keys = values = items = _refuse


def _line(queue, **arguments):
    profile = build_profile("default", queue=queue, queue_arguments=arguments)
    if hasattr(profile.queue, "reservation_depth"):
        return BackfillQueue(profile, Engine(Table(), {"default": profile}))
    return MultifactorQueue(profile) if hasattr(profile.queue, "rank_milli") else SchedulingQueue(profile)


@pytest.mark.parametrize(
    ("queue", "arguments"),
    [
        ("fifo", {}),
        ("priority", {}),
        ("fair", {}),
        ("multifactor", {}),
        ("batch", {"lookahead": 3}),
        ("batch", {"lookahead": 40, "order": "sjf"}),
        ("batch", {"order": "wfp3"}),
    ],
    ids=["fifo", "priority", "fair", "multifactor", "batch beyond", "batch in the columns", "batch reorders"],
)
def test_a_queue_position_is_found_without_a_walk_over_the_queue(queue, arguments):
    draw, line, now_ms = random.Random(1), _line(queue, **arguments), 10_000_000
    gangs = []
    for id in range(1, 31):
        spec = a_job_spec(
            f"job-{id}",
            project=draw.choice("ab"),
            priority=draw.choice((100, 500)),
            estimate_ms=draw.choice((1000, 9000)),
        )
        gangs.append(gang_of(id, spec, draw.randrange(5000)))
        line.add(gangs[-1])
    for gang in gangs[::5]:
        line.remove(gang.id)
    left = [gang for gang in gangs if gang.id in line.gangs]
    line.gangs = _NoWalk(line.gangs)
    if hasattr(line, "_pending_table"):
        line._pending_table._places = _NoWalk(line._pending_table._places)
        line._pending_table._gangs = line.gangs
    assert sorted(line.position(gang, View(now_ms)) for gang in left) == list(range(1, len(left) + 1))
