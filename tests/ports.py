"""Free loopback ports for test servers whose port must be known before they start.

They are below the range of ephemeral ports (32768 and up on Linux), so that no connection takes one between the choice
and the start. No port is returned twice.
"""

from __future__ import annotations

import random
import socket

_RANGE = range(20_000, 32_000)
_used: set[int] = set()
_random = random.SystemRandom()  # Hypothesis seeds the default generator, in every process alike


def free_port() -> int:
    for _ in range(1000):
        port = _random.choice(_RANGE)
        if port in _used:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _used.add(port)
        return port
    raise AssertionError(f"no free port in {_RANGE}")
