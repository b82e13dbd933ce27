from __future__ import annotations

import re

from hodei.sim.metrics import Outcome, Result
from hodei.sim.report import draw_table, gantt_for_terminal
from hodei.sim.report.table import labels_of
from unit.sim.report.fake_results import a_result, some_results


def a_policy(name: str, wait_ms: int, **fields: int) -> Result:
    outcomes = [Outcome(1, "job", "ada", "p", 0, wait_ms, wait_ms + 60_000, {"cpu": 1000}, nodes=("n1",))]
    return Result(name, "w", {"cpu": 1000}, outcomes, [], **fields)


def test_columns_are_aligned_and_the_best_of_each_is_marked() -> None:
    text = draw_table([a_policy("slow", 600_000), a_policy("quick", 60_000)])
    slow, quick = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("slow", "quick"))
    assert "11.00 " in slow
    assert "2.00*" in quick
    assert slow.count("*") == 0
    assert [m.end() for m in re.finditer(r"\d(?=[* ]|$)", slow)] == [
        m.end() for m in re.finditer(r"\d(?=[* ]|$)", quick)
    ]


def test_nothing_is_marked_if_all_are_equal() -> None:
    assert "*" not in draw_table([a_policy("a", 1000), a_policy("b", 1000)])


def test_a_policy_that_started_nothing_is_not_the_best_in_waits() -> None:
    never = Result("never", "w", {"cpu": 1000}, [Outcome(1, "job", "ada", "p", 0, -1, -1, {"cpu": 1000})], [])
    text = draw_table([never, a_policy("quick", 1000)])
    line = next(line for line in text.splitlines() if line.startswith("never"))
    assert "–" in line
    assert "*" not in line


def test_waits_of_a_column_share_one_unit() -> None:
    head = draw_table([a_policy("a", 30_000_000), a_policy("b", 1000)]).partition("---")[0]
    assert re.search(r"\bh\b", head)
    assert "min" not in head


def test_colour_is_off_by_default() -> None:
    results = [a_policy("a", 1000), a_policy("b", 90_000)]
    assert "\x1b" not in draw_table(results)
    assert "\x1b[" in draw_table(results, colour=True)


def test_a_table_without_results_has_a_message() -> None:
    assert draw_table([]) == "No results.\n"


def test_a_name_cannot_move_the_cursor() -> None:
    assert "\x1b" not in draw_table([a_policy("a\x1b[2J\n", 1000)])


def test_several_workloads_are_named_with_the_policy() -> None:
    first, second = a_policy("easy", 1000), a_policy("easy", 2000)
    second.workload = "other"
    text = draw_table([first, second])
    assert "easy · w" in text
    assert "easy · other" in text


def test_the_text_chart_has_a_row_per_node_and_keeps_to_the_width() -> None:
    lines = gantt_for_terminal(a_result("easy", 200, nodes=6), 60).splitlines()
    assert [line.split("│")[0].strip() for line in lines[:-1]] == [f"n{n}" for n in range(6)]
    assert max(len(line) for line in lines) <= 60


def test_the_text_chart_shows_a_node_busy_when_it_was() -> None:
    jobs = [
        Outcome(1, "job", "ada", "p", 0, 0, 50_000, {"cpu": 1000}, nodes=("n1",)),
        Outcome(2, "job", "ada", "p", 0, 50_000, 100_000, {"cpu": 1000}, nodes=("n2",)),
    ]
    first, second, _ = gantt_for_terminal(Result("easy", "w", {"cpu": 2000}, jobs, []), 14).splitlines()
    assert first == "n1│█████"
    assert second == "n2│     █████"


def test_a_pool_is_drawn_as_its_used_share() -> None:
    jobs = [Outcome(1, "job", "ada", "p", 0, 0, 100_000, {"cpu": 1000}, nodes=("pool",))]
    lines = gantt_for_terminal(Result("easy", "w", {"cpu": 2000}, jobs, []), 20, unicode=False).splitlines()
    assert [("#" in line) for line in lines[:8]] == [False] * 4 + [True] * 4


def test_without_unicode_the_text_chart_is_plain_ascii() -> None:
    assert gantt_for_terminal(a_result("easy", 100), 70, unicode=False).isascii()


def test_a_text_chart_without_jobs_has_a_message() -> None:
    assert gantt_for_terminal(Result("easy", "w", {}, [], []), 80) == "No job was started.\n"


def test_a_short_job_is_visible() -> None:
    jobs = [
        Outcome(1, "job", "ada", "p", 0, 0, 1_000_000, {"cpu": 1000}, nodes=("n1",)),
        Outcome(2, "job", "ada", "p", 0, 500_000, 500_000, {"cpu": 1000}, nodes=("n2",)),
    ]
    assert "▁" in gantt_for_terminal(Result("easy", "w", {"cpu": 2000}, jobs, []), 40).splitlines()[1]


def test_all_policies_are_in_the_table() -> None:
    text = draw_table(some_results(30))
    assert all(f"\n{name}" in text for name in ("fcfs", "easy", "hodei"))


def test_two_runs_of_one_policy_get_different_labels() -> None:
    assert labels_of([a_policy("easy", 1), a_policy("fcfs", 1), a_policy("easy", 2)]) == ["easy #1", "fcfs", "easy #2"]
