"""What may be asked of a job while it lives: suspend it, let it go on, have it save its work, move it.

Whoever asks is told at once why it cannot be done; what can be done becomes a fact, and is stored when these return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hodei.control.lifecycle.relocation import can_move
from hodei.model.array import shell_word
from hodei.model.errors import Conflict, NotFound, Unsupported
from hodei.model.facts import Fact, JobCheckpointRequested, JobMigrated, JobReleased, JobSuspended
from hodei.model.ids import JobId
from hodei.model.job import Job
from hodei.model.lifecycle import JOB_ENDED
from hodei.model.text import did_you_mean

if TYPE_CHECKING:
    from hodei.runtime.service import Service

_DOCS = "docs/how-to/checkpoints.md"


async def suspend(service: Service, job: JobId) -> Job:
    """A waiting job is held; a running one saves its work, lets go of its nodes, and is held then."""
    found = await _stored(service, job)
    if found.state in JOB_ENDED:
        raise Conflict(f"job {job} has {found.state} already", hint="there is nothing left to suspend")
    if found.cancel_requested:
        raise Conflict(f"job {job} is being cancelled", hint="it can be requeued when it has ended")
    if found.state == "held" or found.suspend_requested:
        return found
    return await _changed(service, job, JobSuspended(job))


async def resume(service: Service, job: JobId) -> Job:
    found = await _stored(service, job)
    if found.state != "held" and not found.suspend_requested:
        hint = f"hodei job show {shell_word(job, found.spec.array)}"
        raise Conflict(f"job {job} is {found.state}, not suspended", hint=hint)
    return await _changed(service, job, JobReleased(job))


async def save_work(service: Service, job: JobId) -> Job:
    """Its runs are told to save their work now, and go on."""
    found = await _stored(service, job)
    if not found.spec.checkpoint.hooked:
        raise Conflict(
            f"job {job} does not say how its work is saved",
            hint=f"give its file `checkpoint: {{signal: USR1}}` or a command; see {_DOCS}",
            code="NO_CHECKPOINT",
        )
    if found.state != "running":
        raise Conflict(f"job {job} is {found.state}; only a running job can save its work", code="NOT_RUNNING")
    _check_can_save(service, job)
    return await _changed(service, job, JobCheckpointRequested(job))


def _check_can_save(service: Service, job: JobId) -> None:
    """Unsupported if no run of it is on a backend that can tell it to."""
    names = {run.backend for run in service.controller.world.live_runs(job)}
    backends = [service.fleet.backends[name] for name in sorted(names) if name in service.fleet.backends]
    if backends and not any(backend.capabilities.checkpoint for backend in backends):
        told = ", ".join(f"backend {backend.name} ({backend.kind})" for backend in backends)
        raise Unsupported(
            f"{told} cannot let a run save its work",
            hint=f"`hodei backend show NAME` lists what a backend can do; a job may save its work by itself; see {_DOCS}",
        )


async def migrate(service: Service, job: JobId, to: str = "", force: bool = False) -> Job:
    """It leaves its nodes for others. Refused, with the reason, if no other could take it now, unless `force`."""
    found = await _stored(service, job)
    world, moving = service.controller.world, service.controller.moving
    known = world.jobs.get(job)
    if known is None or not can_move(known):
        state = "on its way out" if found.state in ("scheduled", "running") else found.state
        raise Conflict(f"job {job} is {state}; only a running job can be moved", code="NOT_RUNNING")
    if to and to not in world.nodes:
        raise NotFound(f"there is no node {to!r}{did_you_mean(to, sorted(world.nodes))}", hint="hodei nodes")
    if to and all(run.node == to for run in world.live_runs(job)):
        raise Conflict(f"job {job} is on {to} already")
    reason = moving.refusal(known, to, service.clock.now_ms())
    if reason and not force:
        raise Conflict(
            f"job {job} stays where it is: {reason}",
            hint="add --force to stop it all the same; it then waits until there is room",
            code="NOWHERE_TO_GO",
        )
    return await _changed(service, job, JobMigrated(job, to, force))


async def _stored(service: Service, job: JobId) -> Job:
    found = await service.read(service.store.job, job)
    if found is None:
        raise NotFound(f"there is no job {job}", hint="hodei jobs --all")
    # Before anything else is said of it: a caller who may not change it learns no more than that.
    service.rights.check_owner(found)
    return found


async def _changed(service: Service, job: JobId, fact: Fact) -> Job:
    await service.loop.committed([fact])
    return await _stored(service, job)
