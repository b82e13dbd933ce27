"""Chance, as it comes from outside: nothing in here throws dice of its own."""

from __future__ import annotations

from typing import Protocol


class RandomSource(Protocol):
    """`random.Random`, made by whoever asks for forecasts: with the same seed they are the same."""

    def randrange(self, start: int, stop: int) -> int: ...
