"""One order over the lines of all profiles, which share the nodes: whose turn is next in a step.

Each line keeps its own order. Among the gangs that are next in their lines, the one with the highest priority goes first;
ties go to the one that has waited longest, then to the lower job number. So a critical job of any profile is tried before
a low job of any other, whatever the profiles are called. A step looks at the first of each line, never at a whole line.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from hodei.control.lifecycle.per_node import PerNode
from hodei.control.lifecycle.victims import Hold
from hodei.control.queue.backfill import BackfillQueue
from hodei.control.queue.base import SchedulingQueue
from hodei.control.queue.multifactor import MultifactorQueue
from hodei.engine.view import Gang, View

_Key = tuple[int, int, int]


class ProfileQueue:
    """One line's part in a step. `holds`: its gangs that have room being made for them and may start elsewhere now, in
    the line's order. `per_node`: has members of jobs for every node, which stand in the line too. `tried` and `refused`
    count its gangs in this step."""

    __slots__ = ("holds", "name", "per_node", "queue", "refused", "tried")

    def __init__(self, name: str, queue: SchedulingQueue | BackfillQueue, holds: list[Hold], per_node: PerNode) -> None:
        self.name, self.queue, self.holds, self.per_node = name, queue, holds, per_node
        self.tried = self.refused = 0


def next_gangs(turns: list[ProfileQueue], view: View) -> Iterator[tuple[ProfileQueue, Gang | Hold]]:
    """What to try next, and whose line it is from. As with `SchedulingQueue.ready`, the caller must decide each before the next."""
    if len(turns) == 1:
        (turn,) = turns
        for item in _of_line(turn, view):
            yield turn, item
        return
    streams = [stream for turn in turns if not (stream := _Stream(turn, view)).over]
    try:
        while streams:
            first = min(streams, key=_key)
            taken = first.take()
            if taken is not None:
                yield first.turn, taken
            if first.over:
                streams.remove(first)
    finally:
        for stream in streams:
            stream.close()


class _Stream:
    """The gangs of one line, with a look at the next one."""

    __slots__ = ("_items", "_next", "_view", "key", "over", "turn")

    def __init__(self, turn: ProfileQueue, view: View) -> None:
        self.turn, self._view, self.over = turn, view, False
        self._items = _of_line(turn, view)
        self._next: Gang | Hold | None = None
        if isinstance(turn.queue, BackfillQueue) and turn.queue.gangs:
            # A look at its next gang would make promises. That waits until one of its gangs could be next of all.
            keys = [_key_of(hold.gang) for hold in turn.holds]
            if (of_member := turn.per_node.first_key(turn.name)) is not None:
                keys.append(of_member)
            self.key: _Key = min([(-turn.queue.highest_priority(), 0, 0), *keys])
        else:
            self._look()

    def take(self) -> Gang | Hold | None:
        """The next one, if it is still the first of its line; None: look again which line is first."""
        item, queue = self._next, self.turn.queue
        of_line = isinstance(item, Gang) and not item.joins
        if of_line and isinstance(queue, MultifactorQueue) and not queue.is_ranked(self._view):
            # What another line has started has changed the shares, and with them the order of this one.
            self._items.close()
            self._items, item = _of_line(self.turn, self._view), None
        if item is None:
            self._look()
            return None
        self._next = None
        self.key = (-1 << 62, 0, 0)  # until it is decided nothing can be said of those behind it
        return item

    def _look(self) -> None:
        self._next = next(self._items, None)
        if self._next is None:
            self.over = True
        else:
            self.key = _key_of(self._next if isinstance(self._next, Gang) else self._next.gang)

    def close(self) -> None:
        self._items.close()


def _key(stream: _Stream) -> _Key:
    return stream.key


def _key_of(gang: Gang) -> _Key:
    return -gang.priority, gang.queued_ms, gang.id


def _of_line(turn: ProfileQueue, view: View) -> Generator[Gang | Hold, None, None]:
    """What one line has to try, in its own order."""
    if turn.queue.gangs:
        ready = turn.queue.ready(view)
        try:
            for gang in ready:
                yield from _before(gang.order, turn)
                yield gang
        finally:
            ready.close()
    yield from _before(None, turn)


def _before(order: tuple[int, ...] | None, turn: ProfileQueue) -> Generator[Gang | Hold, None, None]:
    """Holds and members of jobs for every node that come before this place in line; None: all of them."""
    holds, per_node = turn.holds, turn.per_node
    while True:
        first = per_node.first(turn.name)
        if holds and (first is None or holds[0].gang.order < first):
            if order is not None and holds[0].gang.order >= order:
                return
            yield holds.pop(0)
        elif first is not None and (order is None or first < order):
            yield per_node.take(turn.name)
        else:
            return
