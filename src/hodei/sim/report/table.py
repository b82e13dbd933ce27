"""The table of a report: as text for a terminal, as CSV, as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from hodei.sim.report.numbers import COLUMNS, Column, Row, best_of, rows_of, unit_of, write_number
from hodei.sim.results import Result

_BOLD, _PLAIN = "\x1b[1;32m", "\x1b[0m"


def draw_table(results: Sequence[Result], *, colour: bool = False) -> str:
    """One line per result, numbers aligned, the best of each column marked with `*` (and green if `colour`)."""
    if not results:
        return "No results.\n"
    rows = rows_of(results)
    columns = shown_columns(rows)
    best = {column.key: best_of(column, rows) for column in columns}
    units = {column.key: unit_of(column, rows) for column in columns}
    words = [["policy"], *([*c.title.split(" "), *([units[c.key][0]] if units[c.key][0] else [])] for c in columns)]
    deep = max(len(head) for head in words)
    heads = [[""] * (deep - len(head)) + head for head in words]  # one word below the other keeps the columns narrow
    cells = [
        [plain(row["label"]), *(write_number(row.get(c.key), c, units[c.key][1]) for c in columns)] for row in rows
    ]
    widths = [max(len(text) for text in [*head, *column]) for head, *column in zip(heads, *cells, strict=True)]
    lines = []
    for level in range(deep):
        first, *others = (head[level] for head in heads)
        lines.append(
            _joined([first.ljust(widths[0]), *(w.rjust(n) + " " for w, n in zip(others, widths[1:], strict=True))])
        )
    lines.append("  ".join("-" * (w + (i > 0)) for i, w in enumerate(widths)))
    for n, line in enumerate(cells):
        out = [line[0].ljust(widths[0])]
        for column, text, width in zip(columns, line[1:], widths[1:], strict=True):
            won = n in best[column.key]
            cell = text.rjust(width) + ("*" if won else " ")
            out.append(f"{_BOLD}{cell}{_PLAIN}" if won and colour else cell)
        lines.append(_joined(out))
    if any(best.values()):
        lines.append("* best of its column")
    return "\n".join(lines) + "\n"


def shown_columns(rows: Sequence[Row]) -> list[Column]:
    """Columns that say something: one that is zero or unknown in every row is left out, but for the broken promises,
    where zero is the news."""
    kept = ("jobs", "promises_broken")
    return [c for c in COLUMNS if c.key in kept or any(row.get(c.key) for row in rows)]


def to_csv(rows: Sequence[Row]) -> str:
    """Every number unrounded, in seconds and shares; one line per result. Numbers within numbers are `outer.inner`."""
    rows = [_flat(row) for row in rows]
    keys = list(dict.fromkeys(key for row in rows for key in row)) or ["label", "policy", "workload"]
    out = io.StringIO()
    writer = csv.DictWriter(out, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def to_json(rows: Sequence[Row]) -> str:
    return json.dumps(list(rows), indent=2, ensure_ascii=False, default=str) + "\n"


def _flat(row: Row) -> Row:
    out: Row = {}
    for key, value in row.items():
        out |= {f"{key}.{inner}": of for inner, of in value.items()} if isinstance(value, dict) else {key: value}
    return out


def plain(text: str) -> str:
    """`text` without what would move a cursor or break a document."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _joined(cells: Sequence[str]) -> str:
    return "  ".join(cells).rstrip()
