"""New profiles and policies for a running controller. Runs are not touched, pending jobs go into the new queues, and holds of
preemptors stay.

A new controller is built from the settings; the live one takes over its policies. A part with settings of its own has
`take_settings(other)`.
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
    """Apply the settings of `fact`. If they are invalid, nothing changes and an event gives the reason."""
    if live.rebuild is None:
        return
    try:
        fresh = live.rebuild(fact.scheduling)
    except HodeiError as error:
        live.cluster.emit("config.rejected", now_ms, reason=error.message)
        return
    before = sorted(live.queues)
    adopt(live, fresh, now_ms)
    removed = [name for name in before if name not in live.queues]
    new = [name for name in live.queues if name not in before]
    live.cluster.emit("config.changed", now_ms, number=fact.number, how=fact.how, added=new, removed=removed)


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
    for name, queue in live.queues.items():
        _keep_virtual_time(old.get(name), queue)
    if any(map(needs_availability, live.queues.values())):
        live.cluster.track_availability()
    _keep_holds(live, now_ms)
    for queue in old.values():
        live.displaced.update(queue.gangs)


def requeue_displaced(live: Controller, now_ms: int) -> Generator[None, None, None]:
    """Move pending gangs from the old queues to the new ones, in chunks, before the next decision."""
    gangs, live.displaced = live.displaced, {}
    for part in chunks(sorted(gangs)):
        for id in part:
            live.cluster.availability.remove_start_reservation(id)  # the new queues make their own
            job = live.cluster.jobs.get(id)
            if job is None or job.state != "pending" or _queued(live, job) is not None:
                continue  # it was cancelled, held or queued in the same step
            live.cluster.enqueue(job, now_ms)
            again = _queued(live, job)
            if again is not None:
                again.attempts, again.last_attempt_ms = gangs[id].attempts, gangs[id].last_attempt_ms
        if len(gangs) > CHUNK_SIZE:
            yield


def _queued(live: Controller, job: Job) -> Gang | None:
    queue = live.queues.get(job.spec.profile)
    return None if queue is None else queue.gangs.get(job.id)


def _keep_virtual_time(before: object, now: object) -> None:
    """Tenants keep their turns if the queue is still of the same kind."""
    if not isinstance(before, SchedulingQueue) or not isinstance(now, SchedulingQueue) or type(before) is not type(now):
        return
    if _kind_of(before) is _kind_of(now):
        now.copy_virtual_time(before)


def _kind_of(queue: SchedulingQueue) -> type:
    """The kind of its queue plugin; a tie-breaker does not change it."""
    return type(getattr(queue.profile.queue, "primary", queue.profile.queue))


def _keep_holds(live: Controller, now_ms: int) -> None:
    """Preemptors and gangs in repair get the shapes of the new profiles. Jobs of a removed profile are held."""
    for id, hold in sorted(live.preemption.holds.items()):
        if hold.gang.job.profile in live.engine.profiles or hold.gang.is_joining:
            live.engine.profile(hold.gang).admit(hold.gang)
        else:
            job = live.cluster.jobs[id]
            live.preemption.release(id)
            live.cluster.enqueue(job, now_ms)
    for repair in live.gangs.repairs.values():
        live.engine.profile(repair.gang).admit(repair.gang)
