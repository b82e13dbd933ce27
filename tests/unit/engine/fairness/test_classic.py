"""Slurm's classic fair share, by its published numbers, with rows that allow checking them."""

from __future__ import annotations

import pytest

from hodei.engine.fairness.formulas import classic
from hodei.engine.fairness.tree import PARENT, build_tree

TREE = build_tree([
    (("A",), 40), (("A", "B"), 30), (("A", "B", "u1"), 1), (("A", "C"), 10), (("A", "C", "u2"), 1), (("A", "C", "u3"), 1),
    (("D",), 60), (("D", "E"), 25), (("D", "E", "u4"), 1), (("D", "F"), 35), (("D", "F", "u5"), 1),
])  # fmt: skip
# In percent of the machine.
USED = {("A", "B", "u1"): 20, ("A", "C", "u2"): 25, ("D", "E", "u4"): 25}


@pytest.mark.parametrize(
    ("name", "effective"), [("B", 0.3875), ("C", 0.3), ("E", 0.25), ("F", 0.145833), ("u2", 0.275), ("u3", 0.15)]
)
def test_effective_usage_is_slurms(name: str, effective: float):
    rows = {row.path[-1]: row for row in classic(TREE, USED, total=100)}
    assert rows[name].effective_usage == pytest.approx(effective, abs=1e-6)


@pytest.mark.parametrize(
    ("user", "factor"), [("u1", 0.408479), ("u2", 0.022097), ("u3", 0.125), ("u4", 0.5), ("u5", 0.749154)]
)
def test_the_factor_is_slurms(user: str, factor: float):
    rows = {row.path[-1]: row for row in classic(TREE, USED, total=100)}
    assert rows[user].factor == pytest.approx(factor, abs=1e-6)


def test_the_factors_follow_from_the_rows_alone():
    tree = build_tree(
        [(("o", "x"), PARENT), (("o", "x", "ann"), 3), (("o", "bob"), 4), (("o", "eve"), PARENT), (("q",), 2)]
    )
    used = {("o", "x", "ann"): 70, ("o", "bob"): 5, ("o", "eve"): 11, ("q",): 14}
    for rows, total in ((classic(TREE, USED, total=100), 100), (classic(tree, used), 100)):
        terms = {(): (1.0, None)}
        for row in rows:
            due, effective = terms[row.parent]
            part = row.usage / total
            if row.shares == PARENT:
                effective = part if effective is None else effective
            else:
                fraction = row.shares / row.level_shares
                due *= fraction
                effective = part if effective is None else part + (effective - part) * fraction
            terms[row.path] = (due, effective)
            assert row.normalised_usage == part
            assert (row.normalised_shares, row.effective_usage) == (due, effective)
            assert row.factor == 2 ** (-effective / due)


def test_a_user_marked_parent_has_the_factor_of_its_account():
    tree = build_tree([(("o", "p"), 1), (("o", "p", "ann"), PARENT), (("o", "p", "bob"), 1), (("o", "q"), 1)])
    rows = {row.path[-1]: row for row in classic(tree, {("o", "p", "ann"): 30, ("o", "q"): 70})}
    assert rows["ann"].factor == rows["p"].factor


def test_without_usage_everyone_has_the_best_factor_and_without_shares_the_worst():
    rows = {row.path[-1]: row.factor for row in classic(build_tree([(("a",), 1), (("b",), 0)]), {})}
    assert rows == {"a": 1.0, "b": 0.0}
