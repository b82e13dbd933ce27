"""Suggestions: single changes that would let a pending job start now, and the run whose end would.

Plugins propose (see `engine.explain`); each is applied to a copy of the spec, tried by the real engine on the live
table, and undone. Call it inside `table.trial()`.

The smallest change comes first: a resource lowered by up to half (the smallest cut first), a toleration, a dropped rule,
fewer members, a resource lowered by more than half.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct, structs, to_builtins

from hodei.control.controller import Controller
from hodei.control.state import ClusterState
from hodei.engine.cycle import Engine
from hodei.engine.explain import Change, drop_placement_rules, fewer_members, objections, shortage
from hodei.engine.nodes import Ints, Nodes
from hodei.engine.plan import Refusal
from hodei.engine.points import Placed
from hodei.engine.ranking import Rankings
from hodei.engine.view import Gang, Member, View, gang_of
from hodei.model.errors import NotFound, did_you_mean
from hodei.model.explanation import Blocker, Explanation, NearestMiss, Patch, Placement, Suggestion
from hodei.model.ids import NodeName, RunId
from hodei.model.job import Decision, Job, JobSpec
from hodei.model.node import Grant

MAX_SUGGESTIONS = 5
# A try costs as much as placing the gang, and `why` must answer quickly: fewer tries of a large gang in a large cluster.
_MAX_TRIES = 40
_LARGE_GANG = 500
# In a larger cluster a gang of different tasks is tried in one order only: the search for another takes too long.
_MAX_NODES_SEARCHED = 64
_HALF = 5_000
_ORDER = {"lower": 0, "tolerate": 1, "drop": 2, "members": 3}
_DEEP_CUT = 4


class _Found(Struct, frozen=True):
    """A change that helps: the changed gang, and its placements in the trial."""

    change: Change
    patch: Patch
    gang: Gang
    placements: list[Placed]


def suggestions(engine: Engine, gang: Gang, refusal: Refusal, view: View) -> tuple[Suggestion, ...]:
    """The smallest single changes that let a refused gang start."""
    layout_plugins = {plugin.name for plugin in engine.profile(gang).layouts}
    if not engine.table.names or any(not v.count and v.reason.plugin not in layout_plugins for v in refusal.verdicts):
        return ()  # no nodes, or refused as a whole: no rule of the job excludes a node
    trial = _Trial(engine, gang, view)
    proposed = {(_task(member, change), change.text): (member, change) for member, change in trial.proposals(refusal)}
    # The number of members that fit is known: it is tried first, before the tries run out.
    in_turn = sorted(proposed.values(), key=lambda one: (one[1].kind != "members", _size(one)))
    found = [trial.best(member, change) for member, change in in_turn]
    kept = {one.patch.task + one.change.text: one for one in found if one is not None}
    smallest = sorted(kept.values(), key=lambda one: _size((one.gang.members[0], one.change)))
    return tuple(trial.suggestion(one) for one in smallest[:MAX_SUGGESTIONS])


def _size(proposal: tuple[Member, Change]) -> tuple[int, int, str]:
    change = proposal[1]
    kind = _DEEP_CUT if change.kind == "lower" and change.cut > _HALF else _ORDER[change.kind]
    return kind, change.cut, change.text


def _task(member: Member, change: Change) -> str:
    return "" if change.whole_job else member.task.name


class _Trial:
    """Tries changes with an engine of its own over the live table, so that the caches of the real one stay intact."""

    def __init__(self, engine: Engine, gang: Gang, view: View) -> None:
        self._gang, self._view = gang, view
        self._profile = engine.profile(gang)
        self._engine = Engine(engine.table, {gang.job.profile: self._profile})
        self._tries_left = _MAX_TRIES
        self._large = len(engine.table.names) > _MAX_NODES_SEARCHED

    def proposals(self, refusal: Refusal) -> Iterator[tuple[Member, Change]]:
        laid_out = any(not verdict.count for verdict in refusal.verdicts)
        for member in self._gang.members:
            for change in self._proposed_by_filters(member):
                yield member, change
            if laid_out:
                for plugin in self._profile.layouts:
                    for change in self._proposed_by(plugin, member, self._engine.table.view()):
                        yield member, change
            task = member.task
            # The number that fits is known only without layouts.
            known = len(self._gang.members) == 1 and not laid_out
            most = refusal.fitted if known else task.needed - 1
            if 0 < most < task.needed:
                yield member, fewer_members(task, most)

    def _proposed_by_filters(self, member: Member) -> Iterator[Change]:
        table, runner = self._engine.table, self._engine.runner
        refused = [runner.refused(plugin, member, table.view(), self._view) for plugin in self._profile.filters]
        count: Ints = np.zeros(len(table.names), dtype=np.int64)
        for mask in refused:
            if mask is not None:
                count += mask
        silent = False
        plugin: Any
        for plugin, mask in zip(self._profile.filters, refused, strict=True):
            rows = np.flatnonzero(count == (0 if mask is None else mask))
            if not len(rows):
                continue
            if not hasattr(plugin, "suggest"):
                silent |= mask is not None and bool(mask.any())
                continue
            yield from self._proposed_by(plugin, member, table.view(rows))
        if silent or len(self._gang.members) > 1 or member.task.count > 1:
            yield from drop_placement_rules(member.task)

    def _proposed_by(self, plugin: Any, member: Member, nodes: Nodes) -> list[Change]:
        try:
            return list(plugin.suggest(member, nodes, self._view)) if hasattr(plugin, "suggest") else []
        except Exception:
            return []  # a plugin that fails here proposes nothing

    def best(self, member: Member, change: Change) -> _Found | None:
        """The change if it helps; a change of an amount with the largest amount that helps."""
        found = self._try(member, change)
        if found is not None or change.amount <= 1:
            return found
        found = self._try(member, change.with_amount(member.task, 1))
        low, high = 1, change.amount - 1
        while found is not None and low < high and self._tries_left > 0:
            middle = (low + high + 1) // 2
            less = change.with_amount(member.task, middle)
            if less.amount > found.change.amount:
                better = self._try(member, less)
                if better is None:
                    high = less.amount - 1
                    continue
                found = better
            low = middle  # no round amount lies between the two
        return found

    def _try(self, member: Member, change: Change) -> _Found | None:
        if self._tries_left <= 0:
            return None
        patch = Patch(_task(member, change), to_builtins(change.fields))
        gang = gang_of(self._gang.id, patch.applied_to(self._gang.job), self._gang.submitted_ms)
        gang.estimate_ms, gang.expected_ms = self._gang.estimate_ms, self._gang.expected_ms
        self._tries_left -= len(gang.members) + gang.size // _LARGE_GANG if self._large else 1
        self._profile.admit(gang)
        result = self._engine.place(gang, self._view, search=not self._large)
        if isinstance(result, Refusal):
            return None
        self._engine.withdraw(gang, result)
        return _Found(change, patch, gang, result)

    def suggestion(self, found: _Found) -> Suggestion:
        engine, change, task = self._engine, found.change, found.patch.task
        changed = [member for member in found.gang.members if task in ("", member.task.name)]
        nodes = min(
            objections(self._profile, engine.runner, member, engine.table, self._view).feasible for member in changed
        )
        example = next(placed.node.name for placed in found.placements if placed.member in changed)
        several = len(found.gang.members) > 1 and task
        return Suggestion(
            f"task {task}: {change.text}" if several else change.text, change.kind, nodes, example, found.patch
        )


def explain_on_node(
    controller: Controller, spec: JobSpec, answer: Explanation, node: NodeName, now_ms: int
) -> Explanation:
    """The explanation of a job for one node: all objections to its tasks, or the score. NotFound for an unknown node."""
    table = controller.engine.table
    table.settle()
    row = table.row.get(node)
    if row is None:
        raise NotFound(f"there is no node {node!r}{did_you_mean(node, table.names)}", hint="see 'hodei nodes'")
    blockers: list[Blocker] = []
    could: list[Placement] = []
    lacks: list[NearestMiss] = []
    gang = controller.gang(answer.job, spec, now_ms)
    if spec.profile in controller.engine.profiles:
        blockers, could, lacks = _evaluate(controller, gang, row, controller.view(now_ms))
    there = tuple(place for place in answer.placements if place.node == node)
    if answer.status not in ("waiting", "unsatisfiable"):
        word = "could take another one like it now" if not blockers else f"would refuse it now: {_texts(blockers)}"
        return structs.replace(
            answer, summary=f"{answer.summary}; {node} {word}", placements=there, blockers=tuple(blockers), nodes=1,
            feasible=int(not blockers),
        )  # fmt: skip
    code = answer.code
    if answer.code not in ("BACKOFF", "PREEMPTING", "WAITING_FOR_DEPENDENCY"):
        code = blockers[0].code if blockers else "FITS_HERE"
    return structs.replace(
        answer, code=code, summary=_summary(node, gang, blockers, could), placements=tuple(could), nodes=1,
        blockers=tuple(blockers), nearest=lacks[0] if lacks else None, feasible=int(not blockers), suggestions=(), hint="",
    )  # fmt: skip


def _evaluate(
    controller: Controller, gang: Gang, row: int, view: View
) -> tuple[list[Blocker], list[Placement], list[NearestMiss]]:
    engine, table = controller.engine, controller.engine.table
    profile, node = engine.profile(gang), table.names[row]
    profile.admit(gang)
    rankings = Rankings(table, engine.runner)
    blockers: list[Blocker] = []
    could: list[Placement] = []
    lacks: list[NearestMiss] = []
    index = 0
    for member, shape in zip(gang.members, gang.shapes, strict=True):
        name, before = member.task.name, len(blockers)
        for plugin in profile.filters:
            for mask, reason in engine.runner.refusals(plugin, member, table.view(slice(row, row + 1)), view):
                if mask[0]:
                    blockers.append(Blocker(reason.code, reason.text, reason.plugin, name, 1, (node,), reason.hint))
        text = shortage(profile, member, table, row, view)
        if text:
            lacks.append(NearestMiss(node, text, name))
        if len(blockers) == before:
            candidate = rankings.of(profile, member, shape, view).candidate(row)
            if candidate is not None:
                could.append(Placement(node, name, index, decision=Decision(candidate, profile=profile.name)))
        index += member.task.count
    engine.runner.take_faults()
    return blockers, could, lacks


def _summary(node: NodeName, gang: Gang, blockers: list[Blocker], could: list[Placement]) -> str:
    if not blockers:
        size = "at least one member of it" if gang.size > 1 else "it"
        scores = ", ".join(f"{place.decision.chosen.score / 100:.1f}" for place in could if place.decision)
        return f"{node} could take {size}" + (f" with a score of {scores} of 100" if scores else "")
    fine = f"; it could take {', '.join(place.task for place in could)}" if could else ""
    return f"{node} cannot take it: {_texts(blockers)}{fine}"


def _texts(blockers: list[Blocker]) -> str:
    return "; ".join(dict.fromkeys(blocker.text for blocker in blockers))


# The first expected ends that are considered; later ones are too uncertain.
_MAX_ENDS = 1000


class Release(Struct, frozen=True):
    """The expected end of a run, and the capacity that it frees."""

    at_ms: int
    run: RunId
    job: Job
    row: int
    member: Member
    grant: Grant | None = None


def next_release(engine: Engine, cluster: ClusterState, gang: Gang, view: View) -> Release | None:
    """The first expected end after which the gang fits, with all earlier ends, or None. Call it in `table.trial()`."""
    table = engine.table
    ends = _expected_ends(engine, cluster, gang, view)
    engine_of_trial = Engine(table, {gang.job.profile: engine.profile(gang)})
    released = 0

    def fits_after(number: int) -> bool:
        nonlocal released
        for end in ends[released:number]:
            table.release(end.row, end.member.task.request, end.member, end.grant)
        for end in ends[number:released]:
            table.place(end.row, end.member.task.request, end.member, end.grant)
        released = number
        result = engine_of_trial.place(gang, view, search=False)
        if isinstance(result, Refusal):
            return False
        engine_of_trial.withdraw(gang, result)
        return True

    low, high = 1, len(ends)
    try:
        if not ends or not fits_after(high):
            return None
        while low < high:
            middle = (low + high) // 2
            if fits_after(middle):
                high = middle
            else:
                low = middle + 1
        return ends[low - 1]
    finally:
        for end in ends[:released]:
            table.place(end.row, end.member.task.request, end.member, end.grant)


def _expected_ends(engine: Engine, cluster: ClusterState, gang: Gang, view: View) -> list[Release]:
    """Runs with an estimate on nodes where only other work blocks the gang, the earliest end first."""
    table = engine.table
    open_rows = table.view().none()
    for member in gang.members:
        open_rows = open_rows | engine.open_to(gang, member, view)
    ends = []
    for row in open_rows.nonzero()[0].tolist():
        for id in cluster.on_node.get(table.names[row], ()):
            run = cluster.run(id)
            job = None if run is None else cluster.jobs.get(run.job)
            if run is not None and job is not None and job.spec.estimate_ms:
                at_ms = run.since_ms + job.spec.estimate_ms
                ends.append(Release(at_ms, id, job, row, Member(job.spec, job.spec.task_of(run.member)), run.grant))
    ends.sort(key=lambda end: (end.at_ms, end.run))
    return ends[:_MAX_ENDS]
