"""`hodei config`: check a configuration file; show, change and undo the configuration of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hodei.cli.documents import read_file
from hodei.cli.groups import Group
from hodei.cli.options import client, headers_option, output_option, settings
from hodei.cli.output import Column, clean, counted, emit_list, emit_one, indent
from hodei.cli.times import clock, ms_of
from hodei.model.errors import NotFound

if TYPE_CHECKING:
    from hodei.api.config import ConfigView
    from hodei.model.config import ConfigChange, ConfigDifference

_TIMEOUT_S = 60
_CHANGES_SHOWN = 60

COLUMNS = (
    Column("NUMBER", lambda c: str(c.number)),
    Column("SINCE", lambda c: clock(ms_of(c.at))),
    Column("BY", lambda c: c.by or "-"),
    Column("HOW", lambda c: f"undo to {c.restores}" if c.restores else c.how),
    Column("PROFILES", lambda c: ", ".join(sorted(c.scheduling.profiles)) or "-"),
)
_dry_run = click.option(
    "--dry-run", is_flag=True, help="Only report what would change, and which jobs would start when."
)


@click.group(cls=Group)
def config() -> None:
    """Check a configuration file; show, change and undo the scheduling configuration of a running server."""


@config.command("show")
@click.argument("number", type=int, required=False, metavar="[NUMBER]")
@output_option
def show(number: int | None, output: str) -> None:
    """Print the current configuration as TOML, or an earlier one by its number."""
    with client() as server:
        known = [server.config()] if number is None else server.config_history()
        found = next((each for each in known if number in (None, each.number)), None)
        if found is None:
            raise NotFound(f"there is no configuration {number}", hint="hodei config history")
    emit_one(found, output, name=lambda c: str(c.number), text=render)


@config.command("history")
@headers_option
@output_option
def history(no_headers: bool, output: str) -> None:
    """List the current and earlier configurations, newest first."""
    with client() as server:
        found = server.config_history()
    emit_list(found, output, COLUMNS, name=lambda c: str(c.number), headers=not no_headers)


@config.command("check")
@click.argument("path", metavar="[FILE]", required=False)
@output_option
def check(path: str | None, output: str) -> None:
    """Check a configuration file without a server: all mistakes with their lines.

    FILE is TOML or YAML [default: the file in HOME that `hodei up` would read]. It is the check that `hodei up`, `reload` and
    `config set` make; plugins that the file names are loaded.

    Exit code 0: no mistakes. 1: it has mistakes. 2: it cannot be read.
    """
    from hodei.cli.serve import need_server, run_program

    need_server()
    home = settings()["home"]
    args = [f"--home={home}"] if home else []
    run_program("hodei.server.config_check", [*args, f"--output={output}", *(["--", path] if path else [])])


@config.command("set")
@click.argument("path", metavar="FILE")
@_dry_run
@output_option
def set_config(path: str, dry_run: bool, output: str) -> None:
    """Apply another scheduling configuration: a file like the server's own, or only its [scheduling] part.

    FILE is TOML, YAML or JSON; - reads TOML or JSON from stdin.

    \b
      hodei config set new.toml --dry-run
      hodei config set new.toml
      hodei config undo
    """
    body = read_file(path, hint="name a file, or - for stdin")
    form = "json" if body.lstrip().startswith(b"{") else "yaml" if path.endswith((".yaml", ".yml")) else "toml"
    with client(_TIMEOUT_S) as server:
        change = server.set_config(body, f"application/{form}", dry_run=dry_run)
    _print_change(change, output)


@config.command("reload")
@_dry_run
@output_option
def reload(dry_run: bool, output: str) -> None:
    """Make the server read its configuration file again. Running jobs continue; a file with mistakes changes nothing.

    The signal HUP does the same. Settings that need a restart are listed.
    """
    with client(_TIMEOUT_S) as server:
        change = server.reload_config(dry_run=dry_run)
    _print_change(change, output)


@config.command("undo")
@click.option(
    "--to", type=click.IntRange(1), metavar="NUMBER", help="Restore this one instead, also one that was undone."
)
@_dry_run
@output_option
def undo(to: int | None, dry_run: bool, output: str) -> None:
    """Undo the last change of the configuration that is not undone yet.

    Repeat it to go further back. A change after an undo starts from the restored configuration.
    """
    with client(_TIMEOUT_S) as server:
        change = server.undo_config(to or 0, dry_run=dry_run)
    _print_change(change, output)


def _print_change(change: ConfigChange, output: str) -> None:
    emit_one(change, output, name=lambda c: str(c.number), text=_describe_change)


def _describe_change(change: ConfigChange) -> str:
    from hodei.cli.why import render_whatif

    count, restored = counted(len(change.changes), "setting"), f"configuration {change.restores}"
    if change.applied:
        same = f", the same as {restored}" if change.restores else ""
        parts = [f"configuration {change.number} is active{same}: {count} changed"]
    elif change.changes:
        by = f" by restoring {restored}" if change.restores else ""
        parts = [f"{count} would change{by}; configuration {change.number} stays active"]
    else:
        parts = [f"configuration {change.number} stays active"]
    if change.changes:
        parts.append(indent(_list_changes(change.changes)))
    if change.effect is not None:
        parts.append("its effect now:\n" + indent(render_whatif(change.effect)))
    if change.needs_restart:
        parts.append("needs a restart of the server:\n" + indent(_list_changes(change.needs_restart)))
    parts += [f"note: {clean(note)}" for note in change.notes]
    if change.applied:
        parts.append(f"  next: hodei config undo --to {change.number - 1} restores the previous one")
    return "\n".join(parts)


def _list_changes(changes: tuple[ConfigDifference, ...]) -> str:
    lines = [_change_line(change) for change in changes[:_CHANGES_SHOWN]]
    more = len(changes) - len(lines)
    return "\n".join(lines) + (f"\n… and {more} more (-o json has all)" if more > 0 else "")


def _change_line(change: ConfigDifference) -> str:
    before, after = _value(change.before), _value(change.after)
    if change.before is None:
        return clean(f"+ {change.path} = {after}")
    if change.after is None:
        return clean(f"- {change.path} = {before}")
    return clean(f"  {change.path} = {before} -> {after}")


def render(found: ConfigView) -> str:
    """The settings that differ from the defaults, as TOML that can be edited and set again."""
    from hodei.api.config import as_toml

    by = f" by {found.by}" if found.by else ""
    return f"# configuration {found.number}, since {found.at} ({found.how}{by})\n{as_toml(found.scheduling)}"


def _value(value: Any) -> str:
    from hodei.api.config import toml_value

    return "" if value is None else toml_value(value)
