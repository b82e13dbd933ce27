"""Writes docs/reference/cli.md from the commands themselves: PYTHONPATH=. python tests/unit/cli/reference.py > docs/reference/cli.md"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import click

from hodei.cli.main import ALIASES, COMMANDS, cli

INTRO = """\
# Command line

This page lists every command and option. It is generated from the commands; `hodei COMMAND --help` prints the same
text. See also [exit codes](exit-codes.md).

**Server address**: `--server` or `HODEI_SERVER`, else the files of `hodei up` in `--home` or `HODEI_HOME` (default
`~/.hodei`): `server.json` with the address and `token` with the token. `HODEI_TOKEN` or `HODEI_TOKEN_FILE` give another
token, `HODEI_CA_FILE` the authority of an `https` server. The token in the home is sent to this machine only.

**Job references**: `12`, `last` (the newest), a name (the newest job of that name), `1-3`, `1,3,5-8`, `2-10:2`, and `all`
(every active job; with `requeue --failed` every failed job; jobs of other users are skipped unless you are an
administrator).

**Names**: commands are `hodei NOUN VERB`, with `list`, `show`, `create` and `delete` wherever they apply. Frequent ones have a
short [alias](#aliases). **Files**: a FILE argument; `-` reads stdin. **Selectors** (`-l`, `--selector`): `zone=a, !spot, disk in
(ssd, nvme)`, as in Kubernetes.

**Output**: a table by default. `-o wide` shows more columns. `-o json|jsonl|yaml|name` is for programs: field names are
those of the API and are only ever added, times are ISO 8601 in UTC, several items are a list and one item is an object.
`HODEI_OUTPUT` sets the default. Data goes to stdout, everything else to stderr. Colours are used only on a terminal and
never with `NO_COLOR`.
"""


# Commands that run as programs of their own.
PROGRAMS = {
    "kube": "hodei.kube.scheduler.commands:kube",
    "sim": "hodei.sim.__main__:sim",
    "replay": "hodei.sim.replay:replay_command",
    "test": "hodei.sim.scenario.__main__:test",
    "bench": "benchmarks.__main__:bench",
}


def walk() -> Iterator[tuple[str, click.Command, str]]:
    """The full name of every command, the command and its help, in the order of `hodei --help`."""
    root = click.Context(cli, info_name="hodei", **cli.context_settings)
    for section in COMMANDS.values():
        for name in section:
            command = cli.get_command(root, name)
            if name in PROGRAMS:
                module, _, attribute = PROGRAMS[name].partition(":")
                command = getattr(import_module(module), attribute)
            assert command is not None
            yield from _walk_below(command, name, root)


def _walk_below(command: click.Command, name: str, parent: click.Context) -> Iterator[tuple[str, click.Command, str]]:
    ctx = click.Context(command, info_name=name, parent=parent, terminal_width=100, max_content_width=100)
    yield ctx.command_path, command, command.get_help(ctx)
    for sub in command.list_commands(ctx) if isinstance(command, click.Group) else ():
        subcommand = command.get_command(ctx, sub)
        assert subcommand is not None
        yield from _walk_below(subcommand, sub, ctx)


def document() -> str:
    defaults = {name: f"{name} {command.default}" for name, command, _ in walk() if getattr(command, "default", "")}
    aliases_of = {f"hodei {alias}": f"hodei {path}" for alias, path in ALIASES.items()} | defaults
    aliases = "\n".join(f"| `{alias}` | `{path}` |" for alias, path in aliases_of.items())
    parts = [INTRO, f"## Aliases\n\n| alias | command |\n|---|---|\n{aliases}\n"]
    parts += [f"## {name}\n\n```text\n{text}\n```\n" for name, _, text in walk()]
    return "\n".join(parts)


if __name__ == "__main__":
    click.echo(document(), nl=False)
