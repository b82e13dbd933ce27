"""A job's place in line as a sum that anyone can add up: one term for each thing that counts, in thousandths of a point."""

from __future__ import annotations

from msgspec import Struct

from hodei.model.ids import JobId


class Term(Struct, frozen=True, omit_defaults=True):
    """`text` says how the points came about."""

    name: str
    milli: int
    text: str = ""


class PriorityBreakdown(Struct, frozen=True, omit_defaults=True):
    """What a job's place in line comes from. `terms` add up to `milli`; who has more of it is ahead."""

    job: JobId
    milli: int
    terms: tuple[Term, ...]
    position: int = 0
    pending: int = 0
    queue: str = ""
