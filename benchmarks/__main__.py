"""`python -m benchmarks agents|docker|engine|fragmentation|gpu|queue|server|sharing|slurm|targets|viewers`."""

from __future__ import annotations

import platform
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import click

from benchmarks import agents, docker, engine, fragmentation, gpu, queue, server, sharing, slurm, targets, viewers
from hodei.cli.groups import Group, exit_code
from hodei.cli.options import output_option
from hodei.cli.output import emit_one, is_for_people


@click.group("bench", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure Hodei on this machine."""


def _add_command(module: ModuleType) -> None:
    benchmark = module.__name__.rpartition(".")[2]

    def measure(**options: Any) -> int:
        given = SimpleNamespace(**options)
        result: dict[str, Any] = module.measure(given)
        if not is_for_people(given.output):
            emit_one(result, given.output, name=lambda _: benchmark, text=str)
        elif hasattr(module, "show"):
            module.show(result)
        else:
            print(f"{platform.machine()}, Python {platform.python_version()}")
            for name, value in result.items():
                print(f"  {name:<46}{value}")
        return 1 if result.get("failed") else 0

    command = click.command(benchmark, help=module.ABOUT)(measure)
    for decorate in (*module.OPTIONS, output_option):
        command = decorate(command)
    bench.add_command(command)


for _module in (engine, fragmentation, queue, server, agents, gpu, sharing, docker, slurm, viewers, targets):
    _add_command(_module)


def main(args: list[str] | None = None) -> int:
    return exit_code(bench.main, args, "hodei bench", invalid_input=2)


if __name__ == "__main__":
    sys.exit(main())
