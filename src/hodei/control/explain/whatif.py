"""What-if: the effect of new jobs, added or removed nodes, or another policy.

Two lookaheads are compared, one without and one with the change. Both use the same run time estimates, so that nothing else
differs. Works on clones only.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, structs

from hodei.control.clone import clone_controller
from hodei.control.controller import Controller
from hodei.control.explain.lookahead import Lookahead, Started, look_ahead
from hodei.model.dependency import DependencyStatus
from hodei.model.errors import InvalidInput, NotFound, did_you_mean
from hodei.model.explanation import ProjectedEviction, ProjectedStart, WhatIf
from hodei.model.facts import (
    Fact,
    JobRestored,
    JobSubmitted,
    NodeJoined,
    NodeOverridden,
    OverridesRestored,
    ReservationMade,
)
from hodei.model.ids import JobId, NodeName
from hodei.model.job import Job, JobSpec, Run
from hodei.model.node import Node

MAX_ADDED_NODES = 10_000
# A start that moves by less counts as the same.
_SAME_MS = 1000
_NEVER = Started(0, ())


class Question(Struct, frozen=True):
    """The change. `like`: the node to copy for added ones ("": the largest). `first`: the number of the first job (0: the
    next one). `dependency_statuses`: of the jobs that the new jobs wait for."""

    jobs: tuple[JobSpec, ...] = ()
    add_nodes: int = 0
    like: NodeName = ""
    remove_nodes: tuple[NodeName, ...] = ()
    first: JobId = 0
    dependency_statuses: tuple[DependencyStatus, ...] = ()


def what_if(
    live: Controller,
    question: Question,
    now_ms: int,
    *,
    under: Controller | None = None,
    default_ms: int = 0,
    max_steps: int = 50_000,
    go_on: Callable[[], bool] = lambda: True,
) -> WhatIf:
    """`live`: a clone of the live controller, which is not changed. `under`: a new controller with another policy.
    `default_ms`: the assumed run time of jobs without an estimate. InvalidInput or NotFound for an impossible change."""
    unknown = set[JobId]()

    def run_ms(run: Run, spec: JobSpec, so_far_ms: int) -> int:
        estimate_ms = live.estimator.estimate(spec).expected_ms
        if not estimate_ms:
            unknown.add(run.job)
        return estimate_ms or default_ms

    changes = _node_facts(live, question)
    changed = clone_controller(live) if under is None else under
    first: list[Fact] = [] if under is None else _restored(live, under, now_ms)
    next_id = question.first or max(live.cluster.jobs, default=0) + 1
    new = dict(enumerate(question.jobs, next_id))
    if new:
        probe = clone_controller(changed)
        probe.step(now_ms, [*first, *changes])
        probe.gate.check(question.jobs, probe.pending())
    submitted = [
        JobSubmitted(Job(id, spec, "pending", now_ms, now_ms, queued_ms=now_ms), question.dependency_statuses)
        for id, spec in new.items()
    ]
    before = look_ahead(clone_controller(live), now_ms, run_ms, max_steps=max_steps, go_on=go_on)
    after = look_ahead(changed, now_ms, run_ms, facts=[*first, *changes, *submitted], max_steps=max_steps, go_on=go_on)
    return _answer(live, now_ms, new, before, after, _notes(before, after, len(unknown), default_ms))


def _node_facts(live: Controller, question: Question) -> list[Fact]:
    known = live.cluster.nodes
    for name in (*question.remove_nodes, *((question.like,) if question.like else ())):
        if name not in known:
            raise NotFound(f"there is no node {name!r}{did_you_mean(name, known)}", hint="hodei nodes")
    facts: list[Fact] = [NodeOverridden(name, cordon=True, drain=True) for name in question.remove_nodes]
    if question.add_nodes:
        if not 0 < question.add_nodes <= MAX_ADDED_NODES:
            raise InvalidInput(f"{question.add_nodes} nodes to add", hint=f"from 1 to {MAX_ADDED_NODES}")
        facts += [NodeJoined(node) for node in _added_nodes(live, question)]
    return facts


def _added_nodes(live: Controller, question: Question) -> list[Node]:
    """Copies of a node, healthy and without overrides."""
    nodes = live.cluster.nodes
    if not nodes:
        raise InvalidInput("there is no node to copy", hint="wait until one has joined")
    model = nodes[question.like] if question.like else max(
        (nodes[name] for name in sorted(nodes)), key=lambda node: sum(node.capacity.values())
    )  # fmt: skip
    out: list[Node] = []
    number = 0
    while len(out) < question.add_nodes:
        number += 1
        name = f"{model.name}-new-{number}"
        if name not in nodes:
            out.append(
                structs.replace(model, name=name, ready=True, not_ready_reason="", not_ready_code="", cordoned=False)
            )
    return out


def _restored(live: Controller, under: Controller, now_ms: int) -> list[Fact]:
    """Bring a new controller to the state of the live one. What runs is restored at once, while there are no nodes and
    nothing can be placed; the other facts are returned."""
    cluster = live.cluster
    if type(under.estimator) is type(live.estimator):
        under.estimator = live.estimator
    at_once: list[Fact] = [OverridesRestored(overrides) for overrides in cluster.overrides.values()]
    at_once += [
        ReservationMade(reservation, restored=True) for reservation in cluster.availability.reservations.values()
    ]
    later: list[Fact] = [NodeJoined(node) for node in cluster.nodes.values()]
    for id in sorted(cluster.jobs):
        runs = tuple(cluster.runs.get(id, {}).values())
        fact = JobRestored(cluster.jobs[id], runs, live.dependencies.statuses(id))
        (later if cluster.jobs[id].state == "pending" else at_once).append(fact)
    under.step(now_ms, at_once)
    return later


def _answer(
    live: Controller,
    now_ms: int,
    new: dict[JobId, JobSpec],
    before: Lookahead,
    after: Lookahead,
    notes: tuple[str, ...],
) -> WhatIf:
    jobs = live.cluster.jobs
    waiting = [id for id in sorted(jobs) if jobs[id].state == "pending"]
    sooner, later, same = list[ProjectedStart](), list[ProjectedStart](), 0
    for id in waiting:
        was, will = before.starts.get(id, _NEVER), after.starts.get(id, _NEVER)
        outlook = ProjectedStart(jobs[id].spec.name, id, will.at_ms, will.nodes, was.at_ms, was.nodes)
        if abs(will.at_ms - was.at_ms) < _SAME_MS:
            same += 1
        elif will.at_ms and (not was.at_ms or will.at_ms < was.at_ms):
            sooner.append(outlook)
        else:
            later.append(outlook)
    evicted_anyway = {one.job for one in before.evicted}
    evicted = []
    for one in after.evicted:
        if one.job in new or one.job in evicted_anyway:
            continue
        again = after.starts.get(one.job)
        name = jobs[one.job].spec.name if one.job in jobs else ""
        by = new[one.by].name if one.by in new else jobs[one.by].spec.name if one.by in jobs else ""
        again_ms = again.at_ms if again is not None and again.at_ms >= one.at_ms else 0
        evicted.append(ProjectedEviction(name, one.at_ms, one.job, 0 if one.by in new else one.by, by, again_ms))
    starts = [
        ProjectedStart(spec.name, 0, after.starts.get(id, _NEVER).at_ms, after.starts.get(id, _NEVER).nodes)
        for id, spec in new.items()
    ]
    return WhatIf(now_ms, tuple(starts), tuple(evicted), tuple(sooner), tuple(later), same, notes)


def _notes(before: Lookahead, after: Lookahead, unknown: int, default_ms: int) -> tuple[str, ...]:
    notes = []
    if unknown:
        how = "assumed to run as long as such jobs usually did" if default_ms else "assumed never to end"
        one = "1 job has" if unknown == 1 else f"{unknown} jobs have"
        notes.append(f"{one} neither estimate nor timeout: {how}")
    if {before.end, after.end} & {"steps", "stopped"}:
        notes.append("the simulation was cut short: late starts are missing")
    if {before.end, after.end} & {"stuck", "horizon"}:
        notes.append("some pending jobs find no capacity even when all runs have ended")
    return tuple(notes)
