"""For benchmarks: the real server with a task in its loop that notes each pause, into HOME/pauses.

A line is: when the pause ended (monotonic), how late the task was, and how much CPU the loop's thread used meanwhile.
CPU is the figure that other work on the machine does not change.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from hodei.server import __main__ as server

_EVERY_S = 0.001
_LEAST_S = 0.005


async def _note_pauses(path: Path) -> None:
    with path.open("w", buffering=1) as out:
        while True:
            began, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(_EVERY_S)
            ended, spent = time.monotonic(), time.thread_time() - cpu
            late = ended - began - _EVERY_S
            if late > _LEAST_S:
                out.write(f"{ended:.4f} {late:.4f} {spent:.4f}\n")


def main() -> int:
    live = server._run_server

    async def watched(home: Path, *args: Any, **named: Any) -> int:
        informers = asyncio.create_task(_note_pauses(home / "pauses"))
        try:
            return await live(home, *args, **named)
        finally:
            informers.cancel()

    server._run_server = watched
    return server.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
