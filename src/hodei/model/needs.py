"""What a job needs of a backend that not every backend can do. This is the only place that derives it from the job.

Each need has a name. A backend's `Capabilities` say which needs it cannot meet (`unmet_by`), its nodes carry these names
(`Node.cannot`), and the filter `capabilities` refuses the nodes for jobs that have such a need.

`binding` is not among them: whether cores can be bound depends on the node and what is known of its sockets, and the filter
`devices` says so (NO_TOPOLOGY).
"""

from __future__ import annotations

from msgspec import Struct

from hodei.model.backend import Capabilities
from hodei.model.job import Checkpoint, Interactive, JobSpec, TaskSpec
from hodei.model.resources import CPU, GPU, MEMORY

WHOLE_GPU = 1000


class Need(Struct, frozen=True):
    """`what` follows the words "backend NAME cannot". `hint`: what a user can do about it."""

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
    """Names of NEEDS. Asked once for every task of every job, so it only looks at fields."""
    out = ["images" if task.image else "bare"]
    if job.health.wanted:
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
    """Names of NEEDS that a backend with these capabilities does not meet. A fake, which runs no commands, meets all."""
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
