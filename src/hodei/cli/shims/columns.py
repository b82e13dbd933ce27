"""Columns: `%.18i %j` of squeue and sinfo, and tables with fixed widths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from hodei.cli.output import clean
from hodei.cli.shims.words import Refused

T = TypeVar("T")
Fields = Mapping[str, tuple[str, Callable[[T], object]]]
_FIELD = re.compile(r"%(\.)?(\d+)?([A-Za-z])")


def lines(format: str, fields: Fields[T], rows: Iterable[T], *, header: bool) -> Iterable[str]:
    """Each row by `format`: `%i` as it is, `%18i` cut and filled to 18 letters, `%.18i` to the right."""
    for _, _, letter in _FIELD.findall(format):
        if letter not in fields:
            raise Refused(
                f"error: the field %{letter} is not known here; there is {' '.join('%' + one for one in fields)}"
            )
    if header:
        yield _FIELD.sub(lambda found: _cell(found, fields[found[3]][0]), format)
    yield from (_line(format, fields, row) for row in rows)


def _line(format: str, fields: Fields[T], row: T) -> str:
    return _FIELD.sub(lambda found: _cell(found, clean(str(fields[found[3]][1](row)))), format)


def _cell(found: re.Match[str], text: str) -> str:
    width = int(found[2] or 0)
    if not width:
        return text
    return text[:width].rjust(width) if found[1] else text[:width].ljust(width)
