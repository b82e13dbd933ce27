"""Numbers as objects of the cluster give them, within bounds: an object may say anything, and none may stop a scheduler.

Digits are those of ASCII alone. `str.isdigit` says yes to "²", of which `int` can make nothing.
"""

from __future__ import annotations

import re

from hodei.model.errors import InvalidInput
from hodei.model.quantity import MAX_DURATION_MS

_WHOLE = re.compile(r"-?[0-9]{1,18}")
_DIGITS = re.compile(r"[0-9]{1,4000}")
MAX_INT32 = 2**31 - 1


def is_whole(text: str) -> bool:
    """Whether it is a whole number, maybe a negative one, that fits in 64 bits."""
    return _WHOLE.fullmatch(text) is not None


def bounded(value: int | None, least: int, most: int, otherwise: int = 0) -> int:
    return otherwise if value is None else max(least, min(most, value))


def seconds_ms(value: int | None, otherwise: int = 0) -> int:
    """Seconds of a field in milliseconds: none below 0, none above a century."""
    return otherwise if value is None else bounded(value, 0, MAX_DURATION_MS // 1000) * 1000


def read_seconds_ms(text: str, where: str) -> int:
    """The same of a text, such as an annotation's; InvalidInput names it by `where`."""
    if not _DIGITS.fullmatch(text):
        raise InvalidInput(f"{where} must be a whole number of seconds, not {text[:40]!r}")
    return seconds_ms(int(text))


def read_count(text: str, where: str, most: int = 1_000_000) -> int:
    if not is_whole(text) or not 0 < int(text) <= most:
        raise InvalidInput(f"{where} must be a whole number from 1 on, not {text[:40]!r}")
    return int(text)
