"""A scheduler profile that is not available: its jobs fall back, or wait and say why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from builders import a_job_spec, a_node
from hodei.control.admission.routing import Routing
from hodei.control.explain.why import plan, why
from hodei.model.errors import InvalidInput
from hodei.model.facts import NodeJoined
from hodei.model.job import BackendChoice, GangRules
from hodei.wiring import check_scheduling, make_controller
from unit.control.configured import Configured, scheduling
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


def test_a_route_to_a_profile_that_is_not_configured_leads_to_the_general_one() -> None:
    harness = Configured(FALLBACK + ROUTE, *NODES)
    harness.submit(1, gpu=1)
    assert harness.state(1) == "scheduled"
    assert harness.jobs[1].spec.profile == "default"
    (planned,) = plan(harness.controller, [a_job_spec(gpu=1)], harness.now_ms)
    assert planned.escalation_steps[0].text == (
        "routed to profile default by rule 1 (gpu), as profile gpu is not configured"
    )


def test_without_a_fallback_such_a_route_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises(InvalidInput, match=r"routes\[0\].profile"):
        make_controller(scheduling(ROUTE))


def test_a_paused_profile_passes_its_jobs_on_to_the_profile_that_it_names() -> None:
    config = FALLBACK + ROUTE + '[scheduling.profiles.gpu]\npaused = true\nfallback = "compute"\n'
    harness = Configured(config, *NODES)
    harness.submit(1, gpu=1)
    assert (harness.state(1), harness.jobs[1].spec.profile) == ("scheduled", "compute")
    said = why(harness.controller, 1, harness.now_ms)
    assert said is not None
    assert said.escalation_steps[0].text == "routed to profile compute by rule 1 (gpu), as profile gpu is paused"


def test_a_paused_profile_without_a_fallback_holds_its_jobs_and_says_so() -> None:
    paused = ROUTE + "[scheduling.profiles.gpu]\npaused = true\n"
    harness = Configured(paused, *NODES)
    harness.submit(1, gpu=1)
    harness.submit(2, cpu=1)
    assert (harness.state(1), harness.state(2)) == ("pending", "scheduled")
    assert harness.reason(1) == ("PROFILE_PAUSED", "profile gpu is paused")
    said = why(harness.controller, 1, harness.now_ms)
    assert said is not None
    assert (said.code, said.summary) == ("PROFILE_PAUSED", "profile gpu is paused: none of its jobs starts")
    assert harness.controller.next_wakeup_ms(harness.now_ms) is None, "nothing is due while it is paused"
    harness.reconfigure(ROUTE + "[scheduling.profiles.gpu]\n")
    assert harness.state(1) == "scheduled"


def test_jobs_that_wait_move_when_their_profile_is_paused_or_taken_away() -> None:
    for after in ("[scheduling.profiles.gpu]\npaused = true\n", ""):
        harness = Configured(FALLBACK + "[scheduling.profiles.gpu]\n", *some_nodes(1))
        harness.submit(1, cpu=1)
        harness.submit(2, cpu=1, profile="gpu")
        assert harness.where(2) == "gpu"
        harness.reconfigure(FALLBACK + after)
        assert harness.where(2) == "default"
        (moved,) = harness.told("job.moved", 2)
        assert (moved["before"], moved["to"]) == ("gpu", "default")
        harness.restart(*some_nodes(1))
        assert harness.where(2) == "default", "a restart does not forget it"


def test_a_fallback_that_is_not_available_either_is_passed_over() -> None:
    config = (
        FALLBACK + '[scheduling.profiles.a]\npaused = true\nfallback = "b"\n[scheduling.profiles.b]\npaused = true\n'
    )
    harness = Configured(config, *some_nodes(1))
    harness.submit(1, profile="a")
    assert harness.jobs[1].spec.profile == "default"


def test_a_profile_that_is_not_open_to_a_project_is_no_fallback_for_its_jobs() -> None:
    config = FALLBACK + (
        '[scheduling.profiles.a]\npaused = true\nfallback = "b"\n[scheduling.profiles.b]\nprojects = ["lab"]\n'
    )
    harness = Configured(config, *some_nodes(2))
    harness.submit(1, profile="a", project="lab")
    harness.submit(2, profile="a", project="other")
    assert (harness.jobs[1].spec.profile, harness.state(2), harness.reason(2)[0]) == ("b", "pending", "PROFILE_PAUSED")


BROKEN = '[scheduling.profiles.odd]\nplugins = ["unit.control.admission.test_profile_availability:Broken"]\n'


def test_a_profile_whose_plugin_fails_again_and_again_passes_its_jobs_on() -> None:
    harness = Configured(FALLBACK + BROKEN, *some_nodes(1))
    harness.submit(1, profile="odd")
    assert harness.where(1) == "odd", "one failure is no reason to leave"
    harness.until(60_000)
    assert (harness.state(1), harness.jobs[1].nodes) == ("scheduled", "n1")
    (moved,) = harness.told("job.moved", 1)
    assert moved["to"] == "default"
    assert moved["cause"].startswith("a plugin of profile odd fails: ")


def test_without_a_fallback_they_wait_until_the_plugin_works_again() -> None:
    harness = Configured(BROKEN, *some_nodes(1))
    harness.submit(1, profile="odd")
    harness.until(60_000)
    assert (harness.where(1), harness.reason(1)[0]) == ("odd", "PLUGIN_FAILED")
    (plugin,) = [each for each in harness.controller.engine.profiles["odd"].filters if each.name == "broken"]
    plugin.broken = False  # type: ignore[attr-defined]
    harness.until(120_000)
    assert harness.state(1) == "scheduled"


def test_a_profile_that_cannot_be_made_does_not_keep_a_server_with_a_fallback_from_its_work() -> None:
    missing = '[scheduling.profiles.odd]\nplugins = ["no_such_module:Thing"]\n'
    harness = Configured(FALLBACK + missing, *some_nodes(1))
    harness.submit(1, profile="odd")
    assert (harness.state(1), harness.jobs[1].spec.profile) == ("scheduled", "default")
    assert "cannot be imported" in harness.jobs[1].spec.routed_by
    with pytest.raises(InvalidInput, match="cannot be imported"):
        make_controller(scheduling(missing))
    with pytest.raises(InvalidInput, match="cannot be imported"):
        check_scheduling(scheduling(FALLBACK + missing))


CHAIN = '[scheduling]\nfallback = ["onprem", "cloud"]\n'


def a_place(name: str, backend: str, cpu: int = 1, **fields: Any) -> Any:
    return a_node(name, cpu, "64Gi", backend=backend, **fields)


def on(harness: Configured, job: int) -> str:
    return next(run.backend for run in harness.runs.values() if run.job == job and run.state in ("placed", "running"))


def both(toml: str, *, onprem: int = 1, cloud: int = 8) -> Configured:
    return Configured(toml, a_place("o1", "onprem", onprem), a_place("c1", "cloud", cloud))


def test_the_first_backend_of_the_chain_is_used_and_the_next_when_it_has_no_room() -> None:
    harness = both(CHAIN)
    harness.submit(1, cpu=1)
    harness.submit(2, cpu=1)
    assert (on(harness, 1), on(harness, 2)) == ("onprem", "cloud")


def test_when_a_backend_fails_the_next_is_used_and_when_it_is_back_it_is_again() -> None:
    harness = both(CHAIN + 'fallback_when = "failure"\n', onprem=4)
    harness.submit(1, cpu=1)
    harness.learn(NodeJoined(a_place("o1", "onprem", 4, ready=False, not_ready_reason="down")))
    harness.submit(2, cpu=1)
    harness.learn(NodeJoined(a_place("o1", "onprem", 4)))
    harness.submit(3, cpu=1)
    assert [on(harness, id) for id in (1, 2, 3)] == ["onprem", "cloud", "onprem"]


def test_after_a_failure_only_means_that_a_full_backend_is_waited_for() -> None:
    harness = both(CHAIN + 'fallback_when = "failure"\n')
    harness.submit(1, cpu=1)
    harness.submit(2, cpu=1)
    assert (harness.state(2), harness.reason(2)) == (
        "pending", ("BACKEND_STANDBY", "backend cloud is on standby: onprem is available"),
    )  # fmt: skip
    harness.see("1.0.1", "succeeded", 0)
    assert on(harness, 2) == "onprem"


@pytest.mark.parametrize("code", ["start_failed", "not_reached"])
def test_a_job_that_a_backend_could_not_start_goes_to_the_next_one(code: str) -> None:
    harness = both(CHAIN + 'fallback_when = "failure"\n', onprem=4)
    harness.submit(1, cpu=1)
    harness.see("1.0.1", "failed", None, reason_code=code, reason="no answer")
    harness.until(60_000)
    assert on(harness, 1) == "cloud"
    harness.restart(a_place("o1", "onprem", 4), a_place("c1", "cloud", 8))
    said = why(harness.controller, 1, harness.now_ms)
    assert said is not None
    assert "failed on backend onprem: others of the fallback chain go first" in [
        each.text for each in said.escalation_steps
    ]
    harness.submit(2, cpu=1)
    assert on(harness, 2) == "onprem", "other jobs are not concerned"


def test_a_job_that_names_its_backend_is_not_held_to_the_chain() -> None:
    harness = both(CHAIN, onprem=4)
    harness.submit(1, cpu=1, backend=BackendChoice("specific", ("cloud",)))
    assert on(harness, 1) == "cloud"


def test_a_backend_outside_the_chain_is_used_as_ever_and_one_the_job_cannot_use_is_passed_over() -> None:
    harness = Configured(CHAIN, a_place("o1", "onprem", 1), a_place("c1", "cloud", 8), a_place("x1", "other", 8))
    harness.submit(1, cpu=8)
    assert on(harness, 1) == "other"
    harness.submit(2, cpu=8)
    assert on(harness, 2) == "cloud"


@pytest.mark.parametrize(
    ("job", "goes_to"),
    [
        ({"cpu": 4}, "cloud"),  # too large for any node of the first
        ({"cpu": 1, "node_selector": {"tier": "big"}}, "cloud"),
        ({"cpu": 1, "count": 3}, "cloud"),  # together too large
        ({"cpu": 1}, ""),  # full is no reason to go on
    ],
)
def test_a_backend_that_could_never_take_a_job_does_not_keep_it_from_one_that_stands_by(
    job: dict[str, Any], goes_to: str
) -> None:
    config = CHAIN + 'fallback_when = "failure"\n'
    harness = Configured(config, a_place("o1", "onprem", 2), a_place("c1", "cloud", 8, labels={"tier": "big"}))
    harness.submit(1, cpu=2)
    harness.submit(2, **job)
    assert harness.state(2) == ("scheduled" if goes_to else "pending")
    if goes_to:
        assert on(harness, 2) == goes_to
    else:
        assert harness.reason(2)[0] == "BACKEND_STANDBY"


def test_one_run_on_every_node_is_on_those_of_backends_that_stand_by_too() -> None:
    harness = both(CHAIN + 'fallback_when = "failure"\n')
    harness.submit(1, cpu=1, gang=GangRules(per_node=True))
    assert sorted(run.node for run in harness.runs.values()) == ["c1", "o1"]


def test_the_reason_of_a_per_node_job_names_what_blocks_a_node() -> None:
    harness = both('[[scheduling.spill]]\nto = "cloud"\nmax_cost = 0.01\nonly_if_wait_over = "0s"\n')
    harness.submit(1, cpu=1, gang=GangRules(per_node=True))
    assert [run.node for run in harness.runs.values()] == ["o1"]
    assert "not on c1 (kept off backend cloud: " in harness.reason(1)[1]


def test_fallback_enabled_turns_the_chain_off() -> None:
    harness = both(
        CHAIN + "fallback_enabled = false\n" + '[scheduling.profiles.default]\nworker_selection = "most_free"\n'
    )
    harness.submit(1, cpu=1)
    assert on(harness, 1) == "cloud"


def test_a_chain_that_names_a_backend_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="twice"):
        make_controller(scheduling('[scheduling]\nfallback = ["a", "b", "a"]\n'))


def test_a_pause_does_not_open_a_profile_to_other_projects() -> None:
    away = SimpleNamespace(mode="fallback", problem=lambda name: "it is paused", fallback=lambda name: "default")
    routing = Routing((), projects={"gpu": ("ml",)}, availability=away)  # type: ignore[arg-type]
    assert routing.route(a_job_spec("a", project="ml", profile="gpu")).profile == "default"
    closed = routing.route(a_job_spec("b", project="web", profile="gpu"))
    with pytest.raises(InvalidInput) as refusal:
        routing.check(closed)
    assert refusal.value.code == "PROFILE_FORBIDDEN"
