from __future__ import annotations

from itertools import combinations

import pytest

from hodei.sim.report.gantt import NODES_SHOWN, Chart, Window, chart_by_node, chart_by_user, natural_key, window_of
from hodei.sim.report.table import arrays_of
from unit.sim.report.fake_results import a_result, some_results


def overlapping(chart: Chart) -> list[tuple[int, int]]:
    """Pairs of bars that cover each other by more than the minimum width of a bar."""
    pieces = [(bar.job, piece) for bar in chart.bars for piece in bar.pieces]
    min_overlap = max(piece.end for _, piece in pieces) * 0.001
    return [
        (first, second)
        for (first, a), (second, b) in combinations(pieces, 2)
        if min(a.high, b.high) - max(a.low, b.low) > 1e-6 and min(a.end, b.end) - max(a.start, b.start) > min_overlap
    ]


@pytest.mark.parametrize("pooled", [True, False], ids=["one pool", "nodes"])
def test_no_two_bars_cover_each_other(pooled: bool) -> None:
    arrays = arrays_of(a_result("easy", 150, nodes=6, pooled=pooled))
    for chart in (
        chart_by_node(arrays, 500, window_of([arrays], 500)),
        chart_by_user(arrays, 500, window_of([arrays], 500)),
    ):
        assert len(chart.bars) == 150
        assert overlapping(chart) == []


def test_a_gang_has_a_piece_on_each_of_its_nodes() -> None:
    arrays = arrays_of(a_result("easy", 50, nodes=6))
    for bar in chart_by_node(arrays, 500, window_of([arrays], 500)).bars:
        assert len(bar.pieces) == len(arrays.result.outcomes[bar.job].nodes)


def test_in_a_pool_a_bar_is_as_high_as_the_jobs_share() -> None:
    arrays = arrays_of(a_result("easy", 50, nodes=6, pooled=True))
    for bar in chart_by_node(arrays, 500, window_of([arrays], 500)).bars:
        assert sum(piece.high - piece.low for piece in bar.pieces) == pytest.approx(arrays.share[bar.job])


def test_with_many_jobs_the_window_around_the_longest_queue_is_shown() -> None:
    arrays = arrays_of(a_result("easy", 300, nodes=6, pooled=True))
    window = window_of([arrays], 40)
    chart = chart_by_node(arrays, 40, window)
    assert 30 <= len(chart.bars) == len(chart.jobs) <= 40
    assert all(window.start <= piece.start < piece.end <= window.end for bar in chart.bars for piece in bar.pieces)
    waiting = {sample.at_ms - arrays.origin_ms: sample.waiting for sample in arrays.result.samples}
    longest = max(waiting, key=lambda at: (waiting[at], -at))
    assert window.start <= longest <= window.end


def test_if_a_short_window_has_too_many_jobs_the_largest_are_shown() -> None:
    arrays = arrays_of(a_result("easy", 300, nodes=6, pooled=True))
    chart = chart_by_node(arrays, 40, Window(0, arrays.span_ms, True))
    shown = {bar.job for bar in chart.bars}
    assert len(shown) == 40
    assert min(arrays.work[job] for job in shown) >= max(arrays.work[job] for job in set(range(300)) - shown)


def test_all_policies_are_shown_over_the_same_window() -> None:
    every = [arrays_of(result) for result in some_results(300, nodes=6)]
    window = window_of(every, 50)
    assert not window.complete
    assert all(len(chart_by_node(arrays, 50, window).jobs) <= 50 for arrays in every)


def test_a_sample_of_many_nodes_is_shown_in_natural_order() -> None:
    arrays = arrays_of(a_result("easy", 2000, nodes=NODES_SHOWN * 2))
    chart = chart_by_node(arrays, 5000, window_of([arrays], 5000))
    assert len(chart.rows) == NODES_SHOWN
    assert chart.rows == sorted(chart.rows, key=natural_key)
    assert chart.all_rows > NODES_SHOWN
