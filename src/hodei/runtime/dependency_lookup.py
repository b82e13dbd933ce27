"""What jobs wait for, looked up before they are let in: names, numbers, and how those stand that have ended already.

The controller asks nobody; so whatever it has to know about jobs that it has forgotten is told with the fact.
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

from hodei.control.admission.dependency_names import Found, Name, asked, depends, resolved
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

_PAGE = 1000
# So many names of the project's latest jobs are offered to whoever has mistyped one.
_NEAR = 200


class Known(Struct, frozen=True):
    """What was found; good for as long as nobody waits in between."""

    found: Found = Found()
    dependency_statuses: dict[JobId, DependencyStatus] = {}

    def resolved(self, specs: Sequence[JobSpec], first: JobId) -> Sequence[JobSpec]:
        return resolved(specs, first, self.found) if depends(specs) else specs

    def of(self, spec: JobSpec) -> tuple[DependencyStatus, ...]:
        if not spec.after.of:
            return ()
        return tuple(self.dependency_statuses[id] for id in _awaited([spec]) if id in self.dependency_statuses)


_NOTHING = Known()


class DependencyLookup:
    def __init__(
        self, controller: Controller, store: Store, read: Callable[..., Awaitable[Any]], allowed: AllowedData
    ) -> None:
        self._controller, self._store, self._read = controller, store, read
        self.allowed = allowed

    async def look_up(self, specs: Sequence[JobSpec]) -> Known:
        """InvalidInput for data that may not be waited for; the rest is refused by `Known.resolved`."""
        if not depends(specs):
            return _NOTHING
        wanted = asked(specs)
        try:
            self.allowed.check(sorted(wanted.data))
        except InvalidInput as error:
            raise InvalidInput(f"after: {error.message}", hint=error.hint, code="DATA_NOT_ALLOWED") from None
        # Of those that go on now the controller hears the end itself.
        live = {id: job for id in wanted.jobs if (job := self._controller.cluster.jobs.get(id)) is not None}
        for_saved = [one.job for spec in specs for one in spec.after.of if one.on == "checkpointed"]
        for_saved_names = {
            (spec.project, one.name) for spec in specs for one in spec.after.of if one.on == "checkpointed"
        }

        def look() -> Known:
            newest: dict[Name, Sequence[JobId]] = {}
            by_number = live | {job.id: job for job in self._jobs(wanted.jobs - live.keys())}
            arrays = {
                id: job.spec.array
                for id, job in by_number.items()
                if job.spec.array is not None and job.spec.array.first
            }
            whole = {id: _every(place) for id, place in arrays.items()}
            for project, name in sorted(wanted.names):
                page = self._store.jobs(JobQuery(project=project, name=name, limit=1)).jobs
                if page:
                    place = page[0].spec.array
                    if place is not None and place.first:
                        newest[project, name] = _every(place)
                        arrays[place.first] = place
                    else:
                        newest[project, name] = (page[0].id,)
            missing = {project for project, name in wanted.names if (project, name) not in newest}
            near = {project: self._names_in(project) for project in missing}
            saved = set(for_saved).union(
                *(newest[name] for name in for_saved_names & newest.keys()),
                *(whole[id] for id in whole.keys() & for_saved),
            )
            ids = set[JobId]().union(*newest.values(), *whole.values())
            names, dependency_statuses = self._standings(ids, saved, by_number)
            return Known(Found(newest, names, near, arrays), dependency_statuses)

        return await self._read(look)  # type: ignore[no-any-return]

    async def of_record(self, record: Job | None) -> tuple[DependencyStatus, ...]:
        """For an ended job that is to begin anew, and may have to wait again."""
        if record is None or record.attempt or not record.spec.after.of:
            return ()
        return tuple((await self._read(self._look, [record])).values())

    def restored(self, now_ms: int) -> tuple[list[JobRestored], list[Save]]:
        """All that the store remembers as not ended, and what is to be written because its times were ahead. Blocks."""
        active: list[tuple[Job, tuple[Run, ...]]] = []
        saves: list[Save] = []
        for job, runs in self._store.active():
            # A run of a member that the job does not have is damage that could not be mended.
            runs = tuple([run for run in runs if job.spec.has_member(run.member)])
            kept, kept_runs = clamp_job_times(job, now_ms), tuple([clamp_run_times(run, now_ms) for run in runs])
            if kept is not job:
                saves.append(SaveJob(kept))
            saves += [SaveRun(new) for new, old in zip(kept_runs, runs, strict=True) if new is not old]
            active.append((kept, kept_runs))
        return self._facts(active), saves

    def _facts(self, active: list[tuple[Job, tuple[Run, ...]]]) -> list[JobRestored]:
        waiting = [job for job, _ in active if job.spec.after.of and not (job.queued_ms or job.attempt)]
        if not waiting:
            return [JobRestored(job, runs) for job, runs in active]
        there = {job.id: DependencyStatus(job.id, job.state) for job, _ in active} | self._look(waiting)
        out = []
        for job, runs in active:
            waits = bool(job.spec.after.of) and not (job.queued_ms or job.attempt)
            told = tuple(there[id] for id in _awaited([job.spec]) if id in there) if waits else ()
            out.append(JobRestored(job, runs, told))
        return out

    # ------------------------------------------------------------------------------------------- the store

    def _look(self, jobs: Iterable[Job]) -> dict[JobId, DependencyStatus]:
        specs = [job.spec for job in jobs]
        saved = {one.job for spec in specs for one in spec.after.of if one.on == "checkpointed"}
        return self._standings(_awaited(specs), saved)[1]

    def _standings(
        self, ids: Iterable[JobId], ask_saved: Iterable[JobId], have: Mapping[JobId, Job] = MappingProxyType({})
    ) -> tuple[dict[JobId, str], dict[JobId, DependencyStatus]]:
        """The names of these jobs; how those stand that have ended or (if asked) have saved their work. `have`: jobs that
        were read already, which are told of too."""
        names: dict[JobId, str] = {}
        dependency_statuses: dict[JobId, DependencyStatus] = {}
        saved = {id for id in sorted(ask_saved) if any(run.checkpoint_ms for run in self._store.runs(id))}
        for job in chain(have.values(), self._jobs((set(ids) | saved) - have.keys())):
            names[job.id] = job.spec.name
            if job.state in JOB_ENDED or job.id in saved:
                dependency_statuses[job.id] = DependencyStatus(job.id, job.state, job.id in saved)
        return names, dependency_statuses

    def _jobs(self, ids: Iterable[JobId]) -> Iterator[Job]:
        wanted = sorted(ids)
        for first in range(0, len(wanted), _PAGE):
            yield from self._store.jobs(JobQuery(ids=tuple(wanted[first : first + _PAGE]), limit=_PAGE)).jobs

    def _names_in(self, project: str) -> list[str]:
        return sorted({job.spec.name for job in self._store.jobs(JobQuery(project=project, limit=_NEAR)).jobs})


def _every(place: ArrayElement) -> range:
    return range(place.first, place.last + 1)


def _awaited(specs: Iterable[JobSpec]) -> list[JobId]:
    return list(dict.fromkeys(one.job for spec in specs for one in spec.after.of if one.job))


# ------------------------------------------------------------------------------------------ data watch
# Looks for the files and addresses that jobs wait for, again and again, less and less often.


log = logging.getLogger("hodei.data")
FIRST_S, LONGEST_S, GROWTH = 1.0, 30.0, 1.5
_ANSWER_S = 10.0
_AT_ONCE = 8


def is_there(what: str, allowed: AllowedData) -> bool:
    """Whether it exists now. Blocks. What may not be asked for is never there."""
    place = parse_data_location(what)
    if place not in allowed:
        return False
    return _file_is_there(place.path, allowed) if place.is_file else _answers(place)


def _file_is_there(path: str, allowed: AllowedData) -> bool:
    try:
        os.stat(path)
        # A link inside an allowed directory must not become a window to the rest of the disk.
        return parse_data_location(os.path.realpath(path)) in allowed
    except (OSError, ValueError, InvalidInput):
        return False


def _answers(place: DataLocation) -> bool:
    scheme, _, host = place.root.partition("://")
    name, _, port = host.rpartition(":")
    name = name.strip("[]")
    connection = (
        http.client.HTTPSConnection(name, int(port), timeout=_ANSWER_S, context=ssl.create_default_context())
        if scheme == "https"
        else http.client.HTTPConnection(name, int(port), timeout=_ANSWER_S)
    )
    try:
        connection.request(HTTPMethod.HEAD, place.path + (f"?{place.query}" if place.query else ""))
        # A redirect leads elsewhere, perhaps where nobody may look: it is not the thing itself.
        return 200 <= connection.getresponse().status < 300
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


class DataWatch:
    """`awaited` says what is waited for now; `tell` hears of what has appeared."""

    def __init__(
        self,
        awaited: Callable[[], Iterable[str]],
        tell: Callable[[Sequence[Fact]], None],
        allowed: AllowedData,
        look: Callable[[str, AllowedData], bool] = is_there,
        *,
        first_s: float = FIRST_S,
    ) -> None:
        self._awaited, self._tell, self._allowed, self._look = awaited, tell, allowed, look
        self._first_s = first_s
        self._due: dict[str, tuple[float, float]] = {}
        self._looking: dict[str, asyncio.Future[bool]] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="data")

    async def run(self) -> None:
        try:
            while True:
                self.turn(asyncio.get_running_loop().time())
                await asyncio.sleep(self._first_s)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def turn(self, now_s: float) -> None:
        """Begin to look for what is due; who has found something tells it."""
        wanted = dict.fromkeys(self._awaited())
        self._due = {what: self._due.get(what, (now_s, self._first_s)) for what in wanted}
        for what, (at_s, pause_s) in self._due.items():
            if at_s > now_s or what in self._looking or len(self._looking) >= _AT_ONCE:
                continue
            self._due[what] = (now_s + pause_s, min(pause_s * GROWTH, LONGEST_S))
            looking = asyncio.get_running_loop().run_in_executor(self._threads, self._look, what, self._allowed)
            self._looking[what] = looking
            looking.add_done_callback(lambda done, what=what: self._looked(what, done))  # type: ignore[misc]

    def _looked(self, what: str, done: asyncio.Future[bool]) -> None:
        self._looking.pop(what, None)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            log.warning("cannot look for %s: %s", what, error)
        elif done.result():
            self._tell([DataAppeared(what)])
