"""Sorted keys that know how many keys precede one of them: queue positions without a walk over the queue.

The keys are kept in chunks, so that adding, removing and counting touch a few hundred keys at most. A key may have a
weight (the charge of its tenant); then the sum of the weights before it is known as well.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Generic, TypeVar

K = TypeVar("K")
# A chunk of twice this size is split.
_CHUNK = 512


class SortedKeys(Generic[K]):
    """Each key at most once."""

    __slots__ = ("_chunks", "_lasts", "_len", "_weights")

    def __init__(self) -> None:
        self._chunks: list[list[Any]] = []
        self._lasts: list[Any] = []  # the last key of each chunk
        self._weights: list[list[int]] | None = None  # of each key, once one is not 0
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[K]:
        for chunk in self._chunks:
            yield from chunk

    def __contains__(self, key: K) -> bool:
        at = bisect_left(self._lasts, key)
        if at == len(self._lasts):
            return False
        chunk = self._chunks[at]
        place = bisect_left(chunk, key)
        return bool(chunk[place] == key)

    @property
    def first(self) -> K:
        """IndexError if it is empty."""
        return self._chunks[0][0]  # type: ignore[no-any-return]

    def add(self, key: K, weight: int = 0) -> None:
        self._len += 1
        lasts, chunks = self._lasts, self._chunks
        if weight and self._weights is None:
            self._weights = [[0] * len(chunk) for chunk in chunks]
        if not lasts:
            lasts.append(key)
            chunks.append([key])
            if self._weights is not None:
                self._weights.append([weight])
            return
        if key > lasts[-1]:  # the usual case
            at = len(lasts) - 1
            lasts[at] = key
            chunk = chunks[at]
            chunk.append(key)
            if self._weights is not None:
                self._weights[at].append(weight)
        else:
            at = bisect_left(lasts, key)
            chunk = chunks[at]
            if self._weights is not None:
                self._weights[at].insert(bisect_left(chunk, key), weight)
            insort(chunk, key)
        if len(chunk) >= 2 * _CHUNK:
            self._split(at)

    def _split(self, at: int) -> None:
        middle = _CHUNK  # keys that are added in order leave full chunks
        chunk = self._chunks[at]
        self._chunks[at : at + 1] = [chunk[:middle], chunk[middle:]]
        self._lasts.insert(at, chunk[middle - 1])
        if self._weights is not None:
            weights = self._weights[at]
            self._weights[at : at + 1] = [weights[:middle], weights[middle:]]

    def remove(self, key: K) -> None:
        """KeyError if it is not a key."""
        at = bisect_left(self._lasts, key)
        chunk = self._chunks[at] if at < len(self._lasts) else []
        place = bisect_left(chunk, key)
        if place == len(chunk) or chunk[place] != key:
            raise KeyError(key)
        self._len -= 1
        del chunk[place]
        if self._weights is not None:
            del self._weights[at][place]
        if not chunk:
            del self._chunks[at], self._lasts[at]
            if self._weights is not None:
                del self._weights[at]
        elif place == len(chunk):
            self._lasts[at] = chunk[-1]

    def pop_first(self) -> K:
        key = self.first
        self.remove(key)
        return key

    def before(self, key: K) -> int:
        """The number of smaller keys."""
        at = bisect_left(self._lasts, key)
        if at == len(self._lasts):
            return self._len
        inside = bisect_left(self._chunks[at], key)
        return inside + sum(map(len, self._chunks[:at])) if at else inside

    def weight_before(self, key: K) -> int:
        """The sum of the weights of smaller keys."""
        if self._weights is None:
            return 0
        at = bisect_left(self._lasts, key)
        total = sum(map(sum, self._weights[:at]))
        if at < len(self._lasts):
            total += sum(self._weights[at][: bisect_left(self._chunks[at], key)])
        return total

    def lighter(self, than: int, *, or_equal: bool) -> int:
        """How many keys have less (or no more) weight than that before them. Weights must not be negative."""
        if than < 0 or (than == 0 and not or_equal):
            return 0
        if self._weights is None:
            return self._len
        counted = behind = 0
        for weights in self._weights:
            sums = list(accumulate(weights, initial=behind))  # the weight before each key, and before the next chunk
            behind = sums.pop()
            here = bisect_right(sums, than) if or_equal else bisect_left(sums, than)
            counted += here
            if here < len(sums):
                break
        return counted
