"""Dominant-resource fairness, by the examples of the paper."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hodei.engine.fairness.formulas import dominant_share
from hodei.model.errors import InvalidInput


def progressive_filling(tasks, totals, weights=None):
    """Tasks per tenant when the tenant with the lowest dominant share is always served next, as in the paper."""

    def share(name):
        used = {resource: amount * served[name] for resource, amount in tasks[name].items()}
        return dominant_share(used, totals, weight=(weights or {}).get(name, 1)).share

    served, free, active = dict.fromkeys(sorted(tasks), 0), dict(totals), set(tasks)
    while active:
        tenant = min(active, key=lambda name: (share(name), name))
        if all(free[resource] >= amount for resource, amount in tasks[tenant].items()):
            served[tenant] += 1
            for resource, amount in tasks[tenant].items():
                free[resource] -= amount
        else:
            active.discard(tenant)
    return served


@pytest.mark.parametrize(
    ("totals", "tasks", "served", "share"),
    [
        pytest.param(
            {"cpu": 100, "memory": 10_000}, {"A": {"cpu": 2, "memory": 300}, "B": {"cpu": 6, "memory": 100}},
            {"A": 20, "B": 10}, Fraction(60, 100), id="sixty percent each",
        ),
        pytest.param(
            {"cpu": 9, "memory": 18}, {"A": {"cpu": 1, "memory": 4}, "B": {"cpu": 3, "memory": 1}},
            {"A": 3, "B": 2}, Fraction(2, 3), id="two thirds each",
        ),
    ],
)  # fmt: skip
def test_progressive_filling_ends_with_equal_dominant_shares(totals, tasks, served, share):
    assert progressive_filling(tasks, totals) == served
    for tenant, request in tasks.items():
        used = {resource: amount * served[tenant] for resource, amount in request.items()}
        assert dominant_share(used, totals).share == share


def test_the_dominant_resource_is_named_and_every_term_is_there():
    found = dominant_share({"cpu": 3, "memory": 12}, {"cpu": 9, "memory": 18})
    assert (found.resource, found.share) == ("memory", Fraction(2, 3))
    assert found.shares == {"cpu": Fraction(1, 3), "memory": Fraction(2, 3)}


def test_weights_lower_the_share_of_a_tenant_and_raise_that_of_a_resource():
    used, totals = {"cpu": 50, "gpu": 30}, {"cpu": 100, "gpu": 100}
    assert dominant_share(used, totals, weight=2).share == Fraction(1, 4)
    assert dominant_share(used, totals, resource_weights={"gpu": 2}).resource == "gpu"
    assert progressive_filling({"a": {"cpu": 1}, "b": {"cpu": 1}}, {"cpu": 9}, weights={"b": 2}) == {"a": 3, "b": 6}


def test_a_resource_without_capacity_does_not_count():
    assert dominant_share({"gpu": 5}, {"cpu": 10}).share == 0
    assert dominant_share({}, {"cpu": 10}).resource == ""


def test_a_weight_below_one_is_refused():
    with pytest.raises(InvalidInput):
        dominant_share({}, {}, weight=0)
