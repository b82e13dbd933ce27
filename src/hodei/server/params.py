"""Reads the parameters that a route declares, and refuses those it does not."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any
from urllib.parse import parse_qsl

from msgspec import UNSET
from starlette.types import Scope

from hodei.model.errors import InvalidInput
from hodei.model.resources import parse_duration_ms
from hodei.server.errors import Malformed
from hodei.server.route import Param, Route

_MAX_QUERY = 16 * 1024
_SECRETS = {"token", "access_token", "authorization", "bearer", "api_key", "apikey"}


def read_params(route: Route, scope: Scope) -> dict[str, Any]:
    """Every declared parameter, typed, or its default. InvalidInput names each wrong one."""
    given = _given(route, scope)
    args: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    for param in route.params:
        values = given.get((param.where, param.name), [])
        try:
            args[param.name] = _value(param, values)
        except InvalidInput as error:
            problems.append((param.name, error.message))
    if problems:
        first = problems[0]
        raise InvalidInput(f"{first[0]}: {first[1]}", problems=tuple(problems))
    return args


def _given(route: Route, scope: Scope) -> dict[tuple[str, str], list[str]]:
    given: dict[tuple[str, str], list[str]] = {
        ("path", name): [value] for name, value in scope.get("path_params", {}).items()
    }
    query = scope.get("query_string", b"")
    if query:
        known = [param.name for param in route.params if param.where == "query"]
        for name, value in _query(query):
            if name not in known:
                raise _unknown(name, known)
            given.setdefault(("query", name), []).append(value)
    headers = {param.name.lower().encode(): param.name for param in route.params if param.where == "header"}
    if headers:
        for raw, found in scope["headers"]:
            if raw in headers:
                given.setdefault(("header", headers[raw]), []).append(found.decode("latin-1"))
    return given


def _query(query: bytes) -> list[tuple[str, str]]:
    if len(query) > _MAX_QUERY:
        raise InvalidInput(f"the query is longer than {_MAX_QUERY} bytes")
    try:
        return parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=200, errors="strict")
    except (ValueError, UnicodeDecodeError):
        raise Malformed("the query cannot be read") from None


def _unknown(name: str, known: list[str]) -> InvalidInput:
    if name.lower() in _SECRETS:
        return InvalidInput(
            "tokens do not belong into a URL: it ends up in logs and histories",
            hint="send the header 'Authorization: Bearer TOKEN', and replace this token if others may have seen it",
        )
    close = get_close_matches(name[:80], known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known) or 'none'}"
    return InvalidInput(f"unknown parameter {name[:80]!r}", hint=hint)


def _value(param: Param, values: list[str]) -> Any:
    if param.many:
        parts = [part for value in values for part in (value.split(",") if param.commas else (value,))]
        return tuple(_one(param, part) for part in parts if part.strip())
    if len(values) > 1:
        raise InvalidInput("given more than once")
    if not values or (values[0] == "" and param.where == "query"):
        if param.default is UNSET:
            raise InvalidInput("missing")
        return param.default
    return _one(param, values[0])


def _one(param: Param, text: str) -> int | str:
    text = text.strip()
    if param.type is int:
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise InvalidInput(f"{text[:40]!r} is not a whole number")
        number = int(text)
        if not param.minimum <= number <= param.maximum:
            raise InvalidInput(f"{number} is not between {param.minimum} and {param.maximum}")
        return number
    if param.choices and text not in param.choices:
        close = get_close_matches(text[:80], param.choices, 1)
        tail = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(param.choices)}"
        raise InvalidInput(f"{text[:80]!r} is not known; {tail}")
    if len(text) > min(param.maximum, 1000):
        raise InvalidInput(f"longer than {min(param.maximum, 1000)} characters")
    if not text.isprintable():
        raise InvalidInput("has characters that cannot be printed")
    return text


def read_since_ms(text: str, now_ms: int, name: str = "since") -> int:
    """A moment in the past: milliseconds since the epoch, ISO 8601 (UTC if it names no zone), or an age such as `90m`."""
    if not text:
        return 0
    if text.isascii() and text.isdigit() and len(text) < 17:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            return max(0, now_ms - parse_duration_ms(text))
        except InvalidInput:
            raise InvalidInput(
                f"{name}: {text[:40]!r} is neither a time nor an age", hint="write 2026-01-31T08:00:00Z, 90m or 2d"
            ) from None
    return max(0, round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000))


def closest(path: str, known: Iterable[str]) -> str:
    """The known path most like the one asked for, or ""."""
    close = get_close_matches(path[:200], list(known), 1, cutoff=0.7)
    return close[0] if close else ""
