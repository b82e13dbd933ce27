"""Writes docs/reference/cli.md from the commands themselves: python tests/unit/cli/reference.py > docs/reference/cli.md"""

from __future__ import annotations

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
(every active job; with `requeue --failed` every failed job).

**Names**: commands are `hodei NOUN VERB`, with `list`, `show`, `create` and `delete` wherever they apply. Frequent ones have a
short [alias](#aliases). **Files**: a FILE argument; `-` reads stdin. **Selectors**: `-l`, `--selector`.

**Output**: a table by default. `-o wide` shows more columns. `-o json|jsonl|yaml|name` is for programs: field names are
those of the API and are only ever added, times are ISO 8601 in UTC, several items are a list and one item is an object.
`HODEI_OUTPUT` sets the default. Data goes to stdout, everything else to stderr. Colours are used only on a terminal and
never with `NO_COLOR`.
"""


def sections() -> dict[str, str]:
    """The help of every command by its full name, in the order of `hodei --help`."""
    out: dict[str, str] = {}
    root = click.Context(cli, info_name="hodei", **cli.context_settings)
    for section in COMMANDS.values():
        for name in section:
            command = cli.get_command(root, name)
            assert command is not None
            ctx = click.Context(command, info_name=name, parent=root, terminal_width=100, max_content_width=100)
            out[f"hodei {name}"] = command.get_help(ctx)
            for sub in command.list_commands(ctx) if isinstance(command, click.Group) else ():
                inner = command.get_command(ctx, sub)
                below = click.Context(inner, info_name=sub, parent=ctx, terminal_width=100, max_content_width=100)
                out[f"hodei {name} {sub}"] = inner.get_help(below)
    return out


def document() -> str:
    aliases = "\n".join(f"| `hodei {alias}` | `hodei {path}` |" for alias, path in ALIASES.items())
    parts = [INTRO, f"## Aliases\n\n| alias | command |\n|---|---|\n{aliases}\n"]
    parts += [f"## {name}\n\n```text\n{text}\n```\n" for name, text in sections().items()]
    return "\n".join(parts)


if __name__ == "__main__":
    click.echo(document(), nl=False)
