"""What the ledger is made of: open runs, what is kept of ended ones, lines that are read, how much a bucket counts."""

from __future__ import annotations

from decimal import Decimal, localcontext

from msgspec import Struct

from hodei.model.resources import Resources

Path = tuple[str, ...]

# Bits of the factor of a bucket: relative error below 2^-40.
FACTOR_BITS = 40


class OpenRun(Struct):
    """A run that is charged as time goes by."""

    path: Path
    amounts: Resources
    at_ms: int


class Kept(Struct):
    """What one account itself used of one resource and is over, by bucket; those before `folded` are folded."""

    amounts: dict[int, int]
    folded: int


class Line:
    """The use of one resource by one account and all below it.

    What is open at the moment is not walked run by run: `rate` is how much is held in all, `settled` the bucket up to whose
    start this is in `amounts`, and `offset` what the rate claims too much in that bucket (runs that began amid it).
    `eras` are the same amounts times the factor of their bucket, by half-life.
    """

    __slots__ = ("amounts", "eras", "folded", "offset", "rate", "settled")

    def __init__(self, folded: int) -> None:
        self.amounts: dict[int, int] = {}
        self.eras: dict[int, int] = {}
        self.folded = folded
        self.rate = self.offset = self.settled = 0


class Factors(dict[int, int]):
    """2^(place / half-life) by the place of a bucket in its half-life, times 2^FACTOR_BITS. In decimals, because a float's power
    may differ from machine to machine."""

    def __init__(self, places: int) -> None:
        self._places = places

    def __missing__(self, place: int) -> int:
        with localcontext() as context:
            context.prec = 40
            factor = int(Decimal(2) ** (FACTOR_BITS + Decimal(place) / self._places))
        self[place] = factor
        return factor
