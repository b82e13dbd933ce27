"""One order over the queues of all profiles, which share the nodes.

Each queue keeps its own order. Of the first gangs of all queues the one with the highest priority is next; ties go to the
one that has waited longest, then to the lower job number. So a critical job is tried before a low job of any profile. Only
the first gang of each queue is compared.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from operator import attrgetter

from hodei.control.lifecycle.per_node import PerNode
from hodei.control.lifecycle.victims import Hold
from hodei.control.queue.backfill import BackfillQueue
from hodei.control.queue.base import SchedulingQueue
from hodei.control.queue.multifactor import MultifactorQueue
from hodei.engine.view import Gang, View

_Key = tuple[int, int, int]


class ProfileQueue:
    """A queue within one step. `holds`: its gangs with a hold that may start elsewhere now, in queue order. `per_node`: has
    members of per-node jobs, which take their turn in the queue. `tried` and `refused` count gangs of this step."""

    __slots__ = ("holds", "name", "per_node", "queue", "refused", "tried")

    def __init__(self, name: str, queue: SchedulingQueue | BackfillQueue, holds: list[Hold], per_node: PerNode) -> None:
        self.name, self.queue, self.holds, self.per_node = name, queue, holds, per_node
        self.tried = self.refused = 0


def next_gangs(queues: list[ProfileQueue], view: View) -> Iterator[tuple[ProfileQueue, Gang | Hold]]:
    """What to try, in order, with its queue. The caller must decide each before the next."""
    if len(queues) == 1:
        (source,) = queues
        for item in _items(source, view):
            yield source, item
        return
    streams = [stream for source in queues if not (stream := _Stream(source, view)).over]
    try:
        while streams:
            first = min(streams, key=attrgetter("key"))
            taken = first.take()
            if taken is not None:
                yield first.source, taken
            if first.over:
                streams.remove(first)
    finally:
        for stream in streams:
            stream.close()


class _Stream:
    """The items of one queue, with a preview of the next one."""

    __slots__ = ("_items", "_next", "_view", "key", "over", "source")

    def __init__(self, source: ProfileQueue, view: View) -> None:
        self.source, self._view, self.over = source, view, False
        self._items = _items(source, view)
        self._next: Gang | Hold | None = None
        if isinstance(source.queue, BackfillQueue) and source.queue.gangs:
            # A preview would make start reservations; it waits until one of its gangs could be the next of all.
            keys = [_key_of(hold.gang) for hold in source.holds]
            if (of_member := source.per_node.first_key(source.name)) is not None:
                keys.append(of_member)
            self.key: _Key = min([(-source.queue.highest_priority(), 0, 0), *keys])
        else:
            self._preview()

    def take(self) -> Gang | Hold | None:
        """The next item, if it is still the first of its queue; None: compare the queues again."""
        item, queue = self._next, self.source.queue
        queued = isinstance(item, Gang) and not item.is_joining
        if queued and isinstance(queue, MultifactorQueue) and not queue.is_ranked(self._view):
            # A start from another queue has changed the shares, and with them the order of this queue.
            self._items.close()
            self._items, item = _items(self.source, self._view), None
        if item is None:
            self._preview()
            return None
        self._next = None
        self.key = (-1 << 62, 0, 0)  # the following item is known only after the decision about this one
        return item

    def _preview(self) -> None:
        self._next = next(self._items, None)
        if self._next is None:
            self.over = True
        else:
            self.key = _key_of(self._next if isinstance(self._next, Gang) else self._next.gang)

    def close(self) -> None:
        self._items.close()


def _key_of(gang: Gang) -> _Key:
    return -gang.priority, gang.queued_ms, gang.id


def _items(source: ProfileQueue, view: View) -> Generator[Gang | Hold, None, None]:
    """What one queue has to try, in its own order."""
    if source.queue.gangs:
        ready = source.queue.ready(view)
        try:
            for gang in ready:
                yield from _before(gang.order, source)
                yield gang
        finally:
            ready.close()
    yield from _before(None, source)


def _before(order: tuple[int, ...] | None, source: ProfileQueue) -> Generator[Gang | Hold, None, None]:
    """Holds and members of per-node jobs that come before this order; None: all of them."""
    holds, per_node = source.holds, source.per_node
    while True:
        first = per_node.first(source.name)
        if holds and (first is None or holds[0].gang.order < first):
            if order is not None and holds[0].gang.order >= order:
                return
            yield holds.pop(0)
        elif first is not None and (order is None or first < order):
            yield per_node.take(source.name)
        else:
            return
