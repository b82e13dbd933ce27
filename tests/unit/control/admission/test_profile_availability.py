"""Profiles and backends that are not available: jobs fall back, or wait with a reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from builders import a_job_spec, a_node
from hodei.configuration import check_scheduling
from hodei.control.admission.routing import Routing
from hodei.control.explain.why import plan, why
from hodei.model.errors import InvalidInput
from hodei.model.facts import NodeJoined
from hodei.model.job import BackendChoice, GangRules
from hodei.wiring import make_controller
from unit.control.configured import ConfiguredHarness, scheduling
from unit.control.harness import some_nodes

FALLBACK = '[scheduling]\nunavailable_profile = "fallback"\n'
ROUTE = '[[scheduling.routes]]\nwhen = {gpu = true}\nprofile = "gpu"\n'
NODES = (a_node("n1", 4, "64Gi", gpu=4),)


class Broken:
    """A filter that fails while `broken`."""

    name = "broken"

    def __init__(self) -> None:
        self.broken = True

    def filter(self, member: Any, nodes: Any, view: Any) -> Any:
        if self.broken:
            raise RuntimeError("out of order")
        return ()


def test_a_route_to_an_unconfigured_profile_falls_back_to_the_default_profile() -> None:
    harness = ConfiguredHarness(FALLBACK + ROUTE, *NODES)
    harness.submit(1, gpu=1)
    assert harness.state(1) == "scheduled"
    assert harness.jobs[1].spec.profile == "default"
    (planned,) = plan(harness.controller, [a_job_spec(gpu=1)], harness.now_ms)
    assert planned.escalation_steps[0].text == (
        "routed to profile default by rule 1 (gpu), as profile gpu is not configured"
    )


def test_without_a_fallback_a_route_to_an_unconfigured_profile_is_a_configuration_error() -> None:
    with pytest.raises(InvalidInput, match=r"routes\[0\].profile"):
        make_controller(scheduling(ROUTE))


def test_jobs_of_a_paused_profile_go_to_its_fallback() -> None:
    config = FALLBACK + ROUTE + '[scheduling.profiles.gpu]\npaused = true\nfallback = "compute"\n'
    harness = ConfiguredHarness(config, *NODES)
    harness.submit(1, gpu=1)
    assert (harness.state(1), harness.jobs[1].spec.profile) == ("scheduled", "compute")
    explanation = why(harness.controller, 1, harness.now_ms)
    assert explanation is not None
    assert explanation.escalation_steps[0].text == "routed to profile compute by rule 1 (gpu), as profile gpu is paused"


def test_jobs_of_a_paused_profile_without_a_fallback_wait_with_a_reason() -> None:
    paused = ROUTE + "[scheduling.profiles.gpu]\npaused = true\n"
    harness = ConfiguredHarness(paused, *NODES)
    harness.submit(1, gpu=1)
    harness.submit(2, cpu=1)
    assert (harness.state(1), harness.state(2)) == ("pending", "scheduled")
    assert harness.reason(1) == ("PROFILE_PAUSED", "profile gpu is paused")
    explanation = why(harness.controller, 1, harness.now_ms)
    assert explanation is not None
    assert (explanation.code, explanation.summary) == (
        "PROFILE_PAUSED",
        "profile gpu is paused: none of its jobs starts",
    )
    assert harness.controller.next_wakeup_ms(harness.now_ms) is None, "nothing is due while it is paused"
    harness.reconfigure(ROUTE + "[scheduling.profiles.gpu]\n")
    assert harness.state(1) == "scheduled"


def test_pending_jobs_move_when_their_profile_is_paused_or_removed() -> None:
    for after in ("[scheduling.profiles.gpu]\npaused = true\n", ""):
        harness = ConfiguredHarness(FALLBACK + "[scheduling.profiles.gpu]\n", *some_nodes(1))
        harness.submit(1, cpu=1)
        harness.submit(2, cpu=1, profile="gpu")
        assert harness.queue_of(2) == "gpu"
        harness.reconfigure(FALLBACK + after)
        assert harness.queue_of(2) == "default"
        (moved,) = harness.event_details("job.moved", 2)
        assert (moved["before"], moved["to"]) == ("gpu", "default")
        harness.restart(*some_nodes(1))
        assert harness.queue_of(2) == "default", "the move survives a restart"


def test_an_unavailable_fallback_is_skipped() -> None:
    config = (
        FALLBACK + '[scheduling.profiles.a]\npaused = true\nfallback = "b"\n[scheduling.profiles.b]\npaused = true\n'
    )
    harness = ConfiguredHarness(config, *some_nodes(1))
    harness.submit(1, profile="a")
    assert harness.jobs[1].spec.profile == "default"


def test_a_profile_closed_to_a_project_is_no_fallback_for_its_jobs() -> None:
    config = FALLBACK + (
        '[scheduling.profiles.a]\npaused = true\nfallback = "b"\n[scheduling.profiles.b]\nprojects = ["lab"]\n'
    )
    harness = ConfiguredHarness(config, *some_nodes(2))
    harness.submit(1, profile="a", project="lab")
    harness.submit(2, profile="a", project="other")
    assert (harness.jobs[1].spec.profile, harness.state(2), harness.reason(2)[0]) == ("b", "pending", "PROFILE_PAUSED")


BROKEN = '[scheduling.profiles.odd]\nplugins = ["unit.control.admission.test_profile_availability:Broken"]\n'


def test_jobs_of_a_profile_with_a_repeatedly_failing_plugin_fall_back() -> None:
    harness = ConfiguredHarness(FALLBACK + BROKEN, *some_nodes(1))
    harness.submit(1, profile="odd")
    assert harness.queue_of(1) == "odd", "one failure is not enough to fall back"
    harness.run_for(60_000)
    assert (harness.state(1), harness.jobs[1].nodes) == ("scheduled", "n1")
    (moved,) = harness.event_details("job.moved", 1)
    assert moved["to"] == "default"
    assert moved["cause"].startswith("a plugin of profile odd fails: ")


def test_without_a_fallback_jobs_wait_until_the_plugin_works_again() -> None:
    harness = ConfiguredHarness(BROKEN, *some_nodes(1))
    harness.submit(1, profile="odd")
    harness.run_for(60_000)
    assert (harness.queue_of(1), harness.reason(1)[0]) == ("odd", "PLUGIN_FAILED")
    (plugin,) = [each for each in harness.controller.engine.profiles["odd"].filters if each.name == "broken"]
    plugin.broken = False  # type: ignore[attr-defined]
    harness.run_for(120_000)
    assert harness.state(1) == "scheduled"


def test_a_profile_that_cannot_be_built_does_not_stop_a_server_with_a_fallback() -> None:
    missing = '[scheduling.profiles.odd]\nplugins = ["no_such_module:Thing"]\n'
    harness = ConfiguredHarness(FALLBACK + missing, *some_nodes(1))
    harness.submit(1, profile="odd")
    assert (harness.state(1), harness.jobs[1].spec.profile) == ("scheduled", "default")
    assert "cannot be imported" in harness.jobs[1].spec.routed_by
    with pytest.raises(InvalidInput, match="cannot be imported"):
        make_controller(scheduling(missing))
    with pytest.raises(InvalidInput, match="cannot be imported"):
        check_scheduling(scheduling(FALLBACK + missing))


CHAIN = '[scheduling]\nfallback = ["onprem", "cloud"]\n'


def a_node_of(name: str, backend: str, cpu: int = 1, **fields: Any) -> Any:
    return a_node(name, cpu, "64Gi", backend=backend, **fields)


def backend_of(harness: ConfiguredHarness, job: int) -> str:
    return next(run.backend for run in harness.runs.values() if run.job == job and run.state in ("placed", "running"))


def onprem_and_cloud(toml: str, *, onprem: int = 1, cloud: int = 8) -> ConfiguredHarness:
    return ConfiguredHarness(toml, a_node_of("o1", "onprem", onprem), a_node_of("c1", "cloud", cloud))


def test_the_next_backend_of_the_chain_is_used_when_the_first_is_full() -> None:
    harness = onprem_and_cloud(CHAIN)
    harness.submit(1, cpu=1)
    harness.submit(2, cpu=1)
    assert (backend_of(harness, 1), backend_of(harness, 2)) == ("onprem", "cloud")


def test_the_next_backend_is_used_until_a_failed_one_recovers() -> None:
    harness = onprem_and_cloud(CHAIN + 'fallback_when = "failure"\n', onprem=4)
    harness.submit(1, cpu=1)
    harness.step(NodeJoined(a_node_of("o1", "onprem", 4, ready=False, not_ready_reason="down")))
    harness.submit(2, cpu=1)
    harness.step(NodeJoined(a_node_of("o1", "onprem", 4)))
    harness.submit(3, cpu=1)
    assert [backend_of(harness, id) for id in (1, 2, 3)] == ["onprem", "cloud", "onprem"]


def test_with_fallback_on_failure_a_job_waits_for_a_full_backend() -> None:
    harness = onprem_and_cloud(CHAIN + 'fallback_when = "failure"\n')
    harness.submit(1, cpu=1)
    harness.submit(2, cpu=1)
    assert (harness.state(2), harness.reason(2)) == (
        "pending", ("BACKEND_STANDBY", "backend cloud is on standby: onprem is available"),
    )  # fmt: skip
    harness.observe("1.0.1", "succeeded", 0)
    assert backend_of(harness, 2) == "onprem"


@pytest.mark.parametrize("code", ["start_failed", "not_reached"])
def test_a_job_that_a_backend_fails_to_start_goes_to_the_next_backend(code: str) -> None:
    harness = onprem_and_cloud(CHAIN + 'fallback_when = "failure"\n', onprem=4)
    harness.submit(1, cpu=1)
    harness.observe("1.0.1", "failed", None, reason_code=code, reason="no answer")
    harness.run_for(60_000)
    assert backend_of(harness, 1) == "cloud"
    harness.restart(a_node_of("o1", "onprem", 4), a_node_of("c1", "cloud", 8))
    explanation = why(harness.controller, 1, harness.now_ms)
    assert explanation is not None
    assert "failed on backend onprem: others of the fallback chain go first" in [
        each.text for each in explanation.escalation_steps
    ]
    harness.submit(2, cpu=1)
    assert backend_of(harness, 2) == "onprem", "other jobs are not affected"


def test_a_job_that_names_its_backend_ignores_the_chain() -> None:
    harness = onprem_and_cloud(CHAIN, onprem=4)
    harness.submit(1, cpu=1, backend=BackendChoice("specific", ("cloud",)))
    assert backend_of(harness, 1) == "cloud"


def test_a_backend_outside_the_chain_is_used_and_one_that_is_too_small_is_skipped() -> None:
    harness = ConfiguredHarness(
        CHAIN, a_node_of("o1", "onprem", 1), a_node_of("c1", "cloud", 8), a_node_of("x1", "other", 8)
    )
    harness.submit(1, cpu=8)
    assert backend_of(harness, 1) == "other"
    harness.submit(2, cpu=8)
    assert backend_of(harness, 2) == "cloud"


@pytest.mark.parametrize(
    ("job", "goes_to"),
    [
        ({"cpu": 4}, "cloud"),  # too large for any node of onprem
        ({"cpu": 1, "node_selector": {"tier": "big"}}, "cloud"),
        ({"cpu": 1, "count": 3}, "cloud"),  # the gang is too large for onprem
        ({"cpu": 1}, ""),  # onprem is only full: the job waits
    ],
)
def test_a_standby_backend_is_used_for_a_job_that_the_first_could_never_take(job: dict[str, Any], goes_to: str) -> None:
    config = CHAIN + 'fallback_when = "failure"\n'
    harness = ConfiguredHarness(
        config, a_node_of("o1", "onprem", 2), a_node_of("c1", "cloud", 8, labels={"tier": "big"})
    )
    harness.submit(1, cpu=2)
    harness.submit(2, **job)
    assert harness.state(2) == ("scheduled" if goes_to else "pending")
    if goes_to:
        assert backend_of(harness, 2) == goes_to
    else:
        assert harness.reason(2)[0] == "BACKEND_STANDBY"


def test_a_per_node_job_also_runs_on_nodes_of_standby_backends() -> None:
    harness = onprem_and_cloud(CHAIN + 'fallback_when = "failure"\n')
    harness.submit(1, cpu=1, gang=GangRules(per_node=True))
    assert sorted(run.node for run in harness.runs.values()) == ["c1", "o1"]


def test_the_reason_of_a_per_node_job_names_what_blocks_a_node() -> None:
    harness = onprem_and_cloud('[[scheduling.spill]]\nto = "cloud"\nmax_cost = 0.01\nonly_if_wait_over = "0s"\n')
    harness.submit(1, cpu=1, gang=GangRules(per_node=True))
    assert [run.node for run in harness.runs.values()] == ["o1"]
    assert "not on c1 (kept off backend cloud: " in harness.reason(1)[1]


def test_fallback_enabled_turns_the_chain_off() -> None:
    harness = onprem_and_cloud(
        CHAIN + "fallback_enabled = false\n" + '[scheduling.profiles.default]\nworker_selection = "most_free"\n'
    )
    harness.submit(1, cpu=1)
    assert backend_of(harness, 1) == "cloud"


def test_a_chain_that_names_a_backend_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="twice"):
        make_controller(scheduling('[scheduling]\nfallback = ["a", "b", "a"]\n'))


def test_a_pause_does_not_open_a_profile_to_other_projects() -> None:
    paused = SimpleNamespace(mode="fallback", problem=lambda name: "it is paused", fallback=lambda name: "default")
    routing = Routing((), projects={"gpu": ("ml",)}, availability=paused)  # type: ignore[arg-type]
    assert routing.route(a_job_spec("a", project="ml", profile="gpu")).profile == "default"
    closed = routing.route(a_job_spec("b", project="web", profile="gpu"))
    with pytest.raises(InvalidInput) as refusal:
        routing.check(closed)
    assert refusal.value.code == "PROFILE_FORBIDDEN"
