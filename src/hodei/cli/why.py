"""`hodei why`: the explanation of a job, for people. One sentence first; the evidence below it."""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from hodei.cli import arrays
from hodei.cli.errors import UsageProblem
from hodei.cli.options import client, job_argument, output_option
from hodei.cli.output import Column, clean, emit_one, fields, indent, paint, table
from hodei.cli.refs import look_up, only, resolve_job
from hodei.cli.times import ago, clock
from hodei.model.escalation_state import EscalationStep
from hodei.model.explanation import Blocker, Explanation, Placement, PriorityBreakdown, PriorityTerm, Suggestion
from hodei.model.job import Candidate, Decision
from hodei.model.reservation import CapacityHold

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client
    from hodei.model.explanation import Explanation


# ------------------------------------------------------------------------------------------- why array
# `hodei why` of a whole array: how its elements stand, and for each reason that some of them wait or failed, one of
# them.


# So many elements of a state are looked at, and so many reasons are explained.
_LOOKED_AT = 1000
_REASONS = 3
_HOW = {"succeeded": "has succeeded", "failed": "has failed", "cancelled": "was cancelled"}
_STATES = ("pending", "held", "failed")


def explain_array(server: Client, array: JobView, node: str, output: str) -> None:
    assert array.array is not None
    groups = _groups(server, array)
    told: list[tuple[str, list[JobView], Explanation]] = []
    for (_, code), members in list(groups.items())[:_REASONS]:
        told.append((code, members, server.why(members[0].id, node)))
    if not told:
        told.append(("", [], server.why(array.array.first, node)))
    if output not in ("table", "wide"):
        answer: dict[str, Any] = {
            "array": array,
            "reasons": [{"code": code, "jobs": [view.id for view in of], "why": why} for code, of, why in told],
        }
        emit_one(answer, output, name=lambda a: arrays.id_text(a["array"]), text=str)
        return
    state = paint(_HOW.get(array.state, f"is {array.state}"), array.state)
    head = f"array {array.id}[] ({clean(array.name)}) {state}: {arrays.counts(array.array)}"
    parts = [head]
    for code, members, why in told:
        if members:
            named = ", ".join(clean(arrays.name_text(view)) for view in members[:4])
            more = f" and {len(members) - 4} more" if len(members) > 4 else ""
            parts.append(f"{len(members)} {members[0].state}{f' [{clean(code)}]' if code else ''}: {named}{more}")
        parts.append(indent(render(why, wide=output == "wide")))
    if len(groups) > len(told):
        parts.append(f"… and {len(groups) - len(told)} more reasons; ask about one element: hodei why '{array.id}[…]'")
    click.echo("\n\n".join(parts))


def _groups(server: Client, array: JobView) -> dict[tuple[str, str], list[JobView]]:
    """The elements that wait or failed, by state and reason, the first element first."""
    assert array.array is not None
    groups: dict[tuple[str, str], list[JobView]] = {}
    for state in _STATES:
        if array.array.states.get(state):
            for view in sorted(islice(server.elements(array, state), _LOOKED_AT), key=lambda view: view.id):
                groups.setdefault((state, view.reason_code), []).append(view)
    return groups


# ----------------------------------------------------------------------------------------------------

_NODES_SHOWN = 4
_PLACEMENTS_SHOWN = 4
_BAR = 20
_STALE_BEAT_MS = 30_000
# Fewer grades than these say nothing about forecasts.
_GRADES_TOLD = 10
_UNPLACED = ("waiting", "unsatisfiable", "held")


@click.command()
@job_argument
@click.argument("pod", metavar="[NAMESPACE/NAME]", default="")
@click.option("--node", default="", metavar="NODE", help="Only for this node.")
@output_option
def why(job: str, pod: str, node: str, output: str) -> None:
    """Explain why a job waits and what would help, or why it was placed there. -o json is the object of the API.
    `hodei why pod NAMESPACE/NAME` explains a pod of the Kubernetes cluster that kubectl uses."""
    if pod:
        if job != "pod":
            raise UsageProblem(f"unexpected argument {pod!r}", hint="one job, or: hodei why pod NAMESPACE/NAME")
        from hodei.cli.serve import ask_kube

        ask_kube(["why", pod, *(["-o", "json"] if output == "json" else [])])
    with client() as server:
        meant = look_up(server, [job])
        if meant.arrays:
            explain_array(server, meant.arrays[0], node, output)
            return
        answer = server.why(only(meant, job), node)
    emit_one(answer, output, name=lambda a: str(a.job), text=lambda a: render(a, wide=output == "wide"))


def render(answer: Explanation, *, wide: bool = False, planned: bool = False) -> str:
    """The explanation as text. `planned`: nothing has happened yet, so the words are those of what would."""
    parts = [_headline(answer, planned)]
    if answer.blockers:
        parts.append(indent(_blockers(answer.blockers, wide)))
    if answer.suggestions:
        parts.append(indent("any one of these changes would let it start now:\n" + _suggestions(answer.suggestions)))
    evidence = _evidence(answer, planned)
    if evidence:
        parts.append(indent(evidence))
    shown = answer.placements if wide else answer.placements[:_PLACEMENTS_SHOWN]
    verb = "would go to" if planned else "could go to" if answer.status in _UNPLACED else "on"
    parts += [indent(_placement(where, verb)) for where in shown]
    if len(shown) < len(answer.placements):
        parts.append(f"  … and {len(answer.placements) - len(shown)} more runs (-o wide shows all)")
    if answer.hint:
        parts.append(f"  next: {clean(answer.hint)}")
    return "\n\n".join(parts)


def _headline(answer: Explanation, planned: bool) -> str:
    who = f"job {answer.job}" if answer.job else "the job"
    if answer.name:
        who += f" ({clean(answer.name)})"
    words = {
        "waiting": "would wait" if planned else "is waiting",
        "unsatisfiable": "can never start as it is" if planned else "can never start as things are",
        "held": "is held",
        "placed": "would start now" if planned else "is placed",
        "running": "is running",
        "ended": answer.state or "has ended",
    }
    state, colour = words[answer.status], answer.state if answer.status == "ended" else answer.status
    text = clean(answer.summary)
    for said in (state, state.removeprefix("is ")):
        if text.startswith(said):  # said once is enough
            return f"{who} {paint(state, colour)}{text.removeprefix(said)} [{clean(answer.code)}]"
    return f"{who} {paint(state, colour)}: {text} [{clean(answer.code)}]"


def _blockers(blockers: tuple[Blocker, ...], wide: bool) -> str:
    several = len({blocker.task for blocker in blockers}) > 1
    columns = [
        Column("NODES", lambda b: str(b.count) if b.count else "all"),
        Column("REASON", lambda b: b.text),
        Column("CODE", lambda b: b.code),
        Column("PLUGIN", lambda b: b.plugin),
        Column("WHERE", lambda b: _names(b, wide)),
    ]
    if several:
        columns.insert(1, Column("TASK", lambda b: b.task))
    return table(blockers, columns, wide=wide)


def _suggestions(suggestions: tuple[Suggestion, ...]) -> str:
    columns = [
        Column("CHANGE", lambda r: r.change),
        Column("NODES", lambda r: str(r.nodes)),
        Column("FOR EXAMPLE", lambda r: r.example),
    ]
    return table(suggestions, columns)


def _names(blocker: Blocker, wide: bool) -> str:
    shown = blocker.nodes if wide else blocker.nodes[:_NODES_SHOWN]
    more = blocker.count - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 and shown else "")


def _evidence(answer: Explanation, planned: bool) -> str:
    nearest, queue = answer.nearest, answer.queue
    waiting = answer.status in _UNPLACED
    tries = "once" if answer.attempts == 1 else f"{answer.attempts} times"
    silent_ms = answer.at_ms - answer.scheduler_beat_ms if answer.scheduler_beat_ms and answer.at_ms else 0
    return fields([
        ("nearest miss", f"{nearest.node}: {nearest.text}" if nearest else ""),
        ("queue", f"position {queue.position} of {queue.pending}" if queue else ""),
        ("nodes", f"{answer.feasible} of {answer.nodes} could take it" if answer.nodes and waiting else ""),
        ("tried", f"{tries}, last {ago(answer.last_attempt_ms)}" if answer.last_attempt_ms and not planned else ""),
        ("next try", ", ".join(filter(None, (ago(answer.next_attempt_ms), answer.next_trigger))) if waiting else ""),
        *(("done" if step.at_ms else "profile", _step_text(step)) for step in answer.escalation_steps),
        ("promised", _promised(answer)),
        *(("held", _held(hold)) for hold in answer.held_for),
        ("expected", _expected(answer)),
        ("forecast", _forecast(answer)),
        ("its line", _in_line(answer)),
        ("scheduler", f"has not been seen since {ago(answer.scheduler_beat_ms)}" if silent_ms > _STALE_BEAT_MS else ""),
    ])  # fmt: skip


def _step_text(step: EscalationStep) -> str:
    return f"{clock(step.at_ms)}: {step.text}" if step.at_ms else step.text


def _promised(answer: Explanation) -> str:
    if answer.start_reservation is None:
        return ""
    start_ms, nodes = answer.start_reservation.start_ms, answer.start_reservation.nodes
    more = f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else ""
    return f"to start by {clock(start_ms)} ({ago(start_ms)}) on {', '.join(nodes[:_NODES_SHOWN])}{more}"


def _held(hold: CapacityHold) -> str:
    if hold.job:
        return f"{hold.node} for job {hold.job} until {clock(hold.start_ms)}: it would not be over by then"
    until = f"from {clock(hold.start_ms)} until {clock(hold.end_ms)}"
    return f"{hold.node} for project {hold.project} ({hold.name}) {until}: it would not be over by then"


def _forecast(answer: Explanation) -> str:
    found = answer.forecast
    if found is None:
        return ""
    soon = found.p50_ms <= answer.at_ms
    text = f"expected to start {'any moment' if soon else clock(found.p50_ms)}, "
    text += f"by {clock(max(found.p90_ms, answer.at_ms))} at the latest in 9 of 10 cases"
    if found.graded >= _GRADES_TOLD:
        text += f"; forecasts like this were right {found.right_percent} % of the time"
    return text


def _in_line(answer: Explanation) -> str:
    line = answer.backend_queue
    if line is None:
        return ""
    text = f"{line.backend} has not told when it will begin"
    if line.start_ms:
        text = f"expected to begin at {clock(line.start_ms)} ({ago(line.start_ms)}) by {line.backend}'s own estimate"
    return f"{text}; it waits because of: {line.reason}" if line.reason else text


def _expected(answer: Explanation) -> str:
    if answer.estimate is None:
        return ""
    text = str(answer.estimate).removeprefix("expected ")
    if answer.past_estimate:
        return f"{text}; it has passed that, now expected by {clock(answer.expected_end_ms)}"
    return f"{text}, until {clock(answer.expected_end_ms)}" if answer.expected_end_ms else text


def _placement(where: Placement, verb: str) -> str:
    what = f"{where.task}[{where.member}]" + (f" run {where.run}" if where.run else "")
    line = clean(f"{what} {verb} {where.node}{f' ({where.state})' if where.state else ''}")
    return f"{line}\n{indent(_decision(where.decision))}" if where.decision else line


def _decision(decision: Decision) -> str:
    """The score of the chosen node, plugin by plugin, and the nodes that came next."""
    best = decision.chosen
    head = f"score {_points(best.score)} of 100"
    if decision.feasible:
        head += f", best of {decision.feasible} of {decision.nodes} nodes"
    head += f" (profile {clean(decision.profile)})"
    total = sum(term.weight for term in best.terms) or 1
    columns = [
        Column("PLUGIN", lambda t: t.plugin),
        Column("SCORE", lambda t: _points(t.score)),
        Column("WEIGHT", lambda t: f"× {t.weight}"),
        Column("ADDS", lambda t: _points(t.score * t.weight // total)),
        Column("", lambda t: bar(t.score)),
    ]
    out = head
    if best.terms:
        out += "\n" + table(best.terms, columns)
    if decision.runners_up:
        out += "\n" + table(decision.runners_up, _runner_columns(best))
    return out


def _runner_columns(best: Candidate) -> list[Column]:
    return [
        Column("RUNNER-UP", lambda c: c.node),
        Column("SCORE", lambda c: _points(c.score)),
        Column("BEHIND", lambda c: _points(best.score - c.score) if c.score < best.score else "equal"),
        Column("", lambda c: bar(c.score)),
    ]


def bar(score: int) -> str:
    """A score of 0 to 10,000 as a bar."""
    full = max(0, min(_BAR, round(score * _BAR / 10_000)))
    return "█" * full + "·" * (_BAR - full) if _unicode() else "#" * full + "." * (_BAR - full)


def _unicode() -> bool:
    return (getattr(sys.stdout, "encoding", "") or "").lower().replace("-", "").startswith("utf")


def _points(score: int) -> str:
    return f"{score / 100:.1f}"


# -------------------------------------------------------------------------------------------- priority
# `hodei priority`: the terms that make up a job's position in the queue.


COLUMNS = (
    Column("TERM", lambda term: clean(term.name)),
    Column("POINTS", lambda term: points(term.milli)),
    Column("HOW", lambda term: clean(term.text)),
)


@click.command()
@job_argument
@output_option
def priority(job: str, output: str) -> None:
    """Show every term of a pending job's priority, and its place in the queue."""
    with client() as server:
        answer = server.priority(resolve_job(server, job))
    emit_one(answer, output, name=lambda a: str(a.job), text=render_priority)


def render_priority(answer: PriorityBreakdown) -> str:
    head = f"job {answer.job} is number {answer.position} of {answer.pending} in its queue ({clean(answer.queue)})"
    rows = [*answer.terms, PriorityTerm("total", answer.milli, "")]
    return f"{head}\n\n{indent(table(rows, COLUMNS))}"


def points(milli: int) -> str:
    return f"{milli / 1000:.3f}".rstrip("0").rstrip(".")
