"""`hodei why`, `priority` and `whatif`: explanations of the scheduler, one sentence first, then the evidence."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from hodei.cli.documents import job_options, read_toml
from hodei.cli.errors import UsageProblem
from hodei.cli.options import client, complete_nodes, job_argument, output_option
from hodei.cli.output import Column, clean, counted, emit_one, fields, indent, is_for_people, is_unicode, paint, table
from hodei.cli.refs import id_text, name_text, resolve_job, resolve_targets, single_job, state_counts
from hodei.cli.submit import COMMAND, FilesOrCommand, documents_from, unless_too_large
from hodei.cli.times import ago, clock, duration_text
from hodei.model.errors import InvalidInput
from hodei.model.escalation_state import EscalationStep
from hodei.model.explanation import (
    Blocker,
    Explanation,
    Placement,
    PriorityBreakdown,
    PriorityTerm,
    ProjectedEviction,
    ProjectedStart,
    WhatIf,
)
from hodei.model.job import Candidate, Decision
from hodei.model.reservation import CapacityHold

if TYPE_CHECKING:
    from hodei.api.views import JobView
    from hodei.client import Client
    from hodei.model.config import SchedulingConfig

_NODES_SHOWN = 4
_PLACEMENTS_SHOWN = 4
_JOBS_SHOWN = 20
_BAR_WIDTH = 20
_STALE_HEARTBEAT_MS = 30_000
# The accuracy of forecasts is shown after this many.
_MIN_GRADED = 10
_UNPLACED = ("waiting", "unsatisfiable", "held")
_WHATIF_TIMEOUT_S = 60
# For an array: elements fetched per state, and reasons explained.
_ELEMENTS_PER_STATE = 1000
_REASONS_SHOWN = 3
_ENDED = {"succeeded": "has succeeded", "failed": "has failed", "cancelled": "was cancelled"}
_EXPLAINED_STATES = ("pending", "held", "failed")


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
        from hodei.cli.serve import start_kube

        start_kube(["why", pod, "-o", output])
    with client() as server:
        targets = resolve_targets(server, [job])
        if targets.arrays:
            explain_array(server, targets.arrays[0], node, output)
            return
        answer = server.why(single_job(targets, job), node)
    emit_one(answer, output, name=lambda a: str(a.job), text=lambda a: render(a, wide=output == "wide"))


def render(answer: Explanation, *, wide: bool = False, planned: bool = False) -> str:
    """The explanation as text. `planned`: of a dry run."""
    parts = [_headline(answer, planned)]
    if answer.blockers:
        parts.append(indent(_blockers(answer.blockers, wide)))
    if answer.suggestions:
        columns = [
            Column("CHANGE", lambda s: s.change),
            Column("NODES", lambda s: str(s.nodes)),
            Column("FOR EXAMPLE", lambda s: s.example),
        ]
        parts.append(indent("any one of these changes would let it start now:\n" + table(answer.suggestions, columns)))
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
    texts = {
        "waiting": "would wait" if planned else "is waiting",
        "unsatisfiable": "can never start as it is" if planned else "can never start as things are",
        "held": "is held",
        "placed": "would start now" if planned else "is placed",
        "running": "is running",
        "ended": answer.state or "has ended",
    }
    state, colour = texts[answer.status], answer.state if answer.status == "ended" else answer.status
    text = clean(answer.summary)
    for start in (state, state.removeprefix("is ")):
        if text.startswith(start):  # do not repeat the state
            return f"{who} {paint(state, colour)}{text.removeprefix(start)} [{clean(answer.code)}]"
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


def _names(blocker: Blocker, wide: bool) -> str:
    shown = blocker.nodes if wide else blocker.nodes[:_NODES_SHOWN]
    more = blocker.count - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 and shown else "")


def _evidence(answer: Explanation, planned: bool) -> str:
    nearest, queue = answer.nearest, answer.queue
    waiting = answer.status in _UNPLACED
    attempts = "once" if answer.attempts == 1 else f"{answer.attempts} times"
    silent_ms = answer.at_ms - answer.scheduler_beat_ms if answer.scheduler_beat_ms and answer.at_ms else 0
    return fields([
        ("nearest miss", f"{nearest.node}: {nearest.text}" if nearest else ""),
        ("queue", f"position {queue.position} of {queue.pending}" if queue else ""),
        ("nodes", f"{answer.feasible} of {answer.nodes} could take it" if answer.nodes and waiting else ""),
        ("tried", f"{attempts}, last {ago(answer.last_attempt_ms)}" if answer.last_attempt_ms and not planned else ""),
        ("next try", ", ".join(filter(None, (ago(answer.next_attempt_ms), answer.next_trigger))) if waiting else ""),
        *(("done" if step.at_ms else "profile", _step_text(step)) for step in answer.escalation_steps),
        ("reserved", _start_reservation(answer)),
        *(("held", _held(hold)) for hold in answer.held_for),
        ("new nodes", _new_nodes(answer)),
        ("expected", _expected(answer)),
        ("forecast", _forecast(answer)),
        ("its queue", _backend_queue(answer)),
        ("scheduler", f"last heartbeat {ago(answer.scheduler_beat_ms)}" if silent_ms > _STALE_HEARTBEAT_MS else ""),
    ])  # fmt: skip


def _step_text(step: EscalationStep) -> str:
    return f"{clock(step.at_ms)}: {step.text}" if step.at_ms else step.text


def _start_reservation(answer: Explanation) -> str:
    if answer.start_reservation is None:
        return ""
    start_ms, nodes = answer.start_reservation.start_ms, answer.start_reservation.nodes
    more = f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else ""
    return f"to start by {clock(start_ms)} ({ago(start_ms)}) on {', '.join(nodes[:_NODES_SHOWN])}{more}"


def _held(hold: CapacityHold) -> str:
    if hold.job:
        return f"{hold.node} for job {hold.job} until {clock(hold.start_ms)}: it would not end before that"
    window = f"from {clock(hold.start_ms)} until {clock(hold.end_ms)}"
    return f"{hold.node} for project {hold.project} ({hold.name}) {window}: it would not end before that"


def _forecast(answer: Explanation) -> str:
    found = answer.forecast
    if found is None:
        return ""
    soon = found.p50_ms <= answer.at_ms
    text = f"expected to start {'any moment' if soon else clock(found.p50_ms)}, "
    text += f"by {clock(max(found.p90_ms, answer.at_ms))} at the latest in 9 of 10 cases"
    if found.graded >= _MIN_GRADED:
        text += f"; forecasts like this were right {found.right_percent} % of the time"
    return text


def _new_nodes(answer: Explanation) -> str:
    found = answer.capacity
    if found is None or found.note:
        return found.note if found is not None else ""
    seconds = max(found.ready_ms - answer.at_ms, 0) / 1000
    when = f"in about {seconds:.0f} s" if seconds < 120 else f"in about {seconds / 60:.0f} min"
    nodes = "1 new node" if found.nodes == 1 else f"{found.nodes} new nodes"
    return f"it would start {when} on {nodes} of group {found.group} ({found.cost_milli / 1000:g} per hour)"


def _backend_queue(answer: Explanation) -> str:
    queue = answer.backend_queue
    if queue is None:
        return ""
    text = f"{queue.backend} has no estimate of its start"
    if queue.start_ms:
        text = f"expected to start at {clock(queue.start_ms)} ({ago(queue.start_ms)}) by {queue.backend}'s own estimate"
    return f"{text}; it waits because of: {queue.reason}" if queue.reason else text


def _expected(answer: Explanation) -> str:
    if answer.estimate is None:
        return ""
    text = str(answer.estimate).removeprefix("expected ")
    if answer.past_estimate:
        return f"{text}; it has run longer, now expected to end by {clock(answer.expected_end_ms)}"
    return f"{text}, until {clock(answer.expected_end_ms)}" if answer.expected_end_ms else text


def _placement(where: Placement, verb: str) -> str:
    what = f"{where.task}[{where.member}]" + (f" run {where.run}" if where.run else "")
    line = clean(f"{what} {verb} {where.node}{f' ({where.state})' if where.state else ''}")
    return f"{line}\n{indent(_decision(where.decision))}" if where.decision else line


def _decision(decision: Decision) -> str:
    """The score of the chosen node by plugin, and the runners-up."""
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
    full = max(0, min(_BAR_WIDTH, round(score * _BAR_WIDTH / 10_000)))
    filled, empty = ("█", "·") if is_unicode() else ("#", ".")
    return filled * full + empty * (_BAR_WIDTH - full)


def _points(score: int) -> str:
    return f"{score / 100:.1f}"


def explain_array(server: Client, array: JobView, node: str, output: str) -> None:
    """The states of the elements, and one explained element for each reason."""
    assert array.array is not None
    groups = _elements_by_reason(server, array)
    explained: list[tuple[str, list[JobView], Explanation]] = []
    for (_, code), elements in list(groups.items())[:_REASONS_SHOWN]:
        explained.append((code, elements, server.why(elements[0].id, node)))
    if not explained:
        explained.append(("", [], server.why(array.array.first, node)))
    if not is_for_people(output):
        answer: dict[str, Any] = {
            "array": array,
            "reasons": [{"code": code, "jobs": [view.id for view in of], "why": why} for code, of, why in explained],
        }
        emit_one(answer, output, name=lambda a: id_text(a["array"]), text=str)
        return
    state = paint(_ENDED.get(array.state, f"is {array.state}"), array.state)
    parts = [f"array {array.id}[] ({clean(array.name)}) {state}: {state_counts(array.array)}"]
    for code, elements, why in explained:
        if elements:
            names = ", ".join(clean(name_text(view)) for view in elements[:4])
            more = f" and {len(elements) - 4} more" if len(elements) > 4 else ""
            parts.append(f"{len(elements)} {elements[0].state}{f' [{clean(code)}]' if code else ''}: {names}{more}")
        parts.append(indent(render(why, wide=output == "wide")))
    if len(groups) > len(explained):
        more = f"{len(groups) - len(explained)} more reasons"
        parts.append(f"… and {more}; explain one element: hodei why '{array.id}[…]'")
    click.echo("\n\n".join(parts))


def _elements_by_reason(server: Client, array: JobView) -> dict[tuple[str, str], list[JobView]]:
    """The pending, held and failed elements by state and reason, in order of id."""
    assert array.array is not None
    groups: dict[tuple[str, str], list[JobView]] = {}
    for state in _EXPLAINED_STATES:
        if array.array.states.get(state):
            for view in sorted(islice(server.elements(array, state), _ELEMENTS_PER_STATE), key=lambda view: view.id):
                groups.setdefault((state, view.reason_code), []).append(view)
    return groups


PRIORITY_COLUMNS = (
    Column("TERM", lambda term: clean(term.name)),
    Column("POINTS", lambda term: f"{term.milli / 1000:.3f}".rstrip("0").rstrip(".")),
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
    return f"{head}\n\n{indent(table(rows, PRIORITY_COLUMNS))}"


@click.command(cls=FilesOrCommand)
@click.argument("files", metavar="[FILE... | - | -- COMMAND...]", nargs=-1)
@click.option("--policy", metavar="FILE", help="Assume the [scheduling] section of this configuration (TOML).")
@click.option("--add-nodes", type=click.IntRange(1, 10_000), metavar="N", help="Assume N more nodes.")
@click.option(
    "--like", metavar="NODE", shell_complete=complete_nodes, help="Model for the added nodes [default: the largest]."
)
@click.option(
    "--remove-node", metavar="NODE", multiple=True, shell_complete=complete_nodes,
    help="Assume that this node is drained and removed; may be repeated.",
)  # fmt: skip
@job_options
@output_option
@click.pass_context
def whatif(
    ctx: click.Context,
    /,
    files: tuple[str, ...],
    policy: str | None,
    add_nodes: int | None,
    like: str | None,
    remove_node: tuple[str, ...],
    output: str,
    **given: Any,
) -> None:
    """Report which jobs would start when, and which would be stopped, after a change. Nothing is changed.

    \b
      hodei whatif train.yaml
      hodei whatif --add-nodes 4 --like gpu-1
      hodei whatif train.yaml --remove-node n3
      hodei whatif --policy easy.toml

    The scheduler itself runs ahead in simulated time, with and without the change, and jobs run as long as
    estimated. Exit code 5: no node could ever take one of the jobs.
    """
    from hodei.api.views import WhatIfRequest

    if like and not add_nodes:
        raise UsageProblem("--like needs --add-nodes", hint=f"for example --add-nodes 1 --like {like}")
    has_jobs = bool(files or ctx.meta.get(COMMAND))
    if not (has_jobs or policy or add_nodes or remove_node):
        hint = "name a job file, or give --add-nodes, --remove-node or --policy"
        raise UsageProblem("there is no change to assume", hint=hint)
    scheduling = read_policy(policy) if policy else None
    with client(_WHATIF_TIMEOUT_S) as server:
        documents = documents_from(ctx, files, given, local=lambda: server.loopback) if has_jobs else []
        request = WhatIfRequest(documents, scheduling, add_nodes or 0, like or "", list(remove_node))
        answer = unless_too_large(ctx, lambda: server.what_if(request))
    emit_one(answer, output, name=lambda a: "\n".join(job.name for job in a.jobs), text=render_whatif)


def read_policy(path: str) -> SchedulingConfig:
    """The `scheduling` section of a configuration file, or a file with only its settings."""
    import msgspec

    from hodei.model.config import SchedulingConfig

    found = read_toml(path)
    try:
        return msgspec.convert(found.get("scheduling", found), SchedulingConfig)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{path}: {error}", hint="docs/reference/configuration.md") from None


def render_whatif(answer: WhatIf) -> str:
    parts = [_projected_start(job, answer.at_ms) for job in answer.jobs]
    if answer.evicted:
        parts.append("would be stopped:\n" + indent(_evicted(answer.evicted, answer.at_ms)))
    for title, jobs in (("would start later:", answer.later), ("would start sooner:", answer.sooner)):
        if jobs:
            parts.append(f"{title}\n" + indent(_moved(jobs, answer.at_ms)))
    if answer.same:
        parts.append(f"{counted(answer.same, 'pending job')} would start at the same time")
    elif not (answer.jobs or answer.evicted or answer.later or answer.sooner):
        parts.append("no job is pending: nothing would change")
    parts += [f"note: {clean(note)}" for note in answer.notes]
    return "\n".join(parts)


def _projected_start(job: ProjectedStart, now_ms: int) -> str:
    if not job.start_ms:
        return f"{clean(job.name)}: no start within the forecast"
    when = "now" if job.start_ms <= now_ms else f"at {clock(job.start_ms)} (in {duration_text(job.start_ms - now_ms)})"
    return f"{clean(job.name)} would start {when} on {clean(_node_list(job.nodes))}"


def _evicted(evictions: tuple[ProjectedEviction, ...], now_ms: int) -> str:
    columns = [
        Column("JOB", lambda e: str(e.job)),
        Column("NAME", lambda e: e.name),
        Column("WHEN", lambda e: _when(e.at_ms, now_ms)),
        Column("FOR", lambda e: f"{e.by} ({e.by_name})" if e.by else e.by_name or "-"),
        Column("AGAIN", lambda e: _when(e.again_ms, now_ms)),
    ]
    return _first_rows(evictions, columns)


def _moved(jobs: tuple[ProjectedStart, ...], now_ms: int) -> str:
    columns = [
        Column("JOB", lambda j: str(j.job)),
        Column("NAME", lambda j: j.name),
        Column("BEFORE", lambda j: _when(j.before_ms, now_ms)),
        Column("AFTER", lambda j: _when(j.start_ms, now_ms)),
        Column("BY", lambda j: _by(j)),
        Column("NODES", lambda j: _node_list(j.nodes) or "-"),
    ]
    return _first_rows(jobs, columns)


def _first_rows(rows: tuple[Any, ...], columns: list[Column]) -> str:
    text = table(rows[:_JOBS_SHOWN], columns)
    return text if len(rows) <= _JOBS_SHOWN else f"{text}\n… and {len(rows) - _JOBS_SHOWN} more (-o json has all)"


def _when(ms: int, now_ms: int) -> str:
    return "never" if not ms else "now" if ms <= now_ms else clock(ms)


def _by(job: ProjectedStart) -> str:
    if not job.start_ms or not job.before_ms:
        return "-"
    moved_ms = job.start_ms - job.before_ms
    return f"{'+' if moved_ms > 0 else '-'}{duration_text(abs(moved_ms))}"


def _node_list(nodes: tuple[str, ...]) -> str:
    shown = ", ".join(nodes[:_NODES_SHOWN])
    return shown + (f" and {len(nodes) - _NODES_SHOWN} more" if len(nodes) > _NODES_SHOWN else "")
