"""What a backend reports about itself (capabilities, health, usage, results of `exec`), and what jobs need of it."""

from __future__ import annotations

from msgspec import Struct, structs

from hodei.model.job import Checkpoint, Interactive, JobSpec, TaskSpec
from hodei.model.resources import CPU, GPU, MEMORY, Resources


class Capabilities(Struct, frozen=True, omit_defaults=True):
    """Optional features of a backend. A job that needs a missing one is not placed enabled.

    `commands`: runs execute their command (only fakes do not). `images`: tasks with an `image`; `bare`: tasks without
    one. `gpus`: runs get the GPUs granted to them. `gpu_shares`: several runs can share a GPU. `limits`: cpu and memory
    limits are enforced. `two_streams`: stdout and stderr are separate, otherwise everything is in stdout. `checkpoint`,
    `health_checks`: as in the job file. `idle_timeouts`: idle runs are detected and stopped. `execute`: commands inside
    a run. `node_execute`: commands on a node, for operators. `usage`: measured usage of its nodes. `run_usage`: measured
    usage of its runs, while they run and with their end. `suspend`: a run can be paused in place. `reserve`: capacity
    can be reserved before a start. `delegates`: the backend queues and places by itself, so a start only submits to its
    queue; `expects`: it estimates when its queued runs start.
    """

    commands: bool = True
    images: bool = False
    bare: bool = True
    gpus: bool = False
    gpu_shares: bool = False
    limits: bool = False
    two_streams: bool = True
    checkpoint: bool = False
    health_checks: bool = False
    idle_timeouts: bool = False
    execute: bool = False
    node_execute: bool = False
    usage: bool = False
    run_usage: bool = False
    suspend: bool = False
    reserve: bool = False
    delegates: bool = False
    expects: bool = False
    scales: bool = False
    stops: bool = False
    offline: bool = False

    def enabled_names(self) -> tuple[str, ...]:
        return tuple(name for name, enabled in sorted(structs.asdict(self).items()) if enabled)


class Health(Struct, frozen=True, omit_defaults=True):
    """`text`: the problem, or what answered (its version). `took_ms`: response time."""

    ok: bool
    text: str = ""
    took_ms: int = 0


class NodeUsage(Struct, frozen=True, omit_defaults=True):
    """Measured usage of a node, by any process. Resources that are not measured are absent."""

    used: Resources = {}


class ExecResult(Struct, frozen=True, omit_defaults=True):
    """The result of a command in a run or on a node. `exit_code` is 128 + signal number if a signal ended it, None if
    it timed out. `cut`: the output was truncated. Backends with a single stream leave `stderr` empty."""

    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    cut: bool = False


WHOLE_GPU = 1000


class Need(Struct, frozen=True):
    """`what` completes "backend NAME cannot ...". `hint`: what the user can do."""

    what: str
    hint: str


NEEDS: dict[str, Need] = {
    "images": Need("run images", "leave out `image`, or use a backend with containers"),
    "bare": Need("run a task without an image", "give the task an `image`, or set a default `image` for the backend"),
    "health_checks": Need("run health checks", "leave out `health`, or use another backend"),
    "checkpoint": Need("save checkpoints", "leave out `checkpoint`, or use another backend"),
    "checkpoint_commands": Need(
        "run a checkpoint command beside a run", "save the work at a signal instead, or use another backend"
    ),
    "gpu_shares": Need("share a GPU between runs", "ask for whole GPUs, or use another backend"),
    "limits": Need("hold cpu or memory limits", "leave out `limits`, or use another backend"),
    "per_node": Need("say which machine a run is on, which `per_node` needs", "use a backend that offers its machines"),
    "idle_timeouts": Need("tell whether a run is idle", "leave out `idle_timeout`, or use another backend"),
}


def needs_of(job: JobSpec, task: TaskSpec) -> tuple[str, ...]:
    """Names in NEEDS. Called for every task of every job, so it only reads fields."""
    out = ["images" if task.image else "bare"]
    if job.health.enabled:
        out.append("health_checks")
    if job.checkpoint != _NO_CHECKPOINT:
        out.append("checkpoint")
        if job.checkpoint.command:
            out.append("checkpoint_commands")
    if task.request.get(GPU, 0) % WHOLE_GPU:
        out.append("gpu_shares")
    if task.limits and (task.limits.get(CPU) or task.limits.get(MEMORY)):
        out.append("limits")
    if job.gang.per_node:
        out.append("per_node")
    if type(job.workload) is Interactive and job.workload.idle_timeout_ms:
        out.append("idle_timeouts")
    return tuple(out)


_NO_CHECKPOINT = Checkpoint()


def unmet_by(can: Capabilities) -> tuple[str, ...]:
    """Names in NEEDS that these capabilities do not meet. A fake that runs no commands meets all."""
    if not can.commands:
        return ()
    met = {
        "images": can.images,
        "bare": can.bare,
        "health_checks": can.health_checks,
        "checkpoint": can.checkpoint,
        "checkpoint_commands": can.checkpoint and can.execute,
        "gpu_shares": can.gpu_shares,
        "limits": can.limits,
        "per_node": not can.delegates,
        "idle_timeouts": can.idle_timeouts,
    }
    return tuple(name for name in NEEDS if not met[name])
