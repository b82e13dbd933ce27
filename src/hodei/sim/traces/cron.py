"""When a cron line fires: minute, hour, day of month, month, day of week. Times are UTC."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from hodei.model.errors import InvalidInput

# The bounds of each field, and the names that may stand for its numbers.
_FIELDS = (("minute", 0, 59, ()), ("hour", 0, 23, ()), ("day", 1, 31, ()),
           ("month", 1, 12, ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")),
           ("weekday", 0, 7, ("sun", "mon", "tue", "wed", "thu", "fri", "sat")))  # fmt: skip


class Cron:
    def __init__(self, text: str) -> None:
        parts = text.split()
        if len(parts) != len(_FIELDS):
            raise InvalidInput(f"{text!r} is not a cron line", hint="write five fields, for example 0 6,18 * * 1-5")
        self._minutes, self._hours, self._days, self._months, weekdays = (
            _values(part, *field) for part, field in zip(parts, _FIELDS, strict=True)
        )
        self._weekdays = {day % 7 for day in weekdays}
        # As cron has it: where both day fields are given, either one is enough.
        self._any_day, self._any_weekday = parts[2].startswith("*"), parts[4].startswith("*")

    def fires(self, start: datetime, days: int) -> Iterator[datetime]:
        """Every time from `start` (a midnight) on, for so many days."""
        for day in (start.astimezone(UTC) + timedelta(days=number) for number in range(days)):
            if self._on(day):
                for hour in sorted(self._hours):
                    for minute in sorted(self._minutes):
                        yield day + timedelta(hours=hour, minutes=minute)

    def _on(self, day: datetime) -> bool:
        by_date, by_weekday = day.day in self._days, day.isoweekday() % 7 in self._weekdays
        if day.month not in self._months:
            return False
        if self._any_day or self._any_weekday:
            return by_date and by_weekday
        return by_date or by_weekday


def _values(text: str, field: str, low: int, high: int, names: tuple[str, ...]) -> set[int]:
    out: set[int] = set()
    for part in text.lower().split(","):
        span, _, step = part.partition("/")
        try:
            if span == "*":
                first, last = low, high
            elif "-" in span:
                begin, _, end = span.partition("-")
                first, last = _value(begin, low, names), _value(end, low, names)
            else:
                first = _value(span, low, names)
                last = high if step else first
            every = int(step or "1")
        except ValueError:
            raise InvalidInput(f"{part!r} is not a {field} of a cron line", hint="write 5, 1-5, */10 or 1,3") from None
        if not (low <= first <= last <= high and every > 0):
            raise InvalidInput(f"{part!r} is not a {field} of a cron line", hint=f"it goes from {low} to {high}")
        out.update(range(first, last + 1, every))
    return out


def _value(text: str, low: int, names: tuple[str, ...]) -> int:
    """A number, or the three-letter name of one."""
    return names.index(text) + low if text in names else int(text)
