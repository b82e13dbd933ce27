"""How answers are printed: tables for people, `-o json|jsonl|yaml|name` for programs.

Machine output is an interface: names and shapes are those of the API and only ever grow. Data goes to stdout,
everything else to stderr. Text that others wrote never reaches a terminal with its control characters.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import click

from hodei.api.views import ExecutedView, NodeExecutedView

FORMATS = ("table", "wide", "json", "jsonl", "yaml", "name")

# C0 and C1 controls, DEL, and the marks that turn the direction of text round.
_UNSAFE_PERMISSIONS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_COLOURS = {
    "running": "cyan", "scheduled": "cyan", "placed": "cyan", "succeeded": "green", "ready": "green", "ok": "green",
    "failed": "red", "lost": "red", "problem": "red", "not-ready": "red", "unsatisfiable": "red",
    "pending": "yellow", "waiting": "yellow", "held": "magenta", "warning": "yellow", "cordoned": "yellow",
    "draining": "yellow", "cancelled": "bright_black", "stopped": "bright_black",
}  # fmt: skip
# Columns that are of no use in part: what one copies into the next command, and how it stands.
_WHOLE = ("ID", "RUN", "STATE", "STATUS", "CODE")
_NARROWEST = 4


class Column(NamedTuple):
    """One column of a table: a header and the text of a row. `wide`: shown only with `-o wide`; `if_any`: left out of
    a narrow table with headers when every row has only `-`; `right`: aligned to the right."""

    header: str
    cell: Callable[[Any], str]
    wide: bool = False
    if_any: bool = False
    right: bool = False


def clean(text: str) -> str:
    r"""`text` with control characters made visible: a name cannot move the cursor or forge a line (ESC -> \x1b)."""
    return _UNSAFE_PERMISSIONS.sub(lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text)


def colourful(err: bool = False) -> bool:
    stream = sys.stderr if err else sys.stdout
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def paint(text: str, state: str) -> str:
    """`text` in the colour of `state`, if this terminal wants colours."""
    colour = _COLOURS.get(state)
    return click.style(text, fg=colour) if colour and colourful() else text


def note(text: str) -> None:
    """A word to the person at the terminal; never part of the data."""
    click.echo(clean(text), err=True)


def emit_list(
    items: Iterable[Any],
    output: str,
    columns: Sequence[Column],
    *,
    name: Callable[[Any], str],
    headers: bool = True,
    empty: str = "",
) -> None:
    """Print a list. `jsonl` and `name` are written as the items come; the others when all are there."""
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


def emit_one(item: Any, output: str, *, name: Callable[[Any], str], text: Callable[[Any], str]) -> None:
    """Print one thing: an object for programs, `text` for people."""
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
    """Rows in aligned columns. On a terminal they are as narrow as it is, unless `wide`: the widest columns give way, but
    never what a thing is called by or how it stands. `inset`: so much to the left of it is taken."""
    silent = {c.header for c in columns if c.if_any and headers and all(c.cell(row) == "-" for row in rows)}
    shown = [column for column in columns if wide or not (column.wide or column.header in silent)]
    cells = [[clean(column.cell(row)) for column in shown] for row in rows]
    if headers:
        cells.insert(0, [column.header for column in shown])
    if not cells:
        return ""
    widths = [max(_width(line[i]) for line in cells) for i in range(len(shown))]
    if not wide and sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - inset - 2 * (len(shown) - 1)
        widths = _narrowed(widths, room, [column.header in _WHOLE for column in shown])
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
    """`name  value` lines, aligned; empty values are left out."""
    kept = [(name, clean(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in kept), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in kept)


def _narrowed(widths: list[int], room: int, whole: Sequence[bool]) -> list[int]:
    """The widest give way first, the later one of two, and none below a few letters."""
    widths = list(widths)
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda i: (0 if whole[i] else widths[i], i))
        if whole[widest] or widths[widest] <= _NARROWEST:
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
    if output == "json":
        import msgspec

        click.echo(_json(item, lambda data: msgspec.json.format(data, indent=2)))
        return
    import msgspec
    import yaml

    text = yaml.safe_dump(msgspec.to_builtins(item), sort_keys=False, allow_unicode=True, width=100)
    click.echo(text, nl=False)


def _json(item: Any, shape: Callable[[bytes], bytes] = lambda data: data) -> str:
    import msgspec

    text = shape(msgspec.json.encode(item)).decode()
    return _UNSAFE_IN_JSON.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


# ----------------------------------------------------------------------------------------- exec output
# How a command that was run elsewhere is shown: its two streams, and its exit code as ours.


MOST_TIMEOUT_S = 300
AS_IT_IS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class ExecCommand(click.Command):
    """`exec [OPTIONS] WHERE -- COMMAND`. Words of the command are not ours to read; options between WHERE and `--` are."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("command") or ("",)
        if not words[0].startswith("-") or words[0] == "--":
            return rest
        # No program is called that: it is an option, known or not.
        ctx.params.clear()
        ctx.allow_interspersed_args, ctx.ignore_unknown_options = True, False
        return super().parse_args(ctx, given)


def show_executed(done: ExecutedView | NodeExecutedView, timeout_s: int) -> NoReturn:
    click.echo(done.stdout, nl=False)
    click.echo(done.stderr, nl=False, err=True)
    if done.cut:
        click.echo("hodei: more was said than is shown", err=True)
    if done.exit_code is None:
        click.echo(f"hodei: it was not over within {timeout_s}s", err=True)
    sys.exit(124 if done.exit_code is None else done.exit_code)


def timeout_seconds(text: str) -> int:
    """What `--timeout` says, in whole seconds; a bare number is seconds."""
    from hodei.cli.errors import UsageProblem
    from hodei.cli.times import timeout_ms

    timeout_s = -(-timeout_ms(text) // 1000)
    if not 1 <= timeout_s <= MOST_TIMEOUT_S:
        raise UsageProblem(f"--timeout {text[:40]}: from 1s to 5m", hint="write it as 30s or 2m")
    return timeout_s
