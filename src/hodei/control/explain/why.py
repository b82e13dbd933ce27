"""Why a job waits, why it landed there, what would happen: one explanation, by the engine that decides.

Whether a job could start now is not argued but tried, on the live table, and undone. So is every change to a job that is
proposed here (`suggestion`), and the work whose end it waits for (`patience`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from hodei.control.admission.gate import UNAVAILABLE
from hodei.control.controller import Controller
from hodei.control.explain.suggestions import next_release, suggestions
from hodei.control.lifecycle.dependencies import NEVER_MET, WAITING_FOR_DEPENDENCY
from hodei.control.lifecycle.preemption import Protection, with_last_preemption
from hodei.control.lifecycle.runs import latest_runs
from hodei.control.queue.backfill import BackfillQueue
from hodei.control.queue.multifactor import MultifactorQueue
from hodei.control.state import ClusterState
from hodei.engine.availability import FOREVER, Claim, corrected_end
from hodei.engine.cycle import Engine
from hodei.engine.explain import blockers, nearest_miss, objections, summary
from hodei.engine.plan import Refusal
from hodei.engine.points import Placed
from hodei.engine.preemption.search import Preemption
from hodei.engine.view import Gang, View
from hodei.model.array import shell_reference
from hodei.model.dependency import Dependency, DependencyStatus
from hodei.model.escalation_state import escalation_steps
from hodei.model.explanation import (
    Blocker,
    Explanation,
    NearestMiss,
    Placement,
    PriorityBreakdown,
    PriorityTerm,
    QueuePosition,
    ReservedStart,
    Status,
)
from hodei.model.ids import JobId, NodeName
from hodei.model.job import JOB_ENDED, RUN_ENDED, Job, JobSpec, Run
from hodei.model.reservation import CapacityHold
from hodei.model.resources import format_duration, format_time

if TYPE_CHECKING:
    from hodei.control.controller import Controller

_TRIGGER_WORDS = {
    "run_ended": "a run ends",
    "node_joined": "a node joins",
    "node_changed": "a node changes",
    "job_ended": "a job ends",
    "run_placed": "another job is placed",
    "time": "time passes",
}
_DOWN = "see `hodei backend list`; it is tried again by itself and the job starts when one is back"
# Trying changes takes a while; of a long list of planned jobs only the first that would wait are told some.
_PLANS_REPAIRED = 5


def why(controller: Controller, job: JobId, now_ms: int) -> Explanation | None:
    """For a job that has not ended; None if it is not known here."""
    known = controller.cluster.jobs.get(job)
    if known is None:
        return None
    if known.state == "held":
        text = "held: it is not considered until it is released"
        return _about(
            controller,
            known,
            now_ms,
            "held",
            "HELD",
            text,
            hint=f"hodei release {shell_reference(job, known.spec.array)}",
        )
    if (outside := controller.arrays.explain(known, now_ms, controller.beat_ms)) is not None:
        return outside
    if known.state == "pending":
        return in_time(controller, known, _waiting(controller, known, now_ms), now_ms)
    answer = landed(known, list(controller.cluster.runs.get(job, {}).values()), now_ms, controller.beat_ms)
    return in_time(controller, known, answer, now_ms)


def landed(job: Job, runs: Sequence[Run], now_ms: int, beat_ms: int = 0) -> Explanation:
    """For a job that was placed at least once: where, and why there. Needs the job and its runs alone."""
    gang = list(latest_runs(run for run in runs if run.attempt >= job.first_attempt).values())
    places = tuple(Placement(run.node, run.task, run.member, run.id, run.state, run.decision) for run in gang)
    live = [run for run in gang if run.state not in RUN_ENDED] if job.state == "running" else []
    nodes = sorted({run.node for run in live or gang})
    where = f" on {', '.join(nodes[:5])}{' and more' if len(nodes) > 5 else ''}" if nodes else ""
    status: Status
    if job.state in JOB_ENDED:
        status, code = "ended", job.reason_code or job.state.upper()
        text = f"{job.state}{where}{': ' + job.reason if job.reason else ''}"
    elif job.state == "running":
        status, code, text = "running", "RUNNING", f"running{where}"
        if job.reason and not job.cancel_requested:
            code, text = job.reason_code, f"{text}: {job.reason}"
    else:
        status, code, text = "placed", "PLACED", f"placed{where}, about to start"
    notes = dict.fromkeys(run.decision.note for run in gang if run.decision is not None and run.decision.note)
    text = "; ".join([text, *notes])
    if job.cancel_requested and status != "ended":
        code, text = "CANCELLING", f"{text}; being cancelled"
    return Explanation(
        status=status, code=code, summary=text, job=job.id, name=job.spec.name, state=job.state, placements=places,
        attempts=job.attempt, scheduler_beat_ms=beat_ms, at_ms=now_ms, escalation_steps=escalation_steps(job.spec, job.escalation_state),
    )  # fmt: skip


def in_doubt(found: Explanation, backends: Sequence[str]) -> Explanation:
    """For a job that was placed and whose start these backends have not answered for."""
    text = (
        f"whether it has started is not known: backend {', '.join(backends)} has not answered yet, and is asked again"
    )
    return structs.replace(
        found, code="START_IN_DOUBT", summary=f"{found.summary.removesuffix(', about to start')}; {text}"
    )


def plan(
    controller: Controller, specs: Sequence[JobSpec], now_ms: int, dependency_statuses: Sequence[DependencyStatus] = ()
) -> list[Explanation]:
    """What would become of these jobs if they were submitted now, in this order. Nothing is changed."""
    out, engine = list[Explanation](), controller.engine
    specs = controller.accounts.admit(specs)
    controller.gate.check(specs, controller.pending())
    specs = [controller.profile_router.routing.route(spec) for spec in specs]
    engine.table.settle()
    with engine.table.trial():
        kept: list[tuple[Gang, list[Placed]]] = []
        refused = 0
        last: JobSpec | None = None  # the one before, if it was refused
        for spec in specs:
            if last is not None and spec == last:
                out.append(out[-1])  # nothing has changed since: many that are alike are one question
                continue
            last = None
            if (waits := would_wait(controller, spec, dependency_statuses, now_ms)) is not None:
                out.append(waits)
                continue
            gang = controller.gang(0, spec, now_ms)
            gang.order = ()
            engine.profile(gang).admit(gang)
            result = engine.try_gang(gang, controller.view(now_ms))
            taking = controller.preemption.find(gang, controller.view(now_ms)) if isinstance(result, Refusal) else None
            if taking is not None:
                out.append(_would_preempt(spec, taking, now_ms))
            elif isinstance(result, Refusal):
                refused, last = refused + 1, spec
                out.append(_refused(controller, spec, gang, result, now_ms, suggestion=refused <= _PLANS_REPAIRED))
            else:
                kept.append((gang, result))
                out.append(_would_start(spec, result, now_ms))
        for gang, placements in reversed(kept):
            engine.withdraw(gang, placements)
    engine.runner.take_faults()
    return [
        structs.replace(each, escalation_steps=escalation_steps(spec, ""))
        for each, spec in zip(out, specs, strict=True)
    ]


def _waiting(controller: Controller, job: Job, now_ms: int) -> Explanation:
    hold = controller.preemption.holds.get(job.id)
    if hold is not None:
        trigger = f"when {', '.join(sorted(hold.waiting_for)[:5])} has stopped, or other room appears"
        return _about(controller, job, now_ms, "waiting", "PREEMPTING", job.reason, next_trigger=trigger)
    for_others = waiting_for(controller, job, now_ms, why)
    if for_others is not None:
        return for_others
    paused = controller.profile_router.routing.availability
    if job.spec.profile in paused.paused:
        text = f"{paused.problem(job.spec.profile)}: none of its jobs starts"
        return _about(controller, job, now_ms, "waiting", "PROFILE_PAUSED", text, next_trigger="when it is resumed")
    line = controller.queues[job.spec.profile]
    gang = line.gangs.get(job.id)
    if gang is None:
        text = "it has come just now and takes its place in line at once"
        return _about(controller, job, now_ms, "waiting", "QUEUED", text, next_trigger="the next cycle")
    past = with_last_preemption(job, "")
    queue = QueuePosition(line.position(gang, controller.view(now_ms)), len(line))
    common = {"queue": queue, "attempts": gang.attempts, "last_attempt_ms": gang.last_attempt_ms}
    until = line.backing_off_until(job.id)
    if until > now_ms:
        text = f"waits {format_duration((until - now_ms + 999) // 1000 * 1000)} before the next try: {job.reason}"
        return _about(controller, job, now_ms, "waiting", "BACKOFF", text, next_attempt_ms=until,
                      next_trigger="the pause is over", **common)  # fmt: skip
    engine = controller.engine
    engine.table.settle()
    with engine.table.trial():
        result = engine.try_gang(gang, controller.view(now_ms))
        if not isinstance(result, Refusal):
            engine.withdraw(gang, result)
            explanation = None
        else:
            explanation = _refused(controller, job.spec, gang, result, now_ms)
    engine.runner.take_faults()
    if explanation is None:
        text = f"{past}there is room for it; it is number {queue.position} of {queue.pending} in the queue"
        return _about(controller, job, now_ms, "waiting", "QUEUED", text, next_trigger="the next cycle", **common)
    return _about(
        controller, job, now_ms, explanation.status, explanation.code, past + explanation.summary, nodes=explanation.nodes,
        next_attempt_ms=explanation.next_attempt_ms,
        feasible=explanation.feasible, blockers=explanation.blockers, nearest=explanation.nearest, hint=explanation.hint,
        next_trigger=explanation.next_trigger, suggestions=explanation.suggestions, **common,
    )  # fmt: skip


def _refused(
    controller: Controller, spec: JobSpec, gang: Gang, refusal: Refusal, now_ms: int, *, suggestion: bool = True
) -> Explanation:
    """To be called inside a trial."""
    engine, view = controller.engine, controller.view(now_ms)
    found, misses, feasible = _all_blockers(engine, gang, refusal, view)
    down = controller.backend_availability.problem(gang, refusal)
    hopeless = None if down else controller.gate.never_fits(spec)
    cures = suggestions(engine, gang, refusal, view) if suggestion else ()
    cause = hopeless or refusal
    text, code = summary(cause.verdicts, cause.nodes), cause.verdicts[0].reason.code if cause.verdicts else "NO_NODES"
    whole = bool(cause.verdicts) and not cause.verdicts[0].count  # refused as a whole, not for want of one node
    if cause.fitted and not whole:
        when = "even when all nodes are idle" if hopeless else "now, all must start together"
        text = f"{cause.fitted} of {gang.size} members fit {when}; for the next one {text}"
    elif hopeless:
        text = f"no node could take it even when idle; {text}"
    guarded = None
    if suggestion and not down and not hopeless and any(verdict.reason.evictable for verdict in refusal.verdicts):
        guarded = controller.preemption.protected(gang, view)
    if down:
        code, text = UNAVAILABLE, f"{down}; {text}"
    elif guarded is not None:
        code, text = "VICTIMS_PROTECTED", f"{_protected(guarded)}; {text}"
    trigger = "when " + " or ".join(_TRIGGER_WORDS[cure] for cure in refusal.requeue_on) if refusal.requeue_on else ""
    return Explanation(
        status="unsatisfiable" if hopeless else "waiting",
        code=code, summary=text, name=spec.name, state="pending", nodes=refusal.nodes, feasible=feasible, blockers=found,
        nearest=misses, next_trigger=trigger, at_ms=now_ms, scheduler_beat_ms=controller.beat_ms, suggestions=cures,
        hint=controller.backend_availability.advice(spec) or _DOWN if down else
        _advice(controller, gang, refusal, view, hopeless=hopeless is not None, cures=bool(cures)) if suggestion else "",
        next_attempt_ms=guarded.until_ms if guarded is not None and guarded.until_ms < FOREVER else 0,
    )  # fmt: skip


def _protected(found: Protection) -> str:
    names = ", ".join(f"job {victim.id} ({victim.job.name})" for victim in found.victims[:5])
    more = " and more" if len(found.victims) > 5 else ""
    until = f"until {format_time(found.until_ms)}" if found.until_ms < FOREVER else "for good"
    if found.by == "budget":
        return f"it could take the place of {names}{more}, but no more jobs are preempted {until} (budget)"
    return f"it could take the place of {names}{more}, but victims are protected {until} ({found.by})"


def _advice(controller: Controller, gang: Gang, refusal: Refusal, view: View, *, hopeless: bool, cures: bool) -> str:
    if not refusal.nodes or any(not verdict.count and not verdict.reason.evictable for verdict in refusal.verdicts):
        return ""  # no rule about nodes stands in its way: the reason itself says all
    if hopeless:
        if hints := _hints(refusal):
            return hints
        change = "make one of these changes" if cures else "no single change to the job lets it start now: change more"
        return f"{change}, or add or change a node"
    alternative = "" if cures else "no single change to the job lets it start now; "
    end = next_release(controller.engine, controller.cluster, gang, view)
    if end is None and "run_placed" in refusal.requeue_on:
        return f"{alternative}wait: it depends on where other jobs are, which changes as they come and go"
    if end is None:
        return f"{alternative}wait: it fits when the nodes are idle and in service"
    left_ms = end.at_ms - view.now_ms
    due = f"expected in {format_duration((left_ms + 999) // 1000 * 1000)}" if left_ms > 0 else "which is overdue"
    return f"{alternative}wait: it fits when job {end.job.id} ({end.job.spec.name}) ends, {due}"


def _hints(refusal: Refusal) -> str:
    """What the plugins themselves advise, if every node was refused by one that has advice."""
    if sum(verdict.count for verdict in refusal.verdicts if verdict.reason.hint) < refusal.nodes:
        return ""
    return "; ".join(dict.fromkeys(verdict.reason.hint for verdict in refusal.verdicts if verdict.reason.hint))


def _all_blockers(
    engine: Engine, gang: Gang, refusal: Refusal, view: View
) -> tuple[tuple[Blocker, ...], NearestMiss | None, int]:
    """Every objection to every task as things stand, before any member of the gang is placed. If each task alone has a
    node to go to, what stands in the way is the gang's own size: then the objections met half-way are told."""
    profile, out, miss, least = engine.profile(gang), list[Blocker](), None, -1
    for member in gang.members:
        found = objections(profile, engine.runner, member, engine.table, view)
        if not found.feasible:
            out += blockers(found, engine.table, member.task.name)
            miss = miss or nearest_miss(found, profile, member, engine.table, view)
        least = found.feasible if least < 0 else min(least, found.feasible)
    if not out:
        out = [
            Blocker(v.reason.code, v.reason.text, v.reason.plugin, refusal.task, v.count, v.nodes, v.reason.hint)
            for v in refusal.verdicts
        ]
    return tuple(out), miss, max(least, 0)


def _would_start(spec: JobSpec, placements: Sequence[Placed], now_ms: int) -> Explanation:
    nodes = sorted({placed.node.name for placed in placements})
    places = tuple(
        Placement(placed.node.name, placed.member.task.name, placed.index, decision=placed.decision)
        for placed in sorted(placements, key=lambda placed: placed.index)
    )
    text = f"would start now on {', '.join(nodes[:5])}{' and more' if len(nodes) > 5 else ''}"
    feasible = min((p.decision.feasible for p in placements if p.decision), default=0)
    if spec.gang.per_node and feasible > 1:
        text = f"would start now on {feasible} nodes, one run on each, {nodes[0]} first"
    return Explanation(
        status="placed",
        code="WOULD_START",
        summary=text,
        name=spec.name,
        placements=places,
        feasible=feasible,
        at_ms=now_ms,
    )


def _would_preempt(spec: JobSpec, taking: Preemption, now_ms: int) -> Explanation:
    nodes = sorted({placed.node.name for placed in taking.placements})
    victims = ", ".join(f"{victim.id} ({victim.job.name})" for victim in taking.victims[:5])
    leaving = ", ".join(f"{victim.id} ({victim.job.name})" for victim in taking.leaving[:5])
    how = f"would take the place of job {victims}" if victims else f"would wait for job {leaving}, which is stopping"
    text = f"{how}, on {', '.join(nodes[:5])}{' and more' if len(nodes) > 5 else ''}"
    trigger = "when they have stopped"
    return Explanation(
        status="waiting", code="WOULD_PREEMPT", summary=text, name=spec.name, next_trigger=trigger, at_ms=now_ms
    )


def _about(
    controller: Controller, job: Job, now_ms: int, status: Status, code: str, text: str, **more: object
) -> Explanation:
    return Explanation(
        status=status, code=code, summary=text, job=job.id, name=job.spec.name, state=job.state, at_ms=now_ms,
        scheduler_beat_ms=controller.beat_ms, escalation_steps=controller.profile_router.escalation_steps(job, status),
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


# -------------------------------------------------------------------------------------------- priority
# What a waiting job's place in line comes from, by the line itself: the sum that orders it, term by term.


def priority_breakdown(controller: Controller, job: JobId, now_ms: int) -> PriorityBreakdown | None:
    """None for a job that does not wait in a line."""
    known = controller.cluster.jobs.get(job)
    line = controller.queues.get(known.spec.profile) if known is not None else None
    gang = line.gangs.get(job) if line is not None else None
    if line is None or gang is None:
        return None
    view, queue = controller.view(now_ms), line.profile.queue
    own = PriorityTerm("priority", gang.job.priority * 1000, "as submitted")
    waited = PriorityTerm("age", 0, f"has waited {format_duration(max(now_ms - gang.queued_ms, 0) // 1000 * 1000)}")
    position = line.position(gang, view)
    if isinstance(line, MultifactorQueue):
        terms = queue.terms(gang, view)  # type: ignore[attr-defined]
    elif isinstance(line, BackfillQueue):
        terms = (*line.queue.terms(gang), waited) if hasattr(line.queue, "terms") else (waited,)
    elif getattr(queue, "ignores_priority", False):
        terms = (waited,)
    else:
        inherited_priority = (gang.priority - gang.job.priority) * 1000
        terms = (
            (own, PriorityTerm("inherited", inherited_priority, "a job of higher priority waits for it"), waited)
            if inherited_priority
            else (own, waited)
        )
    secondary = getattr(queue, "secondary", None)
    if secondary is not None:
        terms = (*terms, PriorityTerm("secondary", 0, f"{secondary.name}, among those of equal priority"))
    total = sum(term.milli for term in terms)
    return PriorityBreakdown(job, total, terms, position, len(line), queue.name)


# So many of what is open are listed, and of so many it is found out what keeps them.
_LISTED = 20
_ASKED = 3
Why = Callable[[Controller, JobId, int], Explanation | None]


def waiting_for(controller: Controller, job: Job, now_ms: int, why: Why) -> Explanation | None:
    """None if it does not wait for others."""
    progress = controller.dependencies.progress(job.id)
    if not progress:
        return None
    open_ones = [one for one, state in progress if state == "open"]
    met = sum(state == "met" for _, state in progress)
    blockers = [
        Blocker(
            WAITING_FOR_DEPENDENCY,
            f"{one}: {_how(controller, one, now_ms, why if i < _ASKED else None)}",
            "dependencies",
        )
        for i, one in enumerate(open_ones[:_LISTED])
    ]
    if len(open_ones) > _LISTED:
        blockers.append(
            Blocker(WAITING_FOR_DEPENDENCY, f"… and {len(open_ones) - _LISTED} more, not listed here", "dependencies")
        )
    of = f"; {met} of {len(progress)} are met" if len(progress) > 1 else ""
    few = f", {job.spec.after.needed} are needed" if job.spec.after.need else ""
    return Explanation(
        status="waiting", code=WAITING_FOR_DEPENDENCY, summary=f"{job.reason}{of}{few}", job=job.id, name=job.spec.name,
        state=job.state, blockers=tuple(blockers), hint=_hint(controller, job, open_ones), at_ms=now_ms,
        next_trigger=_trigger(open_ones), scheduler_beat_ms=controller.beat_ms,
    )  # fmt: skip


def would_wait(
    controller: Controller, spec: JobSpec, dependency_statuses: Iterable[DependencyStatus], now_ms: int
) -> Explanation | None:
    """For a job that has not been submitted: whether it would have to wait for others first, or would fail at once."""
    if not spec.after.of:
        return None
    ended = {one.job: one for one in dependency_statuses}
    open_ones, lost = list[Dependency](), list[Dependency]()
    for one in spec.after.of:
        known, told = controller.cluster.jobs.get(one.job), ended.get(one.job)
        state = known.state if known is not None else told.state if told is not None else ""
        met = one.met_by(state, saved=told is not None and told.saved) if one.on != "exists" else None
        if met is not True:
            (open_ones if met is None else lost).append(one)
    total, needed = len(spec.after.of), spec.after.needed
    if total - len(open_ones) - len(lost) >= needed:
        return None
    code, text = WAITING_FOR_DEPENDENCY, f"would wait for {', '.join(map(str, open_ones[:3]))}"
    if total - len(lost) < needed:
        code, text = NEVER_MET, f"would fail at once: it can never be met that it waits for {lost[0]}"
    elif len(open_ones) > 3:
        text += f" and {len(open_ones) - 3} more"
    return Explanation(status="waiting", code=code, summary=text, name=spec.name, at_ms=now_ms)


def _how(controller: Controller, one: Dependency, now_ms: int, why: Why | None) -> str:
    """How the thing stands that is waited for."""
    if one.on == "exists":
        return "it is not there"
    job = controller.cluster.jobs.get(one.job)
    if job is None:
        return "it is not known here"
    if job.state not in ("pending", "held"):
        return f"it is {job.state}"
    if job.id in controller.dependencies or why is None:
        return f"it is {job.state}{': it ' + job.reason if job.reason_code == WAITING_FOR_DEPENDENCY else ''}"
    answer = why(controller, job.id, now_ms)
    return f"it is {job.state}: {answer.summary}" if answer is not None else f"it is {job.state}"


def _hint(controller: Controller, job: Job, open_ones: list[Dependency]) -> str:
    jobs = [one.job for one in open_ones if one.job]
    held = next((id for id in jobs if (found := controller.cluster.jobs.get(id)) and found.state == "held"), 0)
    if held:
        return f"hodei release {_word(controller, held)}: it is held, and this job waits for it"
    if jobs:
        return f"hodei why {_word(controller, jobs[0])} tells more; the whole picture: hodei job graph {job.id}"
    return "it starts when the data is there; the server looks for it by itself"


def _word(controller: Controller, id: JobId) -> str:
    found = controller.cluster.jobs.get(id)
    return shell_reference(id, found.spec.array if found is not None else None)


def _trigger(open_ones: list[Dependency]) -> str:
    words = []
    if any(one.job for one in open_ones):
        words.append("one of these jobs ends" if len(open_ones) > 1 else "that job ends")
    if any(one.on == "checkpointed" for one in open_ones):
        words.append("saves its work")
    if any(one.on == "exists" for one in open_ones):
        words.append("the data appears")
    return f"when {' or '.join(words)}" if words else ""


_SHOWN = 5


def holds_on(cluster: ClusterState, node: NodeName) -> tuple[CapacityHold, ...]:
    """All that is spoken for of a node, the soonest first."""
    claims = sorted(cluster.availability.claims_on(node), key=lambda claim: (claim.start_ms, claim.job, claim.name))
    return tuple(_hold(node, claim) for claim in claims)


def in_time(controller: Controller, job: Job, answer: Explanation, now_ms: int) -> Explanation:
    """The answer with all that is known of time."""
    estimate = controller.estimator.estimate(job.spec)
    answer = structs.replace(answer, estimate=estimate if estimate.expected_ms else None)
    if job.state == "running" and estimate.expected_ms and job.started_ms:
        ends_ms = corrected_end(job.started_ms, estimate.expected_ms, now_ms)
        past_estimate = job.started_ms + estimate.expected_ms < now_ms
        return structs.replace(answer, expected_end_ms=ends_ms, past_estimate=past_estimate)
    if job.state != "pending":
        return answer
    start_reservation = controller.cluster.availability.start_reservations.get(job.id)
    if start_reservation is not None:
        nodes = tuple(node for node, _ in start_reservation.places)
        return structs.replace(answer, start_reservation=ReservedStart(start_reservation.start_ms, nodes))
    line = controller.queues.get(job.spec.profile)
    gang = line.gangs.get(job.id) if line is not None else None
    if gang is None:
        return answer
    held_for = tuple(_held_for(controller, gang, now_ms))
    if held_for and not gang.estimate_ms and not answer.hint:
        answer = structs.replace(answer, hint="give it a timeout or an estimate: what is over by then may start before")
    return structs.replace(answer, held_for=held_for)


def _held_for(controller: Controller, gang: Gang, now_ms: int) -> Sequence[CapacityHold]:
    """Whose room it is on nodes that have enough for a member now; of each owner the first node."""
    availability, table = controller.cluster.availability, controller.cluster.table
    until_ms = now_ms + gang.estimate_ms if gang.estimate_ms else FOREVER
    found: dict[tuple[int, str], CapacityHold] = {}
    for node in sorted(availability.claimed):
        row = table.row.get(node)
        if row is None:
            continue
        room, used = table.allocatable[row], table.usage(row)
        for member in gang.members:
            request = {resource: amount for resource, amount in member.task.request.items() if amount}
            if any(room.get(resource, 0) - used.get(resource, 0) < amount for resource, amount in request.items()):
                continue
            claim = availability.first_conflict(node, request, now_ms, until_ms, gang.id, gang.job.project)
            if claim is not None:
                found.setdefault((claim.job, claim.name), _hold(node, claim))
        if len(found) >= _SHOWN:
            break
    return list(found.values())


def _hold(node: NodeName, claim: Claim) -> CapacityHold:
    return CapacityHold(node, claim.start_ms, claim.end_ms, claim.request, claim.job, claim.name, claim.project)
