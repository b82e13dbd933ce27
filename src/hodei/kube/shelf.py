"""Objects of one resource by key, as the watches bring them; whoever cares is told what each was and is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")
Moved = Callable[[Any, T | None, T | None], None]


def by_name(thing: Any) -> str:
    name: str = thing.metadata.name
    return name


def by_place(thing: Any) -> tuple[str, str]:
    return (thing.metadata.namespace, thing.metadata.name)


def by_uid(thing: Any) -> str:
    uid: str = thing.metadata.uid
    return uid


class Shelf(Generic[T]):
    """The sink of a reflector. `moved(key, before, after)`: None for what was not there, or is not any more."""

    def __init__(self, key: Callable[[T], Hashable], moved: Moved[T], flushed: Callable[[], None]) -> None:
        self.all: dict[Any, T] = {}
        self._key, self._moved, self.flushed = key, moved, flushed

    def listed(self, objects: Iterable[T]) -> None:
        """A full picture: whatever is not in it has gone."""
        fresh = {self._key(thing): thing for thing in objects}
        for key in [key for key in self.all if key not in fresh]:
            self._moved(key, self.all.pop(key), None)
        for key, thing in fresh.items():
            self._put(key, thing)
        self.flushed()

    def changed(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], thing: T) -> None:
        key = self._key(thing)
        if kind != "DELETED":
            self._put(key, thing)
        elif (before := self.all.pop(key, None)) is not None:
            self._moved(key, before, None)

    def _put(self, key: Hashable, thing: T) -> None:
        before = self.all.get(key)
        self.all[key] = thing
        self._moved(key, before, thing)
