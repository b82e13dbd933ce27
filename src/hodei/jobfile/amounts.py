"""How much: requests and limits from all the places where they may be written. Equal answers are one shared object."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache

from hodei.jobfile.names import shown
from hodei.model.errors import InvalidInput
from hodei.model.quantity import parse_quantity
from hodei.model.resources import (
    DEFAULT_REQUEST,
    GPU,
    MEMORY,
    STORAGE,
    Resources,
    format_resources,
    parse_resources,
)

# Where it was written (relative to the task), the name, the amount.
Entry = tuple[str, str, str | int | float]
Problems = tuple[tuple[str, str], ...]

# Longer than this, a name that looks like one of these is a slip of the finger and not a resource of its own.
_EASILY_MISSPELT = (MEMORY, "storage", STORAGE)


def said(error: InvalidInput) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message


@lru_cache(maxsize=4096)
def settle(requests: tuple[Entry, ...], limits: tuple[Entry, ...]) -> tuple[Resources, Resources, Problems]:
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
