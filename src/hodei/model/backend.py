"""What a backend says of itself: what it can do, whether it is well, what is used on its nodes, how a command went."""

from __future__ import annotations

from msgspec import Struct, structs

from hodei.model.job import Checkpoint, Interactive, JobSpec, TaskSpec
from hodei.model.resources import CPU, GPU, MEMORY, Resources


class Capabilities(Struct, frozen=True, omit_defaults=True):
    """Which of the things that not every system can do this one can. Whoever asks for one that is not there is refused.

    `commands`: runs do what their command says (only fakes do not). `images`: tasks with an `image`; `bare`: tasks without
    one. `gpus`: runs are given those that they were granted. `limits`: cpu and memory limits hold. `two_streams`: stdout
    and stderr are kept apart, else all is in stdout. `checkpoint`, `health_checks`: as a job's file asks for.
    `gpu_shares`: runs can share a GPU. `idle_timeouts`: a run that does nothing is noticed and stopped. `execute`:
    a command beside a run. `node_execute`: a command on a node, for operators. `usage`: what is used on its nodes. `suspend`: a run can be frozen in its place. `reserve`: room
    can be set aside before a start. `delegates`: it queues and places by itself, a start only joins its line; `expects`:
    it tells when those in its line will begin.
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
    suspend: bool = False
    reserve: bool = False
    delegates: bool = False
    expects: bool = False

    def enabled_names(self) -> tuple[str, ...]:
        """Those that are there, by name."""
        return tuple(name for name, there in sorted(structs.asdict(self).items()) if there)


class Health(Struct, frozen=True, omit_defaults=True):
    """`text`: what is wrong, or a word on what answered (its version). `took_ms`: how long the answer took."""

    ok: bool
    text: str = ""
    took_ms: int = 0


class NodeUsage(Struct, frozen=True, omit_defaults=True):
    """What is in use on a node as measured, not as promised, by whomever; resources that nobody measured are left out."""

    used: Resources = {}


class ExecResult(Struct, frozen=True, omit_defaults=True):
    """How a command beside a run went. `exit_code` is 128 + the signal's number if a signal ended it, None if it was not
    over in time. `cut`: more was said than is kept. Systems with one stream only leave `stderr` empty."""

    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    cut: bool = False


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
