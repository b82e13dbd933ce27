"""Slurm: the settings of a cluster, and the backend made from them. See docs/how-to/slurm.md."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from hodei.backends.base import BackendContext
from hodei.backends.hpc.base import HpcBackend
from hodei.backends.hpc.commands import Commands
from hodei.backends.hpc.nodes import ClusterNodes, CpuJobsOnGpus, Mode
from hodei.backends.hpc.ports import Queue
from hodei.backends.hpc.request import RequestBuilder
from hodei.backends.hpc.slurm_commands import SlurmCommands
from hodei.backends.hpc.slurm_options import SlurmOptions
from hodei.backends.hpc.slurm_rest import SlurmRest
from hodei.model.backend import Capabilities
from hodei.model.errors import InvalidInput
from hodei.model.resources import parse_duration_ms


class Settings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`output`: a folder that the server and all nodes see under the same path. `mode`: who chooses the node. `partitions`:
    those that jobs may go to, the first first. `account`, `qos`, `reservation`: for all jobs; `allow_*`: what jobs may ask
    for instead. `ahead`: how much of a partition may be promised, if Slurm chooses. `cpu_jobs_on_gpus`: whether jobs
    without GPUs may go to a partition whose nodes all have some, then."""

    output: str
    mode: Mode = "placed"
    transport: Literal["commands", "rest"] = "commands"
    partitions: tuple[str, ...] = ()
    ahead: float = 1.0
    cpu_jobs_on_gpus: CpuJobsOnGpus = "never"
    poll: str = "2s"
    conf: str = ""
    commands: str = ""
    rest: str = ""
    rest_version: str = "v0.0.38"
    rest_user: str = ""
    rest_token_file: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    allow_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    allow_reservations: tuple[str, ...] = ()
    allow_options: tuple[str, ...] = ()
    workdir: str = ""
    env: dict[str, str] = {}
    requeue: bool = False


def capabilities(mode: Mode, transport: str) -> Capabilities:
    delegate, commands = mode == "delegate", transport == "commands"
    return Capabilities(
        gpus=True,
        limits=True,
        checkpoint=True,
        suspend=True,
        execute=commands,
        node_execute=commands and not delegate,  # a partition is no machine
        usage=not delegate,
        delegates=delegate,
        expects=delegate,
    )


def make(name: str, settings: Settings, context: BackendContext) -> HpcBackend:
    """InvalidInput if the settings make no sense."""
    poll_ms = _check(name, settings)
    queue: Queue
    if settings.transport == "rest":
        queue = SlurmRest(
            settings.rest,
            version=settings.rest_version,
            user=settings.rest_user,
            token_file=settings.rest_token_file,
            requeue=settings.requeue,
        )
    else:
        env = {"SLURM_CONF": settings.conf} if settings.conf else {}
        queue = SlurmCommands(Commands(settings.commands, env), requeue=settings.requeue)
    offers = ClusterNodes(
        name, "slurm", queue, settings.mode, settings.partitions, round(settings.ahead * 100), settings.cpu_jobs_on_gpus
    )  # fmt: skip
    options = SlurmOptions(
        placed=settings.mode == "placed",
        fixed={"account": settings.account, "qos": settings.qos, "reservation": settings.reservation},
        allowed={
            "account": settings.allow_accounts,
            "qos": settings.allow_qos,
            "reservation": settings.allow_reservations,
        },
        also=settings.allow_options,
    )
    can = capabilities(settings.mode, settings.transport)
    wants = RequestBuilder(
        offers,
        options.of,
        job_variable=queue.job_variable,
        node_variable=queue.node_variable,
        element=queue.element,
        system="Slurm",
        beside=can.execute,
        rerun=settings.requeue,
        workdir=settings.workdir,
        env=settings.env,
    )
    return HpcBackend(
        name,
        context,
        queue,
        wants,
        offers,
        kind="slurm",
        system="Slurm",
        output=Path(settings.output),
        poll_s=poll_ms / 1000,
        capabilities=can,
    )


def _check(name: str, settings: Settings) -> int:
    problems = []
    if not settings.output.startswith("/"):
        problems.append(("output", "must be an absolute path, the same on the server and on all nodes"))
    if settings.transport == "rest" and not settings.rest.startswith(("unix:", "http://", "https://")):
        problems.append(("rest", "say where slurmrestd is: unix:/path or http://host:port"))
    if not 1 <= settings.ahead <= 100:
        problems.append(("ahead", "a ratio from 1 to 100"))
    try:
        poll_ms = parse_duration_ms(settings.poll)
        if not 50 <= poll_ms <= 600_000:
            problems.append(("poll", "from 50ms to 10m"))
    except InvalidInput as error:
        poll_ms = 0
        problems.append(("poll", error.message))
    if problems:
        named = tuple((f"backends.{name}.{key}", text) for key, text in problems)
        raise InvalidInput(
            "; ".join(f"{path}: {text}" for path, text in named), hint="docs/how-to/slurm.md", problems=named
        )
    return poll_ms
