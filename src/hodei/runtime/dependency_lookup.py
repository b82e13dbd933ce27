"""Dependencies of jobs that the controller cannot see: names and ended jobs (from the store), files and URLs (`DataWatch`).

The controller does no I/O and keeps only active jobs, so the facts carry what it needs to know about other jobs.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPMethod
from itertools import chain
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from hodei.control.admission.dependency_names import (
    Name,
    ResolvedReferences,
    has_dependencies,
    references,
    resolve_names,
)
from hodei.control.controller import Controller
from hodei.control.lifecycle.runs import clamp_job_times, clamp_run_times
from hodei.model.array import ArrayElement
from hodei.model.dependency import AllowedData, DataLocation, DependencyStatus, parse_data_location
from hodei.model.effects import Save, SaveJob, SaveRun
from hodei.model.errors import InvalidInput
from hodei.model.facts import DataAppeared, Fact, JobRestored
from hodei.model.ids import JobId
from hodei.model.job import JOB_ENDED, Job, JobSpec, Run
from hodei.ports import JobQuery, Store

log = logging.getLogger("hodei.data_watch")
_PAGE = 1000
# This many names of the project's latest jobs are searched for a likely spelling.
_RECENT_JOBS = 200


def read_jobs(store: Store, ids: Iterable[JobId]) -> Iterator[Job]:
    """The jobs with these numbers that the store has. Blocks."""
    wanted = sorted(set(ids))
    for first in range(0, len(wanted), _PAGE):
        yield from store.jobs(JobQuery(ids=tuple(wanted[first : first + _PAGE]), limit=_PAGE)).jobs


class ResolvedDependencies(Struct, frozen=True):
    """The result of a lookup. It holds as long as the event loop does not run in between."""

    found: ResolvedReferences = ResolvedReferences()
    statuses: dict[JobId, DependencyStatus] = {}

    def resolve(self, specs: Sequence[JobSpec], first: JobId) -> Sequence[JobSpec]:
        return resolve_names(specs, first, self.found) if has_dependencies(specs) else specs

    def of(self, spec: JobSpec) -> tuple[DependencyStatus, ...]:
        if not spec.after.of:
            return ()
        return tuple(self.statuses[id] for id in _awaited([spec]) if id in self.statuses)


_NO_DEPENDENCIES = ResolvedDependencies()


class DependencyLookup:
    def __init__(
        self, controller: Controller, store: Store, read: Callable[..., Awaitable[Any]], allowed: AllowedData
    ) -> None:
        self._controller, self._store, self._read = controller, store, read
        self.allowed = allowed

    async def look_up(self, specs: Sequence[JobSpec]) -> ResolvedDependencies:
        """InvalidInput for data that may not be waited for; `resolve` refuses everything else that is wrong."""
        if not has_dependencies(specs):
            return _NO_DEPENDENCIES
        wanted = references(specs)
        try:
            self.allowed.check(sorted(wanted.data))
        except InvalidInput as error:
            raise InvalidInput(f"after: {error.message}", hint=error.hint, code="DATA_NOT_ALLOWED") from None
        # The controller itself sees these end.
        live = {id: job for id in wanted.jobs if (job := self._controller.cluster.jobs.get(id)) is not None}
        conditions = [(spec.project, one) for spec in specs for one in spec.after.of if one.on == "checkpointed"]
        checkpoint_jobs = [one.job for _, one in conditions]
        checkpoint_names = {(project, one.name) for project, one in conditions}

        def query() -> ResolvedDependencies:
            newest: dict[Name, Sequence[JobId]] = {}
            by_number = live | {job.id: job for job in read_jobs(self._store, wanted.jobs - live.keys())}
            arrays = {
                id: job.spec.array
                for id, job in by_number.items()
                if job.spec.array is not None and job.spec.array.first
            }
            elements = {id: _elements(place) for id, place in arrays.items()}
            for project, name in sorted(wanted.names):
                page = self._store.jobs(JobQuery(project=project, name=name, limit=1)).jobs
                if page:
                    place = page[0].spec.array
                    if place is not None and place.first:
                        newest[project, name] = _elements(place)
                        arrays[place.first] = place
                    else:
                        newest[project, name] = (page[0].id,)
            missing = {project for project, name in wanted.names if (project, name) not in newest}
            similar = {project: self._recent_names(project) for project in missing}
            on_checkpoint = set(checkpoint_jobs).union(
                *(newest[name] for name in checkpoint_names & newest.keys()),
                *(elements[id] for id in elements.keys() & checkpoint_jobs),
            )
            ids = set[JobId]().union(*newest.values(), *elements.values())
            names, statuses = self._statuses(ids, on_checkpoint, by_number)
            return ResolvedDependencies(ResolvedReferences(newest, names, similar, arrays), statuses)

        return await self._read(query)  # type: ignore[no-any-return]

    async def of_record(self, record: Job | None) -> tuple[DependencyStatus, ...]:
        """The dependencies of an ended job that is requeued and may have to wait again."""
        if record is None or record.attempt or not record.spec.after.of:
            return ()
        return tuple((await self._read(self._statuses_for, [record])).values())

    def restore(self, now_ms: int) -> tuple[list[JobRestored], list[Save]]:
        """All active jobs of the store, and the saves for those whose times were ahead of the clock. Blocks."""
        active: list[tuple[Job, tuple[Run, ...]]] = []
        saves: list[Save] = []
        for job, runs in self._store.active():
            # A run of a member that the job does not have is damage that could not be repaired.
            runs = tuple([run for run in runs if job.spec.has_member(run.member)])
            kept, kept_runs = clamp_job_times(job, now_ms), tuple([clamp_run_times(run, now_ms) for run in runs])
            if kept is not job:
                saves.append(SaveJob(kept))
            saves += [SaveRun(new) for new, old in zip(kept_runs, runs, strict=True) if new is not old]
            active.append((kept, kept_runs))
        waiting = {job.id: job for job, _ in active if job.spec.after.of and not (job.queued_ms or job.attempt)}
        if not waiting:
            return [JobRestored(job, runs) for job, runs in active], saves
        statuses = {job.id: DependencyStatus(job.id, job.state) for job, _ in active}
        statuses |= self._statuses_for(waiting.values())
        out = []
        for job, runs in active:
            awaited = _awaited([job.spec]) if job.id in waiting else ()
            out.append(JobRestored(job, runs, tuple(statuses[id] for id in awaited if id in statuses)))
        return out, saves

    def _statuses_for(self, jobs: Iterable[Job]) -> dict[JobId, DependencyStatus]:
        specs = [job.spec for job in jobs]
        on_checkpoint = {one.job for spec in specs for one in spec.after.of if one.on == "checkpointed"}
        return self._statuses(_awaited(specs), on_checkpoint)[1]

    def _statuses(
        self, ids: Iterable[JobId], on_checkpoint: Iterable[JobId], have: Mapping[JobId, Job] = MappingProxyType({})
    ) -> tuple[dict[JobId, str], dict[JobId, DependencyStatus]]:
        """The names of these jobs, and the statuses of those that have ended or, if in `on_checkpoint`, have a checkpoint.
        `have`: jobs that were already read; they are included."""
        names: dict[JobId, str] = {}
        statuses: dict[JobId, DependencyStatus] = {}
        saved = {id for id in sorted(on_checkpoint) if any(run.checkpoint_ms for run in self._store.runs(id))}
        for job in chain(have.values(), read_jobs(self._store, (set(ids) | saved) - have.keys())):
            names[job.id] = job.spec.name
            if job.state in JOB_ENDED or job.id in saved:
                statuses[job.id] = DependencyStatus(job.id, job.state, job.id in saved)
        return names, statuses

    def _recent_names(self, project: str) -> list[str]:
        return sorted({job.spec.name for job in self._store.jobs(JobQuery(project=project, limit=_RECENT_JOBS)).jobs})


def _elements(place: ArrayElement) -> range:
    return range(place.first, place.last + 1)


def _awaited(specs: Iterable[JobSpec]) -> list[JobId]:
    return list(dict.fromkeys(one.job for spec in specs for one in spec.after.of if one.job))


FIRST_S, LONGEST_S, GROWTH = 1.0, 30.0, 1.5
_TIMEOUT_S = 10.0
_MAX_CHECKS = 8


def exists(what: str, allowed: AllowedData) -> bool:
    """Whether the file or URL exists now; False if it is not allowed. Blocks."""
    place = parse_data_location(what)
    if place not in allowed:
        return False
    return _file_exists(place.path, allowed) if place.is_file else _url_exists(place)


def _file_exists(path: str, allowed: AllowedData) -> bool:
    try:
        os.stat(path)
        # A link inside an allowed directory must not reveal files elsewhere.
        return parse_data_location(os.path.realpath(path)) in allowed
    except (OSError, ValueError, InvalidInput):
        return False


def _url_exists(place: DataLocation) -> bool:
    scheme, _, host = place.root.partition("://")
    name, _, port = host.rpartition(":")
    name = name.strip("[]")
    connection = (
        http.client.HTTPSConnection(name, int(port), timeout=_TIMEOUT_S, context=ssl.create_default_context())
        if scheme == "https"
        else http.client.HTTPConnection(name, int(port), timeout=_TIMEOUT_S)
    )
    try:
        connection.request(HTTPMethod.HEAD, place.path + (f"?{place.query}" if place.query else ""))
        # Redirects are not followed: the target may not be allowed.
        return 200 <= connection.getresponse().status < 300
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


class DataWatch:
    """Checks the files and URLs that jobs wait for (`awaited`), less and less often, and enqueues DataAppeared."""

    def __init__(
        self,
        awaited: Callable[[], Iterable[str]],
        enqueue: Callable[[Sequence[Fact]], None],
        allowed: AllowedData,
        check: Callable[[str, AllowedData], bool] = exists,
        *,
        first_s: float = FIRST_S,
    ) -> None:
        self._awaited, self._enqueue, self._allowed, self._check = awaited, enqueue, allowed, check
        self._first_s = first_s
        self._due: dict[str, tuple[float, float]] = {}
        self._checks: dict[str, asyncio.Future[bool]] = {}
        self._threads = ThreadPoolExecutor(_MAX_CHECKS, thread_name_prefix="data")

    async def run(self) -> None:
        try:
            while True:
                self.poll(asyncio.get_running_loop().time())
                await asyncio.sleep(self._first_s)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def poll(self, now_s: float) -> None:
        """Starts the checks that are due."""
        wanted = dict.fromkeys(self._awaited())
        self._due = {what: self._due.get(what, (now_s, self._first_s)) for what in wanted}
        for what, (at_s, pause_s) in self._due.items():
            if at_s > now_s or what in self._checks or len(self._checks) >= _MAX_CHECKS:
                continue
            self._due[what] = (now_s + pause_s, min(pause_s * GROWTH, LONGEST_S))
            check = asyncio.get_running_loop().run_in_executor(self._threads, self._check, what, self._allowed)
            self._checks[what] = check
            check.add_done_callback(lambda done, what=what: self._checked(what, done))  # type: ignore[misc]

    def _checked(self, what: str, done: asyncio.Future[bool]) -> None:
        self._checks.pop(what, None)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            log.warning("cannot check whether %s exists: %s", what, error)
        elif done.result():
            self._enqueue([DataAppeared(what)])
