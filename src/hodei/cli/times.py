"""Times for people (`3m ago`, `in 12s`) and the times of options. Programs get ISO 8601 in UTC."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def iso(ms: int) -> str:
    """`2026-01-31T09:30:00.250Z`; empty for 0."""
    if not ms:
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def ms_of(text: str) -> int:
    """Milliseconds since the epoch of an ISO time; 0 if empty or invalid."""
    if not text:
        return 0
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        return 0


def parse_since_ms(text: str) -> int:
    """`--since`: milliseconds since the epoch of `10m` (ago) or of an ISO time; 0 if empty."""
    if not text:
        return 0
    if text[:1].isdigit() and (moment := ms_of(text)):
        return moment
    return now_ms() - _option_duration_ms("--since", text, "write 10m, 2h or 2026-01-31T08:00Z")


def parse_timeout_ms(text: str) -> int:
    return _option_duration_ms("--timeout", text, "write it as 90s, 5m or 1h30m")


def _option_duration_ms(option: str, text: str, hint: str) -> int:
    from hodei.cli.errors import UsageProblem
    from hodei.model.errors import InvalidInput
    from hodei.model.resources import parse_duration_ms

    try:
        return parse_duration_ms(text)
    except InvalidInput as error:
        raise UsageProblem(f"{option}: {error.message}", hint=hint) from None


def timestamp(ms: int) -> str:
    """`14:05:01`, with the day if it is not today; in this machine's zone."""
    if not ms:
        return "-"
    then, today = _local(ms), _local(now_ms()).date()
    return then.strftime("%H:%M:%S" if then.date() == today else "%Y-%m-%d %H:%M:%S")


def _local(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000).astimezone()


def duration_text(ms: int) -> str:
    """A duration in its largest unit or two: `45s`, `3m`, `2h10m`, `5d`."""
    seconds = max(0, ms) // 1000
    if seconds < 1:
        return f"{max(0, ms)}ms" if ms > 0 else "0s"
    if seconds < 120:
        return f"{seconds}s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86_400
    if minutes < 120:
        return f"{minutes}m"
    if hours < 48:
        return f"{hours}h{minutes % 60}m" if minutes % 60 and hours < 10 else f"{hours}h"
    return f"{days}d"


def ago(text: str | int) -> str:
    """`3m ago` or `in 3m`; empty if there is no time."""
    then = text if isinstance(text, int) else ms_of(text)
    if not then:
        return ""
    past_ms = now_ms() - then
    if abs(past_ms) < 1000:
        return "just now"
    return f"{duration_text(past_ms)} ago" if past_ms > 0 else f"in {duration_text(-past_ms)}"


def clock(ms: int) -> str:
    """`14:05`, with the day if it is not today; in this machine's zone."""
    if not ms:
        return ""
    then = _local(ms)
    if then.date() != _local(now_ms()).date():
        return then.strftime("%Y-%m-%d %H:%M")
    return then.strftime("%H:%M:%S" if then.second else "%H:%M")


def elapsed(start: str, end: str) -> str:
    """The time from `start` until `end`, or until now; empty before the start."""
    began = ms_of(start)
    return duration_text((ms_of(end) or now_ms()) - began) if began else ""
