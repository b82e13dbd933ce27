"""Backends without a capability and backends that are down: placement, and the reasons in `why` and `plan`."""

from __future__ import annotations

import pytest

from builders import a_job_spec, a_node
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.explain.why import plan, why
from hodei.model.errors import InvalidInput
from hodei.model.facts import BackendReported, NodeJoined
from hodei.model.job import BackendChoice, HealthCheck
from unit.control.harness import Harness

SLURM = ("images", "health_checks", "gpu_shares")
HEALTH = HealthCheck(command=("/bin/true",))


def _why(harness, job=1):
    return why(harness.controller, job, harness.now_ms)


def _nodes(harness, job):
    return sorted({run.node for run in harness.runs.values() if run.job == job})


def test_a_job_goes_to_the_backend_that_can_run_it_even_if_it_is_smaller():
    harness = Harness(
        a_node("s1", 64, backend="slurm1", cannot=SLURM),
        a_node("d1", 4, backend="docker1", cannot=("bare",)),
    )
    harness.submit(1, cpu="1", image="busybox")
    harness.submit(2, cpu="1", image="busybox", health=HEALTH)
    harness.submit(3, cpu="1")
    assert [_nodes(harness, job) for job in (1, 2, 3)] == [["d1"], ["d1"], ["s1"]]


def test_why_names_the_backend_and_what_it_cannot_do_and_a_hint():
    harness = Harness(a_node("s1", backend="slurm1", cannot=SLURM), a_node("s2", backend="slurm1", cannot=SLURM))
    harness.submit(1, image="busybox")
    explanation = _why(harness)
    assert (explanation.status, explanation.code) == ("unsatisfiable", "BACKEND_CANNOT")
    assert "2 backend slurm1 cannot run images" in explanation.summary
    assert [(b.code, b.text, b.count) for b in explanation.blockers] == [
        ("BACKEND_CANNOT", "backend slurm1 cannot run images", 2)
    ]
    assert explanation.blockers[0].hint == explanation.hint == "leave out `image`, or use a backend with containers"
    assert harness.jobs[1].reason_code == "BACKEND_CANNOT"
    (planned,) = plan(harness.controller, [a_job_spec(image="busybox")], harness.now_ms)
    assert (planned.status, planned.code, planned.hint) == (explanation.status, explanation.code, explanation.hint)


def test_an_unsupported_option_is_suggested_to_be_dropped():
    harness = Harness(a_node("s1", backend="slurm1", cannot=SLURM))
    harness.submit(1, health=HEALTH)
    assert [suggestion.change for suggestion in _why(harness).suggestions] == ["drop health"]


def test_a_pending_job_starts_when_a_capable_backend_joins():
    harness = Harness(a_node("s1", backend="slurm1", cannot=SLURM))
    harness.submit(1, image="busybox")
    assert harness.state(1) == "pending"
    harness.step(NodeJoined(a_node("d1", backend="docker1")))
    assert _nodes(harness, 1) == ["d1"]


OUTAGE = "backend slurm1 is out of reach since 10:00: no answer"


def _down(name, *args, **fields):
    return a_node(
        name,
        *args,
        backend="slurm1",
        ready=False,
        not_ready_code="BACKEND_UNHEALTHY",
        not_ready_reason=OUTAGE,
        **fields,
    )


def test_an_unavailable_backend_is_the_reason_if_only_it_could_take_the_job():
    harness = Harness(a_node("small", 1), _down("s1", 64), _down("s2", 64))
    harness.submit(1, cpu="16")
    text = f"every backend that could take it is unavailable: {OUTAGE}"
    assert harness.reason(1) == ("BACKEND_UNAVAILABLE", text)
    explanation = _why(harness)
    assert (explanation.status, explanation.code) == ("waiting", "BACKEND_UNAVAILABLE")
    assert explanation.summary.startswith(text)
    assert "hodei backend list" in explanation.hint
    (planned,) = plan(harness.controller, [a_job_spec(cpu="16")], harness.now_ms)
    assert planned.code == "BACKEND_UNAVAILABLE"
    harness.step(NodeJoined(a_node("s1", 64, backend="slurm1")))
    assert _nodes(harness, 1) == ["s1"]


def test_an_unavailable_backend_is_not_the_reason_if_an_available_one_could_take_the_job():
    harness = Harness(a_node("n1", 4), _down("s1", 64))
    harness.submit(1, cpu="4")
    harness.submit(2, cpu="4")
    assert harness.reason(2)[0] != "BACKEND_UNAVAILABLE"
    assert _why(harness, 2).code != "BACKEND_UNAVAILABLE"


def test_an_unavailable_backend_is_not_the_reason_if_no_backend_could_take_the_job():
    harness = Harness(a_node("n1", 4), _down("s1", 8))
    harness.submit(1, cpu="32")
    assert harness.reason(1)[0] == "INSUFFICIENT_CPU"
    assert _why(harness).status == "unsatisfiable"
    harness.submit(2, cpu="6", image="busybox")
    harness.step(NodeJoined(_down("s1", 8, cannot=SLURM)))
    assert _why(harness, 2).code != "BACKEND_UNAVAILABLE"


def test_a_backend_that_was_never_reached_is_named():
    harness = Harness(a_node("n1", 4, cannot=("images",)))
    harness.step(BackendReported("farm", "backend farm is out of reach since 10:00: refused", ("bare",)))
    harness.submit(1, image="busybox")
    harness.submit(2, cpu="16")  # the farm requires an image
    assert harness.reason(1)[0] == _why(harness, 1).code == "BACKEND_UNAVAILABLE"
    assert "backend farm is out of reach" in harness.reason(1)[1]
    assert harness.reason(2)[0] == "INSUFFICIENT_CPU"
    harness.step(BackendReported("farm"))
    assert harness.reason(1)[0] == _why(harness, 1).code == "BACKEND_CANNOT"


def test_a_backend_that_was_never_reached_is_named_with_what_it_cannot_do():
    harness = Harness(a_node("n1", 4))
    harness.step(BackendReported("farm", "backend farm is out of reach since 10:00: refused", ("bare",)))
    harness.submit(1, backend=BackendChoice("specific", ("farm",)))
    text = "backend farm is out of reach since 10:00: refused; and backend farm cannot run a task without an image"
    assert harness.reason(1) == ("BACKEND_UNAVAILABLE", text)
    explanation = _why(harness)
    assert explanation.code == "BACKEND_UNAVAILABLE"
    assert explanation.summary.startswith(text)
    assert explanation.hint == "give the task an `image`, or set a default `image` for the backend"


def test_without_any_node_the_backend_that_was_never_reached_is_the_reason():
    harness = Harness()
    harness.submit(1)
    assert _why(harness).code == "NO_NODES"
    harness.step(BackendReported("hpc", "backend hpc is out of reach since 10:00: refused"))
    assert harness.reason(1)[0] == _why(harness).code == "BACKEND_UNAVAILABLE"


def test_a_job_is_not_refused_as_too_large_while_a_backend_was_never_reached():
    harness = Harness(a_node("n1", 4), admission=AdmissionPolicy("reject"))
    check = harness.controller.gate.check
    with pytest.raises(InvalidInput, match="can never run here"):
        check([a_job_spec(cpu="64")], {})
    harness.step(BackendReported("hpc", "backend hpc is out of reach since 10:00: refused"))
    check([a_job_spec(cpu="64")], {})
    with pytest.raises(InvalidInput, match="can never run here"):
        check([a_job_spec(cpu="64", backend=BackendChoice("specific", ("local",)))], {})


def test_backends_disabled_by_an_operator_have_their_own_reason():
    harness = Harness(
        a_node("n1", ready=False, not_ready_code="BACKEND_DISABLED", not_ready_reason="disabled since 10:00")
    )
    harness.submit(1)
    assert harness.reason(1)[0] == _why(harness).code == "BACKEND_DISABLED"
    harness.step(NodeJoined(_down("s1", 8)))
    assert harness.reason(1)[0] == _why(harness).code == "BACKEND_UNAVAILABLE"
    assert "disabled since 10:00" in harness.reason(1)[1]
