"""PBS (OpenPBS, PBS Professional): the settings of a cluster, and the backend made from them. See docs/how-to/pbs.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from hodei.backends.base import BackendContext
from hodei.backends.hpc.base import HpcBackend
from hodei.backends.hpc.batch_lines import Option, parse_options
from hodei.backends.hpc.commands import Commands
from hodei.backends.hpc.nodes import ClusterNodes, CpuJobsOnGpus, Mode
from hodei.backends.hpc.pbs_commands import PbsCommands
from hodei.backends.hpc.ports import Line
from hodei.backends.hpc.request import RequestBuilder
from hodei.model.backend import Capabilities
from hodei.model.effects import Start
from hodei.model.errors import BackendRefused, InvalidInput
from hodei.model.resources import parse_duration_ms

# ----------------------------------------------------------------------------------------- pbs options
# What a job may ask of PBS beyond its file, as `#PBS` lines in its annotation `pbs.hodei.io/options`: let through,
# overridden by what Hodei says, or refused by name.


ANNOTATION = "pbs.hodei.io/options"
_LETTERS = {"account": "A", "project": "P"}
_OVERRIDDEN = {"name", "output", "error", "join", "keep", "rerun", "shell", "quiet", "mail-type"}
_INSTEAD = {
    "resource": "`cpu`, `memory`, `gpu` and `timeout` in the job file",
    "array": "`array` in the job file",
    "variables": "`env` in the job file",
    "all-variables": "`env` in the job file",
    "attributes": "`after` in the job file for dependencies",
    "hold": "`hodei hold`",
    "begin": "`hodei hold` and `hodei release`, or `hodei cron`",
    "priority": "`priority` in the job file",
}


class PbsOptions:
    """`fixed` are the operator's account and project; `allowed` what jobs may name instead."""

    def __init__(self, *, fixed: Mapping[str, str], allowed: Mapping[str, Sequence[str]]) -> None:
        self._fixed = {name: value for name, value in fixed.items() if value}
        self._allowed = dict(allowed)

    def of(self, order: Start, line: Line) -> tuple[tuple[str, str], ...]:
        """As (letter, value) for qsub. BackendRefused for what is not allowed, or makes no sense."""
        chosen = dict(self._fixed)
        options, problems = parse_options(order.spec.annotations.get(ANNOTATION, ""), "pbs")
        if problems:
            raise BackendRefused(f"annotation {ANNOTATION}: {problems[0]}", hint="see docs/how-to/pbs.md")
        for option in options:
            name, value = option.name, option.value
            if name in self._allowed:
                if value != self._fixed.get(name) and value not in self._allowed[name]:
                    raise _refused(option, f"the operator does not allow this {name}")
                chosen[name] = value
            elif name == "queue":
                if value != line.name:
                    label = f"`node_selector: {{pbs.hodei.io/queue: {value[:60]}}}`"
                    raise _refused(option, f"Hodei chose the queue {line.name}", label)
            elif name not in _OVERRIDDEN:
                raise _refused(option, "it is not for jobs to say", _INSTEAD.get(name, ""))
        return tuple((_LETTERS[name], value) for name, value in chosen.items())


def _refused(option: Option, why: str, instead: str = "") -> BackendRefused:
    said = f"{option.name}{' ' + option.value[:80] if option.value else ''}"
    return BackendRefused(
        f"{said!r} in the annotation {ANNOTATION} is refused: {why}",
        hint=f"use {instead}" if instead else "leave it out, or ask the operator (docs/how-to/pbs.md)",
    )


# ----------------------------------------------------------------------------------------------------


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


def make(name: str, settings: Settings, context: BackendContext) -> HpcBackend:
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
        context,
        queue,
        wants,
        offers,
        kind="pbs",
        system="PBS",
        output=Path(settings.output),
        poll_s=parse_duration_ms(settings.poll) / 1000,
        capabilities=can,
    )
