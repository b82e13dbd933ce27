"""Words for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def moment(ms: int) -> str:
    """`2026-01-31 14:05:30 UTC`; the seconds only if there are any."""
    days, rest = divmod(ms // 1000, 86_400)
    hour, minute, second = rest // 3600, rest // 60 % 60, rest % 60
    # The calendar in whole numbers, in years that begin with March so that the leap day is their last.
    days += 719_468
    era, day = divmod(days, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5 - 1
    month += 3 if month < 10 else -9
    year += era * 400 + (month <= 2)
    clock = f"{hour:02}:{minute:02}" + (f":{second:02}" if second else "")
    return f"{year:04}-{month:02}-{day:02} {clock} UTC"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'memory'?)`, or nothing when nothing is near."""
    near = difflib.get_close_matches(word[:100], list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
