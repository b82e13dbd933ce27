"""What commands share: the client, `-o`, `--watch`, and arguments that complete themselves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from hodei.cli.output import FORMATS, note

if TYPE_CHECKING:
    from hodei.client import Client

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
    return click.option("--no-headers", is_flag=True, help="Omit the header row.")(command)


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


# ----------------------------------------------------------------------------------------------- watch
# `--watch`: a list drawn again when something has happened. Events set the pace, so an idle cluster costs nothing.


# Never faster than the eye, and often enough that "3m ago" stays true.
_AT_LEAST_S, _AT_MOST_S, _WHILE_AWAY_S = 0.5, 30.0, 2.0
T = TypeVar("T")
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def redraw(server: Client, fetch: Callable[[], T], draw: Callable[[T], None], output: str) -> None:
    """Fetch and draw now and after every change, until Ctrl-C or the server is gone for good."""
    from hodei.client import ServerUnreachable
    from hodei.model.errors import Unavailable

    changed, pause = threading.Event(), threading.Event()
    trouble: list[Exception] = []
    last = server.last_event()
    ear = client()

    def listen() -> None:
        try:
            for _ in ear.stream(last):
                changed.set()
        except Exception as error:  # raised again by the drawing thread, which then ends
            trouble.append(error)
            changed.set()

    threading.Thread(target=listen, daemon=True).start()
    with suppress(KeyboardInterrupt):
        while not trouble:
            try:
                found = fetch()
            except (ServerUnreachable, Unavailable):
                note("the server is away; trying again")
                pause.wait(_WHILE_AWAY_S)
                continue
            if sys.stdout.isatty() and output in ("table", "wide"):
                click.echo(_CLEAR, nl=False)
            draw(found)
            sys.stdout.flush()
            pause.wait(_AT_LEAST_S)
            changed.wait(_AT_MOST_S)
            changed.clear()
    if trouble:
        raise trouble[0]
