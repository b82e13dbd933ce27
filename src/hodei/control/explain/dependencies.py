"""Why a job waits that waits for others: what is open, how that stands, and what would help. One level deep."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hodei.control.controller import Controller
from hodei.control.lifecycle.dependencies import NEVER_MET, WAITING_FOR_DEPENDENCY
from hodei.model.array import shell_reference
from hodei.model.dependency import Dependency, DependencyStatus
from hodei.model.explanation import Blocker, Explanation
from hodei.model.ids import JobId
from hodei.model.job import Job, JobSpec

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
        return f"it is {job.state}{': it ' + job.reason if job.reason.startswith('waits') else ''}"
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
