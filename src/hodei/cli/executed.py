"""How a command that was run elsewhere is shown: its two streams, and its exit code as ours."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from hodei.wire.backends import ExecutedView, NodeExecutedView


def show_executed(done: ExecutedView | NodeExecutedView) -> NoReturn:
    click.echo(done.stdout, nl=False)
    click.echo(done.stderr, nl=False, err=True)
    if done.cut:
        click.echo("hodei: more was said than is shown", err=True)
    sys.exit(124 if done.exit_code is None else done.exit_code)
