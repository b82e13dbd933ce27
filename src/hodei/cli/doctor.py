"""`hodei doctor`: check the client and the server, and report how to fix problems. Also `version`, `schema` and
`completion`."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hodei import __version__
from hodei.api.views import Check
from hodei.cli import errors
from hodei.cli.options import client, headers_option, output_option, settings
from hodei.cli.output import Column, clean, emit_list, emit_one, is_for_people
from hodei.cli.times import duration_text, now_ms
from hodei.model.errors import HodeiError

if TYPE_CHECKING:
    from hodei.client import Client

_MIN_PYTHON = (3, 11)
_MAX_SKEW_MS = 5_000
_LOW_DISK, _FULL_DISK = 1 << 30, 100 << 20
_SHELLS = ("bash", "zsh", "fish")

COLUMNS = (
    Column("CHECK", lambda c: c.name),
    Column("LEVEL", lambda c: c.level),
    Column("FOUND", lambda c: c.found),
    Column("FIX", lambda c: c.fix or "-"),
)


@click.command()
@output_option
@headers_option
@click.pass_context
def doctor(ctx: click.Context, output: str, no_headers: bool) -> None:
    """Check this installation and report how to fix problems. Exit code 1 if there is a problem, 0 for warnings."""
    from hodei.client.transport import home_dir

    home = home_dir(settings()["home"])
    found = [check_python(), *check_home(home), *check_server(client(timeout_s=5))]
    emit_list(found, output, COLUMNS, headers=not no_headers)
    ctx.exit(errors.ERROR if any(check.level == "problem" for check in found) else errors.OK)


def check_python() -> Check:
    have = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _MIN_PYTHON:
        return Check("python", "problem", have, "install Python 3.11 or newer")
    return Check("python", "ok", have)


def check_home(home: Path) -> Iterator[Check]:
    """The home directory, its permissions, the token in it, and the free disk space."""
    if not home.exists():
        yield Check("home", "ok", f"{home} does not exist yet; hodei up creates it")
        return
    if not home.is_dir():
        yield Check("home", "problem", f"{home} is not a directory", "set HODEI_HOME to a directory")
        return
    mode = stat.S_IMODE(home.stat().st_mode)
    if not os.access(home, os.W_OK | os.X_OK):
        yield Check("home", "problem", f"{home} cannot be written", f"chown it to this user, or chmod u+rwx {home}")
    elif mode & 0o077:
        yield Check("home", "warning", f"{home} is accessible to other users ({mode:04o})", f"chmod 700 {home}")
    else:
        yield Check("home", "ok", f"{home} ({mode:04o})")
    token = home / "token"
    if token.exists():
        mode = stat.S_IMODE(token.stat().st_mode)
        if mode & 0o077:
            yield Check("token", "problem", f"{token} is readable by other users ({mode:04o})", f"chmod 600 {token}")
        else:
            yield Check("token", "ok", f"{token} ({mode:04o})")
    free = shutil.disk_usage(home).free
    level = "problem" if free < _FULL_DISK else "warning" if free < _LOW_DISK else "ok"
    fix = "" if level == "ok" else "free some space, or move HODEI_HOME to a larger disk"
    yield Check("disk", level, f"{free / 2**30:.1f} GiB free at {home}", fix)


def check_server(server: Client) -> Iterator[Check]:
    """Whether it answers, accepts the token, and has the same time and version; then its own checks."""
    with server:
        try:
            skew_ms = _skew_ms(server.server_date())
            yield Check("server", "ok", f"answers at {server.address}")
        except HodeiError as error:
            yield Check("server", "problem", error.message, error.hint)
            return
        if skew_ms is not None and abs(skew_ms) > _MAX_SKEW_MS:
            found = f"differs from the server's by {duration_text(abs(skew_ms))}"
            yield Check("clock", "warning", found, "synchronise both with NTP")
        elif skew_ms is not None:
            yield Check("clock", "ok", "the same as the server's")
        try:
            version = server.info().version
            if version != __version__:
                fix = "install the same version on both"
                yield Check("version", "warning", f"client {__version__}, server {version}", fix)
            else:
                yield Check("version", "ok", __version__)
            yield from server.checks()
        except HodeiError as error:
            yield Check("login", "problem", error.message, error.hint)


def _skew_ms(date: str) -> int | None:
    """How far the server's clock is ahead, to the second; None without a valid `Date` header."""
    try:
        return round(parsedate_to_datetime(date).timestamp() * 1000) - now_ms()
    except (TypeError, ValueError):
        return None


@click.command()
@click.option("--client", "client_only", is_flag=True, help="Do not ask the server.")
@output_option
def version(client_only: bool, output: str) -> None:
    """Print the version of this program and of the server, if one answers."""
    found: dict[str, str | None] = {"client": __version__, "server": None, "address": None}
    if not client_only:
        try:
            with client(timeout_s=3) as server:
                info = server.info()
                found |= {"server": info.version, "address": server.address}
        except HodeiError:
            pass

    def text(answer: dict[str, str | None]) -> str:
        if not answer["server"]:
            return f"hodei {answer['client']}" + ("" if client_only else " (no server answers)")
        return f"hodei {answer['client']}, server {clean(answer['server'])} at {answer['address']}"

    emit_one(found, output, name=lambda v: v["client"], text=text)


@click.command()
@output_option
def schema(output: str) -> None:
    """Print the JSON Schema of a job file, for editors and checkers.

    \b
      hodei schema > job.schema.json
      # yaml-language-server: $schema=job.schema.json     (first line of a job file)
    """
    from hodei.jobfile.schema import job_schema

    emit_one(job_schema(), "json" if is_for_people(output) else output, name=lambda s: s["$id"], text=str)


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of a shell: commands, options, job ids and node names.

    \b
      bash:  hodei completion bash > ~/.local/share/bash-completion/completions/hodei
      zsh:   hodei completion zsh > "${fpath[1]}/_hodei"
      fish:  hodei completion fish > ~/.config/fish/completions/hodei.fish
    """
    from click.shell_completion import get_completion_class

    from hodei.cli.main import cli

    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(cli, {}, "hodei", "_HODEI_COMPLETE").source())
