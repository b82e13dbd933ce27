"""How deeply a JSON text is nested, without parsing it: linear in its size, in C, with bounded memory.

Runs before any decoder, so that no decoder's own limits (or its recursion) are ever put to the test.
"""

from __future__ import annotations

import numpy as np

_KEEP = b'[]{}"'
_DROP = bytes(byte for byte in range(256) if byte not in _KEEP)
_STEP = np.zeros(256, np.int8)
_STEP[[ord("["), ord("{")]] = 1
_STEP[[ord("]"), ord("}")]] = -1
_PIECE = 1 << 20


def deeper_than(raw: bytes, limit: int) -> bool:
    """Whether brackets outside of strings are open more than `limit` deep anywhere in `raw`."""
    if raw.count(b"[") + raw.count(b"{") <= limit:
        return False
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = raw.translate(None, _DROP)
    depth, quotes = 0, 0
    for start in range(0, len(marks), _PIECE):
        piece = np.frombuffer(marks, np.uint8, min(_PIECE, len(marks) - start), start)
        quoted = (np.cumsum(piece == ord('"'), dtype=np.int32) + quotes) & 1
        steps = np.where(quoted == 0, _STEP[piece], 0)
        heights = np.cumsum(steps, dtype=np.int32) + depth
        if int(heights.max()) > limit:
            return True
        depth, quotes = int(heights[-1]), int(quoted[-1])
    return False
