"""The root command: the table of commands and aliases, and how errors become exit codes.

Only click is imported here; a test checks the imports. `options` has what commands share.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import copy
from difflib import get_close_matches
from typing import Any, NoReturn

import click

from hodei import __version__
from hodei.cli.groups import FOREIGN_COMMANDS, Group, Lazy, exit_code

JOB_COMMANDS = {
    "list": Lazy("jobs", "list_jobs", "List jobs."),
    "show": Lazy("jobs", "show", "Show one job and its runs."),
    "create": Lazy("submit", "submit", "Submit jobs from files, from stdin or from the command line."),
    "run": Lazy("submit", "run", "Run a command as a job, follow its output, exit with its code."),
    "plan": Lazy("submit", "plan", "Dry run: report what would happen to a job now."),
    "logs": Lazy("logs", "logs", "Print or follow the output of a job."),
    "why": Lazy("why", "why", "Explain why a job waits, or why it was placed there."),
    "priority": Lazy("why", "priority", "Show every term of a pending job's priority."),
    "wait": Lazy("job_actions", "wait", "Wait until jobs have ended."),
    "cancel": Lazy("job_actions", "cancel", "Cancel jobs."),
    "hold": Lazy("job_actions", "hold", "Keep jobs from starting."),
    "release": Lazy("job_actions", "release", "Release held jobs."),
    "requeue": Lazy("job_actions", "requeue", "Start jobs again from the beginning."),
    "suspend": Lazy("job_actions", "suspend", "Suspend jobs; they take a checkpoint if they can."),
    "resume": Lazy("job_actions", "resume", "Resume suspended jobs."),
    "checkpoint": Lazy("job_actions", "checkpoint", "Make running jobs take a checkpoint now."),
    "migrate": Lazy("job_actions", "migrate", "Move running jobs to other nodes."),
    "exec": Lazy("exec", "exec_in_job", "Run a command next to a running job."),
    "cost": Lazy("jobs", "cost", "Show what runs cost, by project, user or backend."),
    "top": Lazy("jobs", "top", "Show what running jobs use, the largest first."),
    "history": Lazy("jobs", "history", "Show what happened to a job, when and why."),
    "graph": Lazy("graph", "graph", "Draw the dependencies and dependents of a job."),
    "export": Lazy("jobs", "export", "Export what happened around a job as a scenario."),
    "init": Lazy("jobs", "init", "Print an example job file."),
}
# By section, in the order of `hodei --help`.
COMMANDS: dict[str, dict[str, Lazy]] = {
    "Server": {
        "up": Lazy("serve", "up", "Start a server with its scheduler, store and local agent."),
        "down": Lazy("serve", "down", "Stop the server that `up` started."),
        "config": Lazy("config", "config", "Check a configuration file; show, change and undo the configuration of a running server."),
        "doctor": Lazy("doctor", "doctor", "Check this installation and report how to fix problems."),
        "version": Lazy("doctor", "version", "Print the version of client and server."),
    },
    "Resources": {
        "job": Lazy("main", "job", "Submit, list, show, explain and control jobs."),
        "cron": Lazy("resources", "cron", "Manage periodic jobs."),
        "host": Lazy("hosts", "host", "Add, list and remove machines that run the agent."),
        "agent": Lazy("hosts", "agent", "Join a server from this machine; tokens and the file to copy."),
        "node": Lazy("nodes", "node", "List, show, cordon, drain, taint or label nodes."),
        "backend": Lazy("resources", "backend", "Manage the systems that jobs run on."),
        "reservation": Lazy("resources", "reservation", "Reserve capacity for a project and a time window."),
        "share": Lazy("share", "share", "Show each account's share and use of the cluster."),
        "quota": Lazy("share", "quota", "Show usage and quotas of projects."),
        "event": Lazy("events", "event", "Print or follow events."),
        "audit": Lazy("events", "audit", "Print or follow the audit log."),
    },
    "Tools": {
        "whatif": Lazy("why", "whatif", "Report which jobs would start when after a change of jobs, nodes or policy."),
        "kube": Lazy("serve", "kube", "Schedule the pods of a Kubernetes cluster."),
        "sim": Lazy("serve", "sim", "Simulate policies on recorded or generated workloads."),
        "replay": Lazy("serve", "replay", "Replay a decision log and compare the plans."),
        "test": Lazy("serve", "test", "Run scenario files and check their expectations."),
        "bench": Lazy("serve", "bench", "Benchmark the engine or a server."),
        "convert": Lazy("convert", "convert", "Convert a batch script of Slurm or PBS to a job file."),
        "slurm-shims": Lazy("convert", "slurm_shims", "Write sbatch, srun, squeue, sacct and more for Hodei."),
        "schema": Lazy("doctor", "schema", "Print the JSON Schema of a job file."),
        "completion": Lazy("doctor", "completion", "Print the completion script of a shell."),
    },
}  # fmt: skip
# Short forms, and the commands that they stand for.
ALIASES = {
    "jobs": "job list", "submit": "job create",
    **{verb: f"job {verb}" for verb in (
        "run", "plan", "logs", "why", "priority", "wait", "cancel", "hold", "release", "requeue", "suspend", "resume",
        "checkpoint", "migrate", "exec", "top", "cost",
    )},
    "nodes": "node list", "reserve": "reservation create", "events": "event list", "reload": "config reload",
}  # fmt: skip


class Root(Group):
    """Finds commands in the tables above and turns every error into text on stderr and a documented exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.table, *ALIASES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "job":
            return job
        if cmd_name not in ALIASES:
            return super().get_command(ctx, cmd_name)
        noun, verb = ALIASES[cmd_name].split()
        group = self.get_command(ctx, noun)
        command = group.get_command(ctx, verb) if isinstance(group, Group) else None
        if command is not None:
            command = copy(command)
            command.name, command.help = cmd_name, f"{command.help}\n\nAlias of `hodei {ALIASES[cmd_name]}`."
        return command

    def suggestion(self, ctx: click.Context, word: str) -> str:
        found = FOREIGN_COMMANDS.get(word) or next(iter(get_close_matches(word, self.list_commands(ctx), n=1)), "")
        return f"; did you mean {found!r}?" if found else ""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, lazy.help) for name, lazy in section.items()])
        with formatter.section("Aliases"):
            formatter.write_dl([(alias, f"Alias of `hodei {path}`.") for alias, path in ALIASES.items()])

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        sys.exit(exit_code(super().main, args, prog_name or "hodei", **extra))


@click.group("hodei", cls=Root, table={name: lazy for section in COMMANDS.values() for name, lazy in section.items()},
             context_settings={"help_option_names": ["-h", "--help"]})  # fmt: skip
@click.option("--server", metavar="URL", help="Address of the server [env: HODEI_SERVER; default: the one in HOME].")
@click.option("--home", metavar="DIR", help="Home directory of `hodei up` [env: HODEI_HOME; default: ~/.hodei].")
@click.version_option(__version__, prog_name="hodei", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, server: str | None, home: str | None) -> None:
    """Hodei schedules jobs and explains its decisions.

    \b
      hodei up -d                            start a server here
      hodei run -- python -c 'print(6*7)'    run something, wait for it
      hodei why last                         why it waits, or why it runs there

    Exit codes: docs/reference/exit-codes.md.
    """
    ctx.obj = {"server": server, "home": home}


@click.group("job", cls=Group, table=JOB_COMMANDS)
def job() -> None:
    """Submit, list, show, explain and control jobs."""


def main() -> NoReturn:
    cli.main()


if __name__ == "__main__":
    main()
