"""For benchmarks: a real server of its own in a directory, and a client of it, for as long as the measuring takes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hodei.client import Client


@contextmanager
def a_server(home: Path, *options: str) -> Iterator[tuple[int, Client]]:
    """Its process number and a client of it. Whatever is in HOME/config.toml counts."""
    command = [sys.executable, "-m", "hodei.server", "--home", str(home), "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        first = server.stdout.readline()
        if not re.search(r" is up at http", first):
            raise RuntimeError(f"the server did not come up: {first!r}")
        yield server.pid, Client(home=home)
    finally:
        server.terminate()
        server.wait(30)
