"""What commands share: the client, `-o`, `--watch`, and arguments that complete themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from hodei.cli.output import FORMATS

if TYPE_CHECKING:
    from hodei.client import Client

Command = TypeVar("Command", bound=Callable[..., Any])


def settings() -> dict[str, Any]:
    """The options given before the command's name."""
    root = click.get_current_context().find_root()
    return root.obj or {"server": None, "home": None}


def client(timeout_s: float = 30) -> Client:
    from hodei.client import Client

    given = settings()
    return Client(given["server"], home=Path(given["home"]) if given["home"] else None, timeout_s=timeout_s)


def output_option(command: Command) -> Command:
    return click.option(
        "-o",
        "--output",
        type=click.Choice(FORMATS),
        default="table",
        envvar="HODEI_OUTPUT",
        metavar="FORMAT",
        help="table, wide, json, jsonl, yaml or name [env: HODEI_OUTPUT].",
    )(command)


def headers_option(command: Command) -> Command:
    return click.option("--no-headers", is_flag=True, help="Leave out the line of column names.")(command)


def watch_option(command: Command) -> Command:
    return click.option("-w", "--watch", is_flag=True, help="Redraw whenever something changes, until Ctrl-C.")(command)


def jobs_argument(command: Command) -> Command:
    """One or more jobs, as `refs.resolve` reads them."""
    return click.argument("jobs", metavar="JOB...", nargs=-1, required=True, shell_complete=complete_jobs)(command)


def job_argument(command: Command) -> Command:
    return click.argument("job", metavar="JOB", shell_complete=complete_jobs)(command)


def node_argument(command: Command) -> Command:
    return click.argument("name", metavar="NODE", shell_complete=complete_nodes)(command)


def complete_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids with names as help, newest first. Silent when there is no server: completion never complains."""
    try:
        with client_for_completion(ctx) as server:
            found = [CompletionItem(str(view.id), help=f"{view.name} {view.state}") for view in server.jobs(limit=100)]
    except Exception:
        found = []
    found += [CompletionItem("last", help="the newest job"), CompletionItem("all", help="every active job")]
    return [item for item in found if item.value.startswith(incomplete)]


def complete_nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    try:
        with client_for_completion(ctx) as server:
            found = [CompletionItem(view.name, help=view.state) for view in server.nodes()]
    except Exception:
        found = []
    return [item for item in found if item.value.startswith(incomplete)]


def client_for_completion(ctx: click.Context) -> Client:
    from hodei.client import Client

    given = ctx.find_root().params
    home = given.get("home")
    return Client(given.get("server"), home=Path(home) if home else None, timeout_s=1)
