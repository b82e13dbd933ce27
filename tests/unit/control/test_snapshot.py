"""A snapshot of a controller can be written and read back under every configuration, and decides the same."""

from __future__ import annotations

from typing import Any

import pytest

from builders import NOW_MS, a_job, a_node
from hodei.control.explain.why import why
from hodei.control.snapshot import dump, load, modules_of
from hodei.model.config import (
    BudgetConfig,
    EstimatesConfig,
    ProfileConfig,
    QuotaConfig,
    SchedulingConfig,
    SharesConfig,
    SpillConfig,
)
from hodei.model.facts import BackendReported, JobSubmitted, NodeJoined, Reconfigured, RunObserved
from hodei.plugins.registry import PLUGINS, QUEUES
from hodei.wiring import make_controller


class External:
    """A plugin from outside of Hodei."""

    name = "external"

    def __init__(self, api_token: str = "", words: tuple[str, ...] = ()) -> None:
        self.api_token, self.words = api_token, words

    def score(self, member: Any, nodes: Any, view: Any) -> Any:
        return nodes.zeros()


def _config(**fields: Any) -> SchedulingConfig:
    return SchedulingConfig(**fields)


CASES = {
    **{f"queue {name}": _config(profiles={"default": ProfileConfig(queue=name)}) for name in QUEUES},
    "shares, quotas and budgets": _config(
        profiles={"default": ProfileConfig(queue="multifactor")},
        shares=SharesConfig(enabled=True),
        quotas={"a": QuotaConfig(hard={"cpu": 3}, pending=100)},
        budgets={"a": BudgetConfig(hours={"cpu": 100})},
    ),
    "learned estimates": _config(estimates=EstimatesConfig(source="learned")),
    "corrected estimates": _config(estimates=EstimatesConfig(source="corrected")),
    "spill": _config(spill=(SpillConfig(to="cloud", only_if_wait_over="1m"),)),
    "a chain of backends": _config(fallback=("onprem", "cloud"), fallback_when="failure"),
    "unavailable profiles": _config(
        unavailable_profile="fallback", profiles={"x": ProfileConfig(paused=True, secondary="shortest")}
    ),
    "wait limits": _config(scheduling_timeout="1h", profiles={"default": ProfileConfig(max_queue_time="1m")}),
    "an external plugin": _config(
        profiles={"default": ProfileConfig(plugins=(f"{__name__}:External",))},
    ),
}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_a_controller_continues_from_its_snapshot_under_every_configuration(config: SchedulingConfig) -> None:
    one = make_controller(config)
    one.step(NOW_MS, [NodeJoined(a_node(f"n{number}", 4)) for number in range(3)])
    one.step(NOW_MS + 1, [_submitted(id) for id in range(1, 12)])
    one.step(NOW_MS + 2, [RunObserved("1.0.1", "running", NOW_MS + 2)])
    other = load(dump(one), modules_of(one))
    other.rebuild = one.rebuild
    for after, facts in enumerate(
        [
            [RunObserved("1.0.1", "succeeded", NOW_MS + 50_000, 0), _submitted(20)],
            [RunObserved("2.0.1", "failed", NOW_MS + 60_000, 1)],
            [Reconfigured(scheduling=config), _submitted(21)],
            [NodeJoined(a_node("n9", 8))],
        ]
    ):
        now_ms = NOW_MS + 60_000 * (after + 1)
        assert one.step(now_ms, facts) == other.step(now_ms, facts), f"step {after}"


def test_backends_that_were_never_reached_are_in_the_snapshot() -> None:
    one = make_controller(SchedulingConfig())
    one.step(NOW_MS, [BackendReported("farm", "backend farm is out of reach since 10:00", ("bare",), by="ann")])
    one.step(NOW_MS + 1, [_submitted(1)])
    other = load(dump(one), modules_of(one))
    facts = [_submitted(2), BackendReported("hpc", "backend hpc is out of reach since 10:00")]
    assert one.step(NOW_MS + 2, facts) == other.step(NOW_MS + 2, facts)
    explanation = why(one, 1, NOW_MS + 3)
    assert explanation is not None
    assert explanation.code == "BACKEND_UNAVAILABLE"
    assert explanation == why(other, 1, NOW_MS + 3)


def test_every_plugin_can_be_written() -> None:
    for name in PLUGINS:
        config = _config(profiles={"default": ProfileConfig(plugins=(name,))})
        controller = make_controller(config)
        controller.step(NOW_MS, [NodeJoined(a_node("n1", 4)), _submitted(1)])
        assert load(dump(controller)).cluster.jobs == controller.cluster.jobs, name


def test_secrets_of_an_external_plugin_are_not_written() -> None:
    profile = ProfileConfig(
        plugins=(f"{__name__}:External",), options={f"{__name__}:External": {"api_token": "canary", "words": ["a"]}}
    )
    controller = make_controller(_config(profiles={"default": profile}))
    [original] = [each for each in controller.engine.profiles["default"].node_plugins if each.name == "external"]
    assert original.api_token == "canary"
    loaded = load(dump(controller), modules_of(controller))
    [restored] = [each for each in loaded.engine.profiles["default"].node_plugins if each.name == "external"]
    assert (restored.api_token, list(restored.words)) == ("***", ["a"])


def _submitted(id: int) -> JobSubmitted:
    fields = {"project": "ab"[id % 2], "user": "u", "cpu": 1 + id % 3, "estimate_ms": 60_000 * (1 + id % 4)}
    return JobSubmitted(a_job(id, at_ms=NOW_MS, queued_ms=NOW_MS, **fields))
