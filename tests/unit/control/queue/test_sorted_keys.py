"""Sorted keys with fast counts, and queue positions that are found with them."""

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
    draw, keys, weights = random.Random(seed), SortedKeys(), {}
    for _ in range(400):
        key = draw.randrange(150)
        if key in weights and draw.random() < 0.6:
            keys.remove(key)
            del weights[key]
        elif key not in weights:
            weights[key] = draw.choice((0, 1, 5)) if seed % 2 else 0
            keys.add(key, weights[key])
        expected = sorted(weights)
        assert list(keys) == expected
        assert len(keys) == len(expected)
        probe = draw.randrange(150)
        assert (probe in keys) == (probe in weights)
        assert keys.before(probe) == sum(key < probe for key in expected)
        assert keys.weight_before(probe) == sum(weights[key] for key in expected if key < probe)
        least, sums = draw.randrange(-1, 60), [sum(weights[k] for k in expected[:i]) for i in range(len(expected))]
        assert keys.lighter(least, or_equal=False) == sum(behind < least for behind in sums)
        assert keys.lighter(least, or_equal=True) == sum(behind <= least for behind in sums)
    while keys:
        assert keys.pop_first() == expected.pop(0)


def test_removing_an_unknown_key_fails():
    keys = SortedKeys()
    for key in (None, 5):
        if key is not None:
            keys.add(key)
        for other in (1, 9):
            with pytest.raises(KeyError):
                keys.remove(other)


class _NoIteration(dict):
    """The gangs of a queue; iteration over them fails the test."""

    def _refuse(self, *_):
        raise AssertionError("the whole queue was iterated over")

    __iter__ = keys = values = items = _refuse


def _queue(policy, **arguments):
    profile = build_profile("default", queue=policy, queue_arguments=arguments)
    if hasattr(profile.queue, "reservation_depth"):
        return BackfillQueue(profile, Engine(Table(), {"default": profile}))
    return MultifactorQueue(profile) if hasattr(profile.queue, "rank_milli") else SchedulingQueue(profile)


@pytest.mark.parametrize(
    ("policy", "arguments"),
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
def test_a_queue_position_is_found_without_iterating_over_the_queue(policy, arguments):
    draw, queue, now_ms = random.Random(1), _queue(policy, **arguments), 10_000_000
    gangs = []
    for id in range(1, 31):
        spec = a_job_spec(
            f"job-{id}",
            project=draw.choice("ab"),
            priority=draw.choice((100, 500)),
            estimate_ms=draw.choice((1000, 9000)),
        )
        gangs.append(gang_of(id, spec, draw.randrange(5000)))
        queue.add(gangs[-1])
    for gang in gangs[::5]:
        queue.remove(gang.id)
    remaining = [gang for gang in gangs if gang.id in queue.gangs]
    queue.gangs = _NoIteration(queue.gangs)
    if hasattr(queue, "_pending_table"):
        queue._pending_table._order_keys = _NoIteration(queue._pending_table._order_keys)
        queue._pending_table._gangs = queue.gangs
    assert sorted(queue.position(gang, View(now_ms)) for gang in remaining) == list(range(1, len(remaining) + 1))
