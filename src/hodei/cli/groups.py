"""Commands with subcommands: a word that is none of them gets a suggestion, also of a command elsewhere."""

from __future__ import annotations

import click

# What people type who know other tools, and what it is called here.
ELSEWHERE = {
    "apply": "submit", "delete": "cancel", "describe": "job show", "get": "jobs", "kill": "cancel", "list": "jobs", "log": "logs",
    "ls": "jobs", "ps": "jobs", "queue": "jobs", "restart": "requeue", "retry": "requeue", "rm": "cancel", "sbatch": "submit",
    "scancel": "cancel", "serve": "up", "show": "job show", "sinfo": "nodes", "squeue": "jobs", "srun": "run", "start": "up",
    "status": "jobs", "stop": "cancel", "tail": "logs", "top": "nodes",
}  # fmt: skip
_LISTS = {"job": "jobs", "node": "nodes"}


class Group(click.Group):
    """`hodei job …`, `hodei node …`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0] if args else ""
        if word and not ctx.resilient_parsing and not word.startswith("-") and word not in self.commands:
            ctx.fail(f"no such command: {word[:60]!r}{self._suggestion(word)}")
        return super().resolve_command(ctx, args)

    def _suggestion(self, word: str) -> str:
        from difflib import get_close_matches

        from hodei.cli.main import names

        if near := get_close_matches(word, self.commands, n=1):
            return f"; did you mean 'hodei {self.name} {near[0]}'?"
        if word in ("list", "ls") and self.name in _LISTS:
            return f"; did you mean 'hodei {_LISTS[self.name]}'?"
        if word in names():
            return f"; did you mean 'hodei {word}'?"
        return f"; there are: {', '.join(self.commands)}"
