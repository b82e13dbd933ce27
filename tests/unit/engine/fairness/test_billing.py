"""Billing: Slurm's weights, prices and budgets."""

from __future__ import annotations

import pytest

from hodei.engine.fairness.billing import HOUR_MS, MICRO, Budget, Rate, bill, cost_micro, hours, parse_rates, spent
from hodei.model.errors import InvalidInput
from hodei.model.resources import parse_resources


@pytest.mark.parametrize("unit", ["G", "Gi"])
@pytest.mark.parametrize(
    ("cpu", "memory", "mode", "expected"),
    [
        pytest.param(1, 60, "sum", 16, id="much memory"),
        pytest.param(16, 1, "sum", 16.25, id="much cpu"),
        pytest.param(16, 60, "sum", 31, id="much of both"),
        pytest.param(1, 60, "max", 15, id="memory costs most"),
        pytest.param(15, 1, "max", 15, id="cpu costs most"),
        pytest.param(16, 64, "max", 16, id="both cost the same"),
    ],
)
def test_a_bill_is_slurms(cpu, memory, mode, expected, unit):
    rates = parse_rates({"cpu": 1.0, "mem": f"0.25/{unit}"})
    amounts = parse_resources({"cpu": cpu, "memory": f"{memory}{unit}"})
    assert bill(amounts, rates, mode).micro == expected * MICRO


def test_a_bill_lists_every_term_and_resources_without_a_rate_cost_nothing():
    found = bill({"cpu": 1500, "gpu": 2000, "licence/matlab": 3}, parse_rates({"cpu": 1, "gpu": "10.5"}))
    assert found.terms == {"cpu": 1_500_000, "gpu": 21_000_000}
    assert found.micro == 22_500_000
    assert bill({}, {}, "max").micro == 0


@pytest.mark.parametrize("text", ["-1", "1.0000001", "much", "nan", "inf", "1/parsec", "1/0", ""])
def test_an_invalid_rate_is_refused(text):
    with pytest.raises(InvalidInput):
        parse_rates({"memory": text})


def test_a_rate_may_be_for_any_amount():
    assert parse_rates({"memory": "1/16Gi", "gpu": "2", "cpu": "0.5/100m"}) == {
        "memory": Rate(MICRO, 16 * 2**30), "gpu": Rate(2 * MICRO, 1000), "cpu": Rate(500_000, 100),
    }  # fmt: skip
    with pytest.raises(InvalidInput, match="twice"):
        parse_rates({"mem": 1, "memory": 1})


def test_cost_is_the_price_per_hour_times_the_hours():
    prices = parse_rates({"gpu": "2.40", "cpu": "0.05"})
    used = {"gpu": 4000 * HOUR_MS, "cpu": 8000 * HOUR_MS // 2}
    assert cost_micro(used, prices) == round((4 * 2.40 + 8 * 0.5 * 0.05) * MICRO)
    assert hours("gpu", used["gpu"]) == 4.0


def test_a_budget_reports_the_usage_of_each_limit():
    budget = Budget(0, {"gpu": 5000}, 10 * MICRO, parse_rates({"gpu": "2.50"}))
    by_name = {bound.name: bound for bound in spent(budget, {"gpu": 4000 * HOUR_MS})}
    assert (by_name["gpu"].left, by_name["gpu"].exhausted) == (1000 * HOUR_MS, False)
    assert (by_name["money"].left, by_name["money"].exhausted) == (0, True)
    assert spent(Budget(0), {"gpu": 1}) == []
