"""The tree of accounts: how it is built, and which accounts are siblings."""

from __future__ import annotations

import pytest

from hodei.engine.fairness.tree import PARENT, Account, build_tree, level_shares, siblings, total_usage
from hodei.model.errors import InvalidInput


def test_a_tree_is_built_from_rows_in_any_order():
    rows = [(("acme",), 3), (("acme", "web"), 2), (("acme", "web", "ann"), 1), (("acme", "ml"), PARENT)]
    tree = build_tree(rows)
    assert tree == build_tree(reversed(rows))
    assert tree.children == (
        Account("acme", 3, (Account("ml", PARENT), Account("web", 2, (Account("ann", 1),)))),
    )  # fmt: skip


def test_an_ancestor_that_no_row_names_has_one_share():
    tree = build_tree([(("acme", "web", "ann"), 5)])
    found = tree.find(("acme", "web"))
    assert found is not None
    assert found.shares == 1
    assert tree.find(("acme", "unknown", "ann")) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param([(("a",), 1), (("a",), 2)], "given twice", id="one account twice"),
        pytest.param([((), 1)], "without a name", id="the root"),
        pytest.param([(("a", ""), 1)], "without a name", id="an empty name"),
        pytest.param([(("a",), -1)], "-1 shares", id="negative"),
        pytest.param([(("a",), 0.5)], "0.5 shares", id="half a share"),
        pytest.param([(("a",), True)], "True shares", id="a boolean"),
        pytest.param([(("a",), "all")], "'all' shares", id="another string"),
        pytest.param([(("a",) * 33, 1)], "33 levels", id="too deep"),
    ],
)
def test_an_invalid_tree_is_refused(rows, message):
    with pytest.raises(InvalidInput, match=message):
        build_tree(rows)


def test_the_children_of_an_account_marked_parent_compete_with_its_siblings():
    tree = build_tree([(("p", "x"), PARENT), (("p", "x", "ann"), 3), (("p", "bob"), 4), (("p", "eve"), PARENT)])
    project = tree.find(("p",))
    assert project is not None
    competitors = siblings(("p",), project)
    assert [path for path, _ in competitors] == [("p", "bob"), ("p", "eve"), ("p", "x", "ann")]
    assert level_shares(project) == 7


def test_usage_of_an_unknown_user_counts_for_its_project():
    tree = build_tree([(("p", "ann"), 1), (("q",), 1)])
    totals = total_usage(tree, {("p", "ann"): 1, ("p", "unknown"): 10, ("other",): 100})
    assert totals == {(): 111, ("p",): 11, ("p", "ann"): 1, ("q",): 0}
