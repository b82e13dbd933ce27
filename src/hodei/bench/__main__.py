"""`python -m hodei.bench docker|engine|fragmentation|gpu|queue|server|sharing|slurm|targets|viewers`."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

from hodei.bench import docker, engine, fragmentation, gpu, queue, server, sharing, slurm, targets, viewers
from hodei.model.subcommands import Parser, or_help


def main(args: list[str] | None = None) -> int:
    parser = Parser(prog="hodei bench", description="Measure Hodei on this machine.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for module in (engine, fragmentation, queue, server, gpu, sharing, docker, slurm, viewers, targets):
        module.add_arguments(kinds)
    given = parser.parse_args(or_help(sys.argv[1:] if args is None else args))
    result: dict[str, Any] = given.measure(given)
    if given.json:
        print(json.dumps(result))
    elif hasattr(given, "show"):
        given.show(result)
    else:
        print(f"{platform.machine()}, Python {platform.python_version()}")
        for name, value in result.items():
            print(f"  {name:<46}{value}")
    return 1 if result.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
