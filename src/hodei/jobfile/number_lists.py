"""Lists of cores and devices as Linux writes them: `0-3,8` is 0, 1, 2, 3 and 8."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hodei.model.errors import InvalidInput

MAX_NUMBER = 8191  # as many as a Linux kernel is built for
_PART = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")


def parse_numbers(given: str | int | Sequence[int]) -> tuple[int, ...]:
    """In rising order, each once. InvalidInput for anything that is not such a list, or names one twice."""
    if isinstance(given, str):
        spans = [_span(part) for part in given.split(",")] if given.strip() else []
    else:
        spans = [(one, one) for one in ([given] if isinstance(given, int) else given)]
    found: list[int] = []
    for first, last in spans:
        if not 0 <= first <= last <= MAX_NUMBER:
            raise InvalidInput(f"{first}-{last} is not a range" if first != last else f"{first} is out of range",
                               hint=f"numbers go from 0 to {MAX_NUMBER}, the smaller one first")  # fmt: skip
        found += range(first, last + 1)
        if len(found) > MAX_NUMBER + 1:
            break
    if len(set(found)) < len(found):
        raise InvalidInput("a number is named twice", hint="each core or device once")
    return tuple(sorted(found))


def format_numbers(numbers: Iterable[int]) -> str:
    """`0-3,8`; empty for none."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _span(part: str) -> tuple[int, int]:
    found = _PART.fullmatch(part)
    if found is None:
        raise InvalidInput(f"{part.strip()[:40]!r} is not a number or a range", hint="write 0-3,8")
    return int(found[1]), int(found[2] or found[1])
