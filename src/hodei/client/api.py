"""The calls of the client, each one request or a few. Answers are the typed values of `hodei.api.views`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from hodei.api.config import ConfigHistory, ConfigView
from hodei.api.reservations import ReservationList, ReservationRequest, ReservationView
from hodei.api.views import (
    CancelRequest,
    Check,
    CheckList,
    EventList,
    Info,
    JobDetail,
    JobGraph,
    JobList,
    JobView,
    LogTimes,
    MigrateRequest,
    NodeHistoryView,
    NodeList,
    NodePatch,
    NodeView,
    PlanReply,
    SubmitReply,
    WhatIfRequest,
)
from hodei.client.address import find_server
from hodei.client.errors import ServerUnreachable, WaitTimedOut
from hodei.client.job_refs import ArrayId, Found, JobHandle, Reference, find, plain, several, written
from hodei.client.logs import Line, LogReader, Pause, Wish, lines_of
from hodei.client.resource_calls import BackendCalls
from hodei.client.transport import LOST, Reply, Transport, sse_events
from hodei.model.accounting import QuotaList, QuotaRow, ShareReport
from hodei.model.config import ConfigChange, SchedulingConfig
from hodei.model.effects import Event
from hodei.model.errors import HodeiError, InvalidInput, Unavailable
from hodei.model.explanation import Explanation, PriorityBreakdown, WhatIf
from hodei.model.job import JOB_ENDED

API = "/api/v1"
CHUNK_OF_JOBS = 500
MOST_TOGETHER = 10_000
_JSON = {"Content-Type": "application/json"}
_LONGEST_POLL_S = 20
# The keys of `after` that name no jobs.
_NO_JOBS = ("exists", "need", "timeout")
T = TypeVar("T")


class Client(BackendCalls):
    """A server, found by argument, environment (HODEI_SERVER, HODEI_TOKEN, HODEI_TOKEN_FILE) or HODEI_HOME.

    Nothing is sent before the first call. Once a server has answered, calls that last (`wait`, `logs`, `events`,
    `submit_all`) sit out a restart of up to `patience_s`; others fail at once with ServerUnreachable.
    Not for use by several threads at once: give each thread its own.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        *,
        home: Path | None = None,
        timeout_s: float = 30,
        patience_s: float = 60,
    ) -> None:
        self._transport = Transport(lambda: find_server(address, token, home), timeout_s)
        self._timeout_s = timeout_s
        self._patience_s = patience_s

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    @property
    def address(self) -> str:
        return self._transport.target.address

    @property
    def loopback(self) -> bool:
        """True if the server is on this machine, so that paths mean the same on both sides."""
        return self._transport.target.loopback

    # ------------------------------------------------------------------------------------------- jobs

    def submit(
        self,
        job: Mapping[str, Any] | str | Path | None = None,
        *,
        key: str = "",
        wait_ready: bool = False,
        **fields: Any,
    ) -> JobHandle:
        """Hand in one job: a document, the path of a YAML file with one document, or fields (`command=[…], cpu=2`).

        The same `key` within the server's memory of keys makes no second job. `wait_ready`: a server that is just
        starting is waited for first.
        """
        document = _document(job, fields)
        if wait_ready:
            self._patiently(self.ready, first=True)
        return JobHandle(self, self._submit([document], key or secrets.token_hex(16))[0], _name_of(document))

    def submit_all(self, documents: Iterable[Mapping[str, Any]], *, key: str = "") -> list[int]:
        """Hand in many jobs; their ids in the same order, of arrays an `ArrayId`. Each request carries its own key, made from `key`, so a
        request whose answer was lost is sent again without doubling a job."""
        documents, key, ids = list(documents), key or secrets.token_hex(16), []
        # Jobs that wait for each other by name must come together.
        size = MOST_TOGETHER if any(map(_waits, documents)) else CHUNK_OF_JOBS
        for start in range(0, len(documents), size):
            chunk, chunk_key = documents[start : start + size], f"{key}.{start // size}"
            ids += self._patiently(partial(self._submit, chunk, chunk_key))
        return ids

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
        """Newest first, page by page as they are read; `limit` 0 means all of them. `label` is a selector. `arrays`:
        "fold" gives each array as one row."""
        states = state if isinstance(state, str) else ",".join(state)
        query = {
            "state": states,
            "project": project,
            "user": user,
            "name": name,
            "label": label,
            "since": since,
            "arrays": arrays,
        }
        left = limit
        while True:
            size = min(left, CHUNK_OF_JOBS) if limit else CHUNK_OF_JOBS
            page = self._get("/jobs", JobList, query | {"limit": str(size), "after": str(after) if after else ""})
            yield from page.jobs
            left, after = left - len(page.jobs), page.next_after
            if not after or (limit and left <= 0):
                return

    def find(self, reference: Reference) -> Found:
        """What is meant: a number is one job, a word what the command line takes it for (`sweep`, `last`, `17[3]`), a handle
        or a view its job or array. InvalidInput for anything else."""
        meant = plain(reference)
        if isinstance(meant, ArrayId):
            return Found(self.array(int(meant)))
        return Found(None, (meant,)) if isinstance(meant, int) else find(self, meant)

    def job(self, id: Reference, *, secrets: bool = False) -> JobDetail:
        """`secrets`: with the values of variables that look secret, for the owner of the job. Of an array: the array as one
        row, with the specification of its first element."""
        array, one = self._meant(id)
        found = self._get(f"/jobs/{one}", JobDetail, {"secrets": "show"} if secrets else None)
        return msgspec.structs.replace(found, job=array, runs=[]) if array is not None else found

    def cancel(self, id: Reference, reason: str = "") -> JobView:
        array, one = self._meant(id)
        if array is not None:
            return self.cancel_array(array.id, reason)
        return self._post(f"/jobs/{one}/cancel", JobView, CancelRequest(reason))

    def hold(self, id: Reference) -> JobView:
        array, one = self._meant(id)
        return self.hold_array(array.id) if array is not None else self._post(f"/jobs/{one}/hold", JobView)

    def release(self, id: Reference) -> JobView:
        array, one = self._meant(id)
        return self.release_array(array.id) if array is not None else self._post(f"/jobs/{one}/release", JobView)

    def requeue(self, id: Reference) -> JobView:
        """Start it again; of an array every element that has started, also those that have succeeded."""
        array, one = self._meant(id)
        if array is not None:
            self.requeue_all(arrays=[array.id])
            return self.array(array.id)
        # Sent twice it could start the job twice, so an answer that was lost is reported, not asked for again.
        return self._post(f"/jobs/{one}/requeue", JobView, again=False)

    def suspend(self, id: Reference) -> JobView:
        return self._post(f"/jobs/{self._one(id)}/suspend", JobView)

    def resume(self, id: Reference) -> JobView:
        return self._post(f"/jobs/{self._one(id)}/resume", JobView)

    def checkpoint(self, id: Reference) -> JobView:
        """Have its runs save their work now, and go on."""
        return self._post(f"/jobs/{self._one(id)}/checkpoint", JobView)

    def migrate(self, id: Reference, to: str = "", force: bool = False) -> JobView:
        # Sent twice it could move the job twice.
        return self._post(f"/jobs/{self._one(id)}/migrate", JobView, MigrateRequest(to, force), again=False)

    def why(self, id: Reference, node: str = "") -> Explanation:
        """`node`: only what that one node says of the job. Of an array: why its first element that waits does so, if none
        waits the first that has failed, else its first."""
        array, one = self._meant(id)
        if array is not None:
            one = self.telling_element(array)
        return self._get(f"/jobs/{one}/why", Explanation, {"node": node} if node else None)

    def priority(self, id: Reference) -> PriorityBreakdown:
        """What a waiting job's place in line comes from."""
        return self._get(f"/jobs/{self._one(id)}/priority", PriorityBreakdown)

    def graph(self, id: Reference) -> JobGraph:
        """What a job waits for and who waits for it."""
        return self._get(f"/jobs/{self._one(id)}/graph", JobGraph)

    def shares(self, account: str = "") -> ShareReport:
        """Every account with every term of its fair share; or only those of one name, with those above and below."""
        return self._get("/shares", ShareReport, {"account": account} if account else None)

    def quotas(self) -> list[QuotaRow]:
        """How every project stands with its quota."""
        return self._get("/quotas", QuotaList).quotas

    def plan(self, documents: Iterable[Mapping[str, Any]]) -> list[Explanation]:
        """What would happen to these jobs now, in order; nothing is changed."""
        return self._post("/plan", PlanReply, {"jobs": [_sendable(one) for one in documents]}).plans

    def what_if(self, request: WhatIfRequest) -> WhatIf:
        """Who would start when if something were different; nothing is changed."""
        return self._post("/whatif", WhatIf, request)

    def wait(
        self,
        ids: Reference | Iterable[Reference],
        timeout_s: float | None = None,
        *,
        on_end: Callable[[JobView], object] | None = None,
    ) -> list[JobView]:
        """Return when all have ended, in the order given. WaitTimedOut if that takes longer than `timeout_s`.

        An array is one row, which has `succeeded` only if every element has.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wanted = [self._meant(id) for id in several(ids)]
        views: list[JobView] = []
        for array, id in wanted:
            view = self._wait_one(id, deadline) if array is None else self._wait_whole(array.id, deadline)
            if view.state not in JOB_ENDED:
                later = wanted[len(views) + 1 :]
                views += [view, *(self.job(one).job if array is None else self.array(one) for array, one in later)]
                running = [str(v.id) for v in views if v.state not in JOB_ENDED]
                message = (
                    f"{len(running)} of {len(wanted)} jobs not ended after {timeout_s:g} s: {', '.join(running[:10])}"
                )
                raise WaitTimedOut(message, hint=f"see: hodei why {running[0]}" if running else "", jobs=views)
            views.append(view)
            if on_end:
                on_end(view)
        return views

    def telling_element(self, array: JobView) -> int:
        """The element of an array that tells most about how it stands."""
        place = array.array
        assert place is not None
        for state in ("pending", "held", "failed"):
            if place.states.get(state):
                # One page is enough to tell by: of very large arrays it need not be the very first.
                found = [view.id for view in islice(self.elements(array, state), CHUNK_OF_JOBS)]
                if found:
                    return found[-1]
        return place.first

    def logs(
        self, id: Reference, follow: bool = False, stream: str = "stdout", member: int = 0, attempt: int = 0
    ) -> Iterator[bytes]:
        """The output so far, and with `follow` what comes until the job ends, later attempts included. Of an array: line
        by line, each with the element that wrote it (`log_lines` tells more)."""
        array, id = self._meant(id)
        if array is not None:
            for line in lines_of(self, array, Wish((stream,), (member,), attempt, follow=follow)):
                yield b"%s | %s" % (line.who.encode(), line.text)
            return
        reader, pause = self.log_reader(id, stream=stream, member=member, attempt=attempt, follow=follow), Pause()
        while not reader.at_end:
            data = reader.read()
            if data:
                yield data
            if not reader.at_end:
                time.sleep(pause.after(bool(data)))

    def log_times(self, id: Reference, *, stream: str = "stdout", member: int = 0, attempt: int = 0) -> LogTimes:
        """When a run wrote what, as far as its backend tells."""
        query = {"stream": stream, "member": str(member), "attempt": str(attempt)}
        return self._patiently(partial(self._get, f"/jobs/{self._one(id)}/logs/times", LogTimes, query))

    def log_lines(self, id: Reference, wish: Wish = Wish()) -> Iterator[Line]:  # noqa: B008 - it is frozen
        """What the elements of an array or the members of a gang write, line by line, with who wrote it and when."""
        array, one = self._meant(id)
        return lines_of(self, array if array is not None else self.job(one).job, wish)

    def log_reader(
        self, id: Reference, *, stream: str = "stdout", member: int = 0, attempt: int = 0, follow: bool = True
    ) -> LogReader:
        """The means to follow several streams side by side, at the caller's own pace."""
        path = f"{API}/jobs/{self._one(id)}/logs"
        return LogReader(
            lambda query: self._patiently(lambda: self._transport.request("GET", path, query=query)),
            stream=stream, member=member, attempt=attempt, follow=follow,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------ nodes

    def nodes(self) -> list[NodeView]:
        return self._get("/nodes", NodeList).nodes

    def node(self, name: str) -> NodeView:
        return self._get(f"/nodes/{quote(name, safe='')}", NodeView)

    def node_history(
        self, name: str, *, since: str = "", until: str = "", after: str = "", limit: int = 100
    ) -> NodeHistoryView:
        """One page of the runs that held room on a node; ask again with `after` the page's `next` until that is empty."""
        query = {"since": since, "until": until, "after": after, "limit": str(limit)}
        return self._get(f"/nodes/{quote(name, safe='')}/history", NodeHistoryView, query)

    def patch_node(self, name: str, patch: NodePatch) -> NodeView:
        body = msgspec.json.encode(patch)
        reply = self._transport.request("PATCH", f"{API}/nodes/{quote(name, safe='')}", body=body, headers=_JSON)
        return _decode(reply.body, NodeView)

    # ----------------------------------------------------------------------------------- reservations

    def create_reservation(self, request: ReservationRequest) -> ReservationView:
        """Reserve capacity; Conflict, naming what is in the way, if there is no room for it."""
        return self._post("/reservations", ReservationView, request, again=False)

    def reservations(self) -> list[ReservationView]:
        return self._get("/reservations", ReservationList).reservations

    def reservation(self, name: str) -> ReservationView:
        return self._get(f"/reservations/{quote(name, safe='')}", ReservationView)

    def delete_reservation(self, name: str) -> ReservationView:
        reply = self._transport.request("DELETE", f"{API}/reservations/{quote(name, safe='')}", again=False)
        return _decode(reply.body, ReservationView)

    # ----------------------------------------------------------------------------------------- server

    def events(self, after: int = 0, follow: bool = False, *, job: Reference = 0) -> Iterator[Event]:
        """Events with a number above `after`, oldest first; with `follow` it never ends and misses none."""
        job = self._one(job) if job else 0
        while True:
            page = self._patiently(partial(self.event_page, after, job=job))
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
        # The API reads forward only, so the end is found by ever longer, then ever shorter leaps.
        known, leap = 0, 1024
        while True:
            page = self.event_page(known + leap - 1, limit=1)
            if page.events:
                known, leap = page.events[0].seq, leap * 2
            elif leap == 1:
                return known
            else:
                leap = max(1, leap // 4)

    def stream(self, after: int, *, job: int = 0) -> Iterator[Event]:
        """Events with a number above `after` as they happen. A lost connection is taken up where it broke off."""
        lost_at: float | None = None
        pause = Pause()
        while True:
            try:
                query = {"after": str(after), "job": str(job) if job else ""}
                headers = {"Last-Event-ID": str(after), "Accept": "text/event-stream"}
                with self._transport.stream(f"{API}/events/stream", query, headers) as response:
                    for event in sse_events(response):
                        lost_at, pause = None, Pause()
                        if event.seq > after:
                            after = event.seq
                            yield event
            except (*LOST, ServerUnreachable, Unavailable) as error:
                now = time.monotonic()
                lost_at = now if lost_at is None else lost_at
                if not self._transport.met or now - lost_at > self._patience_s:
                    if isinstance(error, HodeiError):
                        raise
                    raise ServerUnreachable(f"the event stream of {self.address} was lost: {error}") from error
            time.sleep(pause.after(False))

    def info(self) -> Info:
        return self._get("/info", Info)

    def scheduling(self) -> SchedulingConfig:
        """What the server's decisions depend on, as its configuration says."""
        return self._get("/scheduling", SchedulingConfig)

    def config(self) -> ConfigView:
        """The scheduling configuration in force, with who set it and when."""
        return self._get("/config", ConfigView)

    def config_history(self) -> list[ConfigView]:
        """Those that were in force, the newest first."""
        return self._get("/config/history", ConfigHistory).configurations

    def set_config(self, body: bytes, *, toml: bool = True, dry_run: bool = False) -> ConfigChange:
        """Put another one in force. InvalidInput names every mistake; nothing is changed then."""
        headers = {"Content-Type": "application/toml" if toml else "application/json"}
        query = {"dry_run": "1"} if dry_run else None
        reply = self._transport.request("PUT", f"{API}/config", body=body, headers=headers, query=query)
        return _decode(reply.body, ConfigChange)

    def reload_config(self, *, dry_run: bool = False) -> ConfigChange:
        """The server reads its file again."""
        return self._post(f"/config/reload{'?dry_run=1' if dry_run else ''}", ConfigChange)

    def undo_config(self, to: int = 0, *, dry_run: bool = False) -> ConfigChange:
        """Back to the one before, or to the one numbered `to`."""
        # Sent twice it would go back twice, so an answer that was lost is reported, not asked for again.
        query = "&".join([f"to={int(to)}"] * (to != 0) + ["dry_run=1"] * dry_run)
        return self._post(f"/config/undo{query and '?' + query}", ConfigChange, again=False)

    def checks(self) -> list[Check]:
        return self._get("/checks", CheckList).checks

    def ready(self) -> bool:
        """True if the server schedules; Unavailable while it is starting or stopping."""
        return self._transport.request("GET", "/readyz").status < 300

    def server_date(self) -> str:
        """The `Date` header of an answer, empty if it has none."""
        return self._transport.request("GET", "/livez").headers.get("Date", "")

    # ---------------------------------------------------------------------------------------- plumbing

    def _submit(self, documents: list[Mapping[str, Any]], key: str) -> list[int]:
        body, headers = _encode({"jobs": [_sendable(one) for one in documents]}), _JSON | {"Idempotency-Key": key}
        reply = self._transport.request("POST", f"{API}/jobs", body=body, headers=headers)
        made = _decode(reply.body, SubmitReply)
        counts = made.counts or [1] * len(made.ids)
        return [ArrayId(id) if count > 1 else id for id, count in zip(made.ids, counts, strict=True)]

    def _meant(self, reference: Reference) -> tuple[JobView | None, int]:
        """The array and the number of its first job, or None and the number of the one job."""
        array, ids = self.find(reference)
        if array is not None:
            return array, array.id
        if len(ids) != 1:
            raise InvalidInput(f"{reference!r} names {len(ids)} jobs, this call takes one")
        return None, ids[0]

    def _one(self, reference: Reference) -> int:
        """The number of the one job, for calls that cannot take a whole array."""
        meant = plain(reference)
        if isinstance(meant, ArrayId):
            raise InvalidInput(f"{meant}[] is an array, this call takes one job", hint=f"name an element: '{meant}[0]'")
        array, one = self._meant(meant)
        if array is not None and array.array is not None:
            what = f"{meant!r} is an array of {array.array.count} jobs, this call takes one"
            raise InvalidInput(what, hint=f"name an element: '{array.id}[{array.array.start}]'")
        return one

    def _wait_whole(self, id: int, deadline: float | None) -> JobView:
        return self.wait_array(id, None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _wait_one(self, id: int, deadline: float | None) -> JobView:
        path, pause = f"{API}/jobs/{int(id)}/wait", Pause()
        while True:
            left_s = _LONGEST_POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
            poll_s = int(min(left_s, _LONGEST_POLL_S))
            reply = self._patiently(partial(self._poll, path, poll_s))
            view = _decode(reply.body, JobView)
            if view.state in JOB_ENDED or (deadline is not None and time.monotonic() >= deadline):
                return view
            if not poll_s:
                time.sleep(min(left_s, pause.after(False)))

    def _poll(self, path: str, poll_s: int) -> Reply:
        return self._transport.request(
            "GET", path, query={"timeout_s": str(poll_s)}, timeout_s=poll_s + self._timeout_s
        )

    def _get(self, path: str, kind: type[T], query: Mapping[str, str] | None = None) -> T:
        return _decode(self._transport.request("GET", API + path, query=query).body, kind)

    def _delete(self, path: str, kind: type[T]) -> T:
        return _decode(self._transport.request("DELETE", API + path, again=False).body, kind)

    def _post(self, path: str, kind: type[T], body: object = None, *, again: bool = True) -> T:
        data = b"" if body is None else _encode(body)
        reply = self._transport.request("POST", API + path, body=data, headers=_JSON, again=again)
        return _decode(reply.body, kind)

    def _patiently(self, call: Callable[[], T], *, first: bool = False) -> T:
        """`call`, again and again while the server is away; a server never met is waited for only if `first`."""
        began, pause = time.monotonic(), Pause()
        while True:
            try:
                return call()
            except (ServerUnreachable, Unavailable):
                if not (self._transport.met or first) or time.monotonic() - began > self._patience_s:
                    raise
                time.sleep(pause.after(False))


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
    from hodei.jobfile.yaml_reader import load_yaml, why_unreadable

    if unreadable := why_unreadable(str(job)):
        raise InvalidInput(unreadable, hint="an example: hodei job init")
    try:
        text = Path(job).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"cannot read the job file {job}: {reason}", hint="an example: hodei job init") from None
    documents = load_yaml(text, name=str(job))
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise InvalidInput(f"{job} holds {len(documents)} documents", hint="read them yourself and use submit_all")
    return documents[0]


def _name_of(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata")
    return str(document.get("name") or (metadata.get("name", "") if isinstance(metadata, Mapping) else ""))


def _waits(document: Mapping[str, Any]) -> bool:
    spec = document.get("spec") if isinstance(document, Mapping) else None
    return "after" in document or (isinstance(spec, Mapping) and "after" in spec)


def _sendable(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """With handles and views in `after` as the server reads them. What is no document is left for the server to refuse."""
    if not isinstance(document, Mapping) or not _waits(document):
        return document
    if "after" in document:
        return {**document, "after": _after(document["after"])}
    return {**document, "spec": {**document["spec"], "after": _after(document["spec"]["after"])}}


def _after(given: Any) -> Any:
    if isinstance(given, Mapping):
        return {on: value if on in _NO_JOBS else _after(value) for on, value in given.items()}
    if isinstance(given, list | tuple | set | frozenset):
        return [_after_one(one) for one in given]
    return _after_one(given)


def _after_one(given: Any) -> Any:
    # Numbers and words are for the server to judge, which names the place.
    if given is None or (isinstance(given, int | str) and not isinstance(given, ArrayId)):
        return given
    try:
        return written(given)
    except InvalidInput as error:
        raise InvalidInput(f"after: {error.message}", hint=error.hint) from None


def _encode(body: object) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise InvalidInput(f"the job cannot be written as JSON: {error}") from None


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "do server and client have the same version? see: hodei doctor"
        raise HodeiError(f"cannot understand the server's answer: {error}", hint=hint, code="BAD_ANSWER") from None
