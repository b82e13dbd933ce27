"""Values that several keys of a job file share: their types, and parsers that report a mistake with its path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from hodei.model.affinity import Requirement
from hodei.model.errors import InvalidInput
from hodei.model.job import PRIORITY_CLASSES
from hodei.model.names import label_key, label_value, safe_repr
from hodei.model.resources import (
    DEFAULT_REQUEST,
    GPU,
    MEMORY,
    STORAGE,
    Resources,
    format_duration,
    format_resources,
    parse_duration_ms,
    parse_resources,
)

Problems = list[tuple[str, str]]
T = TypeVar("T")

# The longest command line and environment that Linux accepts.
MAX_TEXT = 128 * 1024


def text(limit: int) -> Meta:
    return Meta(max_length=limit)


def about(description: str, *examples: Any, **schema: Any) -> Meta:
    return Meta(description=description, examples=list(examples) or None, extra_json_schema=schema or None)


Word = Annotated[str, text(63)]
Key = Annotated[str, text(317)]
Line = Annotated[str, text(1024)]
Long = Annotated[str, text(128 * 1024)]
Short = Annotated[str, text(64)]
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Quantity = Short | Integer | float
Duration = Short | Integer | float
Command = Annotated[
    Annotated[list[Long], Meta(min_length=1, max_length=4096)] | Long,
    about("The program and its arguments; a string is run by `/bin/sh -c`.", ["python3", "train.py"], "echo hello"),
]
Quantities = Annotated[dict[Key, Quantity], Meta(max_length=64)]
Labels = Annotated[dict[Key, Word], Meta(max_length=256)]
Words = Annotated[list[Word], Meta(min_length=1, max_length=64)]


class Form(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the schema types: unknown keys are mistakes."""


class Expression(Form, frozen=True):
    """One condition of a Kubernetes node selector term."""

    key: Key
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: Annotated[list[Annotated[str, text(253)]], Meta(max_length=256)] | None = None


Expressions = Annotated[list[Expression], Meta(max_length=64)]
Weight = Annotated[int, Meta(ge=1, le=100)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'memory'?` if a known word is close, else empty."""
    close = get_close_matches(word[:64], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def error_text(error: InvalidInput) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message


def try_parse(problems: Problems, path: str, parse: Callable[[Any], T], value: Any, default: T) -> T:
    """`parse(value)`, or `default` and a problem at `path`."""
    try:
        return parse(value)
    except InvalidInput as error:
        problems.append((path, error_text(error)))
        return default


def duration(value: str | int | float | None, path: str, problems: Problems) -> int | None:
    return None if value is None else try_parse(problems, path, parse_duration_ms, value, None)


@lru_cache(maxsize=256)
def priority(value: int | str) -> int:
    if isinstance(value, int):
        return value
    if value not in PRIORITY_CLASSES:
        near = did_you_mean(value, PRIORITY_CLASSES)
        raise InvalidInput(
            f"unknown priority {safe_repr(value)}: {', '.join(PRIORITY_CLASSES)} or a whole number{near}"
        )
    return PRIORITY_CLASSES[value]


def check_requirement_names(requirement: Requirement) -> Requirement:
    """The requirement, if its key and values are valid labels."""
    label_key(requirement.key)
    for value in requirement.values if requirement.operator in ("In", "NotIn") else ():
        label_value(value)
    return requirement


def requirement_document(requirement: Requirement) -> dict[str, Any]:
    """The requirement as a Kubernetes match expression."""
    values = {"values": list(requirement.values)} if requirement.values else {}
    return {"key": requirement.key, "operator": requirement.operator} | values


def command(given: str | Sequence[str], path: str, problems: Problems) -> tuple[str, ...]:
    """A string is run by the shell."""
    out = ("/bin/sh", "-c", given) if isinstance(given, str) else tuple(given)
    check_text(out, path, problems)
    return out


def program(given: str | Sequence[str] | None) -> str:
    """The program of a command; empty if there is none."""
    if isinstance(given, str):
        return given.strip()
    return given[0] if given else ""


def absolute_path(value: str) -> str:
    if "\0" in value or not value.startswith("/") or not encodable(value):
        raise InvalidInput(f"{safe_repr(value)} is not an absolute path", hint="start it with /")
    return value


def check_text(texts: tuple[str, ...], at: str, problems: Problems) -> None:
    # Lengths first: aliases of one long text must not be joined into a huge one.
    if sum(map(len, texts)) > MAX_TEXT:
        problems.append((at, f"longer than {MAX_TEXT // 1024} KiB in total; put large data into a file"))
        return
    joined = "".join(texts)
    if "\0" in joined:
        problems.append((at, "contains a NUL character, which no program accepts"))
    elif not joined.isascii() and not encodable(joined):
        problems.append((at, "contains half a surrogate pair, which is not text"))


def non_empty(keys: dict[str, Any]) -> dict[str, Any]:
    """For renderers: the keys without empty values."""
    return {key: value for key, value in keys.items() if value}


def duration_value(ms: int) -> str:
    """For renderers: empty for 0."""
    return format_duration(ms) if ms else ""


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Path relative to the task, resource name, amount.
Entry = tuple[str, str, str | int | float]
AmountProblems = tuple[tuple[str, str], ...]

# A name close to one of these is a misspelling, not a custom resource.
_OFTEN_MISSPELLED = (MEMORY, "storage", STORAGE)


@lru_cache(maxsize=4096)
def resources(requests: tuple[Entry, ...], limits: tuple[Entry, ...]) -> tuple[Resources, Resources, AmountProblems]:
    """Requests and limits in smallest units. A limit without a request sets the request; defaults fill the rest.

    Cached: equal results are one shared object.
    """
    problems: Problems = []
    request, path_of = _amounts(requests, problems)
    limit, limit_path_of = _amounts(limits, problems)
    for name, amount in limit.items():
        if amount < request.setdefault(name, amount):
            low, high = format_resources({name: amount})[name], format_resources({name: request[name]})[name]
            problems.append((limit_path_of[name], f"the limit {low} is below the request {high} ({path_of[name]})"))
    for name, amount in DEFAULT_REQUEST.items():
        request.setdefault(name, amount)
    return request, limit, tuple(problems)


def _amounts(entries: Iterable[Entry], problems: Problems) -> tuple[Resources, dict[str, str]]:
    amounts: Resources = {}
    path_of: dict[str, str] = {}
    for path, given, amount in entries:
        try:
            ((name, parsed),) = parse_resources({given: amount}).items()
        except InvalidInput as error:
            problems.append((path, error_text(error)))
            continue
        if close := _misspelling_of(given):
            problems.append((path, f"unknown resource {safe_repr(given)}; did you mean {close!r}?"))
        elif name in amounts:
            problems.append((path, f"{name} is given twice, here and as {path_of[name]}; keep one of them"))
        elif name == GPU and parsed > 1000 and parsed % 1000:
            text = "more than one GPU, but not a whole number; request a part of one (0.5) or whole ones (2)"
            problems.append((path, f"{safe_repr(amount)} is {text}"))
        else:
            amounts[name], path_of[name] = parsed, path
    return amounts, path_of


def _misspelling_of(name: str) -> str:
    if "/" in name or len(name) < 5 or name in _OFTEN_MISSPELLED or name == "ephemeral_storage":
        return ""
    return next(iter(get_close_matches(name, _OFTEN_MISSPELLED, n=1, cutoff=0.8)), "")


# Cores and devices as Linux writes them: `0-3,8` is 0, 1, 2, 3 and 8.
MAX_NUMBER = 8191  # the most that a Linux kernel supports
_PART = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")


def parse_numbers(given: str | int | Sequence[int]) -> tuple[int, ...]:
    """Sorted. InvalidInput for anything else, or a number that is listed twice."""
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
        raise InvalidInput("a number is listed twice", hint="list each core or device once")
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
