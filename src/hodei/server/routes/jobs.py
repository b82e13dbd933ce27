"""Jobs, arrays and periodic jobs: submit, list, show, wait, change, read logs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec
from msgspec import structs

from hodei.api.resources import PeriodicList, PeriodicRequest, PeriodicView, parse_periodic, periodic_view
from hodei.api.views import (
    CancelRequest,
    JobDetail,
    JobList,
    JobView,
    LogTimes,
    MigrateRequest,
    RefusedJob,
    RequeueReply,
    RequeueRequest,
    SubmitReply,
)
from hodei.jobfile.parse import MAX_BODY_BYTES, decode_jobs
from hodei.jobfile.render import folded_view, job_document, job_view, run_view
from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.affinity import parse_selector
from hodei.model.array import element_count
from hodei.model.cron import Periodic
from hodei.model.errors import InvalidInput, NotFound
from hodei.model.ids import JobId
from hodei.model.job import Job, JobSpec, JobState, Run
from hodei.model.usage import efficiency
from hodei.ports import JobQuery
from hodei.runtime import job_actions
from hodei.server.errors import BadRequest, Forbidden, ServerBusy
from hodei.server.route import (
    API,
    JOB_ID,
    MIB,
    READ,
    SMALL_BODY,
    WRITE,
    Call,
    Param,
    Reply,
    Route,
    read_since_ms,
)

if TYPE_CHECKING:
    from hodei.runtime.service import Service

T = TypeVar("T")
BULK_LIMIT = MAX_BODY_BYTES
LOG_LIMIT = 4 * MIB
# A job is shown without its live usage when its backend takes longer.
_LIVE_USAGE_TIMEOUT_S = 1.0
MAX_REQUEUED = 100_000
_LOG_PARAMS = (
    JOB_ID,
    Param("stream", "which output", default="stdout", choices=("stdout", "stderr")),
    Param("member", "which member, from 0", type=int, default=0),
    Param("attempt", "which attempt, 0 for the latest", type=int, default=0),
)
_WAIT_TIMEOUT = Param("timeout_s", "how long to wait", type=int, default=30, maximum=60)
_cancel_request = msgspec.json.Decoder(CancelRequest)
_migrate_request = msgspec.json.Decoder(MigrateRequest)
_requeue_request = msgspec.json.Decoder(RequeueRequest)
_periodic_request = msgspec.json.Decoder(PeriodicRequest)


async def submit(call: Call) -> SubmitReply:
    key = call.args["Idempotency-Key"]
    # Keys are per user: they cannot collide with those of others.
    user_key = f"{call.who.name}:{key}" if key else ""
    specs = await parse_specs(call)
    done = await call.service.submit(specs, key=user_key, fingerprint=hashlib.sha256(call.body).hexdigest())
    counts = [element_count(spec) for spec in specs]
    return SubmitReply(list(done.ids), done.repeated, counts if any(count > 1 for count in counts) else [])


async def parse_specs(call: Call) -> Sequence[JobSpec]:
    """The jobs in the body, with the caller as their user."""
    if len(call.body) > SMALL_BODY or call.content_type == "application/yaml":
        specs = await asyncio.to_thread(_decode, call)
    else:
        specs = _decode(call)
    if not specs:
        raise InvalidInput("the body has no job", hint='send one job document, a list, or {"jobs": [...]}')
    return [structs.replace(spec, user=call.who.name) for spec in specs]


def _decode(call: Call) -> list[JobSpec]:
    try:
        return decode_jobs(call.body, call.content_type, now_ms=call.shared.now_ms())
    except InvalidInput as error:
        if _parses(call):
            raise
        raise InvalidInput(error.message, hint=error.hint, code=BadRequest.code, problems=error.problems) from None


def _parses(call: Call) -> bool:
    """Whether a refused body is valid JSON or YAML; if not, the error is another one."""
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

    def read_page() -> JobList:
        if fold:
            rows, after = job_actions.list_folded(service.store, query)
            views = [_view(call, row.job) if row.states is None else folded_view(row.job, row.states) for row in rows]
            return JobList(views, after)
        page = service.store.jobs(query)
        return JobList([_view(call, job) for job in page.jobs], page.next_after)

    return await service.bulk_read(read_page)


def _view(call: Call, job: Job) -> JobView:
    return job_view(job, call.service.estimate(job), call.service.forecast(job))


async def show_job(call: Call) -> JobDetail:
    job, runs = await _read_job(call)
    shown = call.who.may_see_env_of(job.spec.user)
    if call.args["secrets"] == "show":
        if shown == "names":
            raise Forbidden("only its owner and administrators may see the secrets of a job")
        shown = "all"
    spec = job_document(job.spec, env=shown)
    damage = call.service.damaged_records.text(job.id)
    runs = await _with_live_usage(call, runs)
    gang = {run.member: run for run in runs if run.attempt >= job.first_attempt}
    used = efficiency(job.spec, gang.values(), call.shared.now_ms())
    cost = round(sum(run.cost(call.shared.now_ms()) for run in runs), 6)
    return JobDetail(_view(call, job), spec, [run_view(run) for run in runs], damage, used, cost)


async def _with_live_usage(call: Call, runs: list[Run]) -> list[Run]:
    running = [run for run in runs if run.state == "running"]
    if not running:
        return runs
    live = await call.service.run_usage.read(running, _LIVE_USAGE_TIMEOUT_S)
    return [structs.replace(run, usage=live[run.id].usage) if run.id in live else run for run in runs]


async def _read_job(call: Call) -> tuple[Job, list[Run]]:
    store, number = call.service.store, call.args["id"]
    job, runs = await call.service.read(lambda: (store.job(number), store.runs(number)))
    if job is None:
        raise NotFound(f"there is no job {number}", hint="ended jobs are pruned after a while; see 'hodei jobs'")
    return job, runs


async def cancel_job(call: Call) -> JobView:
    return job_view(await call.service.cancel(call.args["id"], _cancel_reason(call)))


def _cancel_reason(call: Call) -> str:
    request = _cancel_request.decode(call.body) if call.body.strip() else CancelRequest()
    if len(request.reason) > 1000:
        raise InvalidInput("the reason is longer than 1000 characters")
    return request.reason or f"cancelled by {call.who.name}"


async def wait_job(call: Call) -> JobView:
    id, timeout_ms = call.args["id"], call.args["timeout_s"] * 1000
    return job_view(await _long_poll(call, lambda: call.service.wait(id, timeout_ms)))


async def _long_poll(call: Call, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of `work`; SHUTTING_DOWN when the server stops first."""
    with call.shared.waits.hold(call.limit_key):
        waiting = asyncio.ensure_future(work())
        closing = asyncio.ensure_future(call.shared.closing.wait())
        try:
            await asyncio.wait((waiting, closing), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise ServerBusy("the server is shutting down", hint="try again when it is back", code="SHUTTING_DOWN")
            return waiting.result()
        finally:
            for task in (waiting, closing):
                task.cancel()
            await asyncio.gather(waiting, closing, return_exceptions=True)


async def _select_run(call: Call) -> tuple[Job, Run | None]:
    """The run of a log request; None if nothing has run yet."""
    args = call.args
    job, runs = await _read_job(call)
    if not job.spec.has_member(args["member"]):
        raise NotFound(f"job {job.id} has {job.spec.size} members, numbered from 0", code="NO_SUCH_MEMBER")
    of_member = [run for run in runs if run.member == args["member"]]
    wanted = [run for run in of_member if args["attempt"] in (0, run.attempt)]
    if not wanted and args["attempt"]:
        known = ", ".join(str(run.attempt) for run in of_member) or "none"
        raise NotFound(f"job {job.id} has no attempt {args['attempt']}", hint=f"known: {known}", code="NO_SUCH_ATTEMPT")
    return job, max(wanted, key=lambda run: run.attempt) if wanted else None


async def log_times(call: Call) -> LogTimes:
    _, run = await _select_run(call)
    if run is None:
        return LogTimes()
    times = await call.service.backend_manager.log_times(run, call.args["stream"])
    return LogTimes(run.id, run.started_ms, run.finished_ms, times)


async def read_log(call: Call) -> Reply:
    args = call.args
    job, run = await _select_run(call)
    headers: dict[str, str] = {"hodei-job-state": job.state}
    if run is None:  # nothing has run yet: an empty log so far
        headers |= {"hodei-run": "", "hodei-run-state": "", "hodei-next-offset": str(args["offset"])}
        return Reply(b"", media_type="text/plain; charset=utf-8", headers=headers)
    data, offset = await call.service.backend_manager.logs(run, args["stream"], args["offset"], args["limit"])
    headers |= {"hodei-run": run.id, "hodei-run-state": run.state, "hodei-next-offset": str(offset)}
    return Reply(data, media_type="text/plain; charset=utf-8", headers=headers)


def _action(
    path: str,
    summary: str,
    handler: Callable[[Call], Awaitable[Any]],
    request: Any = None,
    param: Param = JOB_ID,
    response: Any = JobView,
) -> Route:
    return Route("POST", f"{API}/{path}", WRITE, summary, handler, request=request, response=response, params=(param,))


def _job_action(verb: str, summary: str, act: Callable[[Service, JobId], Awaitable[Job]]) -> Route:
    async def handler(call: Call) -> JobView:
        return job_view(await act(call.service, call.args["id"]))

    handler.__name__ = f"{verb}_job"
    return _action(f"jobs/{{id}}/{verb}", summary, handler)


ROUTES = (
    Route(
        "POST", f"{API}/jobs", WRITE, "Submit one job or many; durable when the reply arrives", submit,
        request=bytes, response=SubmitReply, status=201, body_limit=BULK_LIMIT, verb="submit",
        params=(Param("Idempotency-Key", "the same key and body create the jobs only once", where="header",
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
            Param("after", "`next_after` of the previous page", type=int, default=0),
            Param("limit", "jobs per page", type=int, default=100, minimum=1, maximum=1000),
            Param("arrays", "`fold`: each array as one row", default="each", choices=("each", "fold")),
        ),
    ),
    Route("GET", f"{API}/jobs/{{id}}", READ, "One job with its spec and runs", show_job,
          response=JobDetail,
          params=(JOB_ID, Param("secrets", "`show`: include values of variables that look secret; for its owner",
                                default="hide", choices=("hide", "show")))),
    Route("GET", f"{API}/jobs/{{id}}/wait", READ, "Wait until the job has ended, or for the timeout", wait_job,
          response=JobView, concurrency="long", params=(JOB_ID, _WAIT_TIMEOUT)),
    Route(
        "GET", f"{API}/jobs/{{id}}/logs", READ, "A part of a run's output", read_log,
        response=bytes, media_type="text/plain",
        params=(
            *_LOG_PARAMS,
            Param("offset", "first byte", type=int, default=0),
            Param("limit", "bytes at most", type=int, default=64 * 1024, minimum=1, maximum=LOG_LIMIT),
        ),
    ),
    Route("GET", f"{API}/jobs/{{id}}/logs/times", READ, "When a run wrote its output, where the backend knows it",
          log_times, response=LogTimes, params=_LOG_PARAMS),
    _action("jobs/{id}/cancel", "Cancel the job", cancel_job, CancelRequest),
    _job_action("hold", "Keep the job from being placed", lambda service, id: service.hold(id)),
    _job_action("release", "Let a held job be placed again", lambda service, id: service.release(id)),
    _job_action("requeue", "Start the job again from the beginning", lambda service, id: service.requeue(id)),
)  # fmt: skip


async def migrate_job(call: Call) -> JobView:
    request = _migrate_request.decode(call.body) if call.body.strip() else MigrateRequest()
    return job_view(await job_actions.migrate(call.service, call.args["id"], request.to, request.force))


ACTION_ROUTES = (
    _job_action("suspend", "Take a checkpoint and give up the nodes until the job is resumed", job_actions.suspend),
    _job_action("resume", "Continue a suspended job", job_actions.resume),
    _job_action("checkpoint", "Take a checkpoint of a running job, which continues", job_actions.checkpoint),
    _action("jobs/{id}/migrate", "Move a running job to other nodes", migrate_job, MigrateRequest),
)


_ELEMENT = Param("id", "number of any job of the array", type=int, where="path", minimum=1)


async def show_array(call: Call) -> JobView:
    return _array_view(await job_actions.array_status(call.service, call.args["id"]))


async def cancel_array(call: Call) -> JobView:
    return _array_view(await job_actions.cancel_array(call.service, call.args["id"], _cancel_reason(call)))


async def hold_array(call: Call) -> JobView:
    return _array_view(await job_actions.hold_array(call.service, call.args["id"]))


async def release_array(call: Call) -> JobView:
    return _array_view(await job_actions.release_array(call.service, call.args["id"]))


async def wait_array(call: Call) -> JobView:
    id, timeout_ms = call.args["id"], call.args["timeout_s"] * 1000
    return _array_view(await _long_poll(call, lambda: job_actions.wait_array(call.service, id, timeout_ms)))


async def requeue_many(call: Call) -> RequeueReply:
    request = _requeue_request.decode(call.body)
    if len(request.jobs) + len(request.arrays) > MAX_REQUEUED:
        raise InvalidInput(f"more than {MAX_REQUEUED} jobs at once", hint="name fewer, or whole arrays")
    done = await job_actions.requeue_all(
        call.service, request.jobs, request.arrays, failed=request.failed, permitted=request.permitted
    )
    refused = [RefusedJob(id, error.code, error.message) for id, error in sorted(done.refused.items())]
    return RequeueReply(done.requeued, done.revived, refused)


def _array_view(status: job_actions.ArrayStatus) -> JobView:
    return folded_view(status.job, status.states)


ARRAY_ROUTES = (
    Route("GET", f"{API}/arrays/{{id}}", READ, "An array as a whole", show_array, response=JobView, params=(_ELEMENT,)),
    Route("GET", f"{API}/arrays/{{id}}/wait", READ, "Wait until every element has ended, or for the timeout", wait_array,
          response=JobView, concurrency="long", params=(_ELEMENT, _WAIT_TIMEOUT)),
    _action("arrays/{id}/cancel", "Cancel every element", cancel_array, CancelRequest, _ELEMENT),
    _action("arrays/{id}/hold", "Keep pending elements from being placed", hold_array, param=_ELEMENT),
    _action("arrays/{id}/release", "Let held elements be placed again", release_array, param=_ELEMENT),
    Route("POST", f"{API}/jobs/requeue", WRITE, "Start many jobs again, or only the failed ones", requeue_many,
          request=RequeueRequest, response=RequeueReply, body_limit=4 * MIB, verb="requeue_many"),
)  # fmt: skip


_PERIODIC = Param("name", "name of the periodic job", where="path", maximum=63)


async def add_periodic(call: Call) -> PeriodicView:
    periodic = parse_periodic(_periodic_request.decode(call.body), call.who.name)
    spec = structs.replace(periodic.job, user=call.who.name)
    return await _periodic_view(call, await call.service.cron.add(structs.replace(periodic, job=spec)))


async def list_periodic(call: Call) -> PeriodicList:
    return PeriodicList([await _periodic_view(call, each, whole=False) for each in call.service.cron.periodics()])


async def show_periodic(call: Call) -> PeriodicView:
    return await _periodic_view(call, call.service.cron.get(call.args["name"]))


async def pause_periodic(call: Call) -> PeriodicView:
    return await _periodic_view(call, await call.service.cron.pause(call.args["name"]))


async def resume_periodic(call: Call) -> PeriodicView:
    return await _periodic_view(call, await call.service.cron.resume(call.args["name"]))


async def run_periodic(call: Call) -> SubmitReply:
    return SubmitReply([await call.service.cron.run_now(call.args["name"])])


async def remove_periodic(call: Call) -> PeriodicView:
    return await _periodic_view(call, await call.service.cron.remove(call.args["name"]))


async def _periodic_view(call: Call, periodic: Periodic, *, whole: bool = True) -> PeriodicView:
    last = await call.service.read(call.service.store.job, periodic.last_job) if periodic.last_job else None
    return periodic_view(periodic, last, with_job=whole, env=call.who.may_see_env_of(periodic.by))


PERIODIC_ROUTES = (
    Route("POST", f"{API}/periodic", WRITE, "Create a periodic job", add_periodic,
          request=PeriodicRequest, response=PeriodicView, status=201),
    Route("GET", f"{API}/periodic", READ, "Every periodic job", list_periodic, response=PeriodicList),
    Route("GET", f"{API}/periodic/{{name}}", READ, "One periodic job", show_periodic, response=PeriodicView,
          params=(_PERIODIC,)),
    _action("periodic/{name}/pause", "Create no more jobs until it is resumed", pause_periodic, None, _PERIODIC, PeriodicView),
    _action("periodic/{name}/resume", "Continue with the next due time", resume_periodic, None, _PERIODIC, PeriodicView),
    _action("periodic/{name}/run", "Create a job now, outside the schedule", run_periodic, None, _PERIODIC, SubmitReply),
    Route("DELETE", f"{API}/periodic/{{name}}", WRITE, "Remove a periodic job; jobs that it created continue",
          remove_periodic, response=PeriodicView, params=(_PERIODIC,)),
)  # fmt: skip
