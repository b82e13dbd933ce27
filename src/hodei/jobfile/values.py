"""Reading single values that several keys have in common: a mistake becomes a problem at its path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hodei.jobfile.amounts import said
from hodei.jobfile.names import shown
from hodei.model.errors import InvalidInput
from hodei.model.quantity import parse_duration_ms

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
