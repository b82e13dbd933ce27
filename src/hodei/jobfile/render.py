"""Render the model: the canonical document of a job, and the views of the API.

Lists are long, so views must be cheap. `parse_job(job_document(spec)) == spec` for every result of `parse_job`, except
`user`, which the server sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from msgspec import structs

from hodei.api.views import ArrayView, HoldView, JobView, NodeView, RunView, SocketView, TaintView
from hodei.jobfile.sections import affinity, after, escalation, gang, health, placement
from hodei.jobfile.sections.array import array_document
from hodei.jobfile.values import duration_value, non_empty
from hodei.model.array import ArrayElement
from hodei.model.audit import EnvVisibility, mask_env
from hodei.model.escalation_state import apply_escalation
from hodei.model.estimate import Estimate, StartForecast
from hodei.model.job import (
    PRIORITY_CLASSES,
    Batch,
    DataProcessing,
    Interactive,
    Job,
    JobSpec,
    LongRunning,
    Run,
    Serverless,
    TaskSpec,
    Workload,
    job_qos,
)  # fmt: skip
from hodei.model.node import Location, Node
from hodei.model.reservation import CapacityHold
from hodei.model.resources import format_duration, format_quantity, format_resources

_MILLIS = tuple(f".{ms:03d}Z" for ms in range(1000))
_CLASS_OF = {value: name for name, value in PRIORITY_CLASSES.items()}


def iso(ms: int) -> str:
    """UTC in ISO 8601 with milliseconds; empty for 0."""
    if ms == 0:
        return ""
    second, rest = divmod(ms, 1000)
    return _second(second) + _MILLIS[rest]


@lru_cache(maxsize=65_536)
def _second(second: int) -> str:
    return f"{_minute(second // 60)}:{second % 60:02d}"


@lru_cache(maxsize=4096)
def _minute(minute: int) -> str:
    return datetime.fromtimestamp(minute * 60, UTC).strftime("%Y-%m-%dT%H:%M").rjust(16, "0")


def job_view(job: Job, expected: Estimate | None = None, forecast: StartForecast | None = None) -> JobView:
    spec = apply_escalation(job.spec, job.escalation_state)
    tasks = spec.tasks
    return JobView(
        job.id,
        spec.name,
        spec.project,
        spec.user,
        job.state,
        job.reason_code,
        job.reason,
        spec.priority,
        spec.profile,
        spec.labels,
        len(tasks),
        tasks[0].count if len(tasks) == 1 else spec.size,
        job.attempt,
        job.cancel_requested,
        job.exit_code,
        iso(job.submitted_ms),
        iso(job.scheduled_ms),
        iso(job.started_ms),
        iso(job.finished_ms),
        job.version,
        job.nodes.split(),
        job_qos(spec),
        job.first_attempt,
        expected.expected_ms if expected else 0,
        expected.basis if expected else "",
        iso(forecast.p50_ms) if forecast else "",
        iso(forecast.p90_ms) if forecast else "",
        array=None if spec.array is None else array_view(spec.array),
        failure=job.failure,
        suspend_requested=job.suspend_requested,
    )


def array_view(place: ArrayElement, states: dict[str, int] | None = None) -> ArrayView:
    return ArrayView(
        place.first, place.index, place.count, place.at_most, place.start, place.step, states or {}, place.listed
    )


# The state of an array is the first of these that any element has.
_ARRAY_STATES = ("running", "scheduled", "suspended", "pending", "held", "failed", "cancelled", "succeeded")


def folded_view(job: Job, states: dict[str, int]) -> JobView:
    """The row of a whole array, with the id of its first job."""
    assert job.spec.array is not None
    state = next((state for state in _ARRAY_STATES if states.get(state)), job.state)
    view = job_view(job)
    return structs.replace(
        view, id=job.spec.array.first, state=state, exit_code=None, nodes=[], array=array_view(job.spec.array, states)
    )


def run_view(run: Run) -> RunView:
    return RunView(
        id=run.id,
        job=run.job,
        task=run.task,
        member=run.member,
        attempt=run.attempt,
        node=run.node,
        backend=run.backend,
        state=run.state,
        exit_code=run.exit_code,
        reason_code=run.reason_code,
        reason=run.reason,
        placed_at=iso(run.placed_ms),
        started_at=iso(run.started_ms),
        finished_at=iso(run.finished_ms),
        rank=run.rank,
        cpus=list(run.grant.cpus) if run.grant else [],
        gpus={str(gpu): milli / 1000 for gpu, milli in run.grant.gpus} if run.grant else {},
        checkpoint_at=iso(run.checkpoint_ms),
        health=run.health,
        usage=run.usage,
    )


def hold_view(hold: CapacityHold) -> HoldView:
    return HoldView(
        iso(hold.start_ms), iso(hold.end_ms), format_resources(hold.request), hold.job, hold.name, hold.project
    )


def node_view(node: Node, used: Mapping[str, int], runs: int, holds: Sequence[CapacityHold] = ()) -> NodeView:
    """`state`: the phase of a node that is ordered and released, else not-ready, cordoned or ready."""
    state = "not-ready" if not node.ready else "cordoned" if node.cordoned else "ready"
    if node.phase != "ready":
        state = node.phase
    return NodeView(
        name=node.name,
        backend=node.backend,
        kind=node.kind,
        state=state,
        reason=node.not_ready_reason,
        arch=node.arch,
        gpu_type=node.gpu_type,
        capacity=format_resources(node.capacity),
        used=format_resources(used),
        labels=node.labels,
        taints=[TaintView(taint.key, taint.value, taint.effect) for taint in node.taints],
        location=_location(node.location),
        runs=runs,
        version=node.version,
        data=list(node.data),
        cost=node.cost_milli / 1000,
        overcommit={resource: percent / 100 for resource, percent in node.overcommit_percent.items()},
        sockets=[SocketView(list(socket.cpus), list(socket.gpus)) for socket in node.sockets],
        address=node.address,
        holds=[hold_view(hold) for hold in holds],
        group=node.group,
        startup_s=node.startup_ms / 1000,
        spot=node.spot,
        last_seen_at=iso(node.last_seen_ms),
    )


def job_document(spec: JobSpec, *, env: EnvVisibility = "all") -> dict[str, Any]:
    """The full form of a job, without default values.

    `env`: which values of variables are included. Without all of them it is no longer the same job.
    """
    metadata = {
        "name": spec.name,
        "project": spec.project if spec.project != "default" else "",
        "labels": spec.labels,
        "annotations": spec.annotations,
    }
    return {
        "apiVersion": "hodei/v1",
        "kind": "Job",
        "metadata": non_empty(metadata),
        "spec": {
            **non_empty(
                {
                    "profile": spec.profile if spec.profile != "default" else "",
                    "backend": placement.backend_document(spec.backend),
                    "near": _location(spec.near),
                    "inputs": list(spec.inputs),
                    "workload": _workload(spec.workload),
                    "estimate": duration_value(spec.estimate_ms),
                    "timeout": duration_value(spec.timeout_ms),
                    "scheduling_timeout": duration_value(spec.scheduling_timeout_ms),
                    "max_queue_time": duration_value(spec.max_queue_time_ms),
                    "deadline": iso(spec.deadline_ms),
                    "retries": spec.retries,
                }
                | gang.render_job_rules(spec)
                | health.render_job_rules(spec)
                | {"after": after.document(spec.after)}
                | {"array": array_document(spec.array)}
                | {"escalation": escalation.document(spec.escalation)}
            ),
            **({} if spec.priority == 500 else {"priority": _CLASS_OF.get(spec.priority, spec.priority)}),
            **({} if spec.grace_ms == 10_000 else {"grace": format_duration(spec.grace_ms)}),
            **({} if spec.restart == "on_failure" else {"restart": spec.restart}),
            "tasks": [_task(task, env) for task in spec.tasks],
        },
    }


def _task(task: TaskSpec, env: EnvVisibility) -> dict[str, Any]:
    return {"name": task.name, "count": task.count} | non_empty(
        {
            "command": list(task.command),
            "env": mask_env(task.env, env),
            "workdir": task.workdir,
            "image": task.image,
            "resources": non_empty(
                {"requests": format_resources(task.request), "limits": format_resources(task.limits)}
            ),
            "arch": task.arch,
            "gpu_type": task.gpu_type,
            "node_selector": task.node_selector,
            "affinity": placement.affinity_document(task.affinity) | affinity.render_pod_blocks(task),
            "tolerations": list(map(placement.toleration_document, task.tolerations)),
        }
        | affinity.render_rules(task)
        | gang.render_task_rules(task)
    )


def _location(location: Location) -> dict[str, Any]:
    out = non_empty({key: getattr(location, key) for key in ("region", "zone", "datacenter", "rack")})
    if location.lat_micro is not None:
        out["lat"] = location.lat_micro / 1e6
    if location.lng_micro is not None:
        out["lng"] = location.lng_micro / 1e6
    return out


def _workload(workload: Workload) -> Any:
    match workload:
        case Batch():
            return ""
        case LongRunning(max_duration_ms=0):
            return "long-running"
        case LongRunning():
            return {"type": "long-running", "max_duration": format_duration(workload.max_duration_ms)}
        case Serverless():
            return (
                "serverless"
                if workload.cold_start_acceptable
                else {"type": "serverless", "cold_start_acceptable": False}
            )
        case DataProcessing():
            sizes = {"input_size": workload.input_bytes, "output_size": workload.output_bytes}
            return {"type": "data-processing"} | {key: format_quantity(size) for key, size in sizes.items() if size}
        case Interactive(idle_timeout_ms=0):
            return "interactive"
        case Interactive():
            return {"type": "interactive", "idle_timeout": format_duration(workload.idle_timeout_ms)}
