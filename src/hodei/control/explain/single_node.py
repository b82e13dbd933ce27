"""What one node says of a job: every objection to each of its tasks, or the score with which it could take it."""

from __future__ import annotations

from msgspec import structs

from hodei.control.controller import Controller
from hodei.engine.explain import lacking
from hodei.engine.ranking import Rankings
from hodei.engine.view import Gang, View
from hodei.model.decision import Decision
from hodei.model.errors import NotFound
from hodei.model.explanation import Blocker, Explanation, NearestMiss, Placement
from hodei.model.ids import NodeName
from hodei.model.job import JobSpec
from hodei.model.text import did_you_mean


def on_node(controller: Controller, spec: JobSpec, answer: Explanation, node: NodeName, now_ms: int) -> Explanation:
    """The answer about a job, restricted to one node as it is now. NotFound if there is no such node."""
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
        blockers, could, lacks = _asked(controller, gang, row, controller.view(now_ms))
    there = tuple(place for place in answer.placements if place.node == node)
    if answer.status not in ("waiting", "unsatisfiable"):
        word = "could take another like it now" if not blockers else f"says no to it now: {_texts(blockers)}"
        return structs.replace(
            answer, summary=f"{answer.summary}; {node} {word}", placements=there, blockers=tuple(blockers), nodes=1,
            feasible=int(not blockers),
        )  # fmt: skip
    code = answer.code
    if answer.code not in ("BACKOFF", "PREEMPTING", "WAITING_FOR"):
        code = blockers[0].code if blockers else "FITS_HERE"
    return structs.replace(
        answer, code=code, summary=_summary(node, gang, blockers, could), placements=tuple(could), nodes=1,
        blockers=tuple(blockers), nearest=lacks[0] if lacks else None, feasible=int(not blockers), repairs=(), hint="",
    )  # fmt: skip


def _asked(
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
        text = lacking(profile, member, table, row, view)
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
        size = "one member of it at least" if gang.size > 1 else "it"
        scores = ", ".join(f"{place.decision.chosen.score / 100:.1f}" for place in could if place.decision)
        return f"{node} could take {size}" + (f" with a score of {scores} of 100" if scores else "")
    fine = f"; it could take {', '.join(place.task for place in could)}" if could else ""
    return f"{node} cannot take it: {_texts(blockers)}{fine}"


def _texts(blockers: list[Blocker]) -> str:
    return "; ".join(dict.fromkeys(blocker.text for blocker in blockers))
