"""What `why` proposes is true: every suggestion, made and nothing else, starts the job; and it is no larger than it must be."""

from __future__ import annotations

import msgspec
from hypothesis import given, note
from hypothesis import strategies as st
from msgspec import structs

from builders import NOW_MS, a_job
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.controller import Controller, Step
from hodei.control.explain import why as explain
from hodei.control.explain.suggestions import MAX_SUGGESTIONS
from hodei.engine.explain import round_readable
from hodei.model.explanation import Explanation, Patch
from hodei.model.facts import JobSubmitted, NodeJoined
from hodei.model.job import JobSpec
from property import clusters
from property import reference_rules as naive
from property.examples import examples

# One priority: nobody makes room for anybody, so that nothing but the change can have helped.
jobs = clusters.specs().map(lambda spec: structs.replace(spec, priority=500, scheduling_timeout_ms=0))
scenes = st.tuples(clusters.clusters(), st.lists(jobs, min_size=1, max_size=6))
LATER_MS = NOW_MS + 1000


def a_controller(cluster, specs) -> Controller:
    """A cluster to which these jobs were submitted one after the other."""
    made = Controller(clusters.profiles(), admission=AdmissionPolicy("wait"))
    made.step(NOW_MS, [NodeJoined(node) for node in cluster])
    for id, spec in enumerate(specs, 1):
        submit(made, id, spec)
    return made


def submit(controller: Controller, id: int, spec: JobSpec) -> Step:
    return controller.step(NOW_MS, [JobSubmitted(a_job(id, spec=spec, at_ms=NOW_MS, queued_ms=NOW_MS))])


def waiting(controller: Controller) -> list[tuple[int, JobSpec, Explanation]]:
    pending = sorted(job.id for job in controller.cluster.jobs.values() if job.state == "pending")
    found = [(id, controller.cluster.jobs[id].spec, explain.why(controller, id, LATER_MS)) for id in pending]
    return [(id, spec, said) for id, spec, said in found if said is not None]


def starts(cluster, specs, changed: JobSpec) -> bool:
    again = a_controller(cluster, specs)
    return len(specs) + 1 in {bind.job for bind in submit(again, len(specs) + 1, changed).plan.binds}


@examples(60)
@given(scenes)
def test_every_repair_makes_the_job_start_in_the_next_step(scene):
    for id, spec, said in waiting(a_controller(*scene)):
        assert len(said.suggestions) <= MAX_SUGGESTIONS
        for suggestion in said.suggestions:
            note(f"job {id}: {suggestion}")
            sent = msgspec.json.decode(msgspec.json.encode(suggestion.patch), type=Patch)
            changed = sent.applied_to(spec)
            assert changed != spec
            assert suggestion.nodes >= 1
            assert starts(*scene, changed)


@examples(60)
@given(scenes)
def test_a_lowered_resource_could_not_be_any_higher(scene):
    for id, spec, said in waiting(a_controller(*scene)):
        for suggestion in said.suggestions:
            if suggestion.kind != "lower":
                continue
            task = next(task for task in spec.tasks if task.name == suggestion.patch.task)
            request = suggestion.patch.set["request"]
            (resource,) = [name for name, amount in task.request.items() if request[name] != amount]
            more = next_readable(resource, request[resource], task.request[resource])
            note(f"job {id}: {suggestion.change}; next {resource} {more}")
            if more < task.request[resource]:
                changed = Patch(task.name, {"request": {**request, resource: more}}).applied_to(spec)
                assert not starts(*scene, changed)


def next_readable(resource: str, amount: int, asked: int) -> int:
    high = amount + 1
    while high < asked and round_readable(resource, high, asked) <= amount:
        high += max(amount // 64, 1)
    return min(round_readable(resource, high, asked), asked)


@examples(60)
@given(scenes)
def test_every_blocker_that_is_named_is_real_and_placeable_jobs_have_no_repair(scene):
    cluster, _ = scene
    controller = a_controller(*scene)
    table = controller.engine.table
    used = {node.name: table.usage(table.row[node.name]) for node in cluster}
    for id, spec, said in waiting(controller):
        if naive.can_start(spec, cluster, used):
            assert said.suggestions == ()
            continue
        alone = said.feasible == 0
        for blocker in said.blockers:
            task = next(task for task in spec.tasks if task.name == blocker.task)
            for node in [node for node in cluster if node.name in blocker.nodes]:
                note(f"job {id}: {blocker} on {node.name}")
                if alone:
                    assert naive.refusals(spec, task, node) or not naive.has_room(task, node, used[node.name])


@examples(40)
@given(scenes, jobs)
def test_asking_why_leaves_no_mark(scene, last):
    asked, silent = a_controller(*scene), a_controller(*scene)
    for _ in range(2):
        waiting(asked)
    for controller in (asked, silent):
        controller.engine.table.settle()
    said, unsaid = submit(asked, 99, last), submit(silent, 99, last)
    assert msgspec.json.encode([said.plan, said.saves]) == msgspec.json.encode([unsaid.plan, unsaid.saves])
