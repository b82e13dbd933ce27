"""`hodei suspend`, `resume`, `checkpoint`, `migrate`: what can be done to jobs while they live."""

from __future__ import annotations

import click

from hodei.cli.act import each
from hodei.cli.options import client, complete_nodes, jobs_argument, output_option
from hodei.cli.refs import ACTIVE, resolve

# Of an array these verbs mean the elements that they can be done to.
RUNNING = ("scheduled", "running")


@click.command()
@jobs_argument
@output_option
@click.pass_context
def suspend(ctx: click.Context, jobs: tuple[str, ...], output: str) -> None:
    """Stop jobs for a while: they save their work first if they can, and wait until they are resumed."""
    with client() as server:
        ctx.exit(each(resolve(server, jobs, ACTIVE), server.suspend, output, "suspend requested", "suspended"))


@click.command()
@jobs_argument
@output_option
@click.pass_context
def resume(ctx: click.Context, jobs: tuple[str, ...], output: str) -> None:
    """Let suspended jobs go on; the same as `release`."""
    with client() as server:
        ctx.exit(each(resolve(server, jobs, ACTIVE), server.resume, output, "resumed", "resumed"))


@click.command()
@jobs_argument
@output_option
@click.pass_context
def checkpoint(ctx: click.Context, jobs: tuple[str, ...], output: str) -> None:
    """Have running jobs save their work now, and go on.

    When they last did is in `hodei job show`; how they do it is said in the job file (`checkpoint`).
    """
    with client() as server:
        ctx.exit(each(resolve(server, jobs, RUNNING), server.checkpoint, output, "told to save its work", "told"))


@click.command()
@jobs_argument
@click.option("--to", default="", metavar="NODE", shell_complete=complete_nodes, help="There, and nowhere else.")
@click.option("--force", is_flag=True, help="Also if no other node can take it now: it waits then.")
@output_option
@click.pass_context
def migrate(ctx: click.Context, jobs: tuple[str, ...], to: str, force: bool, output: str) -> None:
    """Move running jobs to other nodes: they save their work if they can, stop, and start elsewhere.

    Refused if no other node can take them now. To empty a whole node: `hodei node drain`.
    """
    with client() as server:
        ctx.exit(
            each(
                resolve(server, jobs, RUNNING),
                lambda id: server.migrate(id, to, force),
                output,
                "is leaving",
                "is leaving",
            )
        )
