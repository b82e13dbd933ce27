"""`hodei backend …`: the places where jobs run; and `hodei exec`, a command beside a running job."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from hodei.cli.errors import UsageProblem
from hodei.cli.exec_output import AS_IT_IS, ExecCommand, show_executed, timeout_seconds
from hodei.cli.groups import Group
from hodei.cli.options import client, headers_option, job_argument, output_option
from hodei.cli.output import Column, clean, emit_list, emit_one, fields
from hodei.cli.refs import resolve_job
from hodei.cli.times import ago

if TYPE_CHECKING:
    from hodei.api.backends import BackendView, NodeUsageView

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
    """Show, add, disable, enable and remove the systems that jobs run on."""


@backend.command("list")
@output_option
@headers_option
def list_backends(output: str, no_headers: bool) -> None:
    """List the backends, and how each is."""
    with client() as server:
        found = server.backends()
    emit_list(found, output, COLUMNS, name=lambda b: b.name, headers=not no_headers, empty="no backends")


@backend.command("show")
@click.argument("name", metavar="NAME")
@output_option
def show(name: str, output: str) -> None:
    """Everything about one backend; secrets are masked."""
    with client() as server:
        found = server.backend(name)
    emit_one(found, output, name=lambda b: b.name, text=_describe)


@backend.command("add")
@click.argument("name", metavar="NAME")
@click.option("--kind", required=True, metavar="KIND", help="docker, slurm, pbs, kubernetes or local.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting; VALUE in TOML, or plain text.")
@click.option("-f", "--file", "path", default="", metavar="FILE", help="Settings from a TOML file; - for stdin.")
@output_option
def add(name: str, kind: str, settings: tuple[str, ...], path: str, output: str) -> None:
    """Add a backend to the running server; it is kept over restarts.

    \b
      hodei backend add lab --kind docker --set 'hosts=[{name="h1", url="unix:///run/docker.sock"}]'
      hodei backend add hpc --kind slurm -f slurm.toml

    Keys: docs/how-to/backends.md. Secrets belong into a file (-f), not on a command line that others can read.
    """
    table = {**_of_file(path), **dict(_setting(each) for each in settings)}
    with client() as server:
        made = server.add_backend(name, kind, table)
    emit_one(made, output, name=lambda b: b.name, text=lambda b: f"backend {clean(b.name)} added: {b.state}")


@backend.command("disable")
@click.argument("name", metavar="NAME")
@output_option
def disable(name: str, output: str) -> None:
    """Start nothing more there; what runs goes on."""
    with client() as server:
        found = server.disable_backend(name)
    emit_one(found, output, name=lambda b: b.name, text=lambda b: f"backend {clean(b.name)} disabled")


@backend.command("enable")
@click.argument("name", metavar="NAME")
@output_option
def enable(name: str, output: str) -> None:
    """Let jobs start there again."""
    with client() as server:
        found = server.enable_backend(name)
    emit_one(found, output, name=lambda b: b.name, text=lambda b: f"backend {clean(b.name)} enabled: {b.state}")


@backend.command("remove")
@click.argument("name", metavar="NAME")
@click.option("--force", is_flag=True, help="Even if runs are there: they are not stopped, and count as lost.")
@output_option
def remove(name: str, force: bool, output: str) -> None:
    """Remove a backend that was added. Those of the configuration file are taken out there."""
    with client() as server:
        gone = server.remove_backend(name, force=force)
    emit_one(gone, output, name=lambda b: b.name, text=lambda b: f"backend {clean(b.name)} removed")


@backend.command("usage")
@click.argument("name", metavar="NAME")
@output_option
@headers_option
def usage(name: str, output: str, no_headers: bool) -> None:
    """What is used on its nodes now, as measured, by whomever."""
    with client() as server:
        found = server.backend_usage(name)
    emit_list(found, output, USAGE, name=lambda u: u.node, headers=not no_headers, empty="nothing was measured")


@click.command("exec", cls=ExecCommand, context_settings=AS_IT_IS)
@job_argument
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@click.option("--member", type=click.IntRange(0), default=0, show_default=True, help="Which member of the job.")
@click.option(
    "--timeout", default="30s", show_default=True, metavar="TIME", help="How long it may take: 30s, 2m; up to 5m."
)
def execute(job: str, command: tuple[str, ...], member: int, timeout: str) -> None:
    """Run a command beside a running job, where it is and as whom it is; exit with its code (124: not over in time).

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


def _of_file(path: str) -> dict[str, Any]:
    import tomllib
    from pathlib import Path

    if not path:
        return {}
    try:
        return tomllib.loads(sys.stdin.read() if path == "-" else Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageProblem(f"cannot read {path}: {error}", hint="a TOML file with the backend's settings") from None


def _setting(text: str) -> tuple[str, Any]:
    import tomllib

    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageProblem(f"{text!r} is no KEY=VALUE", hint="for example --set image=busybox")
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
        ("From", "the configuration file" if found.source == "file" else "added at run time"),
        ("Nodes", str(found.nodes)),
        ("Runs", str(found.runs)),
        ("Can", ", ".join(found.capabilities)),
        *((f"  {key}", str(value)) for key, value in sorted(found.settings.items())),
    ]
    return fields([(name, clean(value)) for name, value in rows if value])
