"""Even shares over time: what each user had beside what would have been even."""

from __future__ import annotations

import pytest

from hodei.sim.report.pictures import even_shares_over_time
from hodei.sim.report.table import columns_of
from unit.sim.report.test_columns import a_result

SHORT = 1  # nothing but the slice itself counts


def test_who_asks_for_little_and_gets_it_is_even_with_who_gets_the_rest() -> None:
    columns = columns_of(a_result(("ada", 0, 0, 100), ("bob", 0, 0, 100), ("bob", 0, 0, 100)))
    assert even_shares_over_time(columns, 2, SHORT).tolist() == pytest.approx([1.0, 1.0])


def test_one_who_has_all_while_another_waits_is_not_even() -> None:
    columns = columns_of(a_result(("ada", 0, 0, 100), ("bob", 0, 100, 200), cpu=2000))
    assert even_shares_over_time(columns, 2, SHORT)[0] == pytest.approx(0.5)


def test_who_takes_turns_is_even_over_a_longer_time() -> None:
    columns = columns_of(a_result(("ada", 0, 0, 100), ("bob", 0, 100, 200), ("ada", 0, 200, 300), ("bob", 0, 300, 400)))
    assert even_shares_over_time(columns, 4, SHORT)[2] < 0.6
    assert even_shares_over_time(columns, 4, 400)[3] > 0.9


def test_nobody_is_due_more_than_it_asks_for() -> None:
    # Three cores in use: ada asks for one and has it, so that the two of bob are not too much.
    jobs = [("ada", 0, 0, 100), ("bob", 0, 0, 100), ("bob", 0, 0, 100), ("bob", 0, 100, 200)]
    columns = columns_of(a_result(*jobs))
    assert even_shares_over_time(columns, 2, SHORT)[0] == pytest.approx(1.0)
