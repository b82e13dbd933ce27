"""Long work in parts, so that whoever drives it can see to others in between. What it comes to does not depend on that."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
# So many facts, rows or jobs are one part: some 30 ms of work.
PART = 1000


def parts(many: Iterable[T], most: int = PART) -> Iterator[list[T]]:
    """All of them in order, no more than so many at a time."""
    rest = iter(many)
    while part := list(islice(rest, most)):
        yield part


def at_once(work: Generator[None, None, T]) -> T:
    """Without a break."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
