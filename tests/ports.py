"""For tests: ports on the loopback for servers that must be told one before they start.

They lie below the range from which the system gives ports to everybody else (32768 and up on Linux), so that no
connection and no other server takes one between the choice and the start. No port is given twice.
"""

from __future__ import annotations

import random
import socket

_RANGE = range(20_000, 32_000)
_given: set[int] = set()
_luck = random.SystemRandom()  # Hypothesis seeds the usual source, for every process alike


def free_port() -> int:
    for _ in range(1000):
        port = _luck.choice(_RANGE)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise AssertionError(f"no free port in {_RANGE}")
