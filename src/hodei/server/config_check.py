"""`hodei config check`: the check of a configuration file that `up` and `reload` make, without a server."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from hodei.cli.errors import UsageProblem
from hodei.cli.groups import exit_code
from hodei.cli.options import output_option
from hodei.cli.output import counted, emit_one
from hodei.configuration import load_config
from hodei.model.config import Config
from hodei.server.home import find_config_file


@click.command("check", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@click.option("--home", type=click.Path(path_type=Path), hidden=True)
@output_option
def check(path: Path | None, home: Path | None, output: str) -> None:
    """Check a configuration file without a server, and report all mistakes with their lines.

    FILE is TOML or YAML [default: the file in HOME that `hodei up` would read]. Named plugins are loaded.

    Exit code 0: no mistakes. 1: it has mistakes. 2: it cannot be read.
    """
    if path is None:
        home = home or Path(os.environ.get("HODEI_HOME") or "~/.hodei").expanduser()
        path = find_config_file(home)
        if path is None:
            raise UsageProblem(f"{home} has no configuration file", hint="name one: hodei config check FILE")
    if not os.access(path, os.R_OK) or path.is_dir():
        raise UsageProblem(f"cannot read the configuration {path}", hint="hodei config check FILE")
    found = {"path": str(path), "valid": True, **_counts(load_config(path))}
    emit_one(found, output, name=lambda found: found["path"], text=_describe)


def _counts(config: Config) -> dict[str, int]:
    return {
        "profiles": len(config.scheduling.profiles), "nodes": len(config.nodes), "backends": len(config.backends)
    }  # fmt: skip


def _describe(found: dict[str, object]) -> str:
    parts = [counted(int(str(found[f"{what}s"])), what) for what in ("profile", "node", "backend")]
    return f"{found['path']} has no mistakes: {', '.join(parts)}"


def main(args: list[str] | None = None) -> int:
    return exit_code(check.main, args, "hodei config check")


if __name__ == "__main__":
    sys.exit(main())
