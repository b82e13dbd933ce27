"""Orders in the host agent's words: the command, its environment and limits, what is done beside it, how it is to end."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, structs

from hodei.backends.slurm_variables import slurm_variables
from hodei.model.array import array_environment
from hodei.model.effects import Start, Stop, TakeCheckpoint
from hodei.model.errors import BackendRefused
from hodei.model.job import NODE_HOST, Checkpoint, HealthCheck, Interactive, cpu_shares, oom_score_adj, qos
from hodei.model.node import Grant
from hodei.model.resources import CPU, MEMORY

# The kernel takes no larger command, and no longer word in it; said here, because asking again cannot help.
COMMAND_LIMIT = 1 << 20
WORD_LIMIT = (128 << 10) - 1
WHOLE_GPU = 1000
LOOPBACK = "127.0.0.1"


class Order(Struct, omit_defaults=True):
    """`checkpoint_file`: None if the job says nothing of checkpoints, "" for the agent's own choice. `save`: how it saves
    its work, if the agent is to ask for that by itself."""

    run: str
    argv: tuple[str, ...]
    env: dict[str, str]
    workdir: str = ""
    cpu_milli: int = 0
    memory_bytes: int = 0
    cpus: tuple[int, ...] = ()
    cpu_shares: int = 0
    oom_score_adj: int | None = None
    timeout_ms: int = 0
    grace_ms: int | None = None
    log_cap: int | None = None
    checkpoint_file: str | None = None
    save: dict[str, Any] | None = None
    save_every_ms: int = 0
    health: HealthCheck | None = None
    idle_ms: int = 0

    @property
    def size(self) -> int:
        return sum(map(len, self.argv)) + sum(len(name) + len(value) for name, value in self.env.items())


def start_order(
    order: Start,
    *,
    cpus: tuple[int, ...] = (),
    log_cap: int | None = None,
    address: str = LOOPBACK,
    host_memory: int = 0,
) -> Order:
    """`cpus` are those of the node, for runs that have none of their own, `address` is the node's. BackendRefused if it can
    never run here."""
    run, spec, task = order.run, order.spec, order.task
    if task.image:
        raise BackendRefused(
            "local processes cannot run an image", hint="leave out `image`, or choose a backend with containers"
        )
    if not task.command:
        raise BackendRefused("the task has no command", hint="give it a `command`")
    if run.grant is not None and run.grant.cpus:
        cpus = run.grant.cpus
    env = {**task.env, **own_env(order, cpus)}
    idle_ms = spec.workload.idle_timeout_ms if type(spec.workload) is Interactive else 0
    check_size(task.command, env)
    return Order(
        run=run.id,
        argv=task.command,
        env=env,
        workdir=task.workdir,
        cpu_milli=task.limits.get(CPU, 0),
        memory_bytes=task.limits.get(MEMORY, 0),
        cpus=cpus,
        # A weight needs a group of its own, which costs: for those who have one anyway, and for those who are to yield.
        cpu_shares=cpu_shares(task) if task.limits.get(CPU, 0) or qos(task) == "best-effort" else 0,
        oom_score_adj=oom_score_adj(task, host_memory),
        timeout_ms=spec.timeout_ms,
        grace_ms=spec.grace_ms,
        log_cap=log_cap,
        checkpoint_file=spec.checkpoint.file if spec.checkpoint != Checkpoint() else None,
        save=_hook(spec.checkpoint) if spec.checkpoint.every_ms or idle_ms else None,
        save_every_ms=spec.checkpoint.every_ms,
        health=health_at(spec.health, address) if spec.health.enabled else None,
        idle_ms=idle_ms,
    )


def own_env(order: Start, cpus: tuple[int, ...] = ()) -> dict[str, str]:
    """What every run is told about itself, on whichever backend. `cpus` are those that it is bound to."""
    run, spec = order.run, order.spec
    return {
        "HODEI_JOB_ID": str(run.job),
        "HODEI_RUN_ID": run.id,
        "HODEI_TASK": run.task,
        "HODEI_ATTEMPT": str(run.attempt),
        "HODEI_NODE": run.node,
        "HODEI_PROJECT": spec.project,
        "HODEI_QOS": qos(order.task),
        **_place_in_gang(order),
        **array_environment(spec),
        **_parts(run.grant, cpus),
        **(slurm_variables(order) if spec.annotations else {}),
    }


def health_at(health: HealthCheck, address: str) -> HealthCheck:
    """The node is known now, so the word for it can be replaced."""
    scheme, slashes, rest = health.http.partition("://")
    if not slashes or not rest.startswith(NODE_HOST) or rest[len(NODE_HOST) :][:1] not in ("", ":", "/", "?"):
        return health
    host = f"[{address}]" if ":" in address else address
    return structs.replace(health, http=f"{scheme}://{host}{rest[len(NODE_HOST) :]}")


def _hook(hook: Checkpoint) -> dict[str, Any] | None:
    if not hook.has_hook:
        return None
    return {"signal": hook.signal, "command": hook.command, "timeout_ms": hook.timeout_ms}


def _place_in_gang(order: Start) -> dict[str, str]:
    env = {
        "HODEI_RANK": str(order.run.rank),
        "HODEI_MEMBER": str(order.run.member),
        "HODEI_WORLD_SIZE": str(order.world_size),
        "HODEI_MIN_WORLD_SIZE": str(sum(task.needed for task in order.spec.tasks)),
        "HODEI_MAX_WORLD_SIZE": str(order.spec.size),
    }
    if order.addresses:
        env |= {"HODEI_ADDRESSES": ",".join(order.addresses), "HODEI_MASTER_ADDRESS": order.addresses[0]}
    return env


def _parts(grant: Grant | None, cpus: tuple[int, ...]) -> dict[str, str]:
    """Which parts of its node a run has. A fraction is told, not enforced: nothing here can divide a GPU."""
    env = {}
    if cpus:
        env["HODEI_CPUS"] = _numbers(cpus)
    if grant is not None and grant.gpus:
        gpus = _numbers(tuple(dict.fromkeys(gpu for gpu, _ in grant.gpus)))
        env |= {"HODEI_GPUS": gpus, "CUDA_VISIBLE_DEVICES": gpus}
        last_milli = grant.gpus[-1][1]
        if last_milli < WHOLE_GPU:
            env["HODEI_GPU_MILLI"] = str(last_milli)
    return env


def _numbers(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def check_words(command: tuple[str, ...], env: dict[str, str], workdir: str) -> None:
    """BackendRefused for what no container can be given, whatever runs it."""
    if any("\0" in word for word in command):
        raise BackendRefused("the command holds a NUL character")
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise BackendRefused(f"the environment variable {name[:80]!r} cannot be set")
    if workdir and (not workdir.startswith("/") or "\0" in workdir):
        raise BackendRefused(f"the working directory {workdir[:200]!r} is not a whole path", hint="begin it with a /")


def check_size(command: tuple[str, ...], env: dict[str, str]) -> None:
    sizes = [len(word.encode()) + 1 for word in command]
    sizes += [len(name.encode()) + len(value.encode()) + 2 for name, value in env.items()]
    if sum(sizes) > COMMAND_LIMIT or max(sizes) > WORD_LIMIT:
        raise BackendRefused(
            f"the command and its environment are {sum(sizes)} bytes, the longest word {max(sizes)}; "
            f"the system takes {COMMAND_LIMIT} and {WORD_LIMIT}",
            hint="put the data into a file",
        )


def stop_order(order: Stop) -> dict[str, Any]:
    wire: dict[str, Any] = {"run": order.run, "grace_ms": order.grace_ms, "reason": order.reason.text}
    if order.checkpoint is not None and (hook := _hook(order.checkpoint)) is not None:
        wire["checkpoint"] = hook
    return wire


def save_order(order: TakeCheckpoint) -> dict[str, Any]:
    return {"run": order.run, "checkpoint": _hook(order.checkpoint)}
