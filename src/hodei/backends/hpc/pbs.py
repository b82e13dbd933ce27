"""PBS (OpenPBS, PBS Professional): the settings of a cluster, and the backend made from them. See docs/how-to/pbs.md."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from hodei.backends.base import BackendContext
from hodei.backends.hpc.base import HpcBackend
from hodei.backends.hpc.commands import Commands
from hodei.backends.hpc.nodes import ClusterNodes, CpuJobsOnGpus, Mode
from hodei.backends.hpc.pbs_commands import PbsCommands
from hodei.backends.hpc.pbs_options import PbsOptions
from hodei.backends.hpc.request import RequestBuilder
from hodei.model.backend import Capabilities
from hodei.model.errors import InvalidInput
from hodei.model.quantity import parse_duration_ms


class Settings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """As for Slurm (`hodei.backends.hpc.slurm`), with queues for partitions. `conf`: the file that PBS's commands read
    instead of /etc/pbs.conf."""

    output: str
    mode: Mode = "delegate"
    queues: tuple[str, ...] = ()
    ahead: float = 1.0
    cpu_jobs_on_gpus: CpuJobsOnGpus = "never"
    poll: str = "5s"
    conf: str = ""
    commands: str = ""
    account: str = ""
    project: str = ""
    allow_accounts: tuple[str, ...] = ()
    allow_projects: tuple[str, ...] = ()
    workdir: str = ""
    env: dict[str, str] = {}
    requeue: bool = False


def capabilities(mode: Mode) -> Capabilities:
    delegate = mode == "delegate"
    return Capabilities(gpus=True, limits=True, checkpoint=True, suspend=True, delegates=delegate, expects=delegate)


def make(name: str, settings: Settings, house: BackendContext) -> HpcBackend:
    """InvalidInput if the settings make no sense."""
    if not settings.output.startswith("/"):
        path = f"backends.{name}.output"
        text = "must be an absolute path, the same on the server and on all nodes"
        raise InvalidInput(f"{path}: {text}", hint="docs/how-to/pbs.md", problems=((path, text),))
    env = {"PBS_CONF_FILE": settings.conf} if settings.conf else {}
    queue = PbsCommands(Commands(settings.commands, env), requeue=settings.requeue)
    offers = ClusterNodes(
        name, "pbs", queue, settings.mode, settings.queues, round(settings.ahead * 100), settings.cpu_jobs_on_gpus
    )  # fmt: skip
    options = PbsOptions(
        fixed={"account": settings.account, "project": settings.project},
        allowed={"account": settings.allow_accounts, "project": settings.allow_projects},
    )
    can = capabilities(settings.mode)
    wants = RequestBuilder(
        offers,
        options.of,
        job_variable=queue.job_variable,
        node_variable=queue.node_variable,
        element=queue.element,
        system="PBS",
        beside=can.execute,
        rerun=settings.requeue,
        workdir=settings.workdir,
        env=settings.env,
    )
    return HpcBackend(
        name,
        house,
        queue,
        wants,
        offers,
        kind="pbs",
        system="PBS",
        output=Path(settings.output),
        poll_s=parse_duration_ms(settings.poll) / 1000,
        capabilities=can,
    )
