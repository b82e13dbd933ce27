"""`--watch`: a list drawn again when something has happened. Events set the pace, so an idle cluster costs nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import click

from hodei.cli.options import client
from hodei.cli.output import note

if TYPE_CHECKING:
    from hodei.client import Client

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
