"""`hodei backend …`, and `hodei job exec`: a command beside a running job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hodei.cli.documents import read_toml
from hodei.cli.errors import UsageProblem
from hodei.cli.groups import Group
from hodei.cli.options import client, headers_option, job_argument, output_option
from hodei.cli.output import (
    AS_IT_IS,
    Column,
    ExecCommand,
    clean,
    emit_list,
    emit_one,
    fields,
    show_executed,
    timeout_seconds,
)
from hodei.cli.refs import resolve_job
from hodei.cli.resources import list_command, name_argument, named_command
from hodei.cli.times import ago

if TYPE_CHECKING:
    from hodei.api.views import BackendView, NodeUsageView

COLUMNS = (
    Column("NAME", lambda b: b.name),
    Column("KIND", lambda b: b.kind),
    Column("STATE", lambda b: b.state),
    Column("SINCE", lambda b: ago(b.since) or "-", if_any=True),
    Column("NODES", lambda b: str(b.nodes)),
    Column("RUNS", lambda b: str(b.runs)),
    Column("FROM", lambda b: b.source, wide=True),
    Column("ANSWERED", lambda b: f"{b.took_ms}ms", wide=True),
    Column("REASON", lambda b: b.reason or "-", if_any=True),
)
USAGE = (
    Column("NODE", lambda u: u.node),
    Column("CPU", lambda u: _amount(u, "cpu")),
    Column("MEMORY", lambda u: _amount(u, "memory")),
)


@click.group(cls=Group)
def backend() -> None:
    """Manage the systems that jobs run on."""


list_command(
    backend, lambda server: server.backends(), COLUMNS, empty="no backends", help="List the backends and their health."
)
named_command(
    backend,
    "show",
    lambda server, name: server.backend(name),
    lambda found: _describe(found),
    help="Show one backend; secrets are masked.",
)


@backend.command("create")
@name_argument
@click.argument("path", metavar="[FILE]", default="")
@click.option("--kind", required=True, metavar="KIND", help="docker, slurm, pbs, kubernetes or local.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting; VALUE is TOML or plain text.")
@output_option
def create(name: str, path: str, kind: str, settings: tuple[str, ...], output: str) -> None:
    """Create a backend in the running server; it survives restarts. FILE has settings in TOML, - reads them from stdin.

    \b
      hodei backend create lab --kind docker --set 'hosts=[{name="h1", url="unix:///run/docker.sock"}]'
      hodei backend create hpc slurm.toml --kind slurm

    Keys: docs/how-to/backends.md. Put secrets into the file, not on a command line that others can read.
    """
    table = {**(read_toml(path) if path else {}), **dict(map(_setting, settings))}
    with client() as server:
        made = server.create_backend(name, kind, table)
    emit_one(made, output, name=lambda b: b.name, text=lambda b: f"backend {clean(b.name)} created: {b.state}")


named_command(
    backend,
    "disable",
    lambda server, name: server.disable_backend(name),
    lambda found: f"backend {clean(found.name)} disabled",
    help="Start nothing more there; running jobs continue.",
)
named_command(
    backend,
    "enable",
    lambda server, name: server.enable_backend(name),
    lambda found: f"backend {clean(found.name)} enabled: {found.state}",
    help="Allow starts there again.",
)
named_command(
    backend,
    "delete",
    lambda server, name, force: server.delete_backend(name, force=force),
    lambda found: f"backend {clean(found.name)} deleted",
    help="Delete a backend that was created at run time. Remove the others from the configuration file.",
    options=[
        click.option("--force", is_flag=True, help="Even if it has runs: they are not stopped, and count as lost.")
    ],
)


@backend.command("usage")
@name_argument
@output_option
@headers_option
def usage(name: str, output: str, no_headers: bool) -> None:
    """Show the measured usage of its nodes, by all processes."""
    with client() as server:
        found = server.backend_usage(name)
    emit_list(found, output, USAGE, name=lambda u: u.node, headers=not no_headers, empty="no measurements")


@click.command("exec", cls=ExecCommand, context_settings=AS_IT_IS)
@job_argument
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@click.option("--member", type=click.IntRange(0), default=0, show_default=True, help="Which member of the job.")
@click.option(
    "--timeout", default="30s", show_default=True, metavar="TIME", help="How long it may take: 30s, 2m; up to 5m."
)
def execute(job: str, command: tuple[str, ...], member: int, timeout: str) -> None:
    """Run a command beside a running job, on its node and as its user; exit with its code (124: timeout).

    \b
      hodei exec train -- ps aux
      hodei exec --timeout 2m 'sweep[3]' -- du -sh .
      hodei exec --member 3 42 -- nvidia-smi
    """
    command = command[1:] if command[0] == "--" else command
    if not command:
        raise UsageProblem("name a command", hint=f"hodei exec {job} -- ps aux")
    timeout_s = timeout_seconds(timeout)
    with client(timeout_s + 30) as server:
        show_executed(server.execute(resolve_job(server, job), command, member=member, timeout_s=timeout_s), timeout_s)


def _amount(usage: NodeUsageView, resource: str) -> str:
    from hodei.model.resources import human_amount

    return human_amount(resource, usage.used[resource]) if resource in usage.used else "-"


def _setting(text: str) -> tuple[str, Any]:
    import tomllib

    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageProblem(f"{text!r} is not KEY=VALUE", hint="for example --set image=busybox")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def _describe(found: BackendView) -> str:
    rows = [
        ("Backend", found.name),
        ("Kind", found.kind),
        ("State", f"{found.state}{' since ' + ago(found.since) if found.since else ''}"),
        ("Reason", found.reason),
        ("From", "the configuration file" if found.source == "file" else "created at run time"),
        ("Nodes", str(found.nodes)),
        ("Runs", str(found.runs)),
        ("Can", ", ".join(found.capabilities)),
        *((f"  {key}", str(value)) for key, value in sorted(found.settings.items())),
    ]
    return fields([(name, clean(value)) for name, value in rows if value])
