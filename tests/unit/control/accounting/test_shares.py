"""Fair share as the controller keeps it: who goes first, every term of the sum, and what a restart remembers."""

from __future__ import annotations

import msgspec
import pytest

from builders import NOW_MS
from hodei.control.accounting.accounts import accounts_policy
from hodei.control.clone import clone_controller
from hodei.engine.fairness.formulas import classic, fair_tree
from hodei.engine.fairness.tree import build_tree
from hodei.model.config import SchedulingConfig
from hodei.model.effects import SaveUsage
from hodei.model.errors import InvalidInput
from hodei.model.facts import NodeJoined, RunObserved, UsageRestored
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness, some_nodes

HOUR = 3_600_000
DAY = 24 * HOUR


def a_harness(cpus=(1,), budgets=None, **shares):
    config = msgspec.convert({"shares": {"enabled": True, **shares}, "budgets": budgets or {}}, SchedulingConfig)
    plugins = ("quota",) if budgets else ()
    profiles = {"default": build_profile("default", queue="multifactor", plugins=plugins)}
    return Harness(*some_nodes(*cpus), profiles=profiles, accounts=accounts_policy(config))


def used_up(harness, first, project, hours, user="ann"):
    """One job of the project after another, an hour each."""
    for id in range(first, first + hours):
        harness.submit(id, project=project, user=user)
        harness.now_ms += HOUR
        harness.see(f"{id}.0.1", "succeeded", 0)


def rows_of(harness):
    return {row.account: row for row in harness.controller.accounts.share_report(harness.now_ms).rows}


@pytest.mark.parametrize("formula", ["fair_tree", "classic"])
def test_the_project_with_less_usage_goes_first(formula):
    harness = a_harness(formula=formula)
    used_up(harness, 1, "greedy", 10)
    used_up(harness, 20, "modest", 1)
    harness.submit(30, project="filler")
    harness.submit(31, project="greedy", user="ann")
    harness.submit(32, project="modest", user="ann")
    harness.later(60_000)
    harness.see("30.0.1", "succeeded", 0)
    assert harness.state(32) == "scheduled"
    assert harness.state(31) == "pending"


def test_a_larger_share_may_use_more():
    harness = a_harness(accounts=[{"name": "big", "shares": 9}, {"name": "small", "shares": 1}], formula="classic")
    used_up(harness, 1, "big", 4)
    used_up(harness, 20, "small", 2)
    rows = rows_of(harness)
    assert rows["big"].factor_milli > rows["small"].factor_milli


def test_what_was_used_counts_half_after_a_half_life():
    harness = a_harness(half_life="1d", formula="classic")
    used_up(harness, 1, "a", 8)
    before = rows_of(harness)["a"].usage
    harness.now_ms += DAY
    assert rows_of(harness)["a"].usage == pytest.approx(before / 2, rel=0.05)


def test_only_the_window_counts_where_there_is_one():
    harness = a_harness(window="1d", formula="classic")
    used_up(harness, 1, "a", 8)
    assert rows_of(harness)["a"].usage
    harness.now_ms += 2 * DAY
    assert rows_of(harness)["a"].usage == 0


def test_a_live_run_counts_already():
    harness = a_harness()
    harness.submit(1, project="a", user="ann")
    harness.now_ms += 3 * HOUR
    hours = rows_of(harness)["a/ann"].usage / 1_000_000 / HOUR
    assert hours == pytest.approx(3 * 1.25, rel=0.01), "one core and one Gi: 1.0 + 0.25"


def test_a_new_user_has_the_best_factor_of_its_project_until_the_next_refresh():
    harness = a_harness(refresh="1h")
    used_up(harness, 1, "greedy", 4)
    used_up(harness, 10, "modest", 1)
    sharing = harness.controller.accounts.shares(harness.now_ms + HOUR)
    assert sharing.factor_milli("greedy", "new") == sharing.factor_milli("greedy", "ann") < 1000
    assert sharing.factor_milli("modest", "new") == sharing.factor_milli("modest", "ann") == 1000
    assert sharing.factor_milli("unheard-of", "eve") == 1000


def test_dominant_shares_follow_what_is_held_now():
    harness = a_harness(cpus=(8,), formula="drf")
    harness.submit(1, project="a", cpu=4)
    rows = rows_of(harness)
    assert (rows["a"].dominant, rows["a"].factor_milli) == ("cpu", 500)
    harness.see("1.0.1", "succeeded", 0)
    assert rows_of(harness)["a"].factor_milli == 1000


def test_under_dominant_shares_projects_take_turns_within_one_step():
    harness = a_harness(formula="drf")
    harness.submit(*range(1, 5), project="a")
    harness.submit(*range(11, 15), project="b")
    harness.see("1.0.1", "succeeded", 0)
    harness.learn(NodeJoined(some_nodes(1, 4)[1]))
    running = [id for id in (*range(1, 5), *range(11, 15)) if harness.state(id) == "scheduled"]
    assert len([id for id in running if id < 10]) in (2, 3)
    assert len(running) == 5


def test_exported_rows_work_out_to_the_same_factors_by_the_classic_formula():
    harness = _busy("classic")
    rows = rows_of(harness)
    tree, usage = _again(rows)
    for row in classic(tree, usage):
        told = rows["/".join(row.path)]
        assert round(row.factor * 1000) == told.factor_milli
        assert told.promised == pytest.approx(row.normalised_shares)
        assert 2 ** (-told.effective / told.promised) * 1000 == pytest.approx(told.factor_milli, abs=0.5)


def test_exported_rows_work_out_to_the_same_factors_by_fair_tree():
    harness = _busy("fair_tree")
    rows = rows_of(harness)
    tree, usage = _again(rows)
    for row in fair_tree(tree, usage):
        assert round(row.factor * 1000) == rows["/".join(row.path)].factor_milli


def _busy(formula):
    accounts = [
        {"name": "physics", "shares": 40},
        {"name": "cms", "under": "physics", "shares": 30, "users": {"ann": 2}},
        {"name": "atlas", "under": "physics", "shares": 10},
        {"name": "web", "shares": 60},
    ]
    harness = a_harness(formula=formula, accounts=accounts)
    used_up(harness, 1, "cms", 3, "ann")
    used_up(harness, 10, "cms", 1, "bob")
    used_up(harness, 20, "atlas", 2)
    used_up(harness, 30, "web", 5)
    used_up(harness, 40, "unknown", 1)
    return harness


def _again(rows):
    tree = build_tree((tuple(account.split("/")), row.shares) for account, row in rows.items())
    return tree, {tuple(account.split("/")): row.usage for account, row in rows.items() if row.user}


def test_a_restart_remembers_what_was_used_and_counts_what_runs_once():
    harness = a_harness()
    kept = {}

    def keep(step):
        for save in step.saves:
            if isinstance(save, SaveUsage):
                kept.update({(row.path, row.resource, row.start_ms): row for row in save.rows})

    harness.submit(1, project="a", user="ann")
    harness.now_ms += 2 * HOUR
    keep(harness.see("1.0.1", "succeeded", 0))
    harness.submit(2, project="a", user="ann")
    harness.now_ms += HOUR
    before = rows_of(harness)["a/ann"].usage
    harness.restart(*some_nodes(1))
    harness.learn(UsageRestored(tuple(kept.values())))
    assert rows_of(harness)["a/ann"].usage == before


def test_a_clone_knows_past_usage_and_keeps_its_own_ledger():
    harness = _busy("fair_tree")
    harness.submit(90, project="cms", user="ann")
    copy = clone_controller(harness.controller)
    later_ms = harness.now_ms + 5 * HOUR
    told = copy.accounts.share_report(later_ms)
    assert told == harness.controller.accounts.share_report(later_ms)
    copy.step(later_ms, [RunObserved("90.0.1", "succeeded", later_ms, 0)])
    assert copy.accounts.share_report(later_ms + 5 * HOUR) != harness.controller.accounts.share_report(
        later_ms + 5 * HOUR
    )


def test_a_budget_that_is_used_up_starts_nothing_more_until_the_next_period():
    harness = a_harness(budgets={"ml": {"hours": {"cpu": 2}, "period": "day"}})
    harness.now_ms = NOW_MS // DAY * DAY  # the beginning of a day
    used_up(harness, 1, "ml", 2)
    harness.submit(3, project="ml")
    assert harness.reason(3)[0] == "BUDGET"
    assert "has used 2 of 2 cpu-hours" in harness.reason(3)[1]
    harness.submit(4, project="web")
    assert harness.state(4) == "scheduled", "others go on"
    harness.see("4.0.1", "succeeded", 0)
    harness.now_ms = harness.controller.next_wakeup_ms(harness.now_ms)
    harness.learn()
    assert harness.state(3) == "scheduled"


def test_money_is_spent_at_prices_an_hour():
    harness = a_harness(budgets={"ml": {"money": 1.0, "prices": {"cpu": "0.30"}, "since": "2020-01-01"}})
    used_up(harness, 1, "ml", 3)
    (row,) = harness.controller.accounts.share_report(harness.now_ms).budgets
    assert (row.name, row.used, row.limit) == ("money", pytest.approx(0.9), 1.0)
    used_up(harness, 10, "ml", 1)
    harness.submit(20, project="ml")
    assert harness.reason(20)[0] == "BUDGET"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"shares": {"enabled": True, "half_life": "90s"}}, "scheduling.shares: half_life"),
        ({"shares": {"enabled": True, "accounts": [{"name": "a", "under": "b"}]}}, "which is not an account"),
        ({"shares": {"enabled": True, "accounts": [{"name": "a", "under": "a"}]}}, "under itself"),
        ({"shares": {"enabled": True, "accounts": [{"name": "a"}, {"name": "a"}]}}, "given twice"),
        ({"quotas": {"ml": {"lend": {"cpu": 1}}}}, "lend and borrow need a cohort"),
        ({"quotas": {"ml": {"hard": {"cpu": "many"}}}}, "scheduling.quotas.ml"),
        ({"ranges": {"ml": {"min": {"cpu": 2}, "max": {"cpu": 1}}}}, "the minimum of cpu is larger than the maximum"),
        ({"ranges": {"ml": {"max": {"cpu": 1}, "default": {"cpu": 2}}}}, "is outside the range"),
        ({"budgets": {"ml": {"money": 5}}}, "money without prices"),
        ({"budgets": {"ml": {}}}, "a budget without a limit"),
        ({"budgets": {"ml": {"hours": {"gpu": 1}, "since": "soon"}}}, "since = 'soon'"),
        ({"admission": {"max_priority": {"boss": 1}}}, "there is no role 'boss'"),
        ({"admission": {"max_priority": {"user": "huge"}}}, "unknown priority 'huge'"),
    ],
)  # fmt: skip
def test_an_invalid_setting_is_reported_with_its_section(section, said):
    with pytest.raises(InvalidInput) as error:
        accounts_policy(msgspec.convert(section, SchedulingConfig))
    assert said in str(error.value)
