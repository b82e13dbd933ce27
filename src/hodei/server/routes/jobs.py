"""Jobs: submit, look, wait, change, read the output, ask why."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from msgspec import structs

from hodei.api.views import (
    MAX_GRAPH_EDGES,
    MAX_GRAPH_JOBS,
    CancelRequest,
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
    graph_of,
)
from hodei.jobfile.parse import MAX_BODY_BYTES, decode_jobs
from hodei.jobfile.render import folded_view, job_document, job_view, run_view
from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.affinity import parse_selector
from hodei.model.array import element_count
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.explanation import Explanation
from hodei.model.ids import JobId
from hodei.model.job import Job, JobSpec, JobState, Run
from hodei.ports import JobQuery
from hodei.runtime import arrays, job_actions
from hodei.runtime.arrays import Row, folded
from hodei.runtime.job_actions import requeue_all
from hodei.server.errors import Busy, Forbidden, Malformed
from hodei.server.params import read_since_ms
from hodei.server.route import API, MIB, READ, SMALL, WRITE, Call, Param, Reply, Route

if TYPE_CHECKING:
    from hodei.ports import Store

BULK_LIMIT = MAX_BODY_BYTES
LOG_LIMIT = 4 * MIB
MOST_PLANNED = 100
MOST_MEMBERS_PLANNED = 2000
_ID = Param("id", "the job's number", type=int, where="path", minimum=1)
_OF_A_LOG = (
    _ID,
    Param("stream", "which output", default="stdout", choices=("stdout", "stderr")),
    Param("member", "which member, from 0", type=int, default=0),
    Param("attempt", "which attempt, 0 for the latest", type=int, default=0),
)
_cancel_request = msgspec.json.Decoder(CancelRequest)


async def submit(call: Call) -> SubmitReply:
    key = call.args["Idempotency-Key"]
    # Keys belong to whoever uses them: nobody can hit upon another's.
    owned = f"{call.who.name}:{key}" if key else ""
    specs = await _specs(call)
    done = await call.service.submit(specs, key=owned, fingerprint=hashlib.sha256(call.body).hexdigest())
    counts = [element_count(spec) for spec in specs]
    return SubmitReply(list(done.ids), done.repeated, counts if any(count > 1 for count in counts) else [])


async def plan(call: Call) -> PlanReply:
    specs = await _specs(call)
    members = sum(spec.size for spec in specs)
    if len(specs) > MOST_PLANNED or members > MOST_MEMBERS_PLANNED:
        # It is worked out between two steps of the scheduler, which waits for it, and every other call too.
        raise InvalidInput(
            f"{len(specs)} jobs with {members} members in one plan, at most {MOST_PLANNED} with {MOST_MEMBERS_PLANNED}",
            hint="ask about fewer; /whatif takes more, and works aside",
        )
    return PlanReply(await call.service.plan(specs))


async def _specs(call: Call) -> Sequence[JobSpec]:
    if len(call.body) > SMALL or call.content_type == "application/yaml":
        specs = await asyncio.to_thread(_decode, call)
    else:
        specs = _decode(call)
    if not specs:
        raise InvalidInput("there is no job in this body", hint='send one job document, a list, or {"jobs": [...]}')
    return [structs.replace(spec, user=call.who.name) for spec in specs]


def _decode(call: Call) -> list[JobSpec]:
    try:
        return decode_jobs(call.body, call.content_type, now_ms=call.shared.now_ms())
    except InvalidInput as error:
        if _parses(call):
            raise
        raise InvalidInput(error.message, hint=error.hint, code=Malformed.code, problems=error.problems) from None


def _parses(call: Call) -> bool:
    """Whether a body that was refused is at least JSON or YAML: that is another kind of mistake."""
    try:
        if call.content_type == "application/yaml":
            load_yaml(call.body)
        else:
            msgspec.json.decode(call.body)
    except (InvalidInput, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


async def list_jobs(call: Call) -> JobList:
    args, service = call.args, call.service
    query = JobQuery(
        states=args["state"],
        project=args["project"],
        user=args["user"],
        name=args["name"],
        labels=parse_selector(", ".join(args["label"])),
        since_ms=read_since_ms(args["since"], call.shared.now_ms()),
        after=args["after"],
        limit=args["limit"],
    )
    fold = args["arrays"] == "fold"

    def look() -> JobList:
        if fold:
            rows, after = folded(service.store, query)
            return JobList([_row(call, row) for row in rows], after)
        page = service.store.jobs(query)
        views = [job_view(job, service.expected(job), service.forecast(job)) for job in page.jobs]
        return JobList(views, page.next_after)

    return await service.browse(look)


def _row(call: Call, row: Row) -> JobView:
    if row.states is not None:
        return folded_view(row.job, row.states)
    return job_view(row.job, call.service.expected(row.job), call.service.forecast(row.job))


async def show_job(call: Call) -> JobDetail:
    job, runs = await _job(call)
    sees = call.who.sees_of(job.spec.user)
    if call.args["secrets"] == "show":
        if sees == "names":
            raise Forbidden("only its owner and administrators may see the secrets of a job")
        sees = "all"
    spec = job_document(job.spec, env=sees)
    view = job_view(job, call.service.expected(job), call.service.forecast(job))
    return JobDetail(view, spec, [run_view(run) for run in runs], call.service.damage_of(job.id))


async def _job(call: Call) -> tuple[Job, list[Run]]:
    store, number = call.service.store, call.args["id"]

    def look() -> tuple[Job | None, list[Run]]:
        return store.job(number), store.runs(number)

    job, runs = await call.service.read(look)
    if job is None:
        raise NotFound(f"there is no job {number}", hint="finished jobs are forgotten after a while; see 'hodei jobs'")
    return job, runs


async def cancel_job(call: Call) -> JobView:
    request = _cancel_request.decode(call.body) if call.body.strip() else CancelRequest()
    if len(request.reason) > 1000:
        raise InvalidInput("the reason is longer than 1000 characters")
    return job_view(await call.service.cancel(call.args["id"], request.reason or f"cancelled by {call.who.name}"))


async def hold_job(call: Call) -> JobView:
    return job_view(await call.service.hold(call.args["id"]))


async def release_job(call: Call) -> JobView:
    return job_view(await call.service.release(call.args["id"]))


async def requeue_job(call: Call) -> JobView:
    return job_view(await call.service.requeue(call.args["id"]))


async def why_job(call: Call) -> Explanation:
    return await call.service.why(call.args["id"], call.args["node"])


async def wait_job(call: Call) -> JobView:
    """Answers when the job has ended or the time is over; the state tells which."""
    with call.shared.waits.hold(call.holder):
        waiting = asyncio.ensure_future(call.service.wait(call.args["id"], call.args["timeout_s"] * 1000))
        closing = asyncio.ensure_future(call.shared.closing.wait())
        try:
            await asyncio.wait((waiting, closing), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Busy("the server is about to stop", hint="ask again when it is back", code="SHUTTING_DOWN")
            return job_view(waiting.result())
        finally:
            for task in (waiting, closing):
                task.cancel()
            await asyncio.gather(waiting, closing, return_exceptions=True)


async def _run_of(call: Call) -> tuple[Job, Run | None]:
    """The run whose log is meant; None if nothing has run yet."""
    args = call.args
    job, runs = await _job(call)
    if not job.spec.has_member(args["member"]):
        raise NotFound(f"job {job.id} has {job.spec.size} members, counted from 0", code="NO_SUCH_MEMBER")
    of_member = [run for run in runs if run.member == args["member"]]
    wanted = [run for run in of_member if args["attempt"] in (0, run.attempt)]
    if not wanted and args["attempt"]:
        known = ", ".join(str(run.attempt) for run in of_member) or "none"
        raise NotFound(f"job {job.id} has no attempt {args['attempt']}", hint=f"known: {known}", code="NO_SUCH_ATTEMPT")
    return job, max(wanted, key=lambda run: run.attempt) if wanted else None


async def log_times(call: Call) -> LogTimes:
    _, run = await _run_of(call)
    if run is None:
        return LogTimes()
    overrides = await call.service.log_times(run, call.args["stream"])
    return LogTimes(run.id, run.started_ms, run.finished_ms, overrides)


async def read_log(call: Call) -> Reply:
    args = call.args
    job, run = await _run_of(call)
    headers: dict[str, str] = {"hodei-job-state": job.state}
    if run is None:  # nothing has run yet: an empty log, to be asked for again
        headers |= {"hodei-run": "", "hodei-run-state": "", "hodei-next-offset": str(args["offset"])}
        return Reply(b"", media_type="text/plain; charset=utf-8", headers=headers)
    data, offset = await call.service.logs(run, args["stream"], args["offset"], args["limit"])
    headers |= {"hodei-run": run.id, "hodei-run-state": run.state, "hodei-next-offset": str(offset)}
    return Reply(data, media_type="text/plain; charset=utf-8", headers=headers)


def _change(verb: str, summary: str, handler: Callable[[Call], Awaitable[Any]], request: Any = None) -> Route:
    path = f"{API}/jobs/{{id}}/{verb}"
    return Route("POST", path, WRITE, summary, handler, request=request, response=JobView, params=(_ID,))


ROUTES = (
    Route(
        "POST", f"{API}/jobs", WRITE, "Submit one job or many; durable when answered", submit,
        request=bytes, response=SubmitReply, status=201, body_limit=BULK_LIMIT, verb="submit",
        params=(Param("Idempotency-Key", "the same key and body make the jobs only once", where="header",
                      default="", maximum=200),),
    ),
    Route(
        "GET", f"{API}/jobs", READ, "One page of jobs, newest first", list_jobs, response=JobList,
        params=(
            Param("state", "only jobs in one of these states", many=True, choices=get_args(JobState)),
            Param("project", "only jobs of this project", default=""),
            Param("user", "only jobs of this user", default=""),
            Param("name", "only jobs of this name", default=""),
            Param("label", "a label selector such as `team=a, tier in (x, y)`", many=True, commas=False),
            Param("since", "submitted since: ISO 8601, epoch milliseconds, or an age such as 90m", default=""),
            Param("after", "`next_after` of the page before", type=int, default=0),
            Param("limit", "jobs per page", type=int, default=100, minimum=1, maximum=1000),
            Param("arrays", "`fold`: each array as one row", default="each", choices=("each", "fold")),
        ),
    ),
    Route("GET", f"{API}/jobs/{{id}}", READ, "One job with its spec and runs", show_job,
          response=JobDetail,
          params=(_ID, Param("secrets", "`show`: with the values of variables that look secret, for its owner",
                             default="hide", choices=("hide", "show")))),
    Route("GET", f"{API}/jobs/{{id}}/why", READ, "Why it waits, or why it landed there", why_job,
          response=Explanation, params=(_ID, Param("node", "only what this node says", default=""))),
    Route("GET", f"{API}/jobs/{{id}}/wait", READ, "Wait until the job has ended or the time is over", wait_job,
          response=JobView, lane="long",
          params=(_ID, Param("timeout_s", "how long", type=int, default=30, maximum=60))),
    Route(
        "GET", f"{API}/jobs/{{id}}/logs", READ, "A piece of a run's output", read_log,
        response=bytes, media_type="text/plain",
        params=(
            *_OF_A_LOG,
            Param("offset", "from which byte on", type=int, default=0),
            Param("limit", "how many bytes at most", type=int, default=64 * 1024, minimum=1, maximum=LOG_LIMIT),
        ),
    ),
    Route("GET", f"{API}/jobs/{{id}}/logs/times", READ, "When a run wrote what, as far as its backend tells", log_times,
          response=LogTimes, params=_OF_A_LOG),
    _change("cancel", "Ask for the job to end", cancel_job, CancelRequest),
    _change("hold", "Keep the job from being placed", hold_job),
    _change("release", "Let a held job be placed again", release_job),
    _change("requeue", "Start the job again from the beginning", requeue_job),
    Route("POST", f"{API}/plan", READ, "What would happen to these jobs, without doing it", plan,
          request=bytes, response=PlanReply, harmless=True),
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- graph
# What a job waits for and who waits for it, as a graph.


_PAGE = 1000


async def show_graph(call: Call) -> JobGraph:
    return await call.service.read(graph, call.service.store, call.args["id"], call.args["limit"])


def graph(store: Store, job: JobId, limit: int) -> JobGraph:
    """Breadth first along both directions, so that what is left out is what is farthest away. Blocks."""
    start = store.job(job)
    if start is None:
        raise NotFound(f"there is no job {job}", hint="hodei jobs -a")
    up, down = {job: start}, {job: start}
    front, truncated = [job], False
    while front and not truncated:  # what it waits for
        wanted = _new((one.job for id in front for one in up[id].spec.after.of if one.job), up)
        front, truncated = _take(store, wanted, up, limit)
    front = [job]
    while front and not truncated:  # who waits for it
        edges = store.dependents(front, MAX_GRAPH_EDGES)
        waiting = _new((waiter for _, waiter in edges), down)
        front, truncated = _take(store, waiting, down, max(limit - len(up) + 1, 1))
        truncated = truncated or len(edges) >= MAX_GRAPH_EDGES
    return graph_of(job, list((up | down).values()), truncated=truncated)


def _new(ids: Iterable[JobId], known: dict[JobId, Job]) -> list[JobId]:
    return [id for id in dict.fromkeys(ids) if id not in known]


def _take(store: Store, ids: list[JobId], into: dict[JobId, Job], limit: int) -> tuple[list[JobId], bool]:
    """Those of them that the store still has, and whether there was no room for all."""
    room = max(limit - len(into), 0)
    taken: list[JobId] = []
    for first in range(0, min(len(ids), room), _PAGE):
        some = tuple(ids[first : min(first + _PAGE, room)])
        for found in store.jobs(JobQuery(ids=some, limit=_PAGE)).jobs:
            into[found.id] = found
            taken.append(found.id)
    return sorted(taken), len(ids) > room


GRAPH_ROUTES = (
    Route(
        "GET", f"{API}/jobs/{{id}}/graph", READ, "What the job waits for and who waits for it", show_graph,
        response=JobGraph,
        params=(
            Param("id", "the job's number", type=int, where="path", minimum=1),
            Param("limit", "at most so many jobs, the nearest first", type=int, default=MAX_GRAPH_JOBS, minimum=1,
                  maximum=MAX_GRAPH_JOBS),
        ),
    ),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- arrays
# Arrays as a whole: look, wait, cancel, hold, release, requeue. Elements are jobs like all others.


_ELEMENT_ID = Param("id", "the number of any element's job", type=int, where="path", minimum=1)
_requeue_request = msgspec.json.Decoder(RequeueRequest)
MOST_REQUEUED = 100_000


async def show_array(call: Call) -> JobView:
    return _view(await arrays.array_status(call.service, call.args["id"]))


async def cancel_array(call: Call) -> JobView:
    request = _cancel_request.decode(call.body) if call.body.strip() else CancelRequest()
    if len(request.reason) > 1000:
        raise InvalidInput("the reason is longer than 1000 characters")
    reason = request.reason or f"cancelled by {call.who.name}"
    return _view(await arrays.cancel_array(call.service, call.args["id"], reason))


async def hold_array(call: Call) -> JobView:
    return _view(await arrays.hold_array(call.service, call.args["id"]))


async def release_array(call: Call) -> JobView:
    return _view(await arrays.release_array(call.service, call.args["id"]))


async def wait_array(call: Call) -> JobView:
    """Answers when every element has ended or the time is over; the states tell which."""
    with call.shared.waits.hold(call.holder):
        timeout_ms = call.args["timeout_s"] * 1000
        waiting = asyncio.ensure_future(arrays.wait_array(call.service, call.args["id"], timeout_ms))
        closing = asyncio.ensure_future(call.shared.closing.wait())
        try:
            await asyncio.wait((waiting, closing), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise Busy("the server is about to stop", hint="ask again when it is back", code="SHUTTING_DOWN")
            return _view(waiting.result())
        finally:
            for task in (waiting, closing):
                task.cancel()
            await asyncio.gather(waiting, closing, return_exceptions=True)


async def requeue_many(call: Call) -> RequeueReply:
    request = _requeue_request.decode(call.body)
    if len(request.jobs) + len(request.arrays) > MOST_REQUEUED:
        raise InvalidInput(f"more than {MOST_REQUEUED} jobs at once", hint="name fewer, or whole arrays")
    done = await requeue_all(call.service, request.jobs, request.arrays, failed=request.failed)
    return RequeueReply(done.requeued, done.revived, done.refused)


def _view(status: arrays.ArrayStatus) -> JobView:
    return folded_view(status.job, status.states)


ARRAY_ROUTES = (
    Route("GET", f"{API}/arrays/{{id}}", READ, "An array as a whole", show_array, response=JobView, params=(_ELEMENT_ID,)),
    Route("GET", f"{API}/arrays/{{id}}/wait", READ, "Wait until every element has ended or the time is over", wait_array,
          response=JobView, lane="long",
          params=(_ELEMENT_ID, Param("timeout_s", "how long", type=int, default=30, maximum=60))),
    Route("POST", f"{API}/arrays/{{id}}/cancel", WRITE, "Ask for every element to end", cancel_array,
          request=CancelRequest, response=JobView, params=(_ELEMENT_ID,)),
    Route("POST", f"{API}/arrays/{{id}}/hold", WRITE, "Keep the elements that wait from being placed", hold_array,
          response=JobView, params=(_ELEMENT_ID,)),
    Route("POST", f"{API}/arrays/{{id}}/release", WRITE, "Let held elements be placed again", release_array,
          response=JobView, params=(_ELEMENT_ID,)),
    Route("POST", f"{API}/jobs/requeue", WRITE, "Start many jobs again, or only those of them that have failed", requeue_many,
          request=RequeueRequest, response=RequeueReply, body_limit=4 * MIB, verb="requeue_many"),
)  # fmt: skip


# ----------------------------------------------------------------------------------------- job actions
# A job that lives: suspend it, let it go on, have it save its work, move it.


_migrate_request = msgspec.json.Decoder(MigrateRequest)


async def suspend_job(call: Call) -> JobView:
    return job_view(await job_actions.suspend(call.service, call.args["id"]))


async def resume_job(call: Call) -> JobView:
    return job_view(await job_actions.resume(call.service, call.args["id"]))


async def save_work(call: Call) -> JobView:
    return job_view(await job_actions.save_work(call.service, call.args["id"]))


async def migrate_job(call: Call) -> JobView:
    request = _migrate_request.decode(call.body) if call.body.strip() else MigrateRequest()
    return job_view(await job_actions.migrate(call.service, call.args["id"], request.to, request.force))


ACTION_ROUTES = (
    _change("suspend", "Let a running job save its work and give back its nodes until it is resumed", suspend_job),
    _change("resume", "Let a suspended job go on", resume_job),
    _change("checkpoint", "Let a running job save its work, and go on", save_work),
    _change("migrate", "Move a running job to other nodes", migrate_job, MigrateRequest),
)
