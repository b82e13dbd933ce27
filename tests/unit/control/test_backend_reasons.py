"""What backends cannot do, and backends that are down: where jobs go, and what `why` and `plan` say of it."""

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


def test_a_job_goes_to_the_backend_that_can_run_it_however_full_that_is():
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
    said = _why(harness)
    assert (said.status, said.code) == ("unsatisfiable", "BACKEND_CANNOT")
    assert "2 backend slurm1 cannot run images" in said.summary
    assert [(b.code, b.text, b.count) for b in said.blockers] == [
        ("BACKEND_CANNOT", "backend slurm1 cannot run images", 2)
    ]
    assert said.blockers[0].hint == said.hint == "leave out `image`, or use a backend with containers"
    assert harness.jobs[1].reason_code == "BACKEND_CANNOT"
    (planned,) = plan(harness.controller, [a_job_spec(image="busybox")], harness.now_ms)
    assert (planned.status, planned.code, planned.hint) == (said.status, said.code, said.hint)


def test_what_can_be_left_out_is_tried_and_proposed():
    harness = Harness(a_node("s1", backend="slurm1", cannot=SLURM))
    harness.submit(1, health=HEALTH)
    assert [suggestion.change for suggestion in _why(harness).suggestions] == ["drop health"]


def test_a_job_that_waited_starts_when_a_backend_comes_that_can():
    harness = Harness(a_node("s1", backend="slurm1", cannot=SLURM))
    harness.submit(1, image="busybox")
    assert harness.state(1) == "pending"
    harness.learn(NodeJoined(a_node("d1", backend="docker1")))
    assert _nodes(harness, 1) == ["d1"]


OUT = "backend slurm1 is out of reach since 10:00: no answer"


def _down(name, *args, **fields):
    return a_node(
        name, *args, backend="slurm1", ready=False, not_ready_code="BACKEND_UNHEALTHY", not_ready_reason=OUT, **fields
    )


def test_a_job_that_only_a_backend_could_take_which_is_down_says_so():
    harness = Harness(a_node("small", 1), _down("s1", 64), _down("s2", 64))
    harness.submit(1, cpu="16")
    text = f"every backend that could take it is unavailable: {OUT}"
    assert harness.reason(1) == ("BACKEND_UNAVAILABLE", text)
    said = _why(harness)
    assert (said.status, said.code) == ("waiting", "BACKEND_UNAVAILABLE")
    assert said.summary.startswith(text)
    assert "hodei backend list" in said.hint
    (planned,) = plan(harness.controller, [a_job_spec(cpu="16")], harness.now_ms)
    assert planned.code == "BACKEND_UNAVAILABLE"
    harness.learn(NodeJoined(a_node("s1", 64, backend="slurm1")))
    assert _nodes(harness, 1) == ["s1"]


def test_a_job_that_a_backend_could_take_which_is_up_waits_for_room():
    harness = Harness(a_node("n1", 4), _down("s1", 64))
    harness.submit(1, cpu="4")
    harness.submit(2, cpu="4")
    assert harness.reason(2)[0] != "BACKEND_UNAVAILABLE"
    assert _why(harness, 2).code != "BACKEND_UNAVAILABLE"


def test_a_job_that_no_backend_could_take_is_not_told_to_wait_for_one_that_is_down():
    harness = Harness(a_node("n1", 4), _down("s1", 8))
    harness.submit(1, cpu="32")
    assert harness.reason(1)[0] == "INSUFFICIENT_CPU"
    assert _why(harness).status == "unsatisfiable"
    harness.submit(2, cpu="6", image="busybox")
    harness.learn(NodeJoined(_down("s1", 8, cannot=SLURM)))
    assert _why(harness, 2).code != "BACKEND_UNAVAILABLE"


def test_a_backend_that_was_never_reached_is_named():
    harness = Harness(a_node("n1", 4, cannot=("images",)))
    harness.learn(BackendReported("farm", "backend farm is out of reach since 10:00: refused", ("bare",)))
    harness.submit(1, image="busybox")
    harness.submit(2, cpu="16")  # the farm takes none without an image
    assert harness.reason(1)[0] == _why(harness, 1).code == "BACKEND_UNAVAILABLE"
    assert "backend farm is out of reach" in harness.reason(1)[1]
    assert harness.reason(2)[0] == "INSUFFICIENT_CPU"
    harness.learn(BackendReported("farm"))
    assert harness.reason(1)[0] == _why(harness, 1).code == "BACKEND_CANNOT"


def test_a_backend_that_was_never_reached_is_named_also_to_a_job_that_it_could_not_run():
    harness = Harness(a_node("n1", 4))
    harness.learn(BackendReported("farm", "backend farm is out of reach since 10:00: refused", ("bare",)))
    harness.submit(1, backend=BackendChoice("specific", ("farm",)))
    text = "backend farm is out of reach since 10:00: refused; and backend farm cannot run a task without an image"
    assert harness.reason(1) == ("BACKEND_UNAVAILABLE", text)
    said = _why(harness)
    assert said.code == "BACKEND_UNAVAILABLE"
    assert said.summary.startswith(text)
    assert said.hint == "give the task an `image`, or set a default `image` for the backend"


def test_without_any_node_the_backend_that_was_never_reached_is_the_reason():
    harness = Harness()
    harness.submit(1)
    assert _why(harness).code == "NO_NODES"
    harness.learn(BackendReported("hpc", "backend hpc is out of reach since 10:00: refused"))
    assert harness.reason(1)[0] == _why(harness).code == "BACKEND_UNAVAILABLE"


def test_a_job_is_not_refused_as_too_large_while_a_backend_was_never_reached():
    harness = Harness(a_node("n1", 4), admission=AdmissionPolicy("reject"))
    check = harness.controller.gate.check
    with pytest.raises(InvalidInput, match="can never run here"):
        check([a_job_spec(cpu="64")], {})
    harness.learn(BackendReported("hpc", "backend hpc is out of reach since 10:00: refused"))
    check([a_job_spec(cpu="64")], {})
    with pytest.raises(InvalidInput, match="can never run here"):
        check([a_job_spec(cpu="64", backend=BackendChoice("specific", ("local",)))], {})


def test_that_all_are_disabled_by_an_operator_is_a_reason_of_its_own():
    harness = Harness(
        a_node("n1", ready=False, not_ready_code="BACKEND_DISABLED", not_ready_reason="disabled since 10:00")
    )
    harness.submit(1)
    assert harness.reason(1)[0] == _why(harness).code == "BACKEND_DISABLED"
    harness.learn(NodeJoined(_down("s1", 8)))
    assert harness.reason(1)[0] == _why(harness).code == "BACKEND_UNAVAILABLE"
    assert "disabled since 10:00" in harness.reason(1)[1]
