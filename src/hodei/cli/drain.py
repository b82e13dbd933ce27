"""Waiting until a node is empty, with how many runs are left on stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from hodei.api.views import NodeView
from hodei.cli import errors

if TYPE_CHECKING:
    from hodei.client import Client

LOOK_S = 0.5


def until_empty(server: Client, node: NodeView, timeout: str | None) -> tuple[NodeView, int]:
    """The node when nothing runs there any more or the time was up, and the exit code that says which."""
    from hodei.cli.times import timeout_ms

    ends = None if timeout is None else time.monotonic() + timeout_ms(timeout) / 1000
    terminal, told = sys.stderr.isatty(), -1
    try:
        while node.runs:
            if node.runs != told:
                told = node.runs
                line = f"{told} {'run' if told == 1 else 'runs'} left on {node.name}"
                click.echo(f"\r{line}\x1b[K" if terminal else line, nl=not terminal, err=True)
            if ends is not None and time.monotonic() >= ends:
                return node, errors.TIMED_OUT
            time.sleep(LOOK_S)
            node = server.node(node.name)
    finally:
        if terminal and told >= 0:
            click.echo("", err=True)
    return node, errors.OK
