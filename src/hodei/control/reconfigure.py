"""Other profiles and policies for a controller that is at work. Nothing is lost: what runs is not touched, those who wait
stand in lines again in the order of the new ones, room that is being made for someone stays theirs.

The new settings come as a controller that was made of them; its policies are taken, and it is thrown away. A part of the
controller that has settings of its own says with `take_settings(other)` how it takes those of its counterpart.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from hodei.control.queue.backfill import needs_availability
from hodei.control.queue.base import SchedulingQueue
from hodei.control.state import CHUNK_SIZE, chunks
from hodei.engine.view import Gang
from hodei.model.errors import HodeiError
from hodei.model.facts import Reconfigured
from hodei.model.job import Job

if TYPE_CHECKING:
    from hodei.control.controller import Controller


def reconfigure(live: Controller, fact: Reconfigured, now_ms: int) -> None:
    """Take the settings of `fact`; should they not be fit to be used, all stays as it is and the event says why."""
    if live.rebuild is None:
        return
    try:
        fresh = live.rebuild(fact.scheduling)
    except HodeiError as error:
        live.cluster.emit("config.rejected", now_ms, reason=error.message)
        return
    before = sorted(live.queues)
    adopt(live, fresh, now_ms)
    gone = [name for name in before if name not in live.queues]
    new = [name for name in live.queues if name not in before]
    live.cluster.emit("config.changed", now_ms, number=fact.number, how=fact.how, new=new, gone=gone)


def adopt(live: Controller, fresh: Controller, now_ms: int) -> None:
    old = dict(live.queues)
    live.engine.use(fresh.engine.profiles)
    live.retry = fresh.retry
    if type(live.estimator) is not type(fresh.estimator):
        live.estimator = fresh.estimator
    for name, part in list(vars(live).items()):
        if hasattr(part, "take_settings"):
            part.take_settings(getattr(fresh, name))
    live.queues.clear()
    live.queues.update({name: live.queue_for(profile) for name, profile in sorted(live.engine.profiles.items())})
    for name, line in live.queues.items():
        _keep_turns(old.get(name), line)
    if any(map(needs_availability, live.queues.values())):
        live.cluster.track_availability()
    _keep_holds(live, now_ms)
    for line in old.values():
        live.displaced.update(line.gangs)


def requeue_displaced(live: Controller, now_ms: int) -> Generator[None, None, None]:
    """Those who waited in the old lines go into the new ones, in parts; before anything is decided again."""
    gangs, live.displaced = live.displaced, {}
    for part in chunks(sorted(gangs)):
        for id in part:
            live.cluster.availability.remove_start_reservation(id)  # the new lines make their own promises
            job = live.cluster.jobs.get(id)
            if job is None or job.state != "pending" or _waits(live, job) is not None:
                continue  # it was cancelled, held, or put into its line in the same moment
            live._enqueue(job, now_ms)
            again = _waits(live, job)
            if again is not None:
                again.attempts, again.last_attempt_ms = gangs[id].attempts, gangs[id].last_attempt_ms
        if len(gangs) > CHUNK_SIZE:
            yield


def _waits(live: Controller, job: Job) -> Gang | None:
    line = live.queues.get(job.spec.profile)
    return None if line is None else line.gangs.get(job.id)


def _keep_turns(before: object, now: object) -> None:
    """Tenants who take turns go on where they were, if the line is still of that kind."""
    if not isinstance(before, SchedulingQueue) or not isinstance(now, SchedulingQueue) or type(before) is not type(now):
        return
    if _kind_of(before) is _kind_of(now):
        now.copy_turns(before)


def _kind_of(line: SchedulingQueue) -> type:
    """Of its queue; a second order beside the first makes no other kind of it."""
    return type(getattr(line.profile.queue, "primary", line.profile.queue))


def _keep_holds(live: Controller, now_ms: int) -> None:
    """Gangs for which room is being made, and members that running gangs want back, are known to the new profiles by
    other shapes. Whose profile is gone is held like all others of it."""
    for id, hold in sorted(live.preemption.holds.items()):
        if hold.gang.job.profile in live.engine.profiles or hold.gang.is_joining:
            live.engine.profile(hold.gang).admit(hold.gang)
        else:
            job = live.cluster.jobs[id]
            live.preemption.release(id)
            live._enqueue(job, now_ms)
    for repair in live.gangs.repairs.values():
        live.engine.profile(repair.gang).admit(repair.gang)
