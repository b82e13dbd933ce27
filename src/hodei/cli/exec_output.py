"""How a command that was run elsewhere is shown: its two streams, and its exit code as ours."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from hodei.api.backends import ExecutedView, NodeExecutedView

MOST_TIMEOUT_S = 300
AS_IT_IS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class ExecCommand(click.Command):
    """`exec [OPTIONS] WHERE -- COMMAND`. Words of the command are not ours to read; options between WHERE and `--` are."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("command") or ("",)
        if not words[0].startswith("-") or words[0] == "--":
            return rest
        # No program is called that: it is an option, known or not.
        ctx.params.clear()
        ctx.allow_interspersed_args, ctx.ignore_unknown_options = True, False
        return super().parse_args(ctx, given)


def show_executed(done: ExecutedView | NodeExecutedView, timeout_s: int) -> NoReturn:
    click.echo(done.stdout, nl=False)
    click.echo(done.stderr, nl=False, err=True)
    if done.cut:
        click.echo("hodei: more was said than is shown", err=True)
    if done.exit_code is None:
        click.echo(f"hodei: it was not over within {timeout_s}s", err=True)
    sys.exit(124 if done.exit_code is None else done.exit_code)


def timeout_seconds(text: str) -> int:
    """What `--timeout` says, in whole seconds; a bare number is seconds."""
    from hodei.cli.errors import UsageProblem
    from hodei.cli.times import timeout_ms

    timeout_s = -(-timeout_ms(text) // 1000)
    if not 1 <= timeout_s <= MOST_TIMEOUT_S:
        raise UsageProblem(f"--timeout {text[:40]}: from 1s to 5m", hint="write it as 30s or 2m")
    return timeout_s
