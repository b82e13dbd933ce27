from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hodei.sim.report import pictures
from hodei.sim.report.style import report_style, to_bytes
from hodei.sim.report.table import ResultArrays, arrays_of
from unit.sim.report.fake_results import a_result

pytest.importorskip("matplotlib")

OVER_TIME = [pictures.load_over_time, pictures.wait_cdf, pictures.fairness, pictures.preemptions_over_time]


@pytest.mark.parametrize("draw", OVER_TIME, ids=lambda draw: draw.__name__)
def test_many_policies_with_long_names_do_not_shrink_the_picture(
    draw: Callable[[Sequence[ResultArrays]], Any],
) -> None:
    result = a_result("easy", 40, nodes=4)
    many = [arrays_of(result, f"a policy with a rather long name {n}") for n in range(14)]
    with report_style():
        picture = draw(many)
        to_bytes(picture.figure, "svg")
    boxes = [axes.get_position() for axes in picture.figure.axes]
    assert min(box.width for box in boxes) > 0.8
    assert min(box.height for box in boxes) > 0.05


def test_a_line_of_zeros_is_not_drawn() -> None:
    with report_style():
        assert pictures.preemptions_over_time([arrays_of(a_result("fcfs", 20))]) is None
