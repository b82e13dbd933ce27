"""What an entry under `facts` means to the controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hodei.model.facts import (
    DataAppeared,
    Fact,
    JobCancelled,
    JobHeld,
    JobMigrated,
    JobReleased,
    JobRequeued,
    JobSuspended,
    NodeJoined,
    NodeLost,
    NodeOverridden,
    RunObserved,
)
from hodei.model.lifecycle import JOB_ENDED
from hodei.sim.scenario.parse import BEGIN_MS
from hodei.sim.scenario.schema import NODE_VERBS, Happening

if TYPE_CHECKING:
    from hodei.sim.scenario.play import Play


def facts_of(happening: Happening, play: Play) -> list[Fact]:
    """None at all if it happens to something that is not there (any more), or not in a state for it."""
    if happening.verb == "appear":
        return [DataAppeared(happening.who)]
    return _of_node(happening, play) if happening.verb in NODE_VERBS else _of_job(happening, play)


def _of_node(happening: Happening, play: Play) -> list[Fact]:
    name, there = happening.who, happening.who in play.controller.world.nodes
    taints = (happening.taint,) if happening.taint is not None else ()
    if happening.verb == "join":
        return [] if there else [NodeJoined(play.nodes[name])]
    if not there:
        return []
    match happening.verb:
        case "lose":
            return [NodeLost(name)]
        case "drain":
            return [NodeOverridden(name, cordon=True, drain=True)]
        case "taint":
            return [NodeOverridden(name, add_taints=taints)]
        case "untaint":
            return [NodeOverridden(name, remove_taints=taints)]
    return [NodeOverridden(name, cordon=happening.verb == "cordon")]


def _of_job(happening: Happening, play: Play) -> list[Fact]:
    course = play.story.courses[happening.who]
    job = course.changes[-1][1] if course.changes else None
    if job is None:
        return []
    ended, waiting = job.state in JOB_ENDED, job.state in ("pending", "held")
    match happening.verb:
        case "cancel":
            return [] if ended else [JobCancelled(job.id)]
        case "hold":
            return [JobHeld(job.id)] if job.state == "pending" else []
        case "release":
            return [JobReleased(job.id)] if job.state == "held" or job.suspend_requested else []
        case "suspend":
            return [] if ended else [JobSuspended(job.id)]
        case "migrate":
            return [JobMigrated(job.id)]
        case "requeue":
            return [] if waiting else [JobRequeued(job.id, job if ended else None)]
    mine = [live.run for live in play.live.values() if live.job.id == job.id]
    wanted = sorted((run.member, run.id) for run in mine if happening.member in (None, run.member))
    return [
        RunObserved(run, "failed", BEGIN_MS + happening.at_ms, happening.exit)
        for _, run in wanted[: None if happening.member is not None else 1]
    ]
