"""Whatever happens, in whatever order: the auditor finds nothing to complain of."""

from __future__ import annotations

import msgspec
from hypothesis import given, note

from hodei.control.explain import why as explain
from hodei.model.facts import JobCancelled, RunObserved
from property import reference_rules as naive
from property.auditor import ENDED_JOB
from property.clusters import specs
from property.examples import examples
from property.random_runs import Story, calm_stories, stories


@examples(80)
@given(stories)
def test_no_node_is_overcommitted_no_gang_is_split_and_no_rule_is_broken_whatever_happens(story):
    Story().tell(*story)


@examples(60)
@given(stories)
def test_it_is_so_also_when_higher_work_takes_the_place_of_lower(story):
    Story(warlike=True).tell(*story)


@examples(40)
@given(stories)
def test_no_job_waits_while_there_is_capacity_and_no_job_is_lost(story):
    told = Story(between=_nobody_waits_for_nothing).tell(*story)
    alive = [id for id, job in told.auditor.jobs.items() if job.state not in ENDED_JOB]
    told.step([JobCancelled(id) for id in alive])
    told.step([RunObserved(run.id, "stopped", told.now_ms, 143) for run in told.auditor.live()])
    assert all(job.state in ENDED_JOB for job in told.auditor.jobs.values())
    assert not told.controller.cluster.jobs
    assert not any(told.controller.pending().values())
    assert not told.controller.cluster.table.runs.any()


def _nobody_waits_for_nothing(story: Story) -> None:
    """Brute force over every way to place every waiting gang: if there is one, a wake-up was missed."""
    auditor, used = story.auditor, story.used()
    for job in auditor.jobs.values():
        if job.state == "pending" and job.not_before_ms <= story.now_ms:
            how, *names = job.move.split(" ")  # one that is moved leaves these nodes, or goes to that one
            nodes = [node for node in auditor.nodes() if not how or (node.name in names) == (how == "to")]
            assert not naive.can_start(job.spec, nodes, used), f"job {job.id} waits though there is room"


@examples(25)
@given(calm_stories)
def test_the_same_facts_give_the_same_plans_byte_for_byte_with_or_without_why(story):
    plain = Story().tell(*story)
    asked = Story(between=_ask_everything).tell(*story)
    for number, (one, other) in enumerate(zip(plain.written, asked.written, strict=True)):
        assert one == other, f"step {number} differs"


def _ask_everything(story: Story) -> None:
    for job in story.auditor.jobs.values():
        explain.why(story.controller, job.id, story.now_ms)
    pending = [job.spec for job in story.auditor.jobs.values() if job.state == "pending"]
    explain.plan(story.controller, pending[:2] + [job.spec for job in story.auditor.jobs.values()][:2], story.now_ms)


@examples(40)
@given(calm_stories)
def test_a_restart_holds_the_same_room_and_loses_no_job(story):
    told = Story().tell(*story)
    before, waiting = told.auditor.used(), told.controller.pending()
    live = {run.id for run in told.auditor.live()}
    offered = told.auditor.offered.copy()
    told.restart()
    assert told.auditor.offered == offered
    assert told.controller.pending() == waiting, "a job that waited is forgotten, or started by the restart alone"
    assert {run.id for run in told.auditor.live()} == live
    assert told.auditor.used() == before
    assert set(told.controller.cluster.jobs) == {id for id, job in told.auditor.jobs.items() if not job.finished_ms}


@examples(40)
@given(calm_stories, specs())
def test_a_plan_is_what_then_happens(story, spec):
    told = Story().tell(*story)
    (planned,) = explain.plan(told.controller, [spec], told.now_ms)
    note(f"planned: {planned.code} {planned.summary}")
    done = told.step(told.facts("submit", spec))
    binds = [(bind.member, bind.node, msgspec.json.encode(bind.decision)) for bind in done.plan.binds]
    assert binds == [(place.member, place.node, msgspec.json.encode(place.decision)) for place in planned.placements]
    assert bool(binds) == (planned.code == "WOULD_START")
    assert bool(done.plan.evictions) <= (planned.code == "WOULD_PREEMPT")
    if not binds and planned.code != "WOULD_PREEMPT":
        refused = told.controller.queues[spec.profile].refusal_of(
            told.controller.queues[spec.profile].gangs[told.auditor.jobs[max(told.auditor.jobs)].id]
        )
        assert refused is not None
        if (
            planned.status == "waiting"
        ):  # else the code is that of the empty cluster: what no going of others would cure
            assert (refused.verdicts[0].reason.code if refused.verdicts else "NO_NODES") == planned.code
