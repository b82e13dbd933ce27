"""Explanations of jobs, by the engine that decides: why one waits, why it runs there, what would happen to a new one.

Whether a job could start now is tried on the live table and undone. So are all suggested changes, and the run whose end it
waits for (`suggestions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, structs

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
    BackendQueueEntry,
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
from hodei.model.job import JOB_ENDED, NOT_ESCALATED, RUN_ENDED, Job, JobSpec, Run
from hodei.model.reservation import CapacityHold
from hodei.model.resources import format_duration, format_time
from hodei.model.usage import efficiency

if TYPE_CHECKING:
    from hodei.control.controller import Controller

_TRIGGER_TEXTS = {
    "run_ended": "a run ends",
    "node_joined": "a node joins",
    "node_changed": "a node changes",
    "job_ended": "a job ends",
    "run_placed": "another job is placed",
    "time": "time passes",
}
_DOWN = "see `hodei backend list`; backends are retried automatically, and the job starts when one is available"
# Suggestions take time: in a plan of many jobs only the first that would wait get some.
_PLANS_WITH_SUGGESTIONS = 5


class StartProgress(Struct, frozen=True):
    """What is known of the start of a placed job: backends that have not confirmed it (`in_doubt`), and the `queue` of a
    backend that it waits in."""

    in_doubt: tuple[str, ...] = ()
    queue: BackendQueueEntry | None = None

    @property
    def text(self) -> str:
        if self.in_doubt:
            names = ", ".join(self.in_doubt)
            return f"; it is not known whether it has started: backend {names} has not answered yet, and is asked again"
        return f", waits in the queue of backend {self.queue.backend}" if self.queue is not None else ", about to start"


_STARTING = StartProgress()


def why(controller: Controller, job: JobId, now_ms: int, progress: StartProgress = _STARTING) -> Explanation | None:
    """For a job that has not ended; None for an unknown one."""
    known = controller.cluster.jobs.get(job)
    if known is None:
        return None
    if known.state == "held":
        text = "held: it is not scheduled until it is released"
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
        return _add_timing(controller, known, _waiting(controller, known, now_ms), now_ms)
    runs = list(controller.cluster.runs.get(job, {}).values())
    answer = explain_placement(known, runs, now_ms, controller.beat_ms, progress)
    return _add_timing(controller, known, answer, now_ms)


def explain_placement(
    job: Job, runs: Sequence[Run], now_ms: int, beat_ms: int = 0, progress: StartProgress = _STARTING
) -> Explanation:
    """For a job that was placed at least once: where, and why there. Needs only the job and its runs."""
    gang = list(latest_runs(run for run in runs if run.attempt >= job.first_attempt).values())
    places = tuple(Placement(run.node, run.task, run.member, run.id, run.state, run.decision) for run in gang)
    live = [run for run in gang if run.state not in RUN_ENDED] if job.state == "running" else []
    nodes = sorted({run.node for run in live or gang})
    where = f" on {', '.join(nodes[:5])}{' and more' if len(nodes) > 5 else ''}" if nodes else ""
    status: Status
    hint, queue = "", None
    if job.state in JOB_ENDED:
        status, code = "ended", job.reason_code or job.state.upper()
        used = efficiency(job.spec, gang, now_ms)
        hint = used.hint if used is not None else ""
        text = f"{job.state}{where}{': ' + job.reason if job.reason else ''}"
    elif job.state == "running":
        status, code, text = "running", "RUNNING", f"running{where}"
        if job.reason and not job.cancel_requested:
            code, text = job.reason_code, f"{text}: {job.reason}"
    else:
        status, code, queue = "placed", "START_IN_DOUBT" if progress.in_doubt else "PLACED", progress.queue
        text = f"placed{where}{progress.text}"
    notes = dict.fromkeys(run.decision.note for run in gang if run.decision is not None and run.decision.note)
    text = "; ".join([text, *notes])
    if job.cancel_requested and status != "ended":
        code, text = "CANCELLING", f"{text}; being cancelled"
    return Explanation(
        status=status, code=code, summary=text, job=job.id, name=job.spec.name, state=job.state, placements=places,
        attempts=job.attempt, hint=hint, scheduler_beat_ms=beat_ms, at_ms=now_ms,
        escalation_steps=escalation_steps(job.spec, job.escalation_state), backend_queue=queue,
    )  # fmt: skip


def plan(
    controller: Controller, specs: Sequence[JobSpec], now_ms: int, dependency_statuses: Sequence[DependencyStatus] = ()
) -> list[Explanation]:
    """What would happen to these jobs if they were submitted now, in this order. Nothing is changed."""
    out, engine = list[Explanation](), controller.engine
    specs = controller.accounts.admit(specs)
    controller.gate.check(specs, controller.pending())
    specs = [controller.profile_router.routing.route(spec) for spec in specs]
    engine.table.settle()
    with engine.table.trial():
        kept: list[tuple[Gang, list[Placed]]] = []
        refused = 0
        last: JobSpec | None = None  # the previous one, if it was refused
        for spec in specs:
            if last is not None and spec == last:
                out.append(out[-1])  # nothing has changed since: equal jobs get equal answers
                continue
            last = None
            if (waits := _would_wait(controller, spec, dependency_statuses, now_ms)) is not None:
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
                out.append(
                    _refused(controller, spec, gang, result, now_ms, suggestion=refused <= _PLANS_WITH_SUGGESTIONS)
                )
            else:
                kept.append((gang, result))
                out.append(_would_start(spec, result, now_ms))
        for gang, placements in reversed(kept):
            engine.withdraw(gang, placements)
    engine.runner.take_faults()
    return [
        structs.replace(each, escalation_steps=escalation_steps(spec, NOT_ESCALATED))
        for each, spec in zip(out, specs, strict=True)
    ]


def _waiting(controller: Controller, job: Job, now_ms: int) -> Explanation:
    hold = controller.preemption.holds.get(job.id)
    if hold is not None:
        trigger = f"when {', '.join(sorted(hold.waiting_for)[:5])} has stopped, or other capacity is freed"
        return _about(controller, job, now_ms, "waiting", "PREEMPTING", job.reason, next_trigger=trigger)
    for_others = _waiting_for_others(controller, job, now_ms)
    if for_others is not None:
        return for_others
    paused = controller.profile_router.routing.availability
    if job.spec.profile in paused.paused:
        text = f"{paused.problem(job.spec.profile)}: none of its jobs starts"
        return _about(controller, job, now_ms, "waiting", "PROFILE_PAUSED", text, next_trigger="when it is resumed")
    queue = controller.queues[job.spec.profile]
    gang = queue.gangs.get(job.id)
    if gang is None:
        text = "it was submitted just now and joins the queue in the next step"
        return _about(controller, job, now_ms, "waiting", "QUEUED", text, next_trigger="the next cycle")
    past = with_last_preemption(job, "")
    position = QueuePosition(queue.position(gang, controller.view(now_ms)), len(queue))
    common = {"queue": position, "attempts": gang.attempts, "last_attempt_ms": gang.last_attempt_ms}
    until = queue.backing_off_until(job.id)
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
        text = f"{past}there is capacity for it; it is number {position.position} of {position.pending} in the queue"
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
    """Call it inside a trial."""
    engine, view = controller.engine, controller.view(now_ms)
    found, misses, feasible = _all_blockers(engine, gang, refusal, view)
    down = controller.backend_availability.problem(gang, refusal)
    impossible = None if down else controller.gate.never_fits(spec)
    changes = suggestions(engine, gang, refusal, view) if suggestion else ()
    cause = impossible or refusal
    text, code = summary(cause.verdicts, cause.nodes), cause.verdicts[0].reason.code if cause.verdicts else "NO_NODES"
    as_a_whole = bool(cause.verdicts) and not cause.verdicts[0].count  # refused before any node was evaluated
    if cause.fitted and not as_a_whole:
        when = "even when all nodes are idle" if impossible else "now, all must start together"
        text = f"{cause.fitted} of {gang.size} members fit {when}; for the next one {text}"
    elif impossible:
        text = f"no node could take it even when idle; {text}"
    protection = None
    if suggestion and not down and not impossible and any(verdict.reason.evictable for verdict in refusal.verdicts):
        protection = controller.preemption.protected(gang, view)
    if down:
        code, text = UNAVAILABLE, f"{down}; {text}"
    elif protection is not None:
        code, text = "VICTIMS_PROTECTED", f"{_describe_protection(protection)}; {text}"
    trigger = "when " + " or ".join(_TRIGGER_TEXTS[cure] for cure in refusal.requeue_on) if refusal.requeue_on else ""
    return Explanation(
        status="unsatisfiable" if impossible else "waiting",
        code=code, summary=text, name=spec.name, state="pending", nodes=refusal.nodes, feasible=feasible, blockers=found,
        nearest=misses, next_trigger=trigger, at_ms=now_ms, scheduler_beat_ms=controller.beat_ms, suggestions=changes,
        hint=controller.backend_availability.advice(spec) or _DOWN if down else
        _advice(controller, gang, refusal, view, impossible=impossible is not None, changes=bool(changes)) if suggestion else "",
        next_attempt_ms=protection.until_ms if protection is not None and protection.until_ms < FOREVER else 0,
    )  # fmt: skip


def _describe_protection(found: Protection) -> str:
    names = ", ".join(f"job {victim.id} ({victim.job.name})" for victim in found.victims[:5])
    more = " and more" if len(found.victims) > 5 else ""
    until = f"until {format_time(found.until_ms)}" if found.until_ms < FOREVER else "permanently"
    if found.by == "budget":
        return f"it could preempt {names}{more}, but no more jobs are preempted {until} (budget)"
    return f"it could preempt {names}{more}, but victims are protected {until} ({found.by})"


def _advice(
    controller: Controller, gang: Gang, refusal: Refusal, view: View, *, impossible: bool, changes: bool
) -> str:
    if not refusal.nodes or any(not verdict.count and not verdict.reason.evictable for verdict in refusal.verdicts):
        return ""  # no rule about nodes: the reason itself is enough
    if impossible:
        if hints := _hints(refusal):
            return hints
        change = (
            "make one of these changes" if changes else "no single change to the job lets it start now: change more"
        )
        return f"{change}, or add or change a node"
    no_change = "" if changes else "no single change to the job lets it start now; "
    end = next_release(controller.engine, controller.cluster, gang, view)
    if end is None and "run_placed" in refusal.requeue_on:
        return f"{no_change}wait: it depends on where other jobs run, which changes over time"
    if end is None:
        return f"{no_change}wait: it fits when the nodes are idle and in service"
    left_ms = end.at_ms - view.now_ms
    due = f"expected in {format_duration((left_ms + 999) // 1000 * 1000)}" if left_ms > 0 else "which is overdue"
    return f"{no_change}wait: it fits when job {end.job.id} ({end.job.spec.name}) ends, {due}"


def _hints(refusal: Refusal) -> str:
    """The hints of plugins, if every node was refused by a plugin with a hint."""
    if sum(verdict.count for verdict in refusal.verdicts if verdict.reason.hint) < refusal.nodes:
        return ""
    return "; ".join(dict.fromkeys(verdict.reason.hint for verdict in refusal.verdicts if verdict.reason.hint))


def _all_blockers(
    engine: Engine, gang: Gang, refusal: Refusal, view: View
) -> tuple[tuple[Blocker, ...], NearestMiss | None, int]:
    """All objections to every task before any member is placed. If each task alone fits somewhere, the size of the gang is
    the problem: then the objections of the refusal, after some members were placed."""
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
    stopping = ", ".join(f"{victim.id} ({victim.job.name})" for victim in taking.stopping[:5])
    how = f"would preempt job {victims}" if victims else f"would wait for job {stopping}, which is stopping"
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


def priority_breakdown(controller: Controller, job: JobId, now_ms: int) -> PriorityBreakdown | None:
    """The terms that determine the queue position of a pending job; None for one that is not queued."""
    known = controller.cluster.jobs.get(job)
    queue = controller.queues.get(known.spec.profile) if known is not None else None
    gang = queue.gangs.get(job) if queue is not None else None
    if queue is None or gang is None:
        return None
    view, policy = controller.view(now_ms), queue.profile.queue
    own = PriorityTerm("priority", gang.job.priority * 1000, "as submitted")
    waited = PriorityTerm("age", 0, f"has waited {format_duration(max(now_ms - gang.queued_ms, 0) // 1000 * 1000)}")
    position = queue.position(gang, view)
    if isinstance(queue, MultifactorQueue):
        terms = policy.terms(gang, view)  # type: ignore[attr-defined]
    elif isinstance(queue, BackfillQueue):
        terms = (*queue.queue.terms(gang), waited) if hasattr(queue.queue, "terms") else (waited,)
    elif getattr(policy, "ignores_priority", False):
        terms = (waited,)
    else:
        inherited_priority = (gang.priority - gang.job.priority) * 1000
        terms = (
            (own, PriorityTerm("inherited", inherited_priority, "a job of higher priority waits for it"), waited)
            if inherited_priority
            else (own, waited)
        )
    secondary = getattr(policy, "secondary", None)
    if secondary is not None:
        terms = (*terms, PriorityTerm("secondary", 0, f"{secondary.name}, among jobs of equal priority"))
    total = sum(term.milli for term in terms)
    return PriorityBreakdown(job, total, terms, position, len(queue), policy.name)


# Open dependencies that are listed, and those that are explained in turn.
_LISTED = 20
_EXPLAINED = 3


def _waiting_for_others(controller: Controller, job: Job, now_ms: int) -> Explanation | None:
    """For a job that waits for dependencies; None if it does not."""
    progress = controller.dependencies.progress(job.id)
    if not progress:
        return None
    open_ones = [one for one, state in progress if state == "open"]
    met = sum(state == "met" for _, state in progress)
    texts = [
        f"{one}: {_describe_dependency(controller, one, now_ms, explain=i < _EXPLAINED)}"
        for i, one in enumerate(open_ones[:_LISTED])
    ]
    if len(open_ones) > _LISTED:
        texts.append(f"… and {len(open_ones) - _LISTED} more, not listed here")
    of = f"; {met} of {len(progress)} are met" if len(progress) > 1 else ""
    needed = f", {job.spec.after.needed} are needed" if job.spec.after.need else ""
    return Explanation(
        status="waiting", code=WAITING_FOR_DEPENDENCY, summary=f"{job.reason}{of}{needed}", job=job.id, name=job.spec.name,
        state=job.state, blockers=tuple(Blocker(WAITING_FOR_DEPENDENCY, text, "dependencies") for text in texts),
        hint=_dependency_hint(controller, job, open_ones), at_ms=now_ms,
        next_trigger=_dependency_trigger(open_ones), scheduler_beat_ms=controller.beat_ms,
    )  # fmt: skip


def _would_wait(
    controller: Controller, spec: JobSpec, dependency_statuses: Iterable[DependencyStatus], now_ms: int
) -> Explanation | None:
    """For a new job that would wait for dependencies, or would fail because of them; None if it would not."""
    if not spec.after.of:
        return None
    ended = {one.job: one for one in dependency_statuses}
    open_ones, never = list[Dependency](), list[Dependency]()
    for one in spec.after.of:
        known, past = controller.cluster.jobs.get(one.job), ended.get(one.job)
        state = known.state if known is not None else past.state if past is not None else ""
        met = one.met_by(state, saved=past is not None and past.saved) if one.on != "exists" else None
        if met is not True:
            (open_ones if met is None else never).append(one)
    total, needed = len(spec.after.of), spec.after.needed
    if total - len(open_ones) - len(never) >= needed:
        return None
    code, text = WAITING_FOR_DEPENDENCY, f"would wait for {', '.join(map(str, open_ones[:3]))}"
    if total - len(never) < needed:
        code, text = NEVER_MET, f"would fail at once: a dependency can never be met: {never[0]}"
    elif len(open_ones) > 3:
        text += f" and {len(open_ones) - 3} more"
    return Explanation(status="waiting", code=code, summary=text, name=spec.name, at_ms=now_ms)


def _describe_dependency(controller: Controller, one: Dependency, now_ms: int, *, explain: bool) -> str:
    """The state of what it waits for; with `explain` also why that waits."""
    if one.on == "exists":
        return "it does not exist yet"
    job = controller.cluster.jobs.get(one.job)
    if job is None:
        return "it is unknown"
    if job.state not in ("pending", "held"):
        return f"it is {job.state}"
    if job.id in controller.dependencies or not explain:
        return f"it is {job.state}{': it ' + job.reason if job.reason_code == WAITING_FOR_DEPENDENCY else ''}"
    answer = why(controller, job.id, now_ms)
    return f"it is {job.state}: {answer.summary}" if answer is not None else f"it is {job.state}"


def _dependency_hint(controller: Controller, job: Job, open_ones: list[Dependency]) -> str:
    jobs = [one.job for one in open_ones if one.job]
    held = next((id for id in jobs if (found := controller.cluster.jobs.get(id)) and found.state == "held"), 0)
    if held:
        return f"hodei release {_reference(controller, held)}: it is held, and this job waits for it"
    if jobs:
        return f"hodei why {_reference(controller, jobs[0])} shows more; all dependencies: hodei job graph {job.id}"
    return "it starts when the data exists; the server checks for it"


def _reference(controller: Controller, id: JobId) -> str:
    found = controller.cluster.jobs.get(id)
    return shell_reference(id, found.spec.array if found is not None else None)


def _dependency_trigger(open_ones: list[Dependency]) -> str:
    events = []
    if any(one.job for one in open_ones):
        events.append("one of these jobs ends" if len(open_ones) > 1 else "that job ends")
    if any(one.on == "checkpointed" for one in open_ones):
        events.append("saves its work")
    if any(one.on == "exists" for one in open_ones):
        events.append("the data appears")
    return f"when {' or '.join(events)}" if events else ""


_MAX_HOLDS = 5


def holds_on(cluster: ClusterState, node: NodeName) -> tuple[CapacityHold, ...]:
    """The reserved capacity of a node, the earliest first."""
    claims = sorted(cluster.availability.claims_on(node), key=lambda claim: (claim.start_ms, claim.job, claim.name))
    return tuple(_capacity_hold(node, claim) for claim in claims)


def _add_timing(controller: Controller, job: Job, answer: Explanation, now_ms: int) -> Explanation:
    """The answer with its time-related parts: estimate, start reservation, reserved capacity."""
    estimate = controller.estimator.estimate(job.spec)
    answer = structs.replace(answer, estimate=estimate if estimate.expected_ms else None)
    if job.state == "running" and estimate.expected_ms and job.started_ms:
        ends_ms = corrected_end(job.started_ms, estimate.expected_ms, now_ms)
        past_estimate = job.started_ms + estimate.expected_ms < now_ms
        return structs.replace(answer, expected_end_ms=ends_ms, past_estimate=past_estimate)
    if job.state != "pending":
        return answer
    answer = structs.replace(answer, capacity=controller.scaling.outlooks.get(job.id))
    reservation = controller.cluster.availability.start_reservations.get(job.id)
    if reservation is not None:
        nodes = tuple(node for node, _ in reservation.places)
        return structs.replace(answer, start_reservation=ReservedStart(reservation.start_ms, nodes))
    queue = controller.queues.get(job.spec.profile)
    gang = queue.gangs.get(job.id) if queue is not None else None
    if gang is None:
        return answer
    held_for = tuple(_held_for(controller, gang, now_ms))
    if held_for and not gang.estimate_ms and not answer.hint:
        answer = structs.replace(
            answer, hint="give it a timeout or an estimate: a job that ends early enough may start before"
        )
    return structs.replace(answer, held_for=held_for)


def _held_for(controller: Controller, gang: Gang, now_ms: int) -> Sequence[CapacityHold]:
    """The reservations of nodes that have capacity for a member now; the first node of each."""
    availability, table = controller.cluster.availability, controller.cluster.table
    until_ms = now_ms + gang.estimate_ms if gang.estimate_ms else FOREVER
    found: dict[tuple[int, str], CapacityHold] = {}
    for node in sorted(availability.claimed):
        row = table.row.get(node)
        if row is None:
            continue
        allocatable, used = table.allocatable[row], table.usage(row)
        for member in gang.members:
            request = member.needs
            if any(allocatable.get(name, 0) - used.get(name, 0) < amount for name, amount in request.items()):
                continue
            claim = availability.first_conflict(node, request, now_ms, until_ms, gang.id, gang.job.project)
            if claim is not None:
                found.setdefault((claim.job, claim.name), _capacity_hold(node, claim))
        if len(found) >= _MAX_HOLDS:
            break
    return list(found.values())


def _capacity_hold(node: NodeName, claim: Claim) -> CapacityHold:
    return CapacityHold(node, claim.start_ms, claim.end_ms, claim.request, claim.job, claim.name, claim.project)
