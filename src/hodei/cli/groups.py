"""Groups of commands that are imported on first use, with suggestions for mistyped names. Only click is imported here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

import click

# Names that users of other tools type -> the command.
FOREIGN_COMMANDS = {
    "apply": "submit", "delete": "cancel", "describe": "job show", "get": "jobs", "kill": "cancel", "list": "jobs", "log": "logs",
    "ls": "jobs", "ps": "jobs", "queue": "jobs", "restart": "requeue", "retry": "requeue", "rm": "cancel", "sbatch": "submit",
    "scancel": "cancel", "serve": "up", "show": "job show", "sinfo": "nodes", "squeue": "jobs", "srun": "run", "start": "up",
    "status": "jobs", "stop": "cancel", "tail": "logs", "top": "nodes",
}  # fmt: skip
# The first of these verbs that the group has.
FOREIGN_VERBS = {
    "add": ("create",), "new": ("create",), "submit": ("create",), "ls": ("list",), "get": ("show",), "describe": ("show",),
    "delete": ("delete", "cancel"), "remove": ("delete", "cancel"), "rm": ("delete", "cancel"), "kill": ("cancel",),
    "stop": ("cancel",), "update": ("set",), "edit": ("set",),
}  # fmt: skip


class Lazy(NamedTuple):
    """A command that is imported on first use."""

    module: str
    attribute: str
    help: str

    def load(self) -> click.Command:
        command = getattr(import_module(f"hodei.cli.{self.module}"), self.attribute)
        assert isinstance(command, click.Command)
        return command


class Group(click.Group):
    """`hodei job …`, `hodei node …`. `table`: commands that are imported on first use. `default`: the command if none is
    given."""

    def __init__(self, *args: Any, table: Mapping[str, Lazy] | None = None, default: str = "", **extra: Any) -> None:
        super().__init__(*args, **extra)
        self.table, self.default = table or {}, default

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.table, *(name for name in self.commands if name not in self.table)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.table and cmd_name not in self.commands:
            self.commands[cmd_name] = self.table[cmd_name].load()
        return self.commands.get(cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.default and not ctx.resilient_parsing:
            known = (*self.list_commands(ctx), *ctx.help_option_names)
            args = args if args and args[0] in known else [self.default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0] if args else ""
        if word and not ctx.resilient_parsing and not word.startswith("-") and word not in self.list_commands(ctx):
            ctx.fail(f"no such command: {word[:60]!r}{self.suggestion(ctx, word)}")
        return super().resolve_command(ctx, args)

    def suggestion(self, ctx: click.Context, word: str) -> str:
        known = self.list_commands(ctx)
        foreign = [verb for verb in FOREIGN_VERBS.get(word, ()) if verb in known]
        nearest = next(iter([*foreign, *get_close_matches(word, known, n=1)]), "")
        if nearest:
            return f"; did you mean '{ctx.command_path} {nearest}'?"
        above = ctx.find_root().command
        if isinstance(above, Group) and above is not self and word in above.list_commands(ctx):
            return f"; did you mean 'hodei {word}'?"
        return f"; there are: {', '.join(known)}"

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            if name in self.table:
                rows.append((name, self.table[name].help))
            elif command := self.get_command(ctx, name):
                rows.append((name, command.get_short_help_str(100)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def exit_code(
    main: Callable[..., Any], args: Sequence[str] | None, program: str, *, invalid_input: int = 1, **extra: Any
) -> int:
    """Run the `main` of a click command. Every error becomes text on stderr and a documented exit code;
    `invalid_input` is the code for a file or setting with mistakes."""
    stdout = sys.stdout
    try:
        try:
            code = main(args, program, **extra | {"standalone_mode": False})
        except BrokenPipeError:
            raise
        except Exception as error:
            from hodei.cli.errors import report
            from hodei.model.errors import InvalidInput

            code = report(error)
            code = invalid_input if isinstance(error, InvalidInput) else code
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        # The reader has closed the pipe (`hodei jobs | head`): no message now, and none at exit. click makes it a
        # SystemExit and replaces stdout.
        if isinstance(error, SystemExit) and sys.stdout is stdout:
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        return 141
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0
