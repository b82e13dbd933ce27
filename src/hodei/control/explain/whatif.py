"""What if this job came, these nodes were there, that node went, or another policy were in force?

Two futures of the live controller are run side by side, one as things are and one with the change; what differs is the
answer. Both take run times from the same estimates, so that nothing else makes a difference. Works on twins alone.
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

MOST_NODES_ADDED = 10_000
# A start that moves by less is the same start.
_SAME_MS = 1000
_STARTED = Started(0, ())


class Question(Struct, frozen=True):
    """What is to be different. `like`: the node that the added ones are copies of ("": the largest one).
    `first`: the number that the first of the jobs would have (0: the next one); `dependency_statuses` of those they wait for."""

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
    unsaid_ms: int = 0,
    max_steps: int = 50_000,
    go_on: Callable[[], bool] = lambda: True,
) -> WhatIf:
    """`live` is a twin of the live controller, and is left as it is; `under`: a new controller with another policy.
    `unsaid_ms`: how long jobs are taken to run of which nobody says how long. InvalidInput or NotFound: it can not be."""
    unknown = set[JobId]()

    def run_ms(run: Run, spec: JobSpec, so_far_ms: int) -> int:
        said_ms = live.estimator.estimate(spec).expected_ms
        if not said_ms:
            unknown.add(run.job)
        return said_ms or unsaid_ms

    changes = _node_facts(live, question)
    changed = clone_controller(live) if under is None else under
    first: list[Fact] = [] if under is None else _restored(live, under, now_ms)
    next_id = question.first or max(live.cluster.jobs, default=0) + 1
    asked = dict(enumerate(question.jobs, next_id))
    if asked:
        probe = clone_controller(changed)
        probe.step(now_ms, [*first, *changes])
        probe.gate.check(question.jobs, probe.pending())
    new = [
        JobSubmitted(Job(id, spec, "pending", now_ms, now_ms, queued_ms=now_ms), question.dependency_statuses)
        for id, spec in asked.items()
    ]
    before = look_ahead(clone_controller(live), now_ms, run_ms, max_steps=max_steps, go_on=go_on)
    after = look_ahead(changed, now_ms, run_ms, facts=[*first, *changes, *new], max_steps=max_steps, go_on=go_on)
    return _answer(live, now_ms, asked, before, after, _notes(before, after, len(unknown), unsaid_ms))


def _node_facts(live: Controller, question: Question) -> list[Fact]:
    known = live.cluster.nodes
    for name in (*question.remove_nodes, *((question.like,) if question.like else ())):
        if name not in known:
            raise NotFound(f"there is no node {name!r}{did_you_mean(name, known)}", hint="hodei nodes")
    facts: list[Fact] = [NodeOverridden(name, cordon=True, drain=True) for name in question.remove_nodes]
    if question.add_nodes:
        if not 0 < question.add_nodes <= MOST_NODES_ADDED:
            raise InvalidInput(f"{question.add_nodes} nodes to add", hint=f"from 1 to {MOST_NODES_ADDED}")
        facts += [NodeJoined(node) for node in _more(live, question)]
    return facts


def _more(live: Controller, question: Question) -> list[Node]:
    """Copies of a node, healthy and without the operator's marks."""
    nodes = live.cluster.nodes
    if not nodes:
        raise InvalidInput("there is no node that the added ones could be like", hint="wait until one has joined")
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
    """Bring a new controller to where the live one stands: what runs is told at once, while there is no node yet that it
    could place anything on; the rest is returned, to be told as the first thing that happens."""
    cluster = live.cluster
    if type(under.estimator) is type(live.estimator):
        under.estimator = live.estimator
    told: list[Fact] = [OverridesRestored(overrides) for overrides in cluster.overrides.values()]
    told += [ReservationMade(reservation, restored=True) for reservation in cluster.availability.reservations.values()]
    later: list[Fact] = [NodeJoined(node) for node in cluster.nodes.values()]
    for id in sorted(cluster.jobs):
        runs = tuple(cluster.runs.get(id, {}).values())
        fact = JobRestored(cluster.jobs[id], runs, live.dependencies.statuses(id))
        (later if cluster.jobs[id].state == "pending" else told).append(fact)
    under.step(now_ms, told)
    return later


# ------------------------------------------------------------------------------------------------ the answer


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
        was, will = before.starts.get(id, _STARTED), after.starts.get(id, _STARTED)
        outlook = ProjectedStart(jobs[id].spec.name, id, will.at_ms, will.nodes, was.at_ms, was.nodes)
        if abs(will.at_ms - was.at_ms) < _SAME_MS:
            same += 1
        elif will.at_ms and (not was.at_ms or will.at_ms < was.at_ms):
            sooner.append(outlook)
        else:
            later.append(outlook)
    usual = {gone.job for gone in before.gone}
    evicted = []
    for gone in after.gone:
        if gone.job in new or gone.job in usual:
            continue
        again = after.starts.get(gone.job)
        name = jobs[gone.job].spec.name if gone.job in jobs else ""
        by = new[gone.by].name if gone.by in new else jobs[gone.by].spec.name if gone.by in jobs else ""
        again_ms = again.at_ms if again is not None and again.at_ms >= gone.at_ms else 0
        evicted.append(ProjectedEviction(name, gone.at_ms, gone.job, 0 if gone.by in new else gone.by, by, again_ms))
    asked = [
        ProjectedStart(spec.name, 0, after.starts.get(id, _STARTED).at_ms, after.starts.get(id, _STARTED).nodes)
        for id, spec in new.items()
    ]
    return WhatIf(now_ms, tuple(asked), tuple(evicted), tuple(sooner), tuple(later), same, notes)


def _notes(before: Lookahead, after: Lookahead, unknown: int, unsaid_ms: int) -> tuple[str, ...]:
    notes = []
    if unknown:
        how = "taken to run as long as such jobs mostly did" if unsaid_ms else "taken never to end"
        one = "1 job has" if unknown == 1 else f"{unknown} jobs have"
        notes.append(f"{one} neither estimate nor timeout: {how}")
    if {before.end, after.end} & {"steps", "stopped"}:
        notes.append("it was too much to look all the way ahead: starts far away are not in sight")
    if {before.end, after.end} & {"stuck", "horizon"}:
        notes.append("some who wait find no room whatever ends")
    return tuple(notes)
