"""What backends cannot do, and backends that are down: where jobs go, and what `why` and `plan` say of it."""

from __future__ import annotations

import pytest

from builders import a_job_spec, a_node
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.explain.why import plan, why
from hodei.model.errors import InvalidInput
from hodei.model.facts import BackendReported, NodeJoined
from hodei.model.health import HealthCheck
from hodei.model.job import BackendChoice
from unit.control.house import House

SLURM = ("images", "health_checks", "gpu_shares")
HEALTH = HealthCheck(command=("/bin/true",))


def _why(house, job=1):
    return why(house.controller, job, house.now_ms)


def _nodes(house, job):
    return sorted({run.node for run in house.runs.values() if run.job == job})


def test_a_job_goes_to_the_backend_that_can_run_it_however_full_that_is():
    house = House(
        a_node("s1", 64, backend="slurm1", cannot=SLURM),
        a_node("d1", 4, backend="docker1", cannot=("bare",)),
    )
    house.submit(1, cpu="1", image="busybox")
    house.submit(2, cpu="1", image="busybox", health=HEALTH)
    house.submit(3, cpu="1")
    assert [_nodes(house, job) for job in (1, 2, 3)] == [["d1"], ["d1"], ["s1"]]


def test_why_names_the_backend_and_what_it_cannot_do_and_a_hint():
    house = House(a_node("s1", backend="slurm1", cannot=SLURM), a_node("s2", backend="slurm1", cannot=SLURM))
    house.submit(1, image="busybox")
    said = _why(house)
    assert (said.status, said.code) == ("unsatisfiable", "BACKEND_CANNOT")
    assert "2 backend slurm1 cannot run images" in said.summary
    assert [(b.code, b.text, b.count) for b in said.blockers] == [
        ("BACKEND_CANNOT", "backend slurm1 cannot run images", 2)
    ]
    assert said.blockers[0].hint == said.hint == "leave out `image`, or use a backend with containers"
    assert house.jobs[1].reason_code == "BACKEND_CANNOT"
    (planned,) = plan(house.controller, [a_job_spec(image="busybox")], house.now_ms)
    assert (planned.status, planned.code, planned.hint) == (said.status, said.code, said.hint)


def test_what_can_be_left_out_is_tried_and_proposed():
    house = House(a_node("s1", backend="slurm1", cannot=SLURM))
    house.submit(1, health=HEALTH)
    assert [repair.change for repair in _why(house).repairs] == ["drop health"]


def test_a_job_that_waited_starts_when_a_backend_comes_that_can():
    house = House(a_node("s1", backend="slurm1", cannot=SLURM))
    house.submit(1, image="busybox")
    assert house.state(1) == "pending"
    house.learn(NodeJoined(a_node("d1", backend="docker1")))
    assert _nodes(house, 1) == ["d1"]


# --------------------------------------------------------------------------------------- backends that are down

OUT = "backend slurm1 is out of reach since 10:00: no answer"


def _down(name, *args, **fields):
    return a_node(
        name, *args, backend="slurm1", ready=False, not_ready_code="BACKEND_UNHEALTHY", not_ready_reason=OUT, **fields
    )


def test_a_job_that_only_a_backend_could_take_which_is_down_says_so():
    house = House(a_node("small", 1), _down("s1", 64), _down("s2", 64))
    house.submit(1, cpu="16")
    text = f"every backend that could take it is unavailable: {OUT}"
    assert house.reason(1) == ("BACKEND_UNAVAILABLE", text)
    said = _why(house)
    assert (said.status, said.code) == ("waiting", "BACKEND_UNAVAILABLE")
    assert said.summary.startswith(text)
    assert "hodei backend list" in said.hint
    (planned,) = plan(house.controller, [a_job_spec(cpu="16")], house.now_ms)
    assert planned.code == "BACKEND_UNAVAILABLE"
    house.learn(NodeJoined(a_node("s1", 64, backend="slurm1")))
    assert _nodes(house, 1) == ["s1"]


def test_a_job_that_a_backend_could_take_which_is_up_waits_for_room():
    house = House(a_node("n1", 4), _down("s1", 64))
    house.submit(1, cpu="4")
    house.submit(2, cpu="4")
    assert house.reason(2)[0] != "BACKEND_UNAVAILABLE"
    assert _why(house, 2).code != "BACKEND_UNAVAILABLE"


def test_a_job_that_no_backend_could_take_is_not_told_to_wait_for_one_that_is_down():
    house = House(a_node("n1", 4), _down("s1", 8))
    house.submit(1, cpu="32")
    assert house.reason(1)[0] == "INSUFFICIENT_CPU"
    assert _why(house).status == "unsatisfiable"
    house.submit(2, cpu="6", image="busybox")
    house.learn(NodeJoined(_down("s1", 8, cannot=SLURM)))
    assert _why(house, 2).code != "BACKEND_UNAVAILABLE"


def test_a_backend_that_was_never_reached_is_named():
    house = House(a_node("n1", 4, cannot=("images",)))
    house.learn(BackendReported("farm", "backend farm is out of reach since 10:00: refused", ("bare",)))
    house.submit(1, image="busybox")
    house.submit(2, cpu="16")  # the farm takes none without an image
    assert house.reason(1)[0] == _why(house, 1).code == "BACKEND_UNAVAILABLE"
    assert "backend farm is out of reach" in house.reason(1)[1]
    assert house.reason(2)[0] == "INSUFFICIENT_CPU"
    house.learn(BackendReported("farm"))
    assert house.reason(1)[0] == _why(house, 1).code == "BACKEND_CANNOT"


def test_a_backend_that_was_never_reached_is_named_also_to_a_job_that_it_could_not_run():
    house = House(a_node("n1", 4))
    house.learn(BackendReported("farm", "backend farm is out of reach since 10:00: refused", ("bare",)))
    house.submit(1, backend=BackendChoice("specific", ("farm",)))
    text = "backend farm is out of reach since 10:00: refused; and backend farm cannot run a task without an image"
    assert house.reason(1) == ("BACKEND_UNAVAILABLE", text)
    said = _why(house)
    assert said.code == "BACKEND_UNAVAILABLE"
    assert said.summary.startswith(text)
    assert said.hint == "give the task an `image`, or set a default `image` for the backend"


def test_without_any_node_the_backend_that_was_never_reached_is_the_reason():
    house = House()
    house.submit(1)
    assert _why(house).code == "NO_NODES"
    house.learn(BackendReported("hpc", "backend hpc is out of reach since 10:00: refused"))
    assert house.reason(1)[0] == _why(house).code == "BACKEND_UNAVAILABLE"


def test_a_job_is_not_refused_as_too_large_while_a_backend_was_never_reached():
    house = House(a_node("n1", 4), admission=AdmissionPolicy("reject"))
    check = house.controller.gate.check
    with pytest.raises(InvalidInput, match="can never run here"):
        check([a_job_spec(cpu="64")], {})
    house.learn(BackendReported("hpc", "backend hpc is out of reach since 10:00: refused"))
    check([a_job_spec(cpu="64")], {})
    with pytest.raises(InvalidInput, match="can never run here"):
        check([a_job_spec(cpu="64", backend=BackendChoice("specific", ("local",)))], {})


def test_that_all_are_disabled_by_an_operator_is_a_reason_of_its_own():
    house = House(a_node("n1", ready=False, not_ready_code="BACKEND_DISABLED", not_ready_reason="disabled since 10:00"))
    house.submit(1)
    assert house.reason(1)[0] == _why(house).code == "BACKEND_DISABLED"
    house.learn(NodeJoined(_down("s1", 8)))
    assert house.reason(1)[0] == _why(house).code == "BACKEND_UNAVAILABLE"
    assert "disabled since 10:00" in house.reason(1)[1]
