"""The ledger of usage: charges, decay, rolling windows, folding and storage."""

from __future__ import annotations

import pytest

from hodei.control.accounting.ledger import DAY_MS, HOUR_MS, WEEK_MS, Ledger
from hodei.model.accounting import UsageRow
from hodei.model.errors import InvalidInput

ANN, BOB, EVE = ("acme", "web", "ann"), ("acme", "web", "bob"), ("acme", "ml", "eve")
# The first hour of a day, long after the epoch.
START = 1000 * DAY_MS


def test_usage_is_amount_times_time_for_the_user_and_all_accounts_above():
    ledger = Ledger()
    ledger.charge(ANN, {"cpu": 2000, "gpu": 1000}, START, START + 60_000)
    ledger.charge(BOB, {"cpu": 500}, START, START + 60_000)
    assert ledger.usage(ANN, START + 60_000) == {"cpu": 2000 * 60_000, "gpu": 1000 * 60_000}
    for prefix in (("acme", "web"), ("acme",), ()):
        assert ledger.usage(prefix, START + 60_000) == {"cpu": 2500 * 60_000, "gpu": 1000 * 60_000}
    assert ledger.usage(("acme", "ml"), START) == {}


@pytest.mark.parametrize("half_life_ms", [WEEK_MS, DAY_MS, HOUR_MS, 30 * DAY_MS])
def test_usage_halves_after_a_half_life(half_life_ms):
    ledger = Ledger(half_life_ms=half_life_ms)
    ledger.charge(ANN, {"cpu": 1024}, START, START + 1000)
    for halvings in range(11):
        assert ledger.usage(ANN, START + halvings * half_life_ms) == {"cpu": 1_024_000 >> halvings}


def test_usage_decays_evenly_between_half_lives():
    ledger = Ledger()
    ledger.charge(ANN, {"cpu": 10**12}, START, START + 1)
    for day in range(8):
        assert ledger.usage(ANN, START + day * DAY_MS)["cpu"] == pytest.approx(10**12 * 2 ** (-day / 7), rel=1e-9)


def test_a_rolling_window_counts_usage_in_full_and_older_usage_not_at_all():
    ledger = Ledger(window_ms=WEEK_MS)
    ledger.charge(ANN, {"cpu": 3}, START, START + HOUR_MS)
    ledger.charge(ANN, {"cpu": 5}, START + HOUR_MS, START + 2 * HOUR_MS)
    last = START + WEEK_MS - 1
    assert ledger.usage(ANN, last) == {"cpu": 8 * HOUR_MS}
    assert ledger.usage(ANN, last + 1) == {"cpu": 5 * HOUR_MS}
    assert ledger.usage(ANN, last + 1 + HOUR_MS) == {}


@pytest.mark.parametrize("window_ms", [0, WEEK_MS], ids=["half-life", "window"])
def test_a_run_is_charged_while_it_is_open_and_nothing_changes_when_it_closes(window_ms):
    ledger, expected = Ledger(window_ms=window_ms), Ledger(window_ms=window_ms)
    ledger.opened("1.0.0", ANN, {"cpu": 1000}, START + 5)
    for after in (5, 10, HOUR_MS - 1, HOUR_MS, 30 * HOUR_MS + 7, 100 * HOUR_MS):
        now = START + after
        expected = Ledger(window_ms=window_ms)
        expected.charge(ANN, {"cpu": 1000}, START + 5, now)
        assert ledger.exact_usage(ANN, now) == expected.exact_usage(ANN, now)
        assert ledger.used_since((), START, now).get("cpu", 0) == 1000 * (after - 5)
    ledger.closed("1.0.0", START + 100 * HOUR_MS)
    later = START + 101 * HOUR_MS
    assert ledger.exact_usage(("acme",), later) == expected.exact_usage(("acme",), later)
    assert ledger.rows() == expected.rows()


def test_a_late_end_refunds_the_excess_charge():
    ledger = Ledger()
    ledger.opened("1.0.0", ANN, {"cpu": 1000}, START)
    ledger.usage((), START + 50 * HOUR_MS)
    ledger.closed("1.0.0", START + 90 * 60_000)
    assert ledger.used_since(ANN, START, START + 50 * HOUR_MS) == {"cpu": 1000 * 90 * 60_000}


def test_an_end_may_be_reported_before_the_start_and_both_twice():
    ledger = Ledger()
    ledger.closed("1.0.0", START + 10)
    ledger.opened("1.0.0", ANN, {"cpu": 7}, START)
    ledger.opened("2.0.0", ANN, {"cpu": 1}, START)
    ledger.opened("2.0.0", ANN, {"cpu": 1}, START)
    ledger.closed("2.0.0", START + 10)
    ledger.closed("2.0.0", START + 99)
    assert ledger.used_since(ANN, START, START + DAY_MS) == {"cpu": 80}


def test_an_interval_that_ends_before_it_begins_charges_nothing():
    ledger = Ledger()
    ledger.charge(ANN, {"cpu": 7}, START + 10, START)
    ledger.opened("1.0.0", ANN, {"cpu": 7}, START + 10)
    ledger.closed("1.0.0", START)
    assert ledger.used_since(ANN, 0, START + DAY_MS) == {}
    assert ledger.rows() == []


def test_a_budget_counts_everything_since_its_start_and_forgets_nothing():
    ledger = Ledger(half_life_ms=DAY_MS)
    ledger.charge(ANN, {"gpu": 1000}, START - DAY_MS, START)
    ledger.charge(ANN, {"gpu": 1000}, START, START + 40 * DAY_MS)
    now = START + 300 * DAY_MS
    while ledger.fold(now):
        pass
    assert ledger.used_since(("acme", "web"), START, now) == {"gpu": 1000 * 40 * DAY_MS}
    assert ledger.used_since(("acme", "web"), 0, now) == {"gpu": 1000 * 41 * DAY_MS}


def test_the_usage_of_all_projects_is_read_at_once():
    ledger = Ledger()
    ledger.charge(ANN, {"cpu": 1, "gpu": 9}, START, START + 10)
    ledger.charge(EVE, {"cpu": 2}, START, START + 10)
    assert ledger.usage_of("cpu", START + 10, depth=2) == {("acme", "ml"): 20, ("acme", "web"): 10}
    assert ledger.usage_of("gpu", START + 10, depth=2) == {("acme", "web"): 90}


def test_only_changed_rows_are_saved_with_their_current_amounts():
    ledger = Ledger()
    ledger.charge(ANN, {"cpu": 1}, START + HOUR_MS - 5, START + HOUR_MS + 5)
    ledger.opened("1.0.0", BOB, {"cpu": 1}, START)
    assert ledger.take_dirty() == [
        UsageRow(ANN, "cpu", START, HOUR_MS, 5), UsageRow(ANN, "cpu", START + HOUR_MS, HOUR_MS, 5),
    ]  # fmt: skip
    assert ledger.take_dirty() == []
    ledger.charge(ANN, {"cpu": 1}, START, START + 1)
    assert ledger.take_dirty() == [UsageRow(ANN, "cpu", START, HOUR_MS, 6)]


def test_old_hours_are_folded_into_days_and_deleted_rows_are_dirty():
    ledger = Ledger()
    ledger.charge(ANN, {"cpu": 1}, START + HOUR_MS, START + 3 * HOUR_MS)
    ledger.take_dirty()
    now = START + 16 * DAY_MS
    before = ledger.usage(ANN, now)["cpu"]
    assert not ledger.fold(now)
    assert ledger.rows() == [UsageRow(ANN, "cpu", START, DAY_MS, 2 * HOUR_MS)]
    assert ledger.take_dirty() == [
        UsageRow(ANN, "cpu", START, DAY_MS, 2 * HOUR_MS),
        UsageRow(ANN, "cpu", START + HOUR_MS, HOUR_MS, 0), UsageRow(ANN, "cpu", START + 2 * HOUR_MS, HOUR_MS, 0),
    ]  # fmt: skip
    assert ledger.usage(ANN, now)["cpu"] == pytest.approx(before, rel=2 ** (0.5 / 7) - 1)
    assert ledger.used_since(ANN, START, now) == {"cpu": 2 * HOUR_MS}


def test_usage_older_than_the_retention_is_dropped():
    ledger = Ledger()
    ledger.charge(ANN, {"cpu": 1}, START, START + DAY_MS)
    now = START + 500 * DAY_MS
    while ledger.fold(now, at_most=1):
        pass
    assert ledger.rows() == []
    assert ledger.usage((), now) == {}
    assert {row.amount for row in ledger.take_dirty()} == {0}
    ledger.charge(ANN, {"cpu": 1}, START, START + DAY_MS)
    assert ledger.rows() == [], "late usage of that time is dropped too"


def test_rows_with_another_bucket_size_are_converted_and_replaced_in_the_store():
    coarse, fine = Ledger(), Ledger(bucket_ms=60_000, folds=60)
    coarse.charge(ANN, {"cpu": 1}, START, START + 10)
    fine.restore(coarse.rows())
    assert fine.used_since((), 0, START + DAY_MS) == {"cpu": 10}
    stored = {row.start_ms: row for row in coarse.rows()} | {row.start_ms: row for row in fine.take_dirty()}
    assert [row for row in stored.values() if row.amount] == fine.rows()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"half_life_ms": 0}, id="no half-life"),
        pytest.param({"half_life_ms": HOUR_MS + 1}, id="not a whole number of buckets"),
        pytest.param({"window_ms": 60_000}, id="a window shorter than a bucket"),
        pytest.param({"bucket_ms": 0}, id="no bucket"),
    ],
)
def test_invalid_ledger_settings_are_refused(arguments):
    with pytest.raises(InvalidInput):
        Ledger(**arguments)
