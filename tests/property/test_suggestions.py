"""The suggestions of `why` are correct: each one alone starts the job, and is no larger than necessary."""

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

# One priority, so that there is no preemption and only the suggested change can help.
jobs = clusters.specs().map(lambda spec: structs.replace(spec, priority=500, scheduling_timeout_ms=0))
examples_with_jobs = st.tuples(clusters.clusters(), st.lists(jobs, min_size=1, max_size=6))
LATER_MS = NOW_MS + 1000


def a_controller(cluster, specs) -> Controller:
    """A cluster to which these jobs were submitted one after the other."""
    controller = Controller(clusters.profiles(), admission=AdmissionPolicy("wait"))
    controller.step(NOW_MS, [NodeJoined(node) for node in cluster])
    for id, spec in enumerate(specs, 1):
        submit(controller, id, spec)
    return controller


def submit(controller: Controller, id: int, spec: JobSpec) -> Step:
    return controller.step(NOW_MS, [JobSubmitted(a_job(id, spec=spec, at_ms=NOW_MS, queued_ms=NOW_MS))])


def waiting(controller: Controller) -> list[tuple[int, JobSpec, Explanation]]:
    pending = sorted(job.id for job in controller.cluster.jobs.values() if job.state == "pending")
    found = [(id, controller.cluster.jobs[id].spec, explain.why(controller, id, LATER_MS)) for id in pending]
    return [(id, spec, explanation) for id, spec, explanation in found if explanation is not None]


def starts(cluster, specs, changed: JobSpec) -> bool:
    repeated = a_controller(cluster, specs)
    return len(specs) + 1 in {bind.job for bind in submit(repeated, len(specs) + 1, changed).plan.binds}


@examples(60)
@given(examples_with_jobs)
def test_every_suggestion_lets_the_job_start_in_the_next_step(example):
    for id, spec, explanation in waiting(a_controller(*example)):
        assert len(explanation.suggestions) <= MAX_SUGGESTIONS
        for suggestion in explanation.suggestions:
            note(f"job {id}: {suggestion}")
            sent = msgspec.json.decode(msgspec.json.encode(suggestion.patch), type=Patch)
            changed = sent.applied_to(spec)
            assert changed != spec
            assert suggestion.nodes >= 1
            assert starts(*example, changed)


@examples(60)
@given(examples_with_jobs)
def test_a_lowered_resource_could_not_be_any_higher(example):
    for id, spec, explanation in waiting(a_controller(*example)):
        for suggestion in explanation.suggestions:
            if suggestion.kind != "lower":
                continue
            task = next(task for task in spec.tasks if task.name == suggestion.patch.task)
            request = suggestion.patch.set["request"]
            (resource,) = [name for name, amount in task.request.items() if request[name] != amount]
            more = next_readable(resource, request[resource], task.request[resource])
            note(f"job {id}: {suggestion.change}; next {resource} {more}")
            if more < task.request[resource]:
                changed = Patch(task.name, {"request": {**request, resource: more}}).applied_to(spec)
                assert not starts(*example, changed)


def next_readable(resource: str, amount: int, requested: int) -> int:
    high = amount + 1
    while high < requested and round_readable(resource, high, requested) <= amount:
        high += max(amount // 64, 1)
    return min(round_readable(resource, high, requested), requested)


@examples(60)
@given(examples_with_jobs)
def test_every_named_blocker_is_real_and_placeable_jobs_have_no_suggestion(example):
    cluster, _ = example
    controller = a_controller(*example)
    table = controller.engine.table
    used = {node.name: table.usage(table.row[node.name]) for node in cluster}
    for id, spec, explanation in waiting(controller):
        if naive.can_start(spec, cluster, used):
            assert explanation.suggestions == ()
            continue
        fits_nowhere = explanation.feasible == 0
        for blocker in explanation.blockers:
            task = next(task for task in spec.tasks if task.name == blocker.task)
            for node in [node for node in cluster if node.name in blocker.nodes]:
                note(f"job {id}: {blocker} on {node.name}")
                if fits_nowhere:
                    assert naive.refusals(spec, task, node) or not naive.fits(task, node, used[node.name])


@examples(40)
@given(examples_with_jobs, jobs)
def test_why_does_not_change_the_state(example, last):
    explained, plain = a_controller(*example), a_controller(*example)
    for _ in range(2):
        waiting(explained)
    for controller in (explained, plain):
        controller.engine.table.settle()
    one, other = submit(explained, 99, last), submit(plain, 99, last)
    assert msgspec.json.encode([one.plan, one.saves]) == msgspec.json.encode([other.plan, other.saves])
