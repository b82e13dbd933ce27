"""The root command: which commands there are, where each one lives, and what becomes of errors.

Only click is imported here; the test of the import list holds that. Next: `options` for what commands share.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from hodei import __version__

# name: (module, attribute, one line of help). Grouped as people look for them; `--help` keeps this order.
COMMANDS: dict[str, dict[str, tuple[str, str, str]]] = {
    "Server": {
        "up": ("serve", "up", "Start a server with its scheduler, store and local agent."),
        "down": ("serve", "down", "Stop the server that `up` started."),
        "reload": ("config", "reload", "Have the server read its configuration file again."),
        "config": ("config", "config", "Show, change and take back the configuration of a running server."),
        "doctor": ("doctor", "doctor", "Check this installation and say how to fix what is wrong."),
    },
    "Jobs": {
        "run": ("run", "run", "Run a command as a job, follow its output, exit with its code."),
        "submit": ("submit", "submit", "Hand in jobs from files, from stdin or from the command line."),
        "plan": ("submit", "plan", "Say what would happen to a job now, without doing it."),
        "whatif": ("whatif", "whatif", "Say who would start when if a job, node or policy were different."),
        "jobs": ("jobs", "jobs", "List jobs."),
        "job": ("jobs", "job", "Show one job, its history or an example file; export an incident."),
        "logs": ("logs", "logs", "Print or follow what a job writes."),
        "why": ("why", "why", "Say why a job waits, or why it landed where it did."),
        "priority": ("priority", "priority", "Show every term of a waiting job's priority."),
        "exec": ("backend", "execute", "Run a command beside a running job."),
        "wait": ("act", "wait", "Wait until jobs have ended."),
        "cancel": ("act", "cancel", "End jobs."),
        "hold": ("act", "hold", "Keep jobs from starting."),
        "release": ("act", "release", "Let held jobs start again."),
        "requeue": ("act", "requeue", "Start jobs again from the beginning."),
        "cron": ("cron", "cron", "Jobs that come again and again."),
        "suspend": ("life", "suspend", "Stop jobs for a while; they keep what they have done."),
        "resume": ("life", "resume", "Let suspended jobs go on."),
        "checkpoint": ("life", "checkpoint", "Have running jobs save their work now."),
        "migrate": ("life", "migrate", "Move running jobs to other nodes."),
    },
    "Sharing": {
        "share": ("share", "share", "Show who has had how much of the cluster; explain a project's share."),
        "quota": ("share", "quota", "Show what projects hold and may hold."),
    },
    "Nodes": {
        "nodes": ("nodes", "nodes", "List nodes."),
        "node": ("nodes", "node", "Show, cordon, drain, taint or label a node."),
        "backend": ("backend", "backend", "Show, add, disable, enable and remove the systems that jobs run on."),
        "reserve": ("reserve", "reserve", "Reserve capacity for a project and a window of time."),
    },
    "More": {
        "events": ("events", "events", "Print or follow what happens."),
        "audit": ("audit", "audit", "Print or follow who changed what."),
        "schema": ("about", "schema", "Print the JSON Schema of a job file."),
        "kube": ("serve", "kube", "Schedule the pods of a Kubernetes cluster."),
        "sim": ("serve", "sim", "Try out policies on recorded or invented workloads, in simulated time."),
        "replay": ("serve", "replay", "Replay a decision log and compare the plans."),
        "test": ("serve", "test", "Play scenario files and check what they expect of the scheduler."),
        "bench": ("serve", "bench", "Measure the engine or a server."),
        "convert": ("convert", "convert", "Print a batch script of Slurm or PBS as a job file."),
        "slurm-shims": ("convert", "slurm_shims", "Write sbatch, srun, squeue, sacct and more that speak to Hodei."),
        "completion": ("about", "completion", "Print the completion script of a shell."),
        "version": ("about", "version", "Print the version of client and server."),
    },
}
_WHERE = {name: entry for section in COMMANDS.values() for name, entry in section.items()}


def names() -> list[str]:
    return list(_WHERE)


class Root(click.Group):
    """Finds commands by the table above; turns every error into text on stderr and a documented exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_WHERE)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _WHERE:
            return None
        module, attribute, _ = _WHERE[cmd_name]
        command = getattr(import_module(f"hodei.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not ctx.resilient_parsing and args[0] not in _WHERE and not args[0].startswith("-"):
            from difflib import get_close_matches

            from hodei.cli.groups import ELSEWHERE

            found = ELSEWHERE.get(args[0]) or next(iter(get_close_matches(args[0], _WHERE, n=1)), "")
            ctx.fail(f"no such command: {args[0][:60]!r}" + (f"; did you mean {found!r}?" if found else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, _, text) in section.items()])

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        extra["standalone_mode"] = False
        try:
            code = super().main(args, prog_name or "hodei", **extra)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of our output has gone (`hodei jobs | head`): no complaint, and none at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(141)
        except Exception as error:
            from hodei.cli.errors import report

            sys.exit(report(error))
        except KeyboardInterrupt:
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


@click.group("hodei", cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--server", metavar="URL", help="Address of the server [env: HODEI_SERVER; default: the one in HOME].")
@click.option("--home", metavar="DIR", help="Where `hodei up` keeps its things [env: HODEI_HOME; default: ~/.hodei].")
@click.version_option(__version__, prog_name="hodei", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, server: str | None, home: str | None) -> None:
    """Hodei schedules jobs, and can tell you why.

    \b
      hodei up -d                            start a server here
      hodei run -- python -c 'print(6*7)'    run something, wait for it
      hodei why last                         why it waits, or why it ran there

    Exit codes: docs/reference/exit-codes.md.
    """
    ctx.obj = {"server": server, "home": home}


def main() -> NoReturn:
    cli.main()


if __name__ == "__main__":
    main()
