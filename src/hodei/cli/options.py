"""Shared by commands: the client, `-o`, `--watch`, and arguments with shell completion."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from hodei.cli.output import FORMATS, is_for_people, note

if TYPE_CHECKING:
    from hodei.client import Client

Command = TypeVar("Command", bound=Callable[..., Any])
T = TypeVar("T")
# `--watch` redraws at most every half second, and at least often enough that "3m ago" stays true.
_MIN_REDRAW_S, _MAX_REDRAW_S, _RETRY_S = 0.5, 30.0, 2.0
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def settings() -> dict[str, Any]:
    """The options before the command's name."""
    root = click.get_current_context().find_root()
    return root.obj or {"server": None, "home": None}


def client(timeout_s: float = 30) -> Client:
    from hodei.client import Client

    given = settings()
    return Client(given["server"], home=Path(given["home"]) if given["home"] else None, timeout_s=timeout_s)


def output_option(command: Command) -> Command:
    return _format_option("table, wide, json, jsonl, yaml or name [env: HODEI_OUTPUT].", envvar="HODEI_OUTPUT")(command)


def stream_output_option(command: Command) -> Command:
    """For commands that pass output through: HODEI_OUTPUT, which is set for tables, does not change that."""
    return _format_option("json, jsonl, yaml or name [default: the output itself].", envvar=None)(command)


def _format_option(help: str, *, envvar: str | None) -> Callable[[Command], Command]:
    return click.option(
        "-o", "--output", type=click.Choice(FORMATS), default="table", envvar=envvar, metavar="FORMAT", help=help
    )


def headers_option(command: Command) -> Command:
    return click.option("--no-headers", is_flag=True, help="Omit the header row.")(command)


def watch_option(command: Command) -> Command:
    return click.option("-w", "--watch", is_flag=True, help="Redraw whenever something changes, until Ctrl-C.")(command)


def jobs_argument(command: Command) -> Command:
    """One or more job references, see `refs`."""
    return click.argument("jobs", metavar="JOB...", nargs=-1, required=True, shell_complete=complete_jobs)(command)


def job_argument(command: Command) -> Command:
    return click.argument("job", metavar="JOB", shell_complete=complete_jobs)(command)


def node_argument(command: Command) -> Command:
    return click.argument("name", metavar="NODE", shell_complete=complete_nodes)(command)


def complete_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids with names as help, newest first."""

    def fetch(server: Client) -> list[CompletionItem]:
        return [CompletionItem(str(view.id), help=f"{view.name} {view.state}") for view in server.jobs(limit=100)]

    words = [CompletionItem("last", help="the newest job"), CompletionItem("all", help="every active job")]
    return _complete(ctx, incomplete, fetch, words)


def complete_nodes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _complete(
        ctx, incomplete, lambda server: [CompletionItem(view.name, help=view.state) for view in server.nodes()], []
    )


def _complete(
    ctx: click.Context, incomplete: str, fetch: Callable[[Client], list[CompletionItem]], words: list[CompletionItem]
) -> list[CompletionItem]:
    """What `fetch` returns, then `words`. Errors are ignored: completion prints no messages."""
    from hodei.client import Client

    given, found = ctx.find_root().params, list[CompletionItem]()
    home = given.get("home")
    with suppress(Exception), Client(given.get("server"), home=Path(home) if home else None, timeout_s=1) as server:
        found = fetch(server)
    return [item for item in (*found, *words) if item.value.startswith(incomplete)]


def redraw(server: Client, fetch: Callable[[], T], draw: Callable[[T], None], output: str) -> None:
    """`--watch`: fetch and draw now and after every event, until Ctrl-C or the server stays unreachable."""
    from hodei.client import ServerUnreachable
    from hodei.model.errors import Unavailable

    changed, pause = threading.Event(), threading.Event()
    errors: list[Exception] = []
    last = server.last_event()
    events_client = client()

    def listen() -> None:
        try:
            for _ in events_client.stream(last):
                changed.set()
        except Exception as error:  # raised again by the drawing thread
            errors.append(error)
            changed.set()

    threading.Thread(target=listen, daemon=True).start()
    with suppress(KeyboardInterrupt):
        while not errors:
            try:
                found = fetch()
            except (ServerUnreachable, Unavailable):
                note("the server does not answer; trying again")
                pause.wait(_RETRY_S)
                continue
            if sys.stdout.isatty() and is_for_people(output):
                click.echo(_CLEAR, nl=False)
            draw(found)
            sys.stdout.flush()
            pause.wait(_MIN_REDRAW_S)
            changed.wait(_MAX_REDRAW_S)
            changed.clear()
    if errors:
        raise errors[0]
