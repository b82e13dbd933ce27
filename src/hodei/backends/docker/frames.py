"""Docker's multiplexed streams: frames of one of two streams, each with a head of eight bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime

import aiohttp

STDOUT, STDERR = 1, 2
_HEAD = 8
# Far above any frame that Docker makes (16 KiB and a time); more is no frame.
_LONGEST = 64 << 20


async def frames(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[int, bytes]]:
    """(which stream, what) until the end. One that breaks off in the middle of a frame ends there."""
    buffer = bytearray()
    async for chunk in response.content.iter_any():
        buffer += chunk
        at = 0
        while len(buffer) - at >= _HEAD:
            size = int.from_bytes(buffer[at + 4 : at + _HEAD], "big")
            if size > _LONGEST or buffer[at] > STDERR:
                raise ValueError("this is not one of Docker's streams")
            if len(buffer) - at < _HEAD + size:
                break
            yield buffer[at], bytes(buffer[at + _HEAD : at + _HEAD + size])
            at += _HEAD + size
        del buffer[:at]


def split_time(frame: bytes) -> tuple[bytes, bytes]:
    """(the time, what was said) of a frame of a log with times."""
    time, space, said = frame.partition(b" ")
    return (time, said) if space else (b"", frame)


def since(time: bytes) -> str:
    """A time of a log as the daemon wants to be asked for it: seconds, a dot, nine digits."""
    text = time.decode()
    whole, dot, fraction = text.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return f"{seconds}.{(fraction if dot else '')[:9]:0<9}"
