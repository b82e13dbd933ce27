"""Server-sent events, read line by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from hodei.model.effects import Event


def sse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events in a stream of server-sent events; comments and messages of other kinds are passed over."""
    data: list[bytes] = []
    for raw in lines:
        line = raw.rstrip(b"\r\n")
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            try:
                yield msgspec.json.decode(b"\n".join(data), type=Event)
            except msgspec.DecodeError:
                pass
            data = []
