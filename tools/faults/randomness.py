"""Whether a fault happens: one source of luck for a whole run, so that the seed alone tells all of it."""

from __future__ import annotations

from random import Random


class Wrong(Exception):
    """Something that must never be."""


class Chance:
    """`odds` names the faults of this run. When they are over (`stop`) nothing goes wrong any more."""

    def __init__(self, rng: Random, odds: dict[str, float]) -> None:
        self.rng = rng
        self.odds = odds
        self.over = False

    def __call__(self, fault: str) -> bool:
        odds = 0.0 if self.over else self.odds.get(fault, 0.0)
        return odds > 0 and self.rng.random() < odds

    def stop(self) -> None:
        self.over = True
