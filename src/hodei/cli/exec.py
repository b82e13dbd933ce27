"""`hodei job exec` and `hodei node exec`: run a command elsewhere, show its output, exit with its code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import click

from hodei.cli.errors import UsageProblem
from hodei.cli.options import client, job_argument, node_argument, stream_output_option
from hodei.cli.output import emit_one, is_for_people
from hodei.cli.refs import resolve_job
from hodei.cli.times import parse_timeout_ms

if TYPE_CHECKING:
    from collections.abc import Callable

    from hodei.api.views import ExecutedView, NodeExecutedView
    from hodei.client import Client

_MAX_TIMEOUT_S = 300
_TIMED_OUT = 124
_PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_timeout_option = click.option(
    "--timeout", default="30s", show_default=True, metavar="TIME", help="How long it may take: 30s, 2m; up to 5m."
)
_command_argument = click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")


class ExecCommand(click.Command):
    """`exec [OPTIONS] TARGET -- COMMAND`. Options of the command are passed through; options between TARGET and `--` are
    parsed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("command") or ("",)
        if not words[0].startswith("-") or words[0] == "--":
            return rest
        # No program has such a name: it is an option, known or not.
        ctx.params.clear()
        ctx.allow_interspersed_args, ctx.ignore_unknown_options = True, False
        return super().parse_args(ctx, given)


@click.command("exec", cls=ExecCommand, context_settings=_PASS_THROUGH)
@job_argument
@_command_argument
@click.option("--member", type=click.IntRange(0), default=0, show_default=True, help="Which member of the job.")
@_timeout_option
@stream_output_option
def exec_in_job(job: str, command: tuple[str, ...], member: int, timeout: str, output: str) -> None:
    """Run a command next to a running job, on its node and as its user; exit with its code (124: timeout).

    \b
      hodei exec train -- ps aux
      hodei exec --timeout 2m 'sweep[3]' -- du -sh .
      hodei exec --member 3 42 -- nvidia-smi

    With -o json the output and the exit code are one object.
    """

    def call(server: Client, words: tuple[str, ...], timeout_s: int) -> ExecutedView:
        return server.execute(resolve_job(server, job), words, member=member, timeout_s=timeout_s)

    _execute(call, command, timeout, output, example=f"hodei exec {job} -- ps aux")


@click.command("exec", cls=ExecCommand, context_settings=_PASS_THROUGH)
@node_argument
@_command_argument
@_timeout_option
@stream_output_option
def exec_on_node(name: str, command: tuple[str, ...], timeout: str, output: str) -> None:
    """Run a command on a node, for administrators; exit with its code (124: timeout).

    \b
      hodei node exec hpc1-n17 -- uptime

    The audit log records the command. Not every backend supports this: see `hodei backend show`.
    """

    def call(server: Client, words: tuple[str, ...], timeout_s: int) -> NodeExecutedView:
        return server.execute_on(name, words, timeout_s=timeout_s)

    _execute(call, command, timeout, output, example=f"hodei node exec {name} -- uptime")


def _execute(
    call: Callable[[Client, tuple[str, ...], int], ExecutedView | NodeExecutedView],
    command: tuple[str, ...],
    timeout: str,
    output: str,
    *,
    example: str,
) -> NoReturn:
    command = command[1:] if command[0] == "--" else command
    if not command:
        raise UsageProblem("the command is missing", hint=example)
    timeout_s = -(-parse_timeout_ms(timeout) // 1000)
    if not 1 <= timeout_s <= _MAX_TIMEOUT_S:
        raise UsageProblem(f"--timeout {timeout[:40]}: from 1s to 5m", hint="write it as 30s or 2m")
    with client(timeout_s + 30) as server:
        result = call(server, command, timeout_s)
    if is_for_people(output):
        click.echo(result.stdout, nl=False)
        click.echo(result.stderr, nl=False, err=True)
    else:
        emit_one(result, output, name=lambda r: getattr(r, "run", "") or r.node, text=str)
    if result.cut:
        click.echo("hodei: the output was truncated", err=True)
    if result.exit_code is None:
        click.echo(f"hodei: the command did not end within {timeout_s}s", err=True)
    sys.exit(_TIMED_OUT if result.exit_code is None else result.exit_code)
