"""Print results: tables for people, `-o json|jsonl|yaml|name` for programs.

Machine output is an interface: its fields are those of the API and are only ever added. Data goes to stdout, everything
else to stderr. Control characters in names and texts never reach a terminal.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import click

FORMATS = ("table", "wide", "json", "jsonl", "yaml", "name")

# C0 and C1 controls, DEL, and marks that change the direction of text.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_COLOURS = {
    "running": "cyan", "scheduled": "cyan", "placed": "cyan", "succeeded": "green", "ready": "green", "ok": "green",
    "failed": "red", "lost": "red", "problem": "red", "not-ready": "red", "unsatisfiable": "red",
    "pending": "yellow", "waiting": "yellow", "held": "magenta", "warning": "yellow", "cordoned": "yellow",
    "draining": "yellow", "cancelled": "bright_black", "stopped": "bright_black",
}  # fmt: skip
# Columns that are never shortened: they are copied into the next command, or show the state.
_NEVER_SHORTENED = ("ID", "RUN", "STATE", "STATUS", "CODE")
_MIN_WIDTH = 4


class Column(NamedTuple):
    """One column of a table: a header and the text of a row. `wide`: only with `-o wide`; `if_any`: omitted from a table
    with headers if every row has only `-`; `right`: aligned to the right."""

    header: str
    cell: Callable[[Any], str]
    wide: bool = False
    if_any: bool = False
    right: bool = False


def clean(text: str) -> str:
    r"""`text` with control characters escaped (ESC -> \x1b), so that it cannot move the cursor or forge a line."""
    return _UNSAFE.sub(lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text)


def uses_colour(err: bool = False) -> bool:
    stream = sys.stderr if err else sys.stdout
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def paint(text: str, state: str) -> str:
    """`text` in the colour of `state`, on a terminal with colours."""
    colour = _COLOURS.get(state)
    return click.style(text, fg=colour) if colour and uses_colour() else text


def note(text: str) -> None:
    """Print a message for the user on stderr."""
    click.echo(clean(text), err=True)


def counted(number: int, noun: str) -> str:
    """`1 run`, `2 runs`"""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def is_for_people(output: str) -> bool:
    """Whether this format is for people: with the others, nothing but data is printed."""
    return output in ("table", "wide")


def item_name(item: Any) -> str:
    return str(item.name)


def emit_list(
    items: Iterable[Any],
    output: str,
    columns: Sequence[Column],
    *,
    name: Callable[[Any], str] = item_name,
    headers: bool = True,
    empty: str = "",
) -> None:
    """Print a list. `jsonl` and `name` print each item as it arrives, the others wait for the last one."""
    if output == "jsonl":
        for item in items:
            click.echo(_json(item))
    elif output == "name":
        for item in items:
            click.echo(clean(name(item)))
    elif output in ("json", "yaml"):
        _machine(list(items), output)
    else:
        rows = list(items)
        if rows or not empty:
            click.echo(table(rows, columns, wide=output == "wide", headers=headers), nl=bool(rows or headers))
        else:
            note(empty)


def emit_one(item: Any, output: str, *, text: Callable[[Any], str], name: Callable[[Any], str] = item_name) -> None:
    """Print one item: an object for programs, `text` for people."""
    if output == "jsonl":
        click.echo(_json(item))
    elif output == "name":
        click.echo(clean(name(item)))
    elif output in ("json", "yaml"):
        _machine(item, output)
    else:
        click.echo(text(item))


def table(
    rows: Sequence[Any], columns: Sequence[Column], *, wide: bool = False, headers: bool = True, inset: int = 0
) -> str:
    """Rows in aligned columns. On a terminal the widest columns are shortened to fit, unless `wide`. `inset`: width that
    is taken by an indent."""
    empty = {c.header for c in columns if c.if_any and headers and all(c.cell(row) == "-" for row in rows)}
    shown = [column for column in columns if wide or not (column.wide or column.header in empty)]
    cells = [[clean(column.cell(row)) for column in shown] for row in rows]
    if headers:
        cells.insert(0, [column.header for column in shown])
    if not cells:
        return ""
    widths = [max(_width(line[i]) for line in cells) for i in range(len(shown))]
    if not wide and sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - inset - 2 * (len(shown) - 1)
        widths = _fit_widths(widths, room, [column.header in _NEVER_SHORTENED for column in shown])
    lines = []
    for number, line in enumerate(cells):
        line[:] = [shorten(text, width) for text, width in zip(line, widths, strict=True)]
        gaps = [" " * (width - _width(text)) for text, width in zip(line, widths, strict=True)]
        padded = [gap + text if c.right else text + gap for c, text, gap in zip(shown, line, gaps, strict=True)]
        if number or not headers:
            padded = [
                paint(text, line[i]) if shown[i].header in ("STATE", "LEVEL", "STATUS") else text
                for i, text in enumerate(padded)
            ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """Aligned `name  value` lines; empty values are omitted."""
    kept = [(name, clean(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in kept), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in kept)


def _fit_widths(widths: list[int], room: int, fixed: Sequence[bool]) -> list[int]:
    """Shrink the widest column first, the later one of two, and none below a few letters."""
    widths = list(widths)
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda i: (0 if fixed[i] else widths[i], i))
        if fixed[widest] or widths[widest] <= _MIN_WIDTH:
            break
        widths[widest] -= 1
    return widths


def shorten(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    kept = text
    while kept and _width(kept) > width - 1:
        kept = kept[:-1]
    return (kept or text[:1]) + "…"


def indent(text: str, by: str = "  ") -> str:
    return "\n".join(by + line if line else line for line in text.split("\n"))


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _machine(item: Any, output: str) -> None:
    import msgspec

    if output == "json":
        click.echo(_json(item, lambda data: msgspec.json.format(data, indent=2)))
        return
    import yaml

    text = yaml.safe_dump(msgspec.to_builtins(item), sort_keys=False, allow_unicode=True, width=100)
    click.echo(text, nl=False)


def _json(item: Any, shape: Callable[[bytes], bytes] = lambda data: data) -> str:
    import msgspec

    text = shape(msgspec.json.encode(item)).decode()
    return _UNSAFE_IN_JSON.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


def short_amount(resource: str, amount: str | None) -> str:
    from hodei.model.errors import InvalidInput
    from hodei.model.resources import human_amount, parse_quantity, scale_of

    try:
        return human_amount(resource, parse_quantity(amount or "0", scale=scale_of(resource)))
    except InvalidInput:
        return amount or "0"


def labels_text(labels: Mapping[str, str], separator: str = ", ") -> str:
    return separator.join(f"{key}={value}" for key, value in sorted(labels.items()))


def is_unicode() -> bool:
    """Whether stdout can print characters beyond ASCII."""
    return (getattr(sys.stdout, "encoding", "") or "").lower().replace("-", "").startswith("utf")
