"""Slurm's Fair Tree, by its published numbers."""

from __future__ import annotations

import math

import pytest

from hodei.engine.fairness.formulas import fair_tree
from hodei.engine.fairness.tree import PARENT, build_tree

# Path from the root, shares, usage.
TABLE = [
    ("u1", 10, 0), ("u2", 10, 10),
    ("aA", 40, 0), ("aA/aAA", 30, 0), ("aA/aAA/uAA1", 1, 20),
    ("aA/aAB", 10, 0), ("aA/aAB/uAB1", 1, 25), ("aA/aAB/uAB2", 1, 0),
    ("aB", 60, 0), ("aB/aBA", 25, 0), ("aB/aBA/uBA1", 1, 25), ("aB/aBB", 35, 0), ("aB/aBB/uBB1", 1, 0),
    ("aC", 0, 0), ("aC/uC1", 0, 30),
    ("aD", 50, 0), ("aD/uD1", PARENT, 20), ("aD/uD2", 40, 20), ("aD/uD3", 50, 25),
    ("aD/aDA", PARENT, 0), ("aD/aDA/uDA1", PARENT, 10), ("aD/aDA/uDA2", 30, 10), ("aD/aDA/uDA3", 50, 25),
    ("aE", 10, 0), ("aE/aE1", 10, 0), ("aE/aE2", 10, 0),
    ("aF", 20, 0), ("aF/uF1", 10, 0), ("aF/uF2", 20, 0),
    ("aG", 8, 0), ("aG/uG1", 10, 10), ("aG/aGA", 10, 0), ("aG/aGA/uGA1", 20, 4), ("aG/aGA/uGA2", 20, 6),
]  # fmt: skip
TREE = build_tree((tuple(path.split("/")), shares) for path, shares, _ in TABLE)
USED = {tuple(path.split("/")): used for path, _, used in TABLE if used}

FACTORS = {
    "u1": 1.0, "aE1": 1.0, "aE2": 1.0, "uF1": 1.0, "uF2": 1.0, "uBB1": 0.761905, "uBA1": 0.714286, "u2": 0.666667,
    "uAA1": 0.619048, "uAB2": 0.571429, "uAB1": 0.523810, "uD1": 0.476190, "uDA1": 0.476190, "uDA2": 0.380952,
    "uD3": 0.333333, "uDA3": 0.333333, "uD2": 0.238095, "uG1": 0.190476, "uGA1": 0.190476, "uGA2": 0.095238,
    "uC1": 0.047619,
}  # fmt: skip
LEVELS = {
    "aA": 1.025641, "aB": 2.769231, "aD": 0.524476, "aG": 0.461538, "aAA": 1.6875, "aAB": 0.45, "aBA": 0.416667,
    "uDA2": 1.941176, "uD2": 1.294118, "uD3": 1.294118, "uDA3": 1.294118, "aC": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return {row.path[-1]: row for row in fair_tree(TREE, USED)}


@pytest.mark.parametrize(("user", "factor"), FACTORS.items())
def test_the_factor_of_a_user_is_slurms(rows, user, factor):
    assert rows[user].factor == pytest.approx(factor, abs=1e-6)


@pytest.mark.parametrize(("name", "level"), LEVELS.items())
def test_level_fs_is_slurms(rows, name, level):
    assert rows[name].level_fs == pytest.approx(level, abs=1e-6)


def test_users_marked_parent_come_first_in_the_sibling_set_of_their_account(rows):
    assert rows["uD1"].level_fs == rows["uDA1"].level_fs == math.inf
    assert rows["uDA1"].parent == ("aD",), "their account is merged into it"
    assert rows["aDA"].level_fs is None
    assert rows["uD2"].level_usage == 110, "their usage counts"


def test_level_and_factor_follow_from_the_rows_alone(rows):
    for row in rows.values():
        assert row.factor == row.rank / row.users
        if row.level_fs is not None and row.shares != PARENT and row.shares and row.usage:
            assert row.level_fs == (row.shares / row.level_shares) / (row.usage / row.level_usage)
            assert row.level_fs == row.normalised_shares / row.normalised_usage


def test_an_account_has_the_rank_of_its_best_user(rows):
    assert rows["aG"].rank == rows["aGA"].rank == rows["uG1"].rank
    assert rows["aA"].rank == rows["uAA1"].rank


def test_exact_fractions_find_a_tie_that_rounding_hides(rows):
    exact = {row.path[-1]: row.factor for row in fair_tree(TREE, USED, exact=True)}
    assert exact["uD2"] == exact["uD3"] == exact["uDA3"]
    assert {name for name in exact if exact[name] != rows[name].factor} == {"uD2"}


def test_the_users_of_equal_accounts_are_ranked_together():
    tree = build_tree([(("a", "ann"), 1), (("a", "bob"), 1), (("b", "cat"), 1), (("b", "dan"), 1)])
    used = {("a", "ann"): 1, ("a", "bob"): 3, ("b", "cat"): 3, ("b", "dan"): 1}
    assert {row.path[-1]: row.rank for row in fair_tree(tree, used) if len(row.path) == 2} == {
        "ann": 4, "dan": 4, "bob": 2, "cat": 2,
    }  # fmt: skip


def test_all_users_of_an_account_with_a_higher_level_fs_rank_before_its_sibling():
    tree = build_tree([(("a", "hog"), 1), (("a", "idle"), 9), (("b", "x"), 1)])
    ranks = {row.path[-1]: row.rank for row in fair_tree(tree, {("a", "hog"): 40, ("b", "x"): 60})}
    assert ranks["hog"] > ranks["x"]


def test_a_tree_without_accounts_has_no_rows():
    assert fair_tree(build_tree([]), {}) == []
