"""Random runs of the controller under the invariants of the auditor."""

from __future__ import annotations

import msgspec
from hypothesis import given, note

from hodei.control.explain import why as explain
from hodei.model.facts import JobCancelled, RunObserved
from hodei.model.job import Move
from property import reference_rules as naive
from property.auditor import ENDED_JOB
from property.clusters import specs
from property.examples import examples
from property.random_runs import RandomRun, random_runs, runs_without_restarts


@examples(80)
@given(random_runs)
def test_no_node_is_overcommitted_no_gang_is_split_and_no_rule_is_broken(example):
    RandomRun().run(*example)


@examples(60)
@given(random_runs)
def test_the_invariants_hold_with_preemption(example):
    RandomRun(preemption=True).run(*example)


@examples(40)
@given(random_runs)
def test_no_job_waits_while_there_is_capacity_and_no_job_is_lost(example):
    random_run = RandomRun(between=_no_pending_job_could_start).run(*example)
    alive = [id for id, job in random_run.auditor.jobs.items() if job.state not in ENDED_JOB]
    random_run.step([JobCancelled(id) for id in alive])
    random_run.step([RunObserved(run.id, "stopped", random_run.now_ms, 143) for run in random_run.auditor.live()])
    assert all(job.state in ENDED_JOB for job in random_run.auditor.jobs.values())
    assert not random_run.controller.cluster.jobs
    assert not any(random_run.controller.pending().values())
    assert not random_run.controller.cluster.table.runs.any()


def _no_pending_job_could_start(random_run: RandomRun) -> None:
    """Brute force over all placements of all pending gangs: if there is one, a trigger was missed."""
    auditor, used = random_run.auditor, random_run.used()
    for job in auditor.jobs.values():
        if job.state == "pending" and job.not_before_ms <= random_run.now_ms:
            move = job.move or Move()
            nodes = [node for node in auditor.nodes() if node.name not in move.off and move.to in ("", node.name)]
            assert not naive.can_start(job.spec, nodes, used), f"job {job.id} waits although it could start"


@examples(25)
@given(runs_without_restarts)
def test_the_same_facts_give_the_same_plans_with_or_without_why(example):
    plain = RandomRun().run(*example)
    explained = RandomRun(between=_explain_all).run(*example)
    for number, (one, other) in enumerate(zip(plain.encoded_steps, explained.encoded_steps, strict=True)):
        assert one == other, f"step {number} differs"


def _explain_all(random_run: RandomRun) -> None:
    for job in random_run.auditor.jobs.values():
        explain.why(random_run.controller, job.id, random_run.now_ms)
    pending = [job.spec for job in random_run.auditor.jobs.values() if job.state == "pending"]
    explain.plan(
        random_run.controller,
        pending[:2] + [job.spec for job in random_run.auditor.jobs.values()][:2],
        random_run.now_ms,
    )


@examples(40)
@given(runs_without_restarts)
def test_a_restart_keeps_usage_and_jobs(example):
    random_run = RandomRun().run(*example)
    before, waiting = random_run.auditor.used(), random_run.controller.pending()
    live = {run.id for run in random_run.auditor.live()}
    offered = random_run.auditor.offered.copy()
    random_run.restart()
    assert random_run.auditor.offered == offered
    assert random_run.controller.pending() == waiting, "a pending job is lost or started by the restart"
    assert {run.id for run in random_run.auditor.live()} == live
    assert random_run.auditor.used() == before
    assert set(random_run.controller.cluster.jobs) == {
        id for id, job in random_run.auditor.jobs.items() if not job.finished_ms
    }


@examples(40)
@given(runs_without_restarts, specs())
def test_a_plan_predicts_the_next_step(example, spec):
    random_run = RandomRun().run(*example)
    (planned,) = explain.plan(random_run.controller, [spec], random_run.now_ms)
    note(f"planned: {planned.code} {planned.summary}")
    done = random_run.step(random_run.facts("submit", spec))
    binds = [(bind.member, bind.node, msgspec.json.encode(bind.decision)) for bind in done.plan.binds]
    assert binds == [(place.member, place.node, msgspec.json.encode(place.decision)) for place in planned.placements]
    assert bool(binds) == (planned.code == "WOULD_START")
    assert bool(done.plan.evictions) <= (planned.code == "WOULD_PREEMPT")
    if not binds and planned.code != "WOULD_PREEMPT":
        refusal = random_run.controller.queues[spec.profile].refusal_of(
            random_run.controller.queues[spec.profile].gangs[random_run.auditor.jobs[max(random_run.auditor.jobs)].id]
        )
        assert refusal is not None
        if planned.status == "waiting":  # else the code is that of the empty cluster
            assert (refusal.verdicts[0].reason.code if refusal.verdicts else "NO_NODES") == planned.code
