"""The cluster: backends, nodes, reservations, shares and quotas; and commands on nodes and in runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hodei.api.resources import (
    ReservationList,
    ReservationRequest,
    ReservationView,
    parse_reservation,
    reservation_view,
)
from hodei.api.views import (
    BackendList,
    BackendRequest,
    BackendView,
    ExecutedView,
    ExecuteRequest,
    NodeExecutedView,
    NodeExecuteRequest,
    NodeHistoryView,
    NodeList,
    NodePatch,
    NodeRunView,
    NodeUsageView,
    NodeView,
    TaintView,
    UsageList,
)
from hodei.engine.nodes import allocatable
from hodei.jobfile.render import iso, node_view
from hodei.model.accounting import QuotaList, ShareReport
from hodei.model.array import shell_reference
from hodei.model.audit import mask_settings
from hodei.model.errors import Conflict, InvalidInput, NotFound
from hodei.model.facts import NodeOverridden
from hodei.model.job import RUN_ENDED, Job, Run
from hodei.model.names import parse_labels
from hodei.model.node import Taint
from hodei.model.resources import Resources, format_resources
from hodei.ports import JobQuery, NodeRunsQuery, RunKey
from hodei.server.route import ADMIN, API, JOB_ID, READ, WRITE, Call, Param, Route, closest, read_since_ms

if TYPE_CHECKING:
    from hodei.runtime.backend_manager import BackendStatus
    from hodei.runtime.service import NodeStatus, ReservationStatus

_BACKEND = Param("name", "name of the backend", where="path", maximum=63)
_FORCE = Param("force", "1: even if it has active runs, which are then lost", type=int, default=0, maximum=1)
_backend_request = msgspec.json.Decoder(BackendRequest)


async def list_backends(call: Call) -> BackendList:
    return BackendList([_backend_view(status) for status in call.service.backend_manager.statuses()])


async def show_backend(call: Call) -> BackendView:
    return _backend_view(call.service.backend_manager.status(call.args["name"]))


async def add_backend(call: Call) -> BackendView:
    request = _backend_request.decode(call.body)
    if "kind" in request.settings or "enabled" in request.settings:
        raise InvalidInput(
            "`kind` and `enabled` are not settings", hint="`kind` is a field of its own, next to `settings`"
        )
    table = {"kind": request.kind, **request.settings}
    return _backend_view(await call.service.backend_manager.add(request.name, table))


async def disable_backend(call: Call) -> BackendView:
    return _backend_view(await call.service.backend_manager.disable(call.args["name"]))


async def enable_backend(call: Call) -> BackendView:
    return _backend_view(await call.service.backend_manager.enable(call.args["name"]))


async def remove_backend(call: Call) -> BackendView:
    return _backend_view(await call.service.backend_manager.remove(call.args["name"], force=bool(call.args["force"])))


async def usage(call: Call) -> UsageList:
    found = await call.service.backend_manager.usage(call.args["name"])
    return UsageList([NodeUsageView(node, dict(of.used)) for node, of in sorted(found.items())])


def _backend_view(status: BackendStatus) -> BackendView:
    backend = status.backend
    settings = {key: value for key, value in status.table.items() if key != "kind"}
    return BackendView(
        backend.name, backend.kind, status.state, iso(status.since_ms), status.text, status.source, status.nodes,
        status.runs, status.took_ms, list(backend.capabilities.enabled_names()), mask_settings(settings, env="names"),
    )  # fmt: skip


BACKEND_ROUTES = (
    Route("GET", f"{API}/backends", READ, "Every backend with its state", list_backends, response=BackendList),
    Route("POST", f"{API}/backends", ADMIN, "Add a backend; it survives restarts", add_backend,
          request=BackendRequest, response=BackendView, status=201),
    Route("GET", f"{API}/backends/{{name}}", READ, "One backend", show_backend, response=BackendView,
          params=(_BACKEND,)),
    Route("GET", f"{API}/backends/{{name}}/usage", READ, "Measured usage of its nodes", usage,
          response=UsageList, params=(_BACKEND,)),
    Route("POST", f"{API}/backends/{{name}}/disable", ADMIN, "Start nothing more there; runs continue",
          disable_backend, response=BackendView, params=(_BACKEND,)),
    Route("POST", f"{API}/backends/{{name}}/enable", ADMIN, "Let jobs start there again", enable_backend,
          response=BackendView, params=(_BACKEND,)),
    Route("DELETE", f"{API}/backends/{{name}}", ADMIN, "Remove an added backend", remove_backend,
          response=BackendView, params=(_BACKEND, _FORCE)),
)  # fmt: skip


_NODE = Param("name", "name of the node", where="path", maximum=253)
_execute_request = msgspec.json.Decoder(ExecuteRequest)
_node_execute_request = msgspec.json.Decoder(NodeExecuteRequest)
_MAX_TIMEOUT_S = 300


async def execute(call: Call) -> ExecutedView:
    request, service, id = _execute_request.decode(call.body), call.service, call.args["id"]
    _check_command(request.command, request.timeout_s, "hodei exec JOB -- PROGRAM ARGUMENTS")
    job = await service.job(id)
    service.rights.check_owner(job)
    if not job.spec.has_member(request.member):
        raise NotFound(
            f"there is no member {request.member} in job {id}",
            hint=f"it has {job.spec.size} members, numbered from 0", code="NO_SUCH_MEMBER",
        )  # fmt: skip
    runs = [run for run in await service.read(service.store.runs, id) if run.member == request.member]
    if not runs or runs[-1].state in RUN_ENDED:
        raise Conflict(
            f"member {request.member} of job {id} is not running",
            hint=f"hodei job show {shell_reference(id, job.spec.array)}", code="NOT_RUNNING",
        )  # fmt: skip
    with call.shared.waits.hold(call.limit_key):
        done = await service.backend_manager.execute(runs[-1], tuple(request.command), request.timeout_s * 1000)
    stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return ExecutedView(runs[-1].id, done.exit_code, stdout, stderr, done.cut)


async def execute_on_node(call: Call) -> NodeExecutedView:
    request, node = _node_execute_request.decode(call.body), call.args["name"]
    _check_command(request.command, request.timeout_s, "hodei node exec NODE -- PROGRAM ARGUMENTS")
    with call.shared.waits.hold(call.limit_key):
        done = await call.service.backend_manager.execute_on(node, tuple(request.command), request.timeout_s * 1000)
    stdout, stderr = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return NodeExecutedView(node, done.exit_code, stdout, stderr, done.cut)


def _check_command(command: list[str], timeout_s: int, usage: str) -> None:
    if not command or any("\0" in word for word in command):
        raise InvalidInput("a command has at least one word, and no NUL in it", hint=usage)
    if not 1 <= timeout_s <= _MAX_TIMEOUT_S:
        raise InvalidInput(f"timeout_s must be from 1 to {_MAX_TIMEOUT_S}", hint="submit longer work as a job")


EXEC_ROUTES = (
    Route("POST", f"{API}/jobs/{{id}}/execute", WRITE, "Run a command where a job runs", execute,
          request=ExecuteRequest, response=ExecutedView, params=(JOB_ID,), concurrency="long"),
    Route("POST", f"{API}/nodes/{{name}}/execute", ADMIN, "Run a command on a node", execute_on_node,
          request=NodeExecuteRequest, response=NodeExecutedView, params=(_NODE,), concurrency="long"),
)  # fmt: skip


_node_patch = msgspec.json.Decoder(NodePatch)


async def list_nodes(call: Call) -> NodeList:
    return NodeList([_node_view(status) for status in call.service.nodes()])


async def show_node(call: Call) -> NodeView:
    name, nodes = call.args["name"], call.service.nodes()
    for status in nodes:
        if status.node.name == name:
            return _node_view(status)
    near = closest(name, (status.node.name for status in nodes))
    raise NotFound(f"there is no node {name!r}", hint=f"did you mean {near!r}?" if near else "hodei nodes")


async def node_history(call: Call) -> NodeHistoryView:
    """One page of the runs on a node. `busy_ms`: by resource, how long these runs would have filled the whole node within
    the time span; pages add up. Empty if the node was removed."""
    args, service, now_ms = call.args, call.service, call.shared.now_ms()
    since_ms = read_since_ms(args["since"] or "24h", now_ms)
    until_ms = read_since_ms(args["until"], now_ms, "until") if args["until"] else now_ms
    if until_ms <= since_ms:
        raise InvalidInput("`until` is not after `since`", hint="without `since`: the last 24 hours")
    until_ms = min(until_ms, service.clock.now_ms())
    query = NodeRunsQuery(args["name"], since_ms, until_ms, _run_key(args["after"]), args["limit"])
    page = await service.bulk_read(service.store.runs_on, query)
    node = service.controller.cluster.table.node(args["name"])
    if node is None and not page.runs and page.next_after is None and not args["after"]:
        await show_node(call)  # raises NotFound, with a similar name
    jobs: dict[int, Job] = {}
    if page.runs:
        ids = tuple({run.job for run in page.runs})
        found = await service.bulk_read(service.store.jobs, JobQuery(ids=ids, limit=len(ids)))
        jobs = {job.id: job for job in found.jobs}
    capacity = allocatable(node) if node is not None else {}
    busy: dict[str, int] = {}
    views = []
    for run in page.runs:
        job = jobs.get(run.job)
        request = job.spec.task_of(run.member).request if job is not None and job.spec.has_member(run.member) else {}
        views.append(_node_run_view(run, job, request))
        span_ms = max(0, min(run.finished_ms or until_ms, until_ms) - max(run.placed_ms, since_ms))
        for resource, amount in request.items():
            if total := capacity.get(resource, 0):
                busy[resource] = busy.get(resource, 0) + span_ms * amount // total
    after = ".".join(map(str, page.next_after)) if page.next_after else ""
    return NodeHistoryView(
        node=args["name"], since=iso(since_ms), until=iso(until_ms), runs=views, busy_ms=busy, next=after
    )


def _run_key(text: str) -> RunKey | None:
    if not text:
        return None
    parts = text.split(".")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise InvalidInput(f"after: {text[:80]!r} is not the `next` of a page")
    job, attempt, member = map(int, parts)
    return job, attempt, member


def _node_run_view(run: Run, job: Job | None, request: Resources) -> NodeRunView:
    spec = job.spec if job is not None else None
    return NodeRunView(
        run=run.id, job=run.job, name=spec.name if spec else "", project=spec.project if spec else "",
        user=spec.user if spec else "", state=run.state, placed_at=iso(run.placed_ms), started_at=iso(run.started_ms),
        finished_at=iso(run.finished_ms), resources=format_resources(request), exit_code=run.exit_code,
        reason_code=run.reason_code,
    )  # fmt: skip


async def override_node(call: Call) -> NodeView:
    patch = _node_patch.decode(call.body)
    for key, value in patch.labels.items():
        _check_text("label", key, value or "")  # a label to remove comes from a backend, with rules of its own
    parse_labels({key: value for key, value in patch.labels.items() if value is not None})
    parse_labels({taint.key: taint.value for taint in patch.add_taints})
    change = NodeOverridden(
        call.args["name"],
        cordon=True if patch.drain else patch.cordon,
        labels=patch.labels,
        add_taints=tuple(_taint(taint) for taint in patch.add_taints),
        remove_taints=tuple(_taint(taint) for taint in patch.remove_taints),
        drain=patch.drain,
    )
    return _node_view(await call.service.override_node(change))


def _taint(view: TaintView) -> Taint:
    _check_text("taint", view.key, view.value)
    return msgspec.convert({"key": view.key, "value": view.value, "effect": view.effect}, Taint)


def _check_text(what: str, key: str, value: str) -> None:
    if not 0 < len(key) <= 317 or len(value) > 253 or not (key + value).isprintable():
        raise InvalidInput(f"the {what} {key[:80]!r} is empty, too long or not printable")


def _node_view(status: NodeStatus) -> NodeView:
    return node_view(status.node, status.used, status.runs, status.holds)


NODE_ROUTES = (
    Route("GET", f"{API}/nodes", READ, "Every node with its allocation", list_nodes, response=NodeList),
    Route("GET", f"{API}/nodes/{{name}}", READ, "One node", show_node, response=NodeView, params=(_NODE,)),
    Route(
        "GET", f"{API}/nodes/{{name}}/history", READ, "The runs on a node over time, newest job first", node_history,
        response=NodeHistoryView,
        params=(
            _NODE,
            Param("since", "start: ISO 8601, epoch milliseconds, or an age such as 90m; default: 24 hours ago", default=""),
            Param("until", "end, in the same formats; default: now", default=""),
            Param("after", "`next` of the previous page", default=""),
            Param("limit", "runs per page", type=int, default=100, minimum=1, maximum=1000),
        ),
    ),
    Route("PATCH", f"{API}/nodes/{{name}}", ADMIN, "Cordon, drain, label or taint a node", override_node,
          request=NodePatch, response=NodeView, params=(_NODE,)),
)  # fmt: skip


_RESERVATION = Param("name", "name of the reservation", where="path", maximum=63)
_reservation_request = msgspec.json.Decoder(ReservationRequest)


async def reserve(call: Call) -> ReservationView:
    spec = parse_reservation(_reservation_request.decode(call.body), call.shared.now_ms(), call.who.name)
    return _reservation_view(await call.service.reserve(spec))


async def list_reservations(call: Call) -> ReservationList:
    return ReservationList([_reservation_view(status) for status in call.service.reservations()])


async def show_reservation(call: Call) -> ReservationView:
    return _reservation_view(call.service.reservation(call.args["name"]))


async def delete_reservation(call: Call) -> ReservationView:
    return _reservation_view(await call.service.unreserve(call.args["name"], call.who.name))


def _reservation_view(status: ReservationStatus) -> ReservationView:
    return reservation_view(status.reservation, status.active, status.late)


RESERVATION_ROUTES = (
    Route("POST", f"{API}/reservations", ADMIN, "Reserve capacity for a project in a time window", reserve,
          request=ReservationRequest, response=ReservationView, status=201),
    Route("GET", f"{API}/reservations", READ, "Every reservation that has not ended, earliest first",
          list_reservations, response=ReservationList),
    Route("GET", f"{API}/reservations/{{name}}", READ, "One reservation", show_reservation,
          response=ReservationView, params=(_RESERVATION,)),
    Route("DELETE", f"{API}/reservations/{{name}}", ADMIN, "Cancel a reservation; runs continue",
          delete_reservation, response=ReservationView, params=(_RESERVATION,)),
)  # fmt: skip


_ACCOUNT = Param("account", "only accounts of this name, with their parents and children", default="")


async def shares(call: Call) -> ShareReport:
    service = call.service
    found = service.controller.accounts.share_report(service.clock.now_ms())
    if found is None:
        raise NotFound("fair share is not enabled", hint="set scheduling.shares.enabled = true", code="NO_SHARES")
    return found.about(call.args["account"]) if call.args["account"] else found


async def quotas(call: Call) -> QuotaList:
    return QuotaList(call.service.controller.accounts.quota_rows())


SHARING_ROUTES = (
    Route("GET", f"{API}/shares", READ, "Every account with all terms of its fair share", shares,
          response=ShareReport, params=(_ACCOUNT,)),
    Route("GET", f"{API}/quotas", READ, "Every project with its quota and use", quotas, response=QuotaList),
)  # fmt: skip
