"""The real server with a task in its event loop that records each pause in HOME/pauses.

A line has the end of the pause (monotonic), how late the task was, and the CPU time of the loop's thread meanwhile. The CPU
time does not depend on other work on the machine.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from hodei.server import __main__ as server

_EVERY_S = 0.001
_MIN_PAUSE_S = 0.005


async def _record_pauses(path: Path) -> None:
    with path.open("w", buffering=1) as out:
        while True:
            began, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(_EVERY_S)
            ended, spent = time.monotonic(), time.thread_time() - cpu
            late = ended - began - _EVERY_S
            if late > _MIN_PAUSE_S:
                out.write(f"{ended:.4f} {late:.4f} {spent:.4f}\n")


def main() -> int:
    live = server._run_server

    async def watched(home: Path, *args: Any, **named: Any) -> int:
        recorder = asyncio.create_task(_record_pauses(home / "pauses"))
        try:
            return await live(home, *args, **named)
        finally:
            recorder.cancel()

    server._run_server = watched
    return server.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
