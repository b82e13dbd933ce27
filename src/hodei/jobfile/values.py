"""Reading single values that several keys have in common: a mistake becomes a problem at its path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar

from hodei.jobfile.names import shown
from hodei.model.errors import InvalidInput
from hodei.model.resources import (
    DEFAULT_REQUEST,
    GPU,
    MEMORY,
    STORAGE,
    Resources,
    format_resources,
    parse_duration_ms,
    parse_quantity,
    parse_resources,
)

# --------------------------------------------------------------------------------------------- amounts
# How much: requests and limits from all the places where they may be written. Equal answers are one shared object.


# Where it was written (relative to the task), the name, the amount.
Entry = tuple[str, str, str | int | float]
AmountProblems = tuple[tuple[str, str], ...]

# Longer than this, a name that looks like one of these is a slip of the finger and not a resource of its own.
_EASILY_MISSPELT = (MEMORY, "storage", STORAGE)


def said(error: InvalidInput) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message


@lru_cache(maxsize=4096)
def settle(requests: tuple[Entry, ...], limits: tuple[Entry, ...]) -> tuple[Resources, Resources, AmountProblems]:
    """Request and limits in smallest units: a limit without a request sets it, then the defaults fill what is missing."""
    problems: list[tuple[str, str]] = []
    wanted, where = _read(requests, problems)
    most, limit_where = _read(limits, problems)
    for name, amount in most.items():
        if amount < wanted.setdefault(name, amount):
            low, high = format_resources({name: amount})[name], format_resources({name: wanted[name]})[name]
            problems.append((limit_where[name], f"the limit {low} is below the request {high} ({where[name]})"))
    for name, amount in DEFAULT_REQUEST.items():
        wanted.setdefault(name, amount)
    return wanted, most, tuple(problems)


def size(amount: str | int | float) -> int:
    """Bytes of one quantity."""
    return parse_quantity(amount)


def _read(entries: Iterable[Entry], problems: list[tuple[str, str]]) -> tuple[Resources, dict[str, str]]:
    amounts: Resources = {}
    where: dict[str, str] = {}
    for place, given, amount in entries:
        try:
            ((name, parsed),) = parse_resources({given: amount}).items()
        except InvalidInput as error:
            problems.append((place, said(error)))
            continue
        if close := _slip(given):
            problems.append((place, f"unknown resource {shown(given)}; did you mean {close!r}?"))
        elif name in amounts:
            problems.append((place, f"{name} is given twice, here and as {where[name]}; keep one of them"))
        elif name == GPU and parsed > 1000 and parsed % 1000:
            text = "more than one GPU, and not whole; ask for a part of one (0.5) or for whole ones (2)"
            problems.append((place, f"{shown(amount)} is {text}"))
        else:
            amounts[name], where[name] = parsed, place
    return amounts, where


def _slip(name: str) -> str:
    if "/" in name or len(name) < 5 or name in _EASILY_MISSPELT or name == "ephemeral_storage":
        return ""
    return next(iter(get_close_matches(name, _EASILY_MISSPELT, n=1, cutoff=0.8)), "")


# ----------------------------------------------------------------------------------------------------

Problems = list[tuple[str, str]]
T = TypeVar("T")

# One command line and one environment as Linux takes them.
MAX_TEXT = 128 * 1024


def take(problems: Problems, path: str, read: Callable[[Any], T], value: Any, otherwise: T) -> T:
    try:
        return read(value)
    except InvalidInput as error:
        problems.append((path, said(error)))
        return otherwise


def duration(value: str | int | float | None, path: str, problems: Problems) -> int | None:
    return None if value is None else take(problems, path, parse_duration_ms, value, None)


def command(given: str | Sequence[str], path: str, problems: Problems) -> tuple[str, ...]:
    """A string is a line for the shell."""
    out = ("/bin/sh", "-c", given) if isinstance(given, str) else tuple(given)
    check_text(out, path, problems)
    return out


def program(given: str | Sequence[str] | None) -> str:
    """What a command runs; empty if it runs nothing."""
    if isinstance(given, str):
        return given.strip()
    return given[0] if given else ""


def absolute_path(value: str) -> str:
    if "\0" in value or not value.startswith("/") or not encodable(value):
        raise InvalidInput(f"{shown(value)} is not an absolute path", hint="begin it with /")
    return value


def check_text(texts: tuple[str, ...], at: str, problems: Problems) -> None:
    # The lengths first: repeated references to one long text must not be multiplied out.
    if sum(map(len, texts)) > MAX_TEXT:
        problems.append((at, f"longer than {MAX_TEXT // 1024} KiB in all; put large data into a file"))
        return
    whole = "".join(texts)
    if "\0" in whole:
        problems.append((at, "contains a NUL character, which no program can be given"))
    elif not whole.isascii() and not encodable(whole):
        problems.append((at, "contains half a surrogate pair, which is not text"))


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------------------------------- number lists
# Lists of cores and devices as Linux writes them: `0-3,8` is 0, 1, 2, 3 and 8.


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
