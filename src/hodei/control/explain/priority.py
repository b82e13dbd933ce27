"""What a waiting job's place in line comes from, by the line itself: the sum that orders it, term by term."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hodei.control.queue.backfill import BackfillQueue
from hodei.control.queue.multifactor import MultifactorQueue
from hodei.model.ids import JobId
from hodei.model.priority import PriorityBreakdown, Term
from hodei.model.quantity import format_duration

if TYPE_CHECKING:
    from hodei.control.controller import Controller


def priority_breakdown(controller: Controller, job: JobId, now_ms: int) -> PriorityBreakdown | None:
    """None for a job that does not wait in a line."""
    known = controller.world.jobs.get(job)
    line = controller.lines.get(known.spec.profile) if known is not None else None
    gang = line.gangs.get(job) if line is not None else None
    if line is None or gang is None:
        return None
    view, queue = controller.view(now_ms), line.profile.queue
    own = Term("priority", gang.job.priority * 1000, "as submitted")
    waited = Term("age", 0, f"has waited {format_duration(max(now_ms - gang.queued_ms, 0) // 1000 * 1000)}")
    position = line.position(gang, view)
    if isinstance(line, MultifactorQueue):
        terms = queue.terms(gang, view)  # type: ignore[attr-defined]
    elif isinstance(line, BackfillQueue):
        terms = (*line.queue.terms(gang), waited) if hasattr(line.queue, "terms") else (waited,)
    elif queue.name == "fifo":
        terms = (waited,)
    else:
        lifted = (gang.priority - gang.job.priority) * 1000
        terms = (
            (own, Term("inherited", lifted, "a more important job waits for it"), waited) if lifted else (own, waited)
        )
    secondary = getattr(queue, "secondary", None)
    if secondary is not None:
        terms = (*terms, Term("secondary", 0, f"{secondary.name}, among those of equal priority"))
    total = sum(term.milli for term in terms)
    return PriorityBreakdown(job, total, terms, position, len(line), queue.name)
