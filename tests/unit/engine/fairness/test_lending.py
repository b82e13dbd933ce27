"""Lending of quotas: Kueue's numbers, allowances, and reclaim."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hodei.engine.fairness.lending import (
    UNBOUNDED,
    Quota,
    Reclaim,
    allowance,
    borrow_share,
    lendable,
    quota_of,
    reclaim_from,
    share_of,
)  # fmt: skip
from hodei.model.errors import InvalidInput


def may_use(project, cohort, used):
    """The remaining amount of each resource that the quota names."""
    return {resource: allowance(project, resource, cohort, used).more for resource in cohort[project].nominal}


@pytest.mark.parametrize(
    ("used", "share"),
    [
        pytest.param({"cpu": 3, "gpu": 7}, (200, "gpu"), id="borrows most of gpu"),
        pytest.param({"cpu": 3, "gpu": 3}, (100, "cpu"), id="borrows cpu only"),
        pytest.param({"cpu": 2, "gpu": 5}, (0, ""), id="exactly its quota"),
        pytest.param({"cpu": 1}, (0, ""), id="below its quota"),
    ],
)
def test_a_borrowers_share_is_kueues(used, share):
    cohort = {"borrower": Quota({"cpu": 2, "gpu": 5}), "lender": Quota({"cpu": 8, "gpu": 5})}
    found = share_of("borrower", cohort, {"borrower": used})
    assert (found.milli, found.resource) == share


def test_a_share_is_rounded_up_so_that_one_borrowed_unit_counts():
    cohort = {"borrower": Quota({"gpu": 500}), "lender": Quota({"gpu": 1000})}
    assert share_of("borrower", cohort, {"borrower": {"gpu": 501}}).milli == 1


def test_twice_the_weight_is_half_the_share_and_without_weight_there_is_no_borrowing():
    assert borrow_share({"cpu": 4}, {"cpu": 2}, {"cpu": 10}, 2).milli == 100
    assert borrow_share({"cpu": 4}, {"cpu": 2}, {"cpu": 10}, 0).milli == UNBOUNDED
    assert borrow_share({"cpu": 2}, {"cpu": 2}, {"cpu": 10}, 0).milli == 0


def test_serving_the_lowest_share_first_splits_by_weight():
    used = {("C1", "a"): 0, ("C1", "b"): 0, ("C1", "c"): 0, ("C2", "d"): 0}
    weights = {("C1", "a"): 1, ("C1", "b"): 1, ("C1", "c"): 3, ("C2", "d"): 1}

    def share(paths, weight):
        return borrow_share({"gpu": sum(used[path] for path in paths)}, {"gpu": 0}, {"gpu": 300_000}, weight).milli

    for _ in range(300):
        cohort = min(("C1", "C2"), key=lambda name: (share([path for path in used if path[0] == name], 1), name))
        used[min((p for p in used if p[0] == cohort), key=lambda p: (share([p], weights[p]), p))] += 1000
    assert used == {("C1", "a"): 30_000, ("C1", "b"): 30_000, ("C1", "c"): 90_000, ("C2", "d"): 150_000}


def test_a_project_may_use_its_quota_and_the_unused_quota_of_others():
    cohort = {"web": quota_of({"cpu": 4}), "ml": quota_of({"cpu": 6})}
    assert may_use("web", cohort, {}) == {"cpu": 10_000}
    assert may_use("web", cohort, {"ml": {"cpu": 5000}}) == {"cpu": 5000}
    assert may_use("web", cohort, {"web": {"cpu": 4000}, "ml": {"cpu": 6000}}) == {"cpu": 0}


def test_borrowing_and_lending_have_limits():
    cohort = {
        "web": quota_of({"cpu": 4, "memory": "8Gi"}, borrowing_limit={"cpu": "500m"}),
        "ml": quota_of({"cpu": 6, "memory": "8Gi"}, lending_limit={"cpu": 2, "memory": 0}),
    }
    found = allowance("web", "cpu", cohort, {})
    assert (found.more, found.limited_by, found.pool, found.ceiling) == (4500, "borrowing limit", 6000, 4500)
    assert may_use("web", cohort, {})["memory"] == 8 * 2**30, "ml lends no memory"
    assert allowance("web", "cpu", cohort, {"ml": {"cpu": 5900}}).limited_by == "pool"
    busy = {"web": {"cpu": 4500}}
    assert may_use("ml", cohort, busy)["cpu"] == 5500, "its 4 that are never lent, and the rest of the pool"


def test_the_number_of_jobs_can_be_lent():
    cohort = {"web": quota_of({"jobs": 10}, borrowing_limit={"jobs": 5}), "ml": quota_of({"jobs": 10})}
    assert may_use("web", cohort, {"web": {"jobs": 12}}) == {"jobs": 3}


def test_a_resource_outside_a_quota_is_not_limited_and_does_not_count_for_others():
    cohort = {"web": quota_of({"cpu": 1}), "ml": quota_of({"gpu": 2})}
    assert "gpu" not in may_use("web", cohort, {})
    assert may_use("ml", cohort, {"web": {"gpu": 2000}}) == {"gpu": 2000}


def test_lent_quota_is_reclaimed_from_the_largest_borrower_first():
    cohort = {name: quota_of({"cpu": 10}) for name in ("owner", "small", "big")} | {
        "big2": quota_of({"cpu": 10}, weight=2)
    }
    used = {"small": {"cpu": 12_000}, "big": {"cpu": 14_000}, "big2": {"cpu": 14_000}}
    assert reclaim_from("owner", {"cpu": 7000}, cohort, used) == [
        Reclaim("big", {"cpu": 4000}, 100), Reclaim("big2", {"cpu": 3000}, 50),
    ]  # fmt: skip


def test_only_the_nominal_quota_can_be_reclaimed():
    cohort = {"owner": quota_of({"cpu": 2}), "other": quota_of({"cpu": 2})}
    assert reclaim_from("owner", {"cpu": 2000}, cohort, {}) == [], "there is no shortage"
    assert reclaim_from("owner", {"cpu": 3000}, cohort, {"other": {"cpu": 4000}}) is None
    assert reclaim_from("owner", {"gpu": 3000}, cohort, {"other": {"cpu": 4000}}) == [], "not under quota"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Quota({"cpu": 2.5}), id="cores where thousandths belong"),
        pytest.param(lambda: Quota({"memory": "8Gi"}), id="text where bytes belong"),
        pytest.param(lambda: Quota({"cpu": -1}), id="negative"),
        pytest.param(lambda: Quota({"cpu": 1}, {"gpu": 1}), id="a limit without a quota"),
        pytest.param(lambda: Quota({}, weight=-1), id="a negative weight"),
        pytest.param(lambda: quota_of({"cpu": "2 cores"}), id="an unknown unit"),
    ],
)
def test_a_quota_in_the_wrong_unit_is_refused(make):
    with pytest.raises(InvalidInput):
        make()


amounts = st.integers(0, 12)
quotas = st.builds(
    lambda nominal, borrow, lend, weight: Quota(
        {"cpu": nominal}, {} if borrow is None else {"cpu": borrow}, {} if lend is None else {"cpu": lend}, weight
    ),
    amounts, st.none() | amounts, st.none() | amounts, st.integers(0, 3),
)  # fmt: skip
cohorts = st.lists(quotas, min_size=1, max_size=4).map(lambda found: dict(zip("abcd", found, strict=False)))


@given(cohorts, st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-12, 12)), max_size=30))
def test_a_cohort_never_exceeds_its_quota_and_an_owner_can_always_reclaim(cohort, changes):
    used = {name: {"cpu": 0} for name in cohort}
    for name, change in changes:
        if name not in cohort:
            continue
        if change < 0:
            used[name]["cpu"] = max(0, used[name]["cpu"] + change)
        elif change <= may_use(name, cohort, used)["cpu"]:
            used[name]["cpu"] += change
        elif (reclaimed := reclaim_from(name, {"cpu": change}, cohort, used)) is not None:
            for reclaim in reclaimed:
                used[reclaim.project]["cpu"] -= reclaim.amounts["cpu"]
                assert used[reclaim.project]["cpu"] >= cohort[reclaim.project].nominal["cpu"]
            assert may_use(name, cohort, used)["cpu"] == change, "exactly the shortage is reclaimed"
            used[name]["cpu"] += change
        assert sum(amount["cpu"] for amount in used.values()) <= sum(quota.nominal["cpu"] for quota in cohort.values())
        for project, quota in cohort.items():
            if "cpu" in quota.borrowing_limit:
                assert used[project]["cpu"] <= quota.nominal["cpu"] + quota.borrowing_limit["cpu"]
    assert lendable(cohort)["cpu"] <= sum(quota.nominal["cpu"] for quota in cohort.values())


@given(cohorts, st.lists(st.integers(0, 30), min_size=4, max_size=4), st.integers(0, 12))
def test_an_owner_can_reclaim_even_when_quotas_were_lowered_below_usage(cohort, held, requested):
    used = {name: {"cpu": amount} for name, amount in zip(cohort, held, strict=False)}
    reclaimed = reclaim_from("a", {"cpu": requested}, cohort, used)
    for reclaim in reclaimed or ():
        used[reclaim.project]["cpu"] -= reclaim.amounts["cpu"]
    if reclaimed is not None:
        assert may_use("a", cohort, used)["cpu"] >= requested
