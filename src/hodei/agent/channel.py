"""A reliable, ordered channel of messages over exchanges that may be lost, repeated or reordered. No I/O and no clock.

Each side numbers its messages from 1, repeats what the other has not acknowledged, and drops what it has received before.
So every message of a session arrives once and in order, however often connections are cut. A session ends with either
process; what was not acknowledged by then is gone, and both sides begin again with `hello` and `known`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

# One exchange carries at least one message, and further ones up to this size.
BATCH_BYTES = 2 << 20
OUTBOX_BYTES = 64 << 20


class ChannelBroken(Exception):
    """The other side acknowledges what was never sent, does not read, or skips messages: only a new session helps."""


class Batch(NamedTuple):
    """What one exchange carries: all messages up to `ack` have arrived; `messages` are numbered from `first`."""

    ack: int
    first: int
    messages: list[str]

    def as_fields(self) -> dict[str, Any]:
        return {"ack": self.ack, "first": self.first, "messages": self.messages}


class Channel:
    """One side. Messages are texts."""

    def __init__(self) -> None:
        self._outbox: deque[str] = deque()
        self._outbox_bytes = 0
        self._acknowledged = 0
        self.received = 0

    @property
    def pending(self) -> bool:
        """Whether messages wait for their acknowledgement."""
        return bool(self._outbox)

    @property
    def pending_bytes(self) -> int:
        return self._outbox_bytes

    @property
    def sent(self) -> int:
        """The number of the last message that `send` took."""
        return self._acknowledged + len(self._outbox)

    @property
    def acknowledged(self) -> int:
        return self._acknowledged

    def send(self, message: str) -> None:
        """ChannelBroken if the other side has not read for too long."""
        if self._outbox_bytes + len(message) > OUTBOX_BYTES and self._outbox:
            raise ChannelBroken(f"more than {OUTBOX_BYTES} bytes of messages were not acknowledged")
        self._outbox.append(message)
        self._outbox_bytes += len(message)

    def batch(self, *, with_messages: bool = True) -> Batch:
        """The next exchange: the oldest messages that were not acknowledged."""
        messages: list[str] = []
        size = 0
        for message in self._outbox if with_messages else ():
            if messages and size + len(message) > BATCH_BYTES:
                break
            messages.append(message)
            size += len(message)
        return Batch(self.received, self._acknowledged + 1, messages)

    def receive(self, batch: Batch) -> list[str]:
        """The new messages of the other side, in order. ChannelBroken: the session is over."""
        if batch.ack > self.sent:
            raise ChannelBroken("a message was acknowledged that was never sent")
        while self._acknowledged < batch.ack:
            self._outbox_bytes -= len(self._outbox.popleft())
            self._acknowledged += 1
        if batch.messages and batch.first > self.received + 1:
            raise ChannelBroken("messages are missing")
        new = batch.messages[max(0, self.received + 1 - batch.first) :]
        self.received += len(new)
        return new
