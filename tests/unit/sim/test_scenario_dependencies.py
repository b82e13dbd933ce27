"""Scenarios with jobs that wait for others and for data."""

from __future__ import annotations

import pytest

from hodei.model.errors import InvalidInput
from hodei.sim.scenario.parse import parse_scenario
from hodei.sim.scenario.runner import run_scenario

CLUSTER = "cluster: [{name: n, cpu: 4, memory: 8Gi}]\n"


def changes_of(jobs: str, facts: str = "") -> dict[str, list[tuple[int, str]]]:
    history = run_scenario(parse_scenario(f"scenario: s\n{CLUSTER}jobs:\n{jobs}{facts}".encode(), "s"))
    return {
        record.job.name: [(at_ms // 1000, job.state) for at_ms, job in record.changes]
        for record in history.by_id.values()
    }


def test_jobs_wait_for_names_ids_and_data() -> None:
    changes = changes_of(
        "- {name: last, after: [second, 7], run: 1m}\n"
        "- {name: second, after: {succeeded: first, exists: /data/x}, run: 1m}\n"
        "- {name: first, run: 1m}\n"
        "- {name: mend, after: {failed: first}}\n",
        "facts:\n- {at: 90s, appear: /data/x}\n",
    )
    assert (60, "succeeded") in changes["first"]
    assert (90, "scheduled") in changes["second"]
    assert changes["last"][-1] == (210, "succeeded")
    assert changes["mend"][-1] == (60, "failed")


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        pytest.param("- {name: a, after: b}\n- {name: b, after: a}\n", "a -> b -> a", id="a cycle"),
        pytest.param("- {name: a, after: c}\n- {name: b}\n", "there is no job 'c'", id="an unknown job"),
        pytest.param("- {name: a, after: b}\n- {name: b, at: 1m}\n", "submitted later", id="a later job"),
    ],
)
def test_an_impossible_dependency_is_refused(jobs: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        changes_of(jobs)
    assert message in f"{refused.value.message} {refused.value.problems}"
