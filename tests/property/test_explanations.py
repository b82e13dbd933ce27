"""`why` agrees with the engine: its statements about a job and its nodes match the next decision."""

from __future__ import annotations

from hypothesis import assume, given, note
from msgspec import structs

from hodei.control.explain import why as explain
from hodei.engine.explain import objections
from hodei.engine.view import View
from property import reference_rules as naive
from property.examples import examples
from property.random_runs import RandomRun, runs_without_restarts


def nothing_is_held(random_run):
    """No capacity is held for repairs or migrations, which no run uses."""
    return not random_run.controller.gangs.repairs and not random_run.controller.relocation.held


@examples(60)
@given(runs_without_restarts)
def test_why_names_a_blocker_for_every_node_that_refuses_and_none_for_the_others(example):
    random_run = RandomRun().run(*example)
    assume(nothing_is_held(random_run))
    auditor, used, engine = random_run.auditor, random_run.auditor.used(), random_run.controller.engine
    for gang in [gang for queue in random_run.controller.queues.values() for gang in queue.gangs.values()]:
        for member in gang.members:
            found = objections(engine.profile(gang), engine.runner, member, engine.table, View(random_run.now_ms))
            named_nodes = {engine.table.names[row] for mask, _ in found.pairs for row in mask.nonzero()[0]}
            for node in auditor.nodes():
                broken = naive.refusals(gang.job, member.task, node)
                fits = naive.fits(member.task, node, used[node.name])
                note(f"job {gang.id} task {member.task.name} on {node.name}: {broken} fits={fits}")
                assert (node.name in named_nodes) == bool(broken or not fits)


@examples(60)
@given(runs_without_restarts)
def test_why_reports_waiting_exactly_for_jobs_that_cannot_start(example):
    random_run = RandomRun().run(*example)
    assume(nothing_is_held(random_run))
    auditor, used = random_run.auditor, random_run.auditor.used()
    for job in [job for job in auditor.jobs.values() if job.state == "pending"]:
        explanation = explain.why(random_run.controller, job.id, random_run.now_ms)
        note(f"job {job.id}: {explanation}")
        if explanation.code == "BACKOFF":
            assert explanation.next_attempt_ms > random_run.now_ms
            continue
        assert (explanation.code == "QUEUED") == naive.can_start(job.spec, auditor.nodes(), used)
        if explanation.code == "QUEUED":
            continue
        assert explanation.blockers or not auditor.offered
        if explanation.feasible == 0:
            for task in {blocker.task for blocker in explanation.blockers}:
                named = {node for blocker in explanation.blockers if blocker.task == task for node in blocker.nodes}
                assert named == set(auditor.offered), f"task {task} fits nowhere, but only {named} are named"
        empty = {node.name: {} for node in auditor.nodes()}
        healthy = [_healthy(node) for node in auditor.nodes()]
        if auditor.offered:
            assert (explanation.status == "unsatisfiable") == (not naive.can_start(job.spec, healthy, empty))


def _healthy(node):
    return structs.replace(node, ready=True, not_ready_reason="", cordoned=False)


@examples(60)
@given(runs_without_restarts)
def test_a_job_that_why_calls_placeable_is_placed_by_the_next_step_if_it_is_first_in_the_queue(example):
    """With one try per step some gangs that fit are left in the queue."""
    random_run = RandomRun(max_tries=1).run(*example)
    for _ in range(20):
        if random_run.controller.next_wakeup_ms(random_run.now_ms) != random_run.now_ms:
            break
        first = _next_job(random_run)
        explanation = explain.why(random_run.controller, first, random_run.now_ms)
        done = random_run.step([])
        placed = {bind.job for bind in done.plan.binds}
        note(
            f"first: {first}, explained as {explanation.code}, placed {placed}, refused {[r.job for r in done.plan.refusals]}"
        )
        assert (explanation.code == "QUEUED") == (first in placed)


def _next_job(random_run: RandomRun) -> int:
    """The gang that the next step tries, read from the queues without removing it."""
    heads = [next(iter(queue.ready()), None) for queue in random_run.controller.queues.values()]
    return min((-gang.priority, gang.queued_ms, gang.id) for gang in heads if gang is not None)[-1]
