"""Which evictions violate a PodDisruptionBudget: counted as kube-scheduler does, with the selectors of policy/v1."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.kube.api.objects import PodDisruptionBudget, decode, from_builtins
from hodei.kube.scheduler.disruption_budgets import Budgets
from unit.kube.pod_factory import a_pod

WEB = {"matchLabels": {"app": "web"}}


def _budget(allowed: int, selector: Any = WEB, *, namespace: str = "ns", disrupted: tuple[str, ...] = ()) -> Any:
    status = {"disruptionsAllowed": allowed, "disruptedPods": dict.fromkeys(disrupted, "2026-01-01T00:00:00Z")}
    spec = {} if selector is None else {"selector": selector}
    return from_builtins({"metadata": {"namespace": namespace}, "spec": spec, "status": status}, PodDisruptionBudget)


def _budgets(*budgets: PodDisruptionBudget, pods: int = 3, **of_pod: Any) -> Budgets:
    """Budgets over pods p1, p2, ... of the jobs 1, 2, ..."""
    out = Budgets()
    for number, budget in enumerate(budgets):
        out.put((budget.metadata.namespace, f"budget-{number}"), budget)
    for id in range(1, pods + 1):
        out.watch(id, a_pod(f"p{id}", **({"labels": {"app": "web"}} | of_pod)).metadata)
    return out


def _violations(budgets: Budgets, *jobs: int) -> list[int]:
    return budgets.violations([(job, ()) for job in jobs])


@pytest.mark.parametrize(
    ("allowed", "violations"), [(0, [1, 1, 1]), (1, [0, 1, 1]), (2, [0, 0, 1]), (3, [0, 0, 0]), (-1, [1, 1, 1])]
)
def test_evictions_beyond_the_allowed_number_violate_the_budget(allowed, violations):
    assert _violations(_budgets(_budget(allowed)), 1, 2, 3) == violations


@pytest.mark.parametrize(
    ("selector", "labels", "covered"),
    [
        (WEB, {"app": "web"}, True),
        (WEB, {"app": "db"}, False),
        (WEB, {}, False),
        ({}, {"app": "web"}, True),
        ({}, {}, True),
        (None, {"app": "web"}, False),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["db"]}]}, {"app": "web"}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["db"]}]}, {"app": "db"}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": []}]}, {"app": "web"}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Sounds", "values": ["x"]}]}, {"app": "web"}, False),
    ],
    ids=[
        "its label",
        "another label",
        "no labels",
        "an empty selector picks all",
        "an empty selector picks pods without labels too",
        "no selector picks none",
        "NotIn another label",
        "NotIn its label",
        "In without values picks none",
        "an unknown operator picks none",
    ],
)
def test_a_budget_counts_the_pods_that_its_selector_matches(selector, labels, covered):
    budgets = _budgets(_budget(0, selector), labels=labels)
    assert budgets.guarded(1) == covered
    assert _violations(budgets, 1) == [int(covered)]


def test_a_budget_of_another_namespace_does_not_count():
    budgets = _budgets(_budget(0, namespace="other"))
    assert not budgets.guarded(1)
    assert _violations(budgets, 1) == [0]


def test_a_disrupted_pod_is_not_counted_again():
    assert _violations(_budgets(_budget(1, disrupted=("p2",))), 2, 1, 3) == [0, 0, 1]


def test_a_pod_under_two_budgets_violates_either_and_counts_in_both():
    two = _budgets(_budget(2), _budget(1, {}))
    assert _violations(two, 1, 2, 3) == [0, 1, 1]


def test_a_gang_violates_once_for_each_of_its_pods():
    budgets = _budgets(_budget(1), pods=1)
    for member in (1, 2):
        budgets.watch(1, a_pod(f"q{member}", labels={"app": "web"}).metadata, member)
    assert _violations(budgets, 1) == [2]
    assert budgets.violations([(1, (2,))]) == [0]


def test_changes_apply_at_once_and_increase_the_version():
    budgets = _budgets(_budget(0))
    seen = [budgets.version]

    def version_changed() -> bool:
        seen.append(budgets.version)
        return seen[-1] != seen[-2]

    assert _violations(budgets, 1) == [1]
    budgets.put(("ns", "budget-0"), _budget(1))
    assert version_changed()
    assert _violations(budgets, 1) == [0]
    budgets.put(("ns", "budget-0"), _budget(0, {"matchLabels": {"app": "db"}}))
    assert version_changed()
    assert not budgets.guarded(1)
    budgets.watch(1, a_pod("p1", labels={"app": "db"}).metadata)
    assert version_changed()
    assert _violations(budgets, 1, 2) == [1, 0]
    budgets.watch(1, a_pod("p1", labels={"app": "db"}).metadata)
    assert not version_changed()
    budgets.put(("ns", "budget-0"), None)
    assert version_changed()
    assert _violations(budgets, 1) == [0]


def test_an_unknown_job_violates_nothing():
    budgets = _budgets(_budget(0))
    budgets.forget(1)
    budgets.forget(99)
    assert _violations(budgets, 1, 99, 2) == [0, 0, 1]
    assert not budgets.guarded(99)


def test_an_empty_selector_and_none_differ_in_json():
    for text, covered in ((b'{"spec": {"selector": {}}}', True), (b'{"spec": {"selector": null}}', False)):
        budget = decode(text, PodDisruptionBudget)
        budgets = Budgets()
        budgets.put(("ns", "b"), budget)
        budgets.watch(1, a_pod().metadata)
        assert budgets.guarded(1) == covered
