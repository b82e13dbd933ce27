"""A tie-breaker orders gangs with equal keys, and is a plugin like any other."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.configuration import check_scheduling
from hodei.control.explain.why import priority_breakdown
from hodei.engine.view import Gang
from hodei.model.config import Config, imported_code
from hodei.model.errors import InvalidInput
from hodei.plugins.registry import build_profiles
from unit.control.configured import ConfiguredHarness, scheduling
from unit.control.harness import some_nodes

HOUR = 3_600_000
JOBS: dict[int, dict[str, Any]] = {
    1: {"cpu": 2, "estimate_ms": 3 * HOUR, "deadline_ms": 0},
    2: {"cpu": 1, "estimate_ms": 2 * HOUR, "deadline_ms": 9 * HOUR},
    3: {"cpu": 3, "estimate_ms": 1 * HOUR, "deadline_ms": 5 * HOUR},
    4: {"cpu": 4, "estimate_ms": 0, "deadline_ms": 0},
}


class Latest:
    """The latest job first."""

    name = "latest"

    def __init__(self, sign: int = -1) -> None:
        self.sign = sign

    def keys(self, gang: Gang) -> tuple[int, ...]:
        return (self.sign * gang.id,)


class Odd:
    """A custom primary order: odd job ids first."""

    name = "odd"
    preempts = False

    def queue_sort(self, gang: Gang) -> tuple[int, ...]:
        return ((gang.id + 1) % 2,)

    def tenant(self, gang: Gang) -> str:
        return ""

    def charge(self, gang: Gang) -> int:
        return 0


def order_of(profile: str, jobs: dict[int, dict[str, Any]] = JOBS, apart_ms: int = 1) -> list[int]:
    """The order in which jobs start on a node that fits one at a time."""
    harness = ConfiguredHarness(
        f"[scheduling.preemption]\nenabled = false\n[scheduling.profiles.default]\n{profile}", *some_nodes(4)
    )
    harness.submit(99, cpu=4)
    for id, fields in jobs.items():
        harness.now_ms += apart_ms
        harness.submit(id, **{"cpu": 4, **fields, "memory": "40Gi"})
    out, run = [], "99.0.1"
    for _ in jobs:
        harness.observe(run, "succeeded", 0)
        (run,) = harness.started()
        out.append(int(run.split(".")[0]))
    return out


@pytest.mark.parametrize(
    ("secondary", "expected"),
    [
        ("", [1, 2, 3, 4]),
        ("shortest", [3, 2, 1, 4]),
        ("smallest", [2, 1, 3, 4]),
        ("largest", [4, 3, 1, 2]),
        ("deadline", [3, 2, 1, 4]),
        ("newest", [4, 3, 2, 1]),
        ("unit.plugins.test_tie_breakers:Latest", [4, 3, 2, 1]),
    ],
)
@pytest.mark.parametrize("queue", ["priority", "fair"])
def test_jobs_of_equal_priority_are_ordered_by_the_tie_breaker(queue: str, secondary: str, expected: list[int]) -> None:
    assert order_of(f'queue = "{queue}"\nsecondary = "{secondary}"\n') == expected


def test_among_jobs_of_the_same_time_the_highest_id_is_the_newest() -> None:
    assert order_of('secondary = "newest"\n', apart_ms=0) == [4, 3, 2, 1]


def test_the_primary_order_comes_before_the_tie_breaker() -> None:
    jobs = {id: {**fields, "priority": "low" if id == 3 else "medium"} for id, fields in JOBS.items()}
    assert order_of('secondary = "shortest"\n', jobs) == [2, 1, 4, 3]


def test_a_custom_queue_can_have_a_tie_breaker() -> None:
    queue = 'queue = "unit.plugins.test_tie_breakers:Odd"\n'
    assert order_of(queue) == [1, 3, 2, 4]
    assert order_of(queue + 'secondary = "shortest"\n') == [3, 1, 2, 4]


def test_a_custom_tie_breaker_takes_arguments() -> None:
    name = "unit.plugins.test_tie_breakers:Latest"
    assert order_of(f'secondary = "{name}"\noptions = {{"{name}" = {{sign = 1}}}}\n') == [1, 2, 3, 4]


def test_the_queue_position_includes_the_tie_breaker() -> None:
    harness = ConfiguredHarness('[scheduling.profiles.default]\nsecondary = "shortest"\n', *some_nodes(1))
    harness.submit(9, cpu=1)
    for id, fields in JOBS.items():
        harness.submit(id, **{**fields, "cpu": 1})
    found = priority_breakdown(harness.controller, 3, harness.now_ms)
    assert found is not None
    assert found.position == 1
    assert found.terms[-1].text == "shortest, among jobs of equal priority"


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ('secondary = "shortes"', "there is no secondary 'shortes' (did you mean 'shortest'?)"),
        ('queue = "prio"', "there is no queue 'prio'"),
        ('queue = "batch"\nsecondary = "shortest"', "the queue 'batch' takes no secondary order"),
        ('queue = "multifactor"\nsecondary = "shortest"', "the queue 'multifactor' takes no secondary order"),
        ('secondary = "unit.plugins.test_tie_breakers:Odd"', "cannot be a secondary: it has no keys"),
        ('secondary = "no.such:Thing"', "cannot be imported"),
    ],
)
def test_an_invalid_order_is_refused_with_its_name(profile: str, message: str) -> None:
    config = scheduling(f"[scheduling.profiles.default]\n{profile}\n")
    with pytest.raises(InvalidInput) as error:
        build_profiles(config)
    assert message in error.value.message
    with pytest.raises(InvalidInput):
        check_scheduling(config)


def test_orders_named_by_a_path_are_imported_plugins() -> None:
    config = scheduling('[scheduling.profiles.default]\nqueue = "a:B"\nsecondary = "c:D"\n')
    assert imported_code(Config(scheduling=config)) == {
        "scheduling.profiles.default.queue": "a:B", "scheduling.profiles.default.secondary": "c:D"
    }  # fmt: skip
