"""Writes docs/reference/cli.md from the commands themselves: python tests/unit/cli/reference.py > docs/reference/cli.md"""

from __future__ import annotations

import click

from hodei.cli.main import COMMANDS, cli

INTRO = """\
# The command line

Written from the commands themselves; `hodei COMMAND --help` says the same. See also [exit codes](exit-codes.md).

**Where the server is**: `--server` or `HODEI_SERVER`, else what `hodei up` left in `--home` or `HODEI_HOME` (default
`~/.hodei`): `server.json` with the address and `token` with the token. `HODEI_TOKEN` or `HODEI_TOKEN_FILE` name another
token, `HODEI_CA_FILE` the authority of an `https` server. The token in the home is sent to this machine only.

**Which jobs**: `12`, `last` (the newest), a name (the newest job called so), `1-3`, `1,3,5-8`, `2-10:2`, and `all` (every
active job; with `requeue --failed` every job that has failed).

**Output**: a table for people. `-o wide` shows more columns, `-o json|jsonl|yaml|name` is for programs: field names are
those of the API and only ever grow, times are ISO 8601 in UTC, a list is a list and one thing is an object.
`HODEI_OUTPUT` sets the default. Data goes to stdout, everything else to stderr. Colours only on a terminal and never with
`NO_COLOR`.
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
            for sub, inner in getattr(command, "commands", {}).items():
                below = click.Context(inner, info_name=sub, parent=ctx, terminal_width=100, max_content_width=100)
                out[f"hodei {name} {sub}"] = inner.get_help(below)
    return out


def document() -> str:
    parts = [INTRO, *(f"## {name}\n\n```text\n{text}\n```\n" for name, text in sections().items())]
    return "\n".join(parts)


if __name__ == "__main__":
    click.echo(document(), nl=False)
