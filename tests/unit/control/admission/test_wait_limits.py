"""Wait limits of a job: its own, else those of its profile, else those of the server."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from builders import a_job, a_job_spec
from hodei.configuration import check_scheduling
from hodei.control.explain.why import plan, why
from hodei.model.array import ArrayElement, iter_expanded
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.errors import InvalidInput
from hodei.model.facts import JobRequeued, JobSubmitted
from unit.control.configured import ConfiguredHarness, scheduling
from unit.control.harness import some_nodes

DEFAULTS = """
[scheduling]
scheduling_timeout = "1h"
[scheduling.profiles.quick]
scheduling_timeout = "10s"
[scheduling.profiles.patient]
scheduling_timeout = "0s"
max_queue_time = "2h"
"""


@pytest.mark.parametrize(
    ("fields", "fails_after_s", "code"),
    [
        pytest.param({}, 3600, "SCHEDULING_TIMEOUT", id="the server's"),
        pytest.param({"profile": "quick"}, 10, "SCHEDULING_TIMEOUT", id="its profile's"),
        pytest.param({"profile": "compute"}, 3600, "SCHEDULING_TIMEOUT", id="a profile without a limit"),
        pytest.param({"profile": "patient"}, 7200, "QUEUE_TIME_EXCEEDED", id="a profile that turns the server's off"),
        pytest.param(
            {"profile": "quick", "scheduling_timeout_ms": 60_000}, 60, "SCHEDULING_TIMEOUT", id="the job's own"
        ),
        pytest.param(
            {"profile": "patient", "max_queue_time_ms": 5000}, 5, "QUEUE_TIME_EXCEEDED", id="its own time in the queue"
        ),
    ],
)
def test_a_job_without_a_limit_waits_as_long_as_its_profile_or_the_server_allows(
    fields: dict[str, object], fails_after_s: int, code: str
) -> None:
    harness = ConfiguredHarness(DEFAULTS, *some_nodes(1))
    harness.submit(1, cpu=2, **fields)
    harness.run_for(fails_after_s * 1000 - 1)
    assert harness.state(1) == "pending"
    harness.run_for(1)
    assert (harness.state(1), harness.reason(1)[0]) == ("failed", code)


def test_max_queue_time_limits_the_first_start_only() -> None:
    harness = ConfiguredHarness('[scheduling]\nmax_queue_time = "1m"\n', *some_nodes(1))
    harness.submit(1, cpu=1, retries=3)
    harness.observe("1.0.1", "running")
    harness.submit(2, cpu=1, priority="high", scheduling_timeout_ms=3_600_000)
    harness.now_ms += 1000
    harness.observe("1.0.1", "failed", 1)
    assert harness.state(2) == "scheduled"
    harness.run_for(600_000)
    assert (harness.state(1), harness.jobs[1].attempt) == ("pending", 1), (
        "it has run before: max_queue_time does not apply"
    )


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param({"max_queue_time_ms": 60_000}, id="max_queue_time"),
        pytest.param({"scheduling_timeout_ms": 60_000}, id="scheduling_timeout"),
    ],
)
@pytest.mark.parametrize("outside", ["at_most", "after"])
def test_waiting_outside_the_queue_is_not_counted(limit: dict[str, int], outside: str) -> None:
    """Both limits are about waiting for capacity. Waiting for dependencies has its own limit (`after.timeout`)."""
    harness = ConfiguredHarness("", *some_nodes(1))
    array: dict[str, Any] = {"array": ArrayElement(0, 0, 2, 1)} if outside == "at_most" else {}
    first, second = iter_expanded([a_job_spec("sweep", **array)], 1) if array else [a_job_spec("a"), a_job_spec("b")]
    if outside == "after":
        second = structs.replace(second, after=Dependencies((Dependency("succeeded", job=1, name="a"),)))
    second = structs.replace(second, **limit)
    harness.step(*(JobSubmitted(a_job(id, spec=spec)) for id, spec in ((1, first), (2, second))))
    harness.observe("1.0.1", "running")
    harness.run_for(600_000)
    assert harness.state(2) == "pending", "ten minutes outside the queue"
    harness.submit(3, cpu=1, priority="high")
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.state(3) == "scheduled", "it holds the capacity that job 2 now waits for"
    harness.run_for(59_000)
    assert harness.state(2) == "pending"
    harness.run_for(1_000)
    assert harness.reason(2)[0] == ("QUEUE_TIME_EXCEEDED" if "max_queue_time_ms" in limit else "SCHEDULING_TIMEOUT")


def test_every_timed_out_job_of_a_group_has_the_reason_of_the_refusal() -> None:
    harness = ConfiguredHarness(DEFAULTS, *some_nodes(1))
    for id in (1, 2, 3):
        harness.submit(id, cpu=1, node_selector={"pool": "moon"}, profile="quick")
    harness.run_for(10_000)
    reasons = {harness.reason(id)[1] for id in (1, 2, 3)}
    assert len(reasons) == 1, reasons
    assert "pool" in reasons.pop()


def test_a_timed_out_job_has_the_refusal_as_reason_and_not_its_requeue() -> None:
    harness = ConfiguredHarness(DEFAULTS, *some_nodes(1))
    for id in (1, 2):
        harness.submit(id, cpu=1, node_selector={"pool": "moon"}, profile="quick")
    harness.run_for(10_000)
    harness.step(JobRequeued(1, harness.jobs[1]), JobRequeued(2, harness.jobs[2]))
    harness.run_for(10_000)
    for id in (1, 2):
        code, text = harness.reason(id)
        assert code == "SCHEDULING_TIMEOUT"
        assert "requeued" not in text
        assert "pool" in text


def test_a_job_keeps_its_wait_limit_after_a_restart_and_a_new_configuration() -> None:
    harness = ConfiguredHarness(DEFAULTS, *some_nodes(1))
    harness.submit(1, cpu=2, profile="quick")
    harness.restart(*some_nodes(1))
    harness.reconfigure('[scheduling]\nscheduling_timeout = "1s"\n[scheduling.profiles.quick]\n')
    harness.run_for(9_999)
    assert harness.state(1) == "pending"
    harness.run_for(1)
    assert harness.reason(1)[0] == "SCHEDULING_TIMEOUT"


def test_why_names_the_wait_limit_and_where_it_is_set() -> None:
    harness = ConfiguredHarness(DEFAULTS, *some_nodes(1))
    harness.submit(1, cpu=2, profile="quick")
    harness.submit(2, cpu=2, scheduling_timeout_ms=60_000)
    texts = [why(harness.controller, id, harness.now_ms).escalation_steps[0].text for id in (1, 2)]  # type: ignore[union-attr]
    assert texts[0].startswith("fails if it still waits at 2023-11-14")
    assert texts[0].endswith("(10s: scheduling_timeout from profile quick)")
    assert texts[1].endswith("(1m: its own scheduling_timeout)")


def test_jobs_with_one_spec_still_share_it_after_routing() -> None:
    harness = ConfiguredHarness(DEFAULTS, *some_nodes(1))
    spec = a_job_spec(cpu=2)
    routing = harness.controller.profile_router.routing
    assert routing.route(spec) is routing.route(spec)
    routed = routing.route(spec)
    assert routing.route(routed) is routed, "a limit that is set stays"
    assert plan(harness.controller, [a_job_spec(cpu=1)], harness.now_ms)[0].code == "WOULD_START"


def test_without_defaults_a_spec_is_not_changed() -> None:
    spec = a_job_spec(cpu=2)
    assert ConfiguredHarness("").controller.profile_router.routing.route(spec) is spec


def test_an_invalid_default_is_reported_with_its_path() -> None:
    wrong = scheduling(
        '[scheduling]\nmax_queue_time = "soon"\n[scheduling.profiles.x]\nscheduling_timeout = "1 year"\n'
    )
    with pytest.raises(InvalidInput) as error:
        check_scheduling(wrong)
    assert {path for path, _ in error.value.problems} >= {
        "scheduling.max_queue_time", "scheduling.profiles.x.scheduling_timeout",
    }  # fmt: skip
