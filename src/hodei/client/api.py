"""`Client`: calls about jobs, arrays, their output and events. Responses are the types of `hodei.api.views`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from hodei.api.usage import CostList, RunUsageList, RunUsageRow
from hodei.api.views import (
    CancelRequest,
    EventList,
    ExecutedView,
    ExecuteRequest,
    JobDetail,
    JobGraph,
    JobList,
    JobView,
    LogTimes,
    MigrateRequest,
    PlanReply,
    RequeueReply,
    RequeueRequest,
    SubmitReply,
    WhatIfRequest,
)
from hodei.client.job_refs import ArrayId, JobHandle, Reference, Resolved, as_list, document_ref, normalize, resolve
from hodei.client.logs import Backoff, Line, LogOptions, LogReader, read_lines
from hodei.client.resources import API, JSON, PAGE, ResourceClient, decode, encode
from hodei.client.transport import CONNECTION_ERRORS, ServerUnreachable, WaitTimedOut, sse_events
from hodei.model.effects import Event
from hodei.model.errors import HodeiError, InvalidInput, Unavailable
from hodei.model.explanation import Explanation, PriorityBreakdown, WhatIf
from hodei.model.job import JOB_ENDED

# The most jobs that a server takes in one request.
MAX_BATCH = 10_000
_LONG_POLL_S = 20
# The keys of `after` that name no jobs.
_AFTER_OPTIONS = ("exists", "need", "timeout")


class Client(ResourceClient):
    """A server, found by argument, environment (HODEI_SERVER, HODEI_TOKEN, HODEI_TOKEN_FILE) or HODEI_HOME.

    Nothing is sent before the first call. Once a server has answered, long calls (`wait`, `logs`, `events`,
    `submit_all`) survive a restart of up to `retry_s`; others fail at once with ServerUnreachable.
    Not thread-safe: give each thread its own.
    """

    def submit(
        self,
        job: Mapping[str, Any] | str | Path | None = None,
        *,
        key: str = "",
        wait_ready: bool = False,
        **fields: Any,
    ) -> JobHandle:
        """Submit one job: a document, the path of a YAML file with one document, or fields (`command=[…], cpu=2`).

        `key` is an idempotency key: the same key creates no second job. `wait_ready`: wait for a server that is
        starting.
        """
        document = _document(job, fields)
        if wait_ready:
            self._retry(self.ready, wait_for_first=True)
        return JobHandle(self, self._submit([document], key or secrets.token_hex(16))[0], document_name(document))

    def submit_all(self, documents: Iterable[Mapping[str, Any]], *, key: str = "") -> list[int]:
        """Submit many jobs; returns their ids in the same order, for arrays an `ArrayId`. Each request has its own key,
        derived from `key`, so repeating a request whose response was lost creates no second job."""
        documents, key, ids = list(documents), key or secrets.token_hex(16), []
        # Jobs that depend on each other by name must be in one request.
        size = MAX_BATCH if any(map(_has_dependencies, documents)) else PAGE
        for start in range(0, len(documents), size):
            chunk, chunk_key = documents[start : start + size], f"{key}.{start // size}"
            ids += self._retry(partial(self._submit, chunk, chunk_key))
        return ids

    def plan(self, documents: Iterable[Mapping[str, Any]]) -> list[Explanation]:
        """Dry run: what would happen to these jobs now, in order."""
        return self._post("/plan", PlanReply, {"jobs": [_sendable(one) for one in documents]}).plans

    def what_if(self, request: WhatIfRequest) -> WhatIf:
        """Which jobs would start when after a change. Nothing is changed."""
        return self._post("/whatif", WhatIf, request)

    def jobs(
        self,
        *,
        state: str | Sequence[str] = (),
        project: str = "",
        user: str = "",
        name: str = "",
        label: str = "",
        since: str = "",
        after: int = 0,
        limit: int = 0,
        arrays: str = "",
    ) -> Iterator[JobView]:
        """Newest first, page by page; `limit` 0: all. `label` is a selector. `arrays="fold"`: one row per array."""
        query = {
            "state": state if isinstance(state, str) else ",".join(state),
            "project": project, "user": user, "name": name, "label": label, "since": since, "arrays": arrays,
        }  # fmt: skip
        left = limit
        while True:
            size = min(left, PAGE) if limit else PAGE
            page = self._get("/jobs", JobList, query | {"limit": str(size), "after": str(after) if after else ""})
            yield from page.jobs
            left, after = left - len(page.jobs), page.next_after
            if not after or (limit and left <= 0):
                return

    def costs(self, *, since: str = "", until: str = "", **only: str) -> CostList:
        """What runs cost by project, user and backend. `only`: project, user or backend."""
        return self._get("/costs", CostList, {"since": since, "until": until, **only})

    def usage(
        self, *, project: str = "", user: str = "", node: str = "", sort: str = "cpu", limit: int = 0
    ) -> Iterator[RunUsageRow]:
        """What running runs use now, the largest first, page by page; `limit` 0: all. `sort`: cpu or memory."""
        query = {"project": project, "user": user, "node": node, "sort": sort}
        left, after = limit, 0
        while True:
            size = min(left, PAGE) if limit else PAGE
            page = self._get("/usage", RunUsageList, query | {"limit": str(size), "after": str(after)})
            yield from page.runs
            left, after = left - len(page.runs), page.next_after
            if not after or (limit and left <= 0):
                return

    def resolve(self, reference: Reference) -> Resolved:
        """The array or jobs of a reference: a number is one job; text is read as on the command line (`sweep`, `last`,
        `17[3]`); a handle or view is its job or array. InvalidInput for anything else."""
        ref = normalize(reference)
        if isinstance(ref, ArrayId):
            return Resolved(self.array(int(ref)))
        return Resolved(None, (ref,)) if isinstance(ref, int) else resolve(self, ref)

    def job(self, id: Reference, *, secrets: bool = False) -> JobDetail:
        """`secrets`: include the values of secret variables, for the owner of the job. For an array: its row, with the
        specification of its first element."""
        array, one = self._job_or_array(id)
        found = self._get(f"/jobs/{one}", JobDetail, {"secrets": "show"} if secrets else None)
        return msgspec.structs.replace(found, job=array, runs=[]) if array is not None else found

    def cancel(self, id: Reference, reason: str = "") -> JobView:
        return self._post(f"{self._path(id)}/cancel", JobView, CancelRequest(reason))

    def hold(self, id: Reference) -> JobView:
        return self._post(f"{self._path(id)}/hold", JobView)

    def release(self, id: Reference) -> JobView:
        return self._post(f"{self._path(id)}/release", JobView)

    def requeue(self, id: Reference) -> JobView:
        """Start a job again. For an array: every element that has started, also those that have succeeded."""
        array, one = self._job_or_array(id)
        if array is not None:
            self.requeue_all(arrays=[array.id])
            return self.array(array.id)
        return self._post(f"/jobs/{one}/requeue", JobView, idempotent=False)

    def requeue_all(
        self,
        jobs: Reference | Sequence[Reference] = (),
        arrays: Reference | Sequence[Reference] = (),
        *,
        failed: bool = False,
        permitted: bool = False,
    ) -> RequeueReply:
        """Requeue jobs and elements of arrays. `failed`: only failed ones, and jobs that failed because of them.
        `permitted`: only those that this caller may requeue; without it, one that they may not requeue refuses all."""
        job_ids, array_ids = list[int](), [self._element_id(one) for one in as_list(arrays)]
        for one in as_list(jobs):
            array, ids = self.resolve(one)
            job_ids += ids
            array_ids += [array.id] if array is not None else []
        request = RequeueRequest(job_ids, array_ids, failed, permitted)
        return self._post("/jobs/requeue", RequeueReply, request, idempotent=False)

    def suspend(self, id: Reference) -> JobView:
        return self._post(f"/jobs/{self._job_id(id)}/suspend", JobView)

    def resume(self, id: Reference) -> JobView:
        return self._post(f"/jobs/{self._job_id(id)}/resume", JobView)

    def checkpoint(self, id: Reference) -> JobView:
        """Make its runs take a checkpoint now and continue."""
        return self._post(f"/jobs/{self._job_id(id)}/checkpoint", JobView)

    def migrate(self, id: Reference, to: str = "", force: bool = False) -> JobView:
        return self._post(f"/jobs/{self._job_id(id)}/migrate", JobView, MigrateRequest(to, force), idempotent=False)

    def execute(self, job: Reference, command: Sequence[str], *, member: int = 0, timeout_s: int = 30) -> ExecutedView:
        """Run a command next to a running job, without a shell."""
        request = ExecuteRequest(list(command), timeout_s, member)
        return self._post(f"/jobs/{self._job_id(job)}/execute", ExecutedView, request, idempotent=False)

    def why(self, id: Reference, node: str = "") -> Explanation:
        """`node`: only for that node. Of an array: its first pending, else its first failed, else its first element."""
        array, one = self._job_or_array(id)
        if array is not None:
            one = self.element_to_explain(array)
        return self._get(f"/jobs/{one}/why", Explanation, {"node": node} if node else None)

    def priority(self, id: Reference) -> PriorityBreakdown:
        """Every term of a pending job's priority."""
        return self._get(f"/jobs/{self._job_id(id)}/priority", PriorityBreakdown)

    def graph(self, id: Reference) -> JobGraph:
        """The dependencies and dependents of a job."""
        return self._get(f"/jobs/{self._job_id(id)}/graph", JobGraph)

    def wait(
        self,
        ids: Reference | Iterable[Reference],
        timeout_s: float | None = None,
        *,
        on_end: Callable[[JobView], object] | None = None,
    ) -> list[JobView]:
        """Return when all have ended, in the order given. WaitTimedOut if that takes longer than `timeout_s`.

        An array is one row, which is `succeeded` only if every element is.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wanted = [self._job_or_array(id) for id in as_list(ids)]
        views: list[JobView] = []
        for array, id in wanted:
            view = self._wait(f"/{'jobs' if array is None else 'arrays'}/{id}/wait", deadline)
            if not _has_ended(view):
                later = wanted[len(views) + 1 :]
                views += [view, *(self.job(one).job if array is None else self.array(one) for array, one in later)]
                running = [str(v.id) for v in views if not _has_ended(v)]
                raise WaitTimedOut(
                    f"{len(running)} of {len(wanted)} jobs not ended after {timeout_s:g} s: {', '.join(running[:10])}",
                    hint=f"hodei why {running[0]}" if running else "", jobs=views,
                )  # fmt: skip
            views.append(view)
            if on_end:
                on_end(view)
        return views

    def array(self, id: Reference) -> JobView:
        """The array that this job is an element of, as one row: `array.states` counts its elements by state."""
        return self._get(f"/arrays/{self._element_id(id)}", JobView)

    def elements(self, array: Reference, state: str | Sequence[str] = ()) -> Iterator[JobView]:
        """The elements of an array, last first, fetched page by page; only those in one of these states."""
        return self._elements(array if isinstance(array, JobView) else self.array(array), state)

    def element_to_explain(self, array: JobView) -> int:
        """The element that says most about the state of an array."""
        assert array.array is not None
        for state in ("pending", "held", "failed"):
            if array.array.states.get(state):
                # One page is enough: in a very large array this need not be the very first element.
                found = [view.id for view in islice(self.elements(array, state), PAGE)]
                if found:
                    return found[-1]
        return array.array.first

    def logs(
        self, id: Reference, follow: bool = False, stream: str = "stdout", member: int = 0, attempt: int = 0
    ) -> Iterator[bytes]:
        """The output so far; with `follow` also what comes until the job ends, later attempts included. For an array:
        line by line, each with its element (`log_lines` has more)."""
        array, id = self._job_or_array(id)
        if array is not None:
            for line in read_lines(self, array, LogOptions((stream,), (member,), attempt, follow=follow)):
                yield b"%s | %s" % (line.source.encode(), line.text)
            return
        reader, backoff = self.log_reader(id, stream=stream, member=member, attempt=attempt, follow=follow), Backoff()
        while not reader.at_end:
            data = reader.read()
            if data:
                yield data
            if not reader.at_end:
                time.sleep(backoff.next_s(reset=bool(data)))

    def log_times(self, id: Reference, *, stream: str = "stdout", member: int = 0, attempt: int = 0) -> LogTimes:
        """When a run wrote which part of its output, if its backend records that."""
        query = {"stream": stream, "member": str(member), "attempt": str(attempt)}
        return self._retry(partial(self._get, f"/jobs/{self._job_id(id)}/logs/times", LogTimes, query))

    def log_lines(self, id: Reference, options: LogOptions = LogOptions()) -> Iterator[Line]:  # noqa: B008 - frozen
        """The output of the elements of an array or the members of a gang, line by line, with source and time."""
        array, one = self._job_or_array(id)
        return read_lines(self, array if array is not None else self.job(one).job, options)

    def log_reader(
        self, id: Reference, *, stream: str = "stdout", member: int = 0, attempt: int = 0, follow: bool = True
    ) -> LogReader:
        """A reader of one stream, for callers that follow several streams at their own pace."""
        path = f"{API}/jobs/{self._job_id(id)}/logs"
        return LogReader(
            lambda query: self._retry(lambda: self._transport.request("GET", path, query=query)),
            stream=stream, member=member, attempt=attempt, follow=follow,
        )  # fmt: skip

    def events(self, after: int = 0, follow: bool = False, *, job: Reference = 0) -> Iterator[Event]:
        """Events with a number above `after`, oldest first; with `follow` it never ends and misses none."""
        job = self._job_id(job) if job else 0
        while True:
            page = self._retry(partial(self.event_page, after, job=job))
            yield from page.events
            if not page.events:
                break
            after = page.events[-1].seq
        if follow:
            yield from self.stream(after, job=job)

    def event_page(self, after: int = 0, *, job: int = 0, limit: int = 1000) -> EventList:
        query = {"after": str(after), "job": str(job) if job else "", "limit": str(limit)}
        return self._get("/events", EventList, query)

    def last_event(self) -> int:
        """The number of the newest event, 0 if there is none."""
        # The API only reads forward, so the end is found by growing, then shrinking steps.
        known, step = 0, 1024
        while True:
            page = self.event_page(known + step - 1, limit=1)
            if page.events:
                known, step = page.events[0].seq, step * 2
            elif step == 1:
                return known
            else:
                step = max(1, step // 4)

    def stream(self, after: int, *, job: int = 0) -> Iterator[Event]:
        """Events with a number above `after` as they happen. A lost connection is resumed after the last event."""
        lost_at: float | None = None
        backoff = Backoff()
        while True:
            try:
                query = {"after": str(after), "job": str(job) if job else ""}
                headers = {"Last-Event-ID": str(after), "Accept": "text/event-stream"}
                with self._transport.stream(f"{API}/events/stream", query, headers) as response:
                    for event in sse_events(response):
                        lost_at, backoff = None, Backoff()
                        if event.seq > after:
                            after = event.seq
                            yield event
            except (*CONNECTION_ERRORS, ServerUnreachable, Unavailable) as error:
                now = time.monotonic()
                lost_at = now if lost_at is None else lost_at
                if not self._transport.connected or now - lost_at > self._retry_s:
                    if isinstance(error, HodeiError):
                        raise
                    raise ServerUnreachable(f"the event stream of {self.address} was lost: {error}") from error
            time.sleep(backoff.next_s())

    def _submit(self, documents: list[Mapping[str, Any]], key: str) -> list[int]:
        body, headers = encode({"jobs": [_sendable(one) for one in documents]}), JSON | {"Idempotency-Key": key}
        reply = decode(self._transport.request("POST", f"{API}/jobs", body=body, headers=headers).body, SubmitReply)
        counts = reply.counts or [1] * len(reply.ids)
        return [ArrayId(id) if count > 1 else id for id, count in zip(reply.ids, counts, strict=True)]

    def _job_or_array(self, reference: Reference) -> tuple[JobView | None, int]:
        """The array and the id of its first job, or None and the id of the one job."""
        array, ids = self.resolve(reference)
        if array is not None:
            return array, array.id
        if len(ids) != 1:
            raise InvalidInput(f"{reference!r} names {len(ids)} jobs, this call takes one")
        return None, ids[0]

    def _path(self, reference: Reference) -> str:
        ref = normalize(reference)
        if isinstance(ref, int):
            return f"/{'arrays' if isinstance(ref, ArrayId) else 'jobs'}/{int(ref)}"
        array, one = self._job_or_array(ref)
        return f"/jobs/{one}" if array is None else f"/arrays/{one}"

    def _job_id(self, reference: Reference) -> int:
        """The id of one job, for calls that do not take an array."""
        ref = normalize(reference)
        if isinstance(ref, ArrayId):
            raise InvalidInput(f"{ref}[] is an array, this call takes one job", hint=f"name an element: '{ref}[0]'")
        array, one = self._job_or_array(ref)
        if array is not None and array.array is not None:
            what = f"{ref!r} is an array of {array.array.count} jobs, this call takes one"
            raise InvalidInput(what, hint=f"name an element: '{array.id}[{array.array.start}]'")
        return one

    def _element_id(self, reference: Reference) -> int:
        """The id of any element of an array."""
        ref = normalize(reference)
        if isinstance(ref, int):
            return int(ref)
        array, ids = self.resolve(ref)
        if array is not None:
            return array.id
        if len(ids) != 1:
            raise InvalidInput(f"{ref!r} names {len(ids)} jobs, this call takes one array")
        return ids[0]

    def _elements(self, array: JobView, state: str | Sequence[str]) -> Iterator[JobView]:
        place = array.array
        if place is None:
            return
        for view in self.jobs(state=state, after=place.first + place.count):
            if view.id < place.first:
                return
            yield view

    def _wait(self, path: str, deadline: float | None) -> JobView:
        backoff = Backoff()
        while True:
            left_s = _LONG_POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
            poll_s = int(min(left_s, _LONG_POLL_S))
            query, timeout_s = {"timeout_s": str(poll_s)}, poll_s + self._timeout_s
            view = self._retry(partial(self._get, path, JobView, query, timeout_s=timeout_s))
            if _has_ended(view) or (deadline is not None and time.monotonic() >= deadline):
                return view
            if not poll_s:
                time.sleep(min(left_s, backoff.next_s()))


def _has_ended(view: JobView) -> bool:
    states = view.array.states if view.array is not None else {}
    return all(state in JOB_ENDED for state in states) if states else view.state in JOB_ENDED


def _document(job: Mapping[str, Any] | str | Path | None, fields: dict[str, Any]) -> Mapping[str, Any]:
    if job is None:
        return fields
    if fields:
        raise InvalidInput("give a job document or fields, not both")
    if isinstance(job, Mapping):
        return job
    if not isinstance(job, str | Path):
        text = f"a job is a document, the path of a job file, or fields, not a {type(job).__name__}"
        raise InvalidInput(text, hint='for a command: submit(command=["echo", "hi"])')
    from hodei.jobfile.yaml_reader import check_suffix, load_yaml

    check_suffix(str(job))
    try:
        text = Path(job).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"cannot read the job file {job}: {reason}", hint="an example: hodei job init") from None
    documents = load_yaml(text, name=str(job))
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise InvalidInput(f"{job} contains {len(documents)} documents", hint="load them and use submit_all")
    return documents[0]


def document_name(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata")
    return str(document.get("name") or (metadata.get("name", "") if isinstance(metadata, Mapping) else ""))


def _has_dependencies(document: Mapping[str, Any]) -> bool:
    spec = document.get("spec") if isinstance(document, Mapping) else None
    return "after" in document or (isinstance(spec, Mapping) and "after" in spec)


def _sendable(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """With handles and views in `after` as text. Anything that is not a document is left for the server to refuse."""
    if not isinstance(document, Mapping) or not _has_dependencies(document):
        return document
    if "after" in document:
        return {**document, "after": _sendable_after(document["after"])}
    return {**document, "spec": {**document["spec"], "after": _sendable_after(document["spec"]["after"])}}


def _sendable_after(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {on: value if on in _AFTER_OPTIONS else _sendable_after(value) for on, value in given.items()}
    if isinstance(given, list | tuple | set | frozenset):
        return [_sendable_after(one) for one in given]
    # The server checks numbers and text, because it knows their path.
    if given is None or (isinstance(given, int | str) and not isinstance(given, ArrayId)):
        return given
    try:
        return document_ref(given)
    except InvalidInput as error:
        raise InvalidInput(f"after: {error.message}", hint=error.hint) from None
