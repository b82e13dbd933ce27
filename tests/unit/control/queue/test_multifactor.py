"""A line by points: own priority, age, fair share, and what others who wait for a job are worth."""

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
    """PRETENDS to keep account: fixed factors by project. Proves nothing about how they come about."""

    def __init__(self, **factors):
        self.factors, self.version = factors, 1

    def changed_since(self, version):
        return [] if version == self.version else None

    def factor_milli(self, project, user):
        return self.factors.get(project, 1000)


def _line(**points):
    return MultifactorQueue(build_profile("default", queue="multifactor", queue_arguments=points))


def _add(line, id, at=0, **fields):
    gang = gang_of(id, a_job_spec(f"job-{id}", **fields), at)
    line.add(gang)
    return gang


def _round(line, now, fits=lambda gang: True, most=10**9, **view):
    """One cycle; those that do not fit sleep until a run ends."""
    tried = []
    for gang in line.ready(View(now, **view)):
        if len(tried) >= most:
            break
        tried.append(gang.id)
        if fits(gang):
            line.started(gang)
        else:
            line.refused(gang, Refusal(gang.id, (), requeue_on=("run_ended",)))
    return tried


def test_without_a_difference_in_age_the_priority_decides():
    line = _line()
    _add(line, 1, priority="low")
    _add(line, 2, priority="high")
    _add(line, 3, priority="medium")
    assert _round(line, 0) == [2, 3, 1]


def test_age_overtakes_a_new_job_of_a_higher_class():
    line = _line(age_per_hour=100, age_max=1000, share=0)
    _add(line, 1, at=0, priority="low")  # 250 points, and 300 more after three hours
    _add(line, 2, at=3 * HOUR, priority="medium")  # 500 points
    assert _round(line, 3 * HOUR) == [1, 2]


def test_age_counts_up_to_its_cap_and_no_further():
    line = _line(age_per_hour=100, age_max=200, share=0)
    _add(line, 1, at=0, priority="low")
    _add(line, 2, at=99 * HOUR, priority="medium")
    assert _round(line, 99 * HOUR) == [2, 1]


def test_of_two_alike_the_one_with_the_lower_priority_never_goes_first_for_being_in_the_same_group():
    line = _line(age_per_hour=10, age_max=50, share=0)
    _add(line, 1, at=0, priority=500)
    _add(line, 2, at=HOUR, priority=600)
    assert _round(line, HOUR) == [2, 1]


def test_who_has_all_that_age_can_give_is_caught_up_with_though_nothing_else_has_happened():
    line = _line(age_per_hour=100, age_max=200, share=0)
    _add(line, 1, at=0, priority=500)  # has 200 points of age after two hours
    _add(line, 2, at=HOUR, priority=550)  # has them after three
    refuse = {"fits": lambda gang: False}
    assert _round(line, HOUR, **refuse) == [1, 2]
    line.wake("run_ended")
    assert _round(line, 2 * HOUR, **refuse) == [1, 2], "700 to 650"
    line.wake("run_ended")
    assert _round(line, 3 * HOUR) == [2, 1], "700 to 750"


def test_only_the_projects_whose_factors_changed_are_ranked_anew():
    line = _line(age_per_hour=10, age_max=1000)
    for id, project in enumerate("abc", 1):
        _add(line, id, project=project)
    shares = _Shares(a=100, b=200, c=300)
    assert _round(line, 0, fits=lambda gang: False, shares=shares) == [3, 2, 1]
    ranked = []
    shares.factors["a"], shares.version = 400, 2
    shares.changed_since = lambda version: ["a"] if version < 2 else []
    shares.factor_milli = lambda project, user: ranked.append(project) or shares.factors[project]
    line.wake("run_ended")
    assert _round(line, HOUR, shares=shares) == [1, 3, 2]
    assert ranked.count("b") <= 1, "once when it is its turn, and not before"


def test_an_account_with_more_of_its_share_left_goes_first():
    line = _line(share=200)
    _add(line, 1, project="greedy")
    _add(line, 2, project="modest")
    assert _round(line, 0, shares=_Shares(greedy=100, modest=900)) == [2, 1]


def test_the_points_of_a_share_do_not_outweigh_a_class():
    line = _line(share=200)
    _add(line, 1, project="greedy", priority="high")
    _add(line, 2, project="modest", priority="medium")
    assert _round(line, 0, shares=_Shares(greedy=0, modest=1000)) == [1, 2]


def test_a_job_counts_as_much_as_the_most_important_that_waits_for_it():
    line = _line(share=0)
    for id in (1, 2, 3):
        _add(line, id, at=id)
    line.set_inherited_priority(3, 1000)
    assert _round(line, 10) == [3, 1, 2]


def test_a_lift_that_is_over_leaves_a_job_where_it_would_have_been():
    line = _line(share=0)
    for id in (1, 2, 3):
        _add(line, id, at=id)
    line.set_inherited_priority(3, 1000)
    line.set_inherited_priority(3, None)
    assert _round(line, 10) == [1, 2, 3]


def test_a_group_sleeps_when_its_first_is_refused_and_is_woken_by_the_cure():
    line = _line()
    _add(line, 1)
    _add(line, 2)
    assert _round(line, 0, fits=lambda gang: False) == [1]
    assert _round(line, 1) == []
    line.wake("run_ended")
    assert _round(line, 2) == [1, 2]


def test_what_a_round_did_not_reach_is_tried_in_the_next():
    line = _line()
    for id in range(1, 6):
        _add(line, id, project=f"p{id}")
    assert _round(line, 0, most=2) == [1, 2]
    assert _round(line, 1) == [3, 4, 5]


def test_a_removed_gang_is_not_tried():
    line = _line()
    for id in (1, 2, 3):
        _add(line, id)
    line.remove(2)
    assert _round(line, 0) == [1, 3]


def test_a_gang_that_backs_off_lets_equal_ones_go_first():
    line = _line()
    first = _add(line, 1)
    _add(line, 2)
    line.back_off(first, 100)
    assert _round(line, 0) == [2]
    line.wake_due(100)
    assert _round(line, 100) == [1]


@pytest.mark.parametrize("seed", range(20))
def test_positions_are_the_order_of_tries(seed):
    random_ = random.Random(seed)
    line = _line(age_per_hour=random_.randrange(200), age_max=random_.randrange(500), share=random_.randrange(300))
    gangs = [
        _add(line, id, random_.randrange(5 * HOUR), project=random_.choice("abc"), priority=random_.randrange(1000))
        for id in range(1, 40)
    ]
    view = {"shares": _Shares(a=100, b=500, c=900)}
    line.set_inherited_priority(7, 900)
    line.set_inherited_priority(9, 950)
    now = 5 * HOUR
    places = {gang.id: line.position(gang, View(now, **view)) for gang in gangs}
    assert [places[id] for id in _round(line, now, **view)] == list(range(1, 40))


def test_the_terms_add_up_to_the_rank():
    line = _line()
    gang = _add(line, 1, at=0, priority="low", project="a")
    gang.inherited_priority = 600
    view = View(2 * HOUR, shares=_Shares(a=400))
    queue = line.profile.queue
    terms = {term.name: term.milli for term in queue.terms(gang, view)}
    assert terms == {"priority": 250_000, "age": 20_000, "inherited": 350_000, "fair share": 80_000}
    assert sum(terms.values()) == queue.rank_milli(gang, view)
