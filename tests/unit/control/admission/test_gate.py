"""Admission: jobs that can never run, unknown profiles and full queues are refused with a message."""

from __future__ import annotations

import pytest

from builders import NOW_MS, a_job_spec, a_node, a_task
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.controller import Controller
from hodei.model.errors import InvalidInput, QueueFull
from hodei.model.facts import NodeJoined
from hodei.model.node import Taint
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness


def _controller(*nodes, policy=None, **profile):
    controller = Controller({"default": build_profile("default", **profile), "night": build_profile("night")},
                            admission=policy)  # fmt: skip
    controller.step(NOW_MS, [NodeJoined(node) for node in nodes])
    return controller


def _refused(controller, *specs):
    with pytest.raises((InvalidInput, QueueFull)) as error:
        controller.gate.check(specs, controller.pending())
    return error.value


def test_a_job_larger_than_every_node_is_refused_with_the_numbers():
    error = _refused(_controller(a_node("a", 4), a_node("b", 8)), a_job_spec("big", cpu="9"))
    assert error.code == "LARGER_THAN_CLUSTER"
    assert error.message == "job 'big' can never run here: it asks for 9 cpu and the largest node has 8"
    assert "oversized" in error.hint


def test_a_gang_larger_than_all_nodes_together_is_refused_with_the_numbers():
    error = _refused(_controller(a_node("a", 2), a_node("b", 2)), a_job_spec("wide", cpu="1", count=5))
    assert error.message == "job 'wide' can never run here: only 4 of its 5 members fit on all 2 nodes together, empty"


def test_a_job_that_needs_resources_of_two_nodes_is_refused():
    nodes = a_node("cores", 64, "1Gi"), a_node("memory", 1, "512Gi")
    error = _refused(_controller(*nodes), a_job_spec("both", cpu="32", memory="256Gi"))
    assert error.message == "job 'both' can never run here: none of the 2 nodes has all that it asks for together"


def test_the_refused_document_is_named():
    error = _refused(_controller(a_node("a", 4)), a_job_spec("fine", cpu="1"), a_job_spec("big", cpu="9"))
    assert error.message.startswith("document 2 (big) can never run here")


def test_a_cordoned_or_tainted_or_not_ready_cluster_is_no_reason_to_refuse():
    controller = _controller(a_node("a", 4, cordoned=True, taints=(Taint("x"),)), a_node("b", 4, ready=False))
    controller.gate.check([a_job_spec(cpu="4", node_selector={"not": "here"})], controller.pending())


def test_without_nodes_no_job_is_too_large():
    controller = _controller()
    controller.gate.check([a_job_spec(cpu="1000")], controller.pending())


def test_a_larger_node_that_joins_admits_a_large_job():
    controller = _controller(a_node("a", 4))
    _refused(controller, a_job_spec(cpu="9"))
    controller.step(NOW_MS, [NodeJoined(a_node("b", 16))])
    controller.gate.check([a_job_spec(cpu="9")], controller.pending())


def test_oversized_jobs_are_admitted_if_configured_to_wait():
    controller = _controller(a_node("a", 4), policy=AdmissionPolicy("wait"))
    controller.gate.check([a_job_spec(cpu="9")], controller.pending())


def test_an_unknown_profile_is_refused_with_a_similar_name():
    error = _refused(_controller(a_node()), a_job_spec("j", profile="nigth"))
    assert (error.code, error.message) == (
        "UNKNOWN_PROFILE",
        "job 'j': there is no profile 'nigth' (did you mean 'night'?)",
    )
    assert error.hint == "one of: default, night"


def test_a_full_queue_refuses_all_of_a_bulk_or_none():
    controller = _controller(a_node("a", 1), max_pending=3)
    controller.gate.check([a_job_spec()] * 3, {"default": 0})
    error = _refused(controller, *[a_job_spec()] * 4)
    assert isinstance(error, QueueFull)
    assert "3 jobs pending" in error.message
    with pytest.raises(QueueFull):
        controller.gate.check([a_job_spec()], {"default": 3})
    controller.gate.check([a_job_spec(profile="night")], {"default": 3})


def test_too_many_members_are_refused():
    error = _refused(_controller(policy=AdmissionPolicy(max_members=10)), a_job_spec("wide", count=11))
    assert error.message == "job 'wide': 11 members, at most 10 are allowed"


def test_an_admitted_job_can_start_on_an_idle_cluster():
    harness = Harness(a_node("a", 4), a_node("b", 2))
    spec = a_job_spec(tasks=[a_task("small", cpu="2"), a_task("large", cpu="4")])
    harness.controller.gate.check([spec], {})
    assert harness.controller.gate.never_fits(spec) is None
    assert harness.used() == {"a": {}, "b": {}}


def test_admission_ignores_running_jobs():
    harness = Harness(a_node("a", 4))
    harness.submit(1, cpu="4")
    assert harness.controller.gate.never_fits(a_job_spec(cpu="4")) is None
    assert harness.controller.gate.never_fits(a_job_spec(cpu="5")).verdicts[0].reason.code == "INSUFFICIENT_CPU"
