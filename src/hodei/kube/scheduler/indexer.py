"""Objects of one resource by key, as the watches bring them; whoever cares is told what each was and is.

This is where one object's fault ends: whatever goes wrong while it is taken in, it is refused by name and the next one is
taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

from hodei.kube.api.objects import Meta
from hodei.kube.scheduler.refused_objects import Refusals, said

_log = logging.getLogger(__name__)
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


class _Named(Struct, frozen=True):
    """All that is known of an object that cannot be decoded."""

    metadata: Meta


class Indexer(Generic[T]):
    """The sink of a reflector. `moved(key, before, after)`: None for what was not there, or is not any more."""

    def __init__(self, key: Callable[[T], Hashable], moved: Moved[T], flushed: Callable[[], None]) -> None:
        self.all: dict[Any, T] = {}
        self._key, self._moved, self.flushed = key, moved, flushed
        self.resource, self.refusals = "", Refusals()
        self._unreadable: set[Hashable] = set()
        self._refused: set[Hashable] = set()

    def listed(self, objects: Iterable[T]) -> None:
        """A full picture: whatever is not in it has gone. What cannot be read any more stays as it was last read."""
        fresh = {self._key(thing): thing for thing in objects}
        for key in [key for key in self.all if key not in fresh and key not in self._unreadable]:
            self._gone(key)
        self._unreadable.clear()
        for key, thing in fresh.items():
            self._put(key, thing)
        self.flushed()

    def changed(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], thing: T) -> None:
        key = self._key(thing)
        if kind != "DELETED":
            self._put(key, thing)
        else:
            self._gone(key)
            self._accept(key, thing.metadata)  # type: ignore[attr-defined]

    def unreadable(self, kind: Literal["ADDED", "MODIFIED", "DELETED"], meta: Meta, why: str) -> None:
        """One that is there, or was, and cannot be decoded."""
        key = self._key(_Named(meta))  # type: ignore[arg-type]
        if kind == "DELETED":
            self._gone(key)
            self._accept(key, meta)
        else:
            self._unreadable.add(key)
            self._refuse(key, meta, why)

    def _put(self, key: Hashable, thing: T) -> None:
        meta: Meta = thing.metadata  # type: ignore[attr-defined]
        if not meta.name or not (key[-1] if isinstance(key, tuple) else key):
            self._refuse(key, meta, "it has no name or no uid")
            return
        before = self.all.get(key)
        self.all[key] = thing
        self._unreadable.discard(key)
        try:
            self._moved(key, before, thing)
        except Exception as error:
            _log.debug("while %s was taken in", key, exc_info=True)
            self._refuse(key, meta, said(error))
        else:
            self._accept(key, meta)

    def _gone(self, key: Hashable) -> None:
        before = self.all.pop(key, None)
        if before is None:
            return
        try:
            self._moved(key, before, None)
        except Exception:
            _log.exception("%s of %s is gone, and that could not be taken in", key, self.resource)

    def _refuse(self, key: Hashable, meta: Meta, why: str) -> None:
        self._refused.add(key)
        self.refusals.put(self.resource, meta, why)

    def _accept(self, key: Hashable, meta: Meta) -> None:
        """Whoever reads its parts may have refused it besides: only what was refused here is taken back here."""
        if self._refused and key in self._refused:
            self._refused.discard(key)
            self.refusals.clear(self.resource, meta)
