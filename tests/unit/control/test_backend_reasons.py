"""What backends cannot do, and backends that are down: where jobs go, and what `why` and `plan` say of it."""

from __future__ import annotations

from builders import a_job_spec, a_node
from hodei.control.why import plan, why
from hodei.model.facts import NodeJoined
from hodei.model.health import HealthCheck
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
