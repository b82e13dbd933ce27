"""Calls about arrays, periodic jobs and the audit. `api.Client` has them all."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from hodei.api.audit import AuditList, AuditView
from hodei.api.cron import PeriodicList, PeriodicRequest, PeriodicView
from hodei.api.views import (
    BackendList,
    BackendRequest,
    BackendView,
    CancelRequest,
    ExecutedView,
    ExecuteRequest,
    JobView,
    NodeExecutedView,
    NodeExecuteRequest,
    NodeUsageView,
    RequeueReply,
    RequeueRequest,
    SubmitReply,
    UsageList,
)
from hodei.client.job_refs import Found, Reference, plain, several
from hodei.client.logs import Pause
from hodei.model.errors import InvalidInput
from hodei.model.job import JOB_ENDED

T = TypeVar("T")
_LONGEST_POLL_S = 20
_PAGE = 500


class MoreCalls(ABC):
    """What it needs of a client is at the end."""

    # ----------------------------------------------------------------------------------------- arrays

    def array(self, id: Reference) -> JobView:
        """The array that this job is an element of, as one row: `array.states` counts its elements."""
        return self._get(f"/arrays/{self._in_array(id)}", JobView)

    def cancel_array(self, id: Reference, reason: str = "") -> JobView:
        return self._post(f"/arrays/{self._in_array(id)}/cancel", JobView, CancelRequest(reason))

    def hold_array(self, id: Reference) -> JobView:
        return self._post(f"/arrays/{self._in_array(id)}/hold", JobView)

    def release_array(self, id: Reference) -> JobView:
        return self._post(f"/arrays/{self._in_array(id)}/release", JobView)

    def elements(self, array: Reference, state: str | Sequence[str] = ()) -> Iterator[JobView]:
        """The elements of an array, the last first, page by page as they are read; only those in one of these states."""
        whole = array if isinstance(array, JobView) else self.array(array)
        return self._elements(whole, state)

    def _elements(self, whole: JobView, state: str | Sequence[str]) -> Iterator[JobView]:
        place = whole.array
        if place is None:
            return
        for view in self.jobs(state=state, after=place.first + place.count):
            if view.id < place.first:
                return
            yield view

    def _in_array(self, reference: Reference) -> int:
        """The number of a job of the array that is meant."""
        meant = plain(reference)
        if isinstance(meant, int):
            return int(meant)
        array, ids = self.find(meant)
        if array is not None:
            return array.id
        if len(ids) != 1:
            raise InvalidInput(f"{meant!r} names {len(ids)} jobs, this call takes one array")
        return ids[0]

    def requeue_all(
        self,
        jobs: Reference | Sequence[Reference] = (),
        arrays: Reference | Sequence[Reference] = (),
        *,
        failed: bool = False,
    ) -> RequeueReply:
        """Start these jobs and all elements of these arrays again; `failed`: only those that have failed, and with them
        the jobs that had given up waiting for them."""
        # Sent twice it could start them twice.
        ones, wholes = list[int](), [self._in_array(one) for one in several(arrays)]
        for one in several(jobs):
            array, ids = self.find(one)
            ones += ids
            wholes += [array.id] if array is not None else []
        request = RequeueRequest(ones, wholes, failed)
        return self._post("/jobs/requeue", RequeueReply, request, again=False)

    def wait_array(self, id: Reference, timeout_s: float | None = None) -> JobView:
        """When every element has ended, or as it stands after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause, id = Pause(), self._in_array(id)
        while True:
            left_s = _LONGEST_POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
            poll_s = int(min(left_s, _LONGEST_POLL_S))
            query = {"timeout_s": str(poll_s)}
            view = self._patiently(partial(self._get, f"/arrays/{id}/wait", JobView, query))
            over = deadline is not None and time.monotonic() >= deadline
            if over or (view.array is not None and all(state in JOB_ENDED for state in view.array.states)):
                return view
            if not poll_s:
                time.sleep(min(left_s, pause.after(False)))

    # --------------------------------------------------------------------------------- periodic jobs

    def create_periodic(self, request: PeriodicRequest) -> PeriodicView:
        return self._post("/periodic", PeriodicView, request, again=False)

    def periodics(self) -> list[PeriodicView]:
        return self._get("/periodic", PeriodicList).periodics

    def periodic(self, name: str) -> PeriodicView:
        return self._get(f"/periodic/{quote(name, safe='')}", PeriodicView)

    def pause_periodic(self, name: str) -> PeriodicView:
        return self._post(f"/periodic/{quote(name, safe='')}/pause", PeriodicView)

    def resume_periodic(self, name: str) -> PeriodicView:
        return self._post(f"/periodic/{quote(name, safe='')}/resume", PeriodicView)

    def run_periodic(self, name: str) -> int:
        """Make a job now; its id."""
        return self._post(f"/periodic/{quote(name, safe='')}/run", SubmitReply, again=False).ids[0]

    def delete_periodic(self, name: str) -> PeriodicView:
        return self._delete(f"/periodic/{quote(name, safe='')}", PeriodicView)

    # ------------------------------------------------------------------------------------------ audit

    def audit(
        self, *, who: str = "", what: str = "", target: str = "", since: str = "", limit: int = 0
    ) -> Iterator[AuditView]:
        """Newest first, page by page as they are read; `limit` 0 means all. For administrators."""
        query = {"who": who, "what": what, "target": target, "since": since}
        before, left = 0, limit
        while True:
            size = min(left, _PAGE) if limit else _PAGE
            page = self._get("/audit", AuditList, query | {"limit": str(size), "before": str(before or "")}).entries
            yield from page
            left -= len(page)
            if len(page) < size or (limit and left <= 0):
                return
            before = page[-1].seq

    def audit_after(self, after: int, *, who: str = "", what: str = "", target: str = "") -> list[AuditView]:
        """What came after that row, oldest first."""
        query = {"who": who, "what": what, "target": target, "after": str(after), "limit": str(_PAGE)}
        return self._patiently(lambda: self._get("/audit", AuditList, query).entries)

    # --------------------------------------------------------------------------------- of the client

    @abstractmethod
    def jobs(self, *, state: str | Sequence[str] = (), after: int = 0) -> Iterator[JobView]: ...

    @abstractmethod
    def find(self, reference: Reference) -> Found: ...

    @abstractmethod
    def _one(self, reference: Reference) -> int: ...

    @abstractmethod
    def _get(self, path: str, kind: type[T], query: Mapping[str, str] | None = None) -> T: ...

    @abstractmethod
    def _post(self, path: str, kind: type[T], body: object = None, *, again: bool = True) -> T: ...

    @abstractmethod
    def _delete(self, path: str, kind: type[T]) -> T: ...

    @abstractmethod
    def _patiently(self, call: Callable[[], T], *, first: bool = False) -> T: ...


# --------------------------------------------------------------------------------------- backend calls
# Calls about backends, and commands beside runs. `api.Client` has them all.


class BackendCalls(MoreCalls):
    def backends(self) -> list[BackendView]:
        return self._get("/backends", BackendList).backends

    def backend(self, name: str) -> BackendView:
        return self._get(f"/backends/{quote(name, safe='')}", BackendView)

    def create_backend(self, name: str, kind: str, settings: Mapping[str, Any] | None = None) -> BackendView:
        return self._post("/backends", BackendView, BackendRequest(name, kind, dict(settings or {})), again=False)

    def disable_backend(self, name: str) -> BackendView:
        return self._post(f"/backends/{quote(name, safe='')}/disable", BackendView)

    def enable_backend(self, name: str) -> BackendView:
        return self._post(f"/backends/{quote(name, safe='')}/enable", BackendView)

    def delete_backend(self, name: str, *, force: bool = False) -> BackendView:
        return self._delete(f"/backends/{quote(name, safe='')}{'?force=1' if force else ''}", BackendView)

    def backend_usage(self, name: str) -> list[NodeUsageView]:
        return self._get(f"/backends/{quote(name, safe='')}/usage", UsageList).nodes

    def execute(self, job: Reference, command: Sequence[str], *, member: int = 0, timeout_s: int = 30) -> ExecutedView:
        """A command beside a running job; no shell reads its words."""
        request = ExecuteRequest(list(command), timeout_s, member)
        return self._post(f"/jobs/{self._one(job)}/execute", ExecutedView, request, again=False)

    def execute_on(self, node: str, command: Sequence[str], *, timeout_s: int = 30) -> NodeExecutedView:
        """A command on a node, for administrators; no shell reads its words."""
        request = NodeExecuteRequest(list(command), timeout_s)
        return self._post(f"/nodes/{quote(node, safe='')}/execute", NodeExecutedView, request, again=False)
