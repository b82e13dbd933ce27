"""Overcommit: no more of a resource is allocated than the ratio of the node allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from builders import NOW_MS, a_job, a_node
from hodei.control.controller import Controller
from hodei.model.config import SchedulingConfig
from hodei.model.facts import Fact, JobSubmitted, NodeJoined, RunObserved
from hodei.model.ids import run_id
from hodei.model.node import Node
from hodei.plugins.registry import build_profiles
from property.examples import examples

RATIOS = st.dictionaries(st.sampled_from(("cpu", "memory", "gpu")), st.integers(10, 400), max_size=3)
CPUS, MEMORIES = ("300m", "1", "2500m"), ("0", "700Mi", "3Gi")


@st.composite
def nodes(draw: st.DrawFn) -> list[Node]:
    return [
        a_node(f"n{i}", draw(st.integers(1, 4)), f"{draw(st.integers(1, 4))}Gi", gpu="1", overcommit_percent=draw(RATIOS))
        for i in range(draw(st.integers(1, 3)))
    ]  # fmt: skip


@examples(30)
@given(nodes(), st.data())
def test_allocations_never_exceed_the_overcommit_ratio(cluster: list[Node], data: st.DataObject) -> None:
    controller = Controller(build_profiles(SchedulingConfig()))
    controller.step(NOW_MS, [NodeJoined(node) for node in cluster])
    held: dict[str, tuple[str, dict[str, int]]] = {}
    requests: dict[int, dict[str, int]] = {}
    for step in range(1, 17):
        facts: list[Fact] = []
        if held and data.draw(st.booleans()):
            run = data.draw(st.sampled_from(sorted(held)))
            del held[run]
            facts.append(RunObserved(run, "succeeded", NOW_MS + step, exit_code=0))
        else:
            amounts = {"cpu": data.draw(st.sampled_from(CPUS)), "memory": data.draw(st.sampled_from(MEMORIES))}
            job = a_job(step, **amounts, gpu=data.draw(st.sampled_from(("", "400m"))),
                        profile=data.draw(st.sampled_from(("default", "compute"))))  # fmt: skip
            requests[step] = job.spec.tasks[0].request
            facts.append(JobSubmitted(job))
        for bind in controller.step(NOW_MS + step, facts).plan.binds:
            held[run_id(bind.job, bind.member, 1)] = (bind.node, requests[bind.job])
        for node in cluster:
            allocated: dict[str, int] = {}
            for name, request in held.values():
                if name == node.name:
                    allocated = {r: allocated.get(r, 0) + request.get(r, 0) for r in (*allocated, *request)}
            for resource, amount in allocated.items():
                limit = node.capacity.get(resource, 0) * node.overcommit_percent.get(resource, 100) // 100
                assert amount <= limit, (node, resource)


def test_a_ratio_of_two_allows_twice_the_cores_and_no_more() -> None:
    controller = Controller(build_profiles(SchedulingConfig()))
    controller.step(NOW_MS, [NodeJoined(a_node("n1", 2, "64Gi", overcommit_percent={"cpu": 200}))])
    plan = controller.step(NOW_MS, [JobSubmitted(a_job(id, cpu="1")) for id in range(1, 7)]).plan
    assert len(plan.binds) == 4
