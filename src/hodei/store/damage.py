"""Rows that cannot be read: how they are read all the same, and which were seen.

Text that is not UTF-8 comes as bytes, so that whoever reads the row strictly notices, and nothing else of the answer is
lost. Reads never write: what was seen is set aside later, by `mending`, on the writer's connection.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from hodei.model.errors import InvalidInput
from hodei.store import rows

T = TypeVar("T")
# What reading a row strictly may end in.
UNREADABLE = (msgspec.MsgspecError, InvalidInput, ValueError, TypeError, ArithmeticError, LookupError, RecursionError)
Key = tuple[str, Any]


class Suspects:
    """Rows that could not be read, by kind and key, with the reason. May be told from any thread."""

    def __init__(self) -> None:
        self.seen: dict[Key, str] = {}

    def add(self, kind: str, key: Any, error: object) -> None:
        self.seen.setdefault((kind, key), str(error)[:300] or type(error).__name__)

    def __bool__(self) -> bool:
        return bool(self.seen)

    def read(
        self,
        kind: str,
        found: Iterable[Sequence[Any]],
        decode: Callable[[Any], T],
        key: Callable[[Any], Any],
        instead: Callable[[Any, str], T | None] | None = None,
    ) -> Iterator[T]:
        """Each row as a value; one that cannot be read is noted, and left out unless something stands in for it."""
        for row in found:
            try:
                value = decode(row)
            except UNREADABLE as error:
                self.add(kind, key(row), error)
                other = instead(row, str(error)) if instead is not None else None
                if other is not None:
                    yield other
            else:
                yield value


def text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def is_about_text(error: sqlite3.Error) -> bool:
    return "decode to UTF-8" in str(error)


@contextmanager
def lenient(db: sqlite3.Connection) -> Iterator[None]:
    before, db.text_factory = db.text_factory, text_or_bytes
    try:
        yield
    finally:
        db.text_factory = before


def fetch(db: sqlite3.Connection, sql: str, values: Sequence[Any] = ()) -> list[Any]:
    try:
        return db.execute(sql, values).fetchall()
    except sqlite3.OperationalError as error:
        if not is_about_text(error):
            raise
    with lenient(db):
        return db.execute(sql, values).fetchall()


def fetch_json(db: sqlite3.Connection, sql: str, values: Sequence[Any]) -> list[list[Any]]:
    """The rows of a question whose answer is one row of JSON."""
    try:
        return rows.rows_in(db.execute(sql, values).fetchone()[0])
    except sqlite3.OperationalError as error:
        if not is_about_text(error):
            raise
    except UNREADABLE:
        pass
    with lenient(db):
        found = db.execute(sql, values).fetchone()[0]
    text = found if isinstance(found, str) else found.decode("utf-8", "surrogateescape")
    return [[_bytes_if_broken(value) for value in row] for row in json.loads(text)]


def _bytes_if_broken(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogateescape")
    return value
