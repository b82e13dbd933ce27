"""`hodei version`, `schema`, `completion`: the program speaks of itself."""

from __future__ import annotations

import click

from hodei import __version__
from hodei.cli.options import client, output_option
from hodei.cli.output import clean, emit_one

_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.option("--client", "client_only", is_flag=True, help="Do not ask the server.")
@output_option
def version(client_only: bool, output: str) -> None:
    """Print the version of this program and of the server, if one answers."""
    from hodei.model.errors import HodeiError

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
            return f"hodei {answer['client']} (no server in reach)" if not client_only else f"hodei {answer['client']}"
        return f"hodei {answer['client']}, server {clean(answer['server'])} at {answer['address']}"

    emit_one(found, output, name=lambda v: v["client"], text=text)


@click.command()
def schema() -> None:
    """Print the JSON Schema of a job file, for editors and checkers.

    \b
      hodei schema > job.schema.json
      # yaml-language-server: $schema=job.schema.json     (first line of a job file)
    """
    import json

    from hodei.jobfile.json_schema import job_schema

    click.echo(json.dumps(job_schema(), indent=2, ensure_ascii=False))


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
