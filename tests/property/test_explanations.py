"""`why` and the decision are one: what it says of a job and of each node is what the engine then does."""

from __future__ import annotations

from hypothesis import assume, given, note
from msgspec import structs

from hodei.control.explain import why as explain
from hodei.engine.explain import objections
from hodei.engine.view import View
from property import reference_rules as naive
from property.examples import examples
from property.random_runs import Story, calm_stories


def nothing_is_kept(told):
    """Room that is kept for a member to come back, or a job to move to, is taken though no run holds it."""
    return not told.controller.gangs.repairs and not told.controller.relocation.held


@examples(60)
@given(calm_stories)
def test_why_names_a_blocker_for_every_node_that_refuses_and_none_for_the_others(story):
    told = Story().tell(*story)
    assume(nothing_is_kept(told))
    auditor, used, engine = told.auditor, told.auditor.used(), told.controller.engine
    for gang in [gang for line in told.controller.queues.values() for gang in line.gangs.values()]:
        for member in gang.members:
            found = objections(engine.profile(gang), engine.runner, member, engine.table, View(told.now_ms))
            blamed = {engine.table.names[row] for mask, _ in found.pairs for row in mask.nonzero()[0]}
            for node in auditor.nodes():
                broken = naive.refusals(gang.job, member.task, node)
                room = naive.has_room(member.task, node, used[node.name])
                note(f"job {gang.id} task {member.task.name} on {node.name}: {broken} room={room}")
                assert (node.name in blamed) == bool(broken or not room)


@examples(60)
@given(calm_stories)
def test_why_reports_waiting_exactly_for_jobs_that_cannot_start(story):
    told = Story().tell(*story)
    assume(nothing_is_kept(told))
    auditor, used = told.auditor, told.auditor.used()
    for job in [job for job in auditor.jobs.values() if job.state == "pending"]:
        said = explain.why(told.controller, job.id, told.now_ms)
        note(f"job {job.id}: {said}")
        if said.code == "BACKOFF":
            assert said.next_attempt_ms > told.now_ms
            continue
        assert (said.code == "QUEUED") == naive.can_start(job.spec, auditor.nodes(), used)
        if said.code == "QUEUED":
            continue
        assert said.blockers or not auditor.offered
        if said.feasible == 0:
            for task in {blocker.task for blocker in said.blockers}:
                named = {node for blocker in said.blockers if blocker.task == task for node in blocker.nodes}
                assert named == set(auditor.offered), f"task {task} can go nowhere, but {named} alone are blamed"
        empty = {node.name: {} for node in auditor.nodes()}
        healthy = [_healthy(node) for node in auditor.nodes()]
        if auditor.offered:
            assert (said.status == "unsatisfiable") == (not naive.can_start(job.spec, healthy, empty))


def _healthy(node):
    return structs.replace(node, ready=True, not_ready_reason="", cordoned=False)


@examples(60)
@given(calm_stories)
def test_a_job_that_why_calls_placeable_is_placed_by_the_next_step_if_it_is_first_in_the_queue(story):
    """With one try per step gangs are left over that have room: those are what this is about."""
    told = Story(max_tries=1).tell(*story)
    for _ in range(20):
        if told.controller.next_wakeup_ms(told.now_ms) != told.now_ms:
            break
        first = _next_in_line(told)
        said = explain.why(told.controller, first, told.now_ms)
        done = told.step([])
        placed = {bind.job for bind in done.plan.binds}
        note(f"first: {first}, said {said.code}, placed {placed}, refused {[r.job for r in done.plan.refusals]}")
        assert (said.code == "QUEUED") == (first in placed)


def _next_in_line(told: Story) -> int:
    """The one gang that the next step tries: asked of the lines themselves, which leaves it where it is."""
    heads = [next(iter(line.ready()), None) for line in told.controller.queues.values()]
    return min((-gang.priority, gang.queued_ms, gang.id) for gang in heads if gang is not None)[-1]
