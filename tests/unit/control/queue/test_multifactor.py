"""The multifactor queue: points for priority, age, fair share and inherited priority."""

from __future__ import annotations

import random

import pytest

from builders import a_job_spec
from hodei.control.queue.multifactor import MultifactorQueue
from hodei.engine.plan import Refusal
from hodei.engine.view import View, gang_of
from hodei.plugins.registry import build_profile

HOUR = 3_600_000


class _Shares:
    """A stand-in with fixed fair-share factors per project."""

    def __init__(self, **factors):
        self.factors, self.version = factors, 1

    def changed_since(self, version):
        return [] if version == self.version else None

    def factor_milli(self, project, user):
        return self.factors.get(project, 1000)


def _queue(**points):
    return MultifactorQueue(build_profile("default", queue="multifactor", queue_arguments=points))


def _add(queue, id, at=0, **fields):
    gang = gang_of(id, a_job_spec(f"job-{id}", **fields), at)
    queue.add(gang)
    return gang


def _round(queue, now, fits=lambda gang: True, most=10**9, **view):
    """One cycle; gangs that do not fit are parked until a run ends. Returns the tried ids."""
    tried = []
    for gang in queue.ready(View(now, **view)):
        if len(tried) >= most:
            break
        tried.append(gang.id)
        if fits(gang):
            queue.started(gang)
        else:
            queue.refused(gang, Refusal(gang.id, (), requeue_on=("run_ended",)))
    return tried


def test_at_equal_age_the_priority_decides():
    queue = _queue()
    _add(queue, 1, priority="low")
    _add(queue, 2, priority="high")
    _add(queue, 3, priority="medium")
    assert _round(queue, 0) == [2, 3, 1]


def test_age_overtakes_a_new_job_of_a_higher_class():
    queue = _queue(age_per_hour=100, age_max=1000, share=0)
    _add(queue, 1, at=0, priority="low")  # 250 points, and 300 more after three hours
    _add(queue, 2, at=3 * HOUR, priority="medium")  # 500 points
    assert _round(queue, 3 * HOUR) == [1, 2]


def test_age_counts_up_to_its_maximum():
    queue = _queue(age_per_hour=100, age_max=200, share=0)
    _add(queue, 1, at=0, priority="low")
    _add(queue, 2, at=99 * HOUR, priority="medium")
    assert _round(queue, 99 * HOUR) == [2, 1]


def test_within_a_group_the_higher_rank_is_tried_first():
    queue = _queue(age_per_hour=10, age_max=50, share=0)
    _add(queue, 1, at=0, priority=500)
    _add(queue, 2, at=HOUR, priority=600)
    assert _round(queue, HOUR) == [2, 1]


def test_a_gang_at_the_maximum_age_is_overtaken_as_time_passes():
    queue = _queue(age_per_hour=100, age_max=200, share=0)
    _add(queue, 1, at=0, priority=500)  # has 200 points of age after two hours
    _add(queue, 2, at=HOUR, priority=550)  # has them after three
    refuse = {"fits": lambda gang: False}
    assert _round(queue, HOUR, **refuse) == [1, 2]
    queue.wake("run_ended")
    assert _round(queue, 2 * HOUR, **refuse) == [1, 2], "700 to 650"
    queue.wake("run_ended")
    assert _round(queue, 3 * HOUR) == [2, 1], "700 to 750"


def test_only_projects_with_changed_factors_are_ranked_again():
    queue = _queue(age_per_hour=10, age_max=1000)
    for id, project in enumerate("abc", 1):
        _add(queue, id, project=project)
    shares = _Shares(a=100, b=200, c=300)
    assert _round(queue, 0, fits=lambda gang: False, shares=shares) == [3, 2, 1]
    ranked = []
    shares.factors["a"], shares.version = 400, 2
    shares.changed_since = lambda version: ["a"] if version < 2 else []
    shares.factor_milli = lambda project, user: ranked.append(project) or shares.factors[project]
    queue.wake("run_ended")
    assert _round(queue, HOUR, shares=shares) == [1, 3, 2]
    assert ranked.count("b") <= 1, "b is ranked once, when it is tried"


def test_an_account_with_a_higher_factor_is_tried_first():
    queue = _queue(share=200)
    _add(queue, 1, project="greedy")
    _add(queue, 2, project="modest")
    assert _round(queue, 0, shares=_Shares(greedy=100, modest=900)) == [2, 1]


def test_the_points_of_a_share_do_not_outweigh_a_class():
    queue = _queue(share=200)
    _add(queue, 1, project="greedy", priority="high")
    _add(queue, 2, project="modest", priority="medium")
    assert _round(queue, 0, shares=_Shares(greedy=0, modest=1000)) == [1, 2]


def test_an_inherited_priority_moves_a_gang_forward():
    queue = _queue(share=0)
    for id in (1, 2, 3):
        _add(queue, id, at=id)
    queue.set_inherited_priority(3, 1000)
    assert _round(queue, 10) == [3, 1, 2]


def test_without_its_inherited_priority_a_gang_returns_to_its_position():
    queue = _queue(share=0)
    for id in (1, 2, 3):
        _add(queue, id, at=id)
    queue.set_inherited_priority(3, 1000)
    queue.set_inherited_priority(3, None)
    assert _round(queue, 10) == [1, 2, 3]


def test_a_group_is_parked_when_its_head_is_refused_until_its_trigger():
    queue = _queue()
    _add(queue, 1)
    _add(queue, 2)
    assert _round(queue, 0, fits=lambda gang: False) == [1]
    assert _round(queue, 1) == []
    queue.wake("run_ended")
    assert _round(queue, 2) == [1, 2]


def test_gangs_that_a_cycle_did_not_reach_are_tried_in_the_next():
    queue = _queue()
    for id in range(1, 6):
        _add(queue, id, project=f"p{id}")
    assert _round(queue, 0, most=2) == [1, 2]
    assert _round(queue, 1) == [3, 4, 5]


def test_a_removed_gang_is_not_tried():
    queue = _queue()
    for id in (1, 2, 3):
        _add(queue, id)
    queue.remove(2)
    assert _round(queue, 0) == [1, 3]


def test_a_gang_that_backs_off_lets_equal_ones_pass():
    queue = _queue()
    first = _add(queue, 1)
    _add(queue, 2)
    queue.back_off(first, 100)
    assert _round(queue, 0) == [2]
    queue.wake_due(100)
    assert _round(queue, 100) == [1]


@pytest.mark.parametrize("seed", range(20))
def test_positions_are_the_order_of_tries(seed):
    random_ = random.Random(seed)
    queue = _queue(age_per_hour=random_.randrange(200), age_max=random_.randrange(500), share=random_.randrange(300))
    gangs = [
        _add(queue, id, random_.randrange(5 * HOUR), project=random_.choice("abc"), priority=random_.randrange(1000))
        for id in range(1, 40)
    ]
    view = {"shares": _Shares(a=100, b=500, c=900)}
    queue.set_inherited_priority(7, 900)
    queue.set_inherited_priority(9, 950)
    now = 5 * HOUR
    places = {gang.id: queue.position(gang, View(now, **view)) for gang in gangs}
    assert [places[id] for id in _round(queue, now, **view)] == list(range(1, 40))


def test_the_terms_add_up_to_the_rank():
    queue = _queue()
    gang = _add(queue, 1, at=0, priority="low", project="a")
    gang.inherited_priority = 600
    view = View(2 * HOUR, shares=_Shares(a=400))
    policy = queue.profile.queue
    terms = {term.name: term.milli for term in policy.terms(gang, view)}
    assert terms == {"priority": 250_000, "age": 20_000, "inherited": 350_000, "fair share": 80_000}
    assert sum(terms.values()) == policy.rank_milli(gang, view)
