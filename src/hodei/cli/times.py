"""Times for people: `3m ago`, `in 12s`. Programs get ISO 8601 in UTC."""

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
    """Milliseconds since the epoch of an ISO time; 0 if there is none."""
    if not text:
        return 0
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        return 0


def since_ms(text: str) -> int:
    """Milliseconds since the epoch of `10m` (ago) or of an ISO time; 0 if there is none."""
    if not text:
        return 0
    if text[:1].isdigit() and (moment := ms_of(text)):
        return moment
    from hodei.cli.errors import UsageProblem
    from hodei.model.errors import InvalidInput
    from hodei.model.resources import parse_duration_ms

    try:
        return now_ms() - parse_duration_ms(text)
    except InvalidInput as error:
        raise UsageProblem(f"--since: {error.message}", hint="write 10m, 2h or 2026-01-31T08:00Z") from None


def timeout_ms(text: str) -> int:
    """What `--timeout` says."""
    from hodei.cli.errors import UsageProblem
    from hodei.model.errors import InvalidInput
    from hodei.model.resources import parse_duration_ms

    try:
        return parse_duration_ms(text)
    except InvalidInput as error:
        raise UsageProblem(f"--timeout: {error.message}", hint=error.hint or "write it as 90s, 5m or 1h30m") from None


def stamp(ms: int) -> str:
    """`14:05:01`, with the day if it is not today; in this machine's zone."""
    if not ms:
        return "-"
    then = datetime.fromtimestamp(ms / 1000).astimezone()
    today = datetime.fromtimestamp(now_ms() / 1000).astimezone().date()
    return then.strftime("%H:%M:%S" if then.date() == today else "%Y-%m-%d %H:%M:%S")


def short(ms: int) -> str:
    """A span in its largest unit or two: `45s`, `3m`, `2h10m`, `5d`."""
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
    """How long ago (or in how long) that moment is; empty if there is none."""
    then = text if isinstance(text, int) else ms_of(text)
    if not then:
        return ""
    gone = now_ms() - then
    if abs(gone) < 1000:
        return "just now"
    return f"{short(gone)} ago" if gone > 0 else f"in {short(-gone)}"


def clock(ms: int) -> str:
    """`14:05`, with the day if it is not today; in this machine's zone."""
    if not ms:
        return ""
    then = datetime.fromtimestamp(ms / 1000).astimezone()
    same_day = then.date() == datetime.fromtimestamp(now_ms() / 1000).astimezone().date()
    return then.strftime("%H:%M:%S" if then.second else "%H:%M") if same_day else then.strftime("%Y-%m-%d %H:%M")


def span(start: str, end: str) -> str:
    """How long something took, or has taken so far; empty if it has not begun."""
    began = ms_of(start)
    return short((ms_of(end) or now_ms()) - began) if began else ""
