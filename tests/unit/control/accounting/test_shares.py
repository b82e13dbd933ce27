"""Fair share in the controller: the order of projects, the reported factors, budgets, restarts."""

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


def use_hours(harness, first, project, hours, user="ann"):
    """Runs one job of the project after another, an hour each."""
    for id in range(first, first + hours):
        harness.submit(id, project=project, user=user)
        harness.now_ms += HOUR
        harness.observe(f"{id}.0.1", "succeeded", 0)


def rows_of(harness):
    return {row.account: row for row in harness.controller.accounts.share_report(harness.now_ms).rows}


@pytest.mark.parametrize("formula", ["fair_tree", "classic"])
def test_the_project_with_less_usage_goes_first(formula):
    harness = a_harness(formula=formula)
    use_hours(harness, 1, "greedy", 10)
    use_hours(harness, 20, "modest", 1)
    harness.submit(30, project="filler")
    harness.submit(31, project="greedy", user="ann")
    harness.submit(32, project="modest", user="ann")
    harness.advance(60_000)
    harness.observe("30.0.1", "succeeded", 0)
    assert harness.state(32) == "scheduled"
    assert harness.state(31) == "pending"


def test_a_larger_share_may_use_more():
    harness = a_harness(accounts=[{"name": "big", "shares": 9}, {"name": "small", "shares": 1}], formula="classic")
    use_hours(harness, 1, "big", 4)
    use_hours(harness, 20, "small", 2)
    rows = rows_of(harness)
    assert rows["big"].factor_milli > rows["small"].factor_milli


def test_usage_counts_half_after_a_half_life():
    harness = a_harness(half_life="1d", formula="classic")
    use_hours(harness, 1, "a", 8)
    before = rows_of(harness)["a"].usage
    harness.now_ms += DAY
    assert rows_of(harness)["a"].usage == pytest.approx(before / 2, rel=0.05)


def test_only_usage_within_the_window_counts():
    harness = a_harness(window="1d", formula="classic")
    use_hours(harness, 1, "a", 8)
    assert rows_of(harness)["a"].usage
    harness.now_ms += 2 * DAY
    assert rows_of(harness)["a"].usage == 0


def test_a_running_job_counts_as_usage():
    harness = a_harness()
    harness.submit(1, project="a", user="ann")
    harness.now_ms += 3 * HOUR
    hours = rows_of(harness)["a/ann"].usage / 1_000_000 / HOUR
    assert hours == pytest.approx(3 * 1.25, rel=0.01), "one core and one Gi: 1.0 + 0.25"


def test_a_new_user_has_the_best_factor_of_its_project_until_the_next_refresh():
    harness = a_harness(refresh="1h")
    use_hours(harness, 1, "greedy", 4)
    use_hours(harness, 10, "modest", 1)
    sharing = harness.controller.accounts.shares(harness.now_ms + HOUR)
    assert sharing.factor_milli("greedy", "new") == sharing.factor_milli("greedy", "ann") < 1000
    assert sharing.factor_milli("modest", "new") == sharing.factor_milli("modest", "ann") == 1000
    assert sharing.factor_milli("unheard-of", "eve") == 1000


def test_dominant_shares_follow_current_allocation():
    harness = a_harness(cpus=(8,), formula="drf")
    harness.submit(1, project="a", cpu=4)
    rows = rows_of(harness)
    assert (rows["a"].dominant, rows["a"].factor_milli) == ("cpu", 500)
    harness.observe("1.0.1", "succeeded", 0)
    assert rows_of(harness)["a"].factor_milli == 1000


def test_projects_alternate_within_one_step_under_dominant_shares():
    harness = a_harness(formula="drf")
    harness.submit(*range(1, 5), project="a")
    harness.submit(*range(11, 15), project="b")
    harness.observe("1.0.1", "succeeded", 0)
    harness.step(NodeJoined(some_nodes(1, 4)[1]))
    running = [id for id in (*range(1, 5), *range(11, 15)) if harness.state(id) == "scheduled"]
    assert len([id for id in running if id < 10]) in (2, 3)
    assert len(running) == 5


def test_the_classic_formula_gives_the_reported_factors_from_reported_rows():
    harness = _with_usage("classic")
    rows = rows_of(harness)
    tree, usage = _tree_from(rows)
    for row in classic(tree, usage):
        reported = rows["/".join(row.path)]
        assert round(row.factor * 1000) == reported.factor_milli
        assert reported.due == pytest.approx(row.normalised_shares)
        assert 2 ** (-reported.effective / reported.due) * 1000 == pytest.approx(reported.factor_milli, abs=0.5)


def test_fair_tree_gives_the_reported_factors_from_reported_rows():
    harness = _with_usage("fair_tree")
    rows = rows_of(harness)
    tree, usage = _tree_from(rows)
    for row in fair_tree(tree, usage):
        assert round(row.factor * 1000) == rows["/".join(row.path)].factor_milli


def _with_usage(formula):
    accounts = [
        {"name": "physics", "shares": 40},
        {"name": "cms", "under": "physics", "shares": 30, "users": {"ann": 2}},
        {"name": "atlas", "under": "physics", "shares": 10},
        {"name": "web", "shares": 60},
    ]
    harness = a_harness(formula=formula, accounts=accounts)
    use_hours(harness, 1, "cms", 3, "ann")
    use_hours(harness, 10, "cms", 1, "bob")
    use_hours(harness, 20, "atlas", 2)
    use_hours(harness, 30, "web", 5)
    use_hours(harness, 40, "unknown", 1)
    return harness


def _tree_from(rows):
    tree = build_tree((tuple(account.split("/")), row.shares) for account, row in rows.items())
    return tree, {tuple(account.split("/")): row.usage for account, row in rows.items() if row.user}


def test_usage_survives_a_restart_and_a_live_run_is_counted_once():
    harness = a_harness()
    saved = {}

    def save_rows(step):
        for save in step.saves:
            if isinstance(save, SaveUsage):
                saved.update({(row.path, row.resource, row.start_ms): row for row in save.rows})

    harness.submit(1, project="a", user="ann")
    harness.now_ms += 2 * HOUR
    save_rows(harness.observe("1.0.1", "succeeded", 0))
    harness.submit(2, project="a", user="ann")
    harness.now_ms += HOUR
    before = rows_of(harness)["a/ann"].usage
    harness.restart(*some_nodes(1))
    harness.step(UsageRestored(tuple(saved.values())))
    assert rows_of(harness)["a/ann"].usage == before


def test_a_clone_knows_past_usage_and_keeps_its_own_ledger():
    harness = _with_usage("fair_tree")
    harness.submit(90, project="cms", user="ann")
    copy = clone_controller(harness.controller)
    later_ms = harness.now_ms + 5 * HOUR
    report = copy.accounts.share_report(later_ms)
    assert report == harness.controller.accounts.share_report(later_ms)
    copy.step(later_ms, [RunObserved("90.0.1", "succeeded", later_ms, 0)])
    assert copy.accounts.share_report(later_ms + 5 * HOUR) != harness.controller.accounts.share_report(
        later_ms + 5 * HOUR
    )


def test_an_exhausted_budget_blocks_its_project_until_the_next_period():
    harness = a_harness(budgets={"ml": {"hours": {"cpu": 2}, "period": "day"}})
    harness.now_ms = NOW_MS // DAY * DAY  # the beginning of a day
    use_hours(harness, 1, "ml", 2)
    harness.submit(3, project="ml")
    assert harness.reason(3)[0] == "BUDGET"
    assert "has used 2 of 2 cpu-hours" in harness.reason(3)[1]
    harness.submit(4, project="web")
    assert harness.state(4) == "scheduled", "other projects are not affected"
    harness.observe("4.0.1", "succeeded", 0)
    harness.now_ms = harness.controller.next_wakeup_ms(harness.now_ms)
    harness.step()
    assert harness.state(3) == "scheduled"


def test_a_money_budget_is_charged_at_prices_per_hour():
    harness = a_harness(budgets={"ml": {"money": 1.0, "prices": {"cpu": "0.30"}, "since": "2020-01-01"}})
    use_hours(harness, 1, "ml", 3)
    (row,) = harness.controller.accounts.share_report(harness.now_ms).budgets
    assert (row.name, row.used, row.limit) == ("money", pytest.approx(0.9), 1.0)
    use_hours(harness, 10, "ml", 1)
    harness.submit(20, project="ml")
    assert harness.reason(20)[0] == "BUDGET"


@pytest.mark.parametrize(
    ("section", "problem"),
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
        ({"admission": {"max_priority": {"user": "huge"}}}, "there is no priority 'huge'"),
    ],
)  # fmt: skip
def test_an_invalid_setting_is_reported_with_its_section(section, problem):
    with pytest.raises(InvalidInput) as error:
        accounts_policy(msgspec.convert(section, SchedulingConfig))
    assert problem in str(error.value)
