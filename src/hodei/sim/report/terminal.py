"""A Gantt chart in text, for a quick look without leaving the terminal."""

from __future__ import annotations

import numpy as np

from hodei.sim.report.columns import Columns, Floats, columns_of, time_in_slices
from hodei.sim.report.lanes import natural
from hodei.sim.report.style import clipped, time_unit
from hodei.sim.results import Result

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*%#"
ROWS = 24
POOL_ROWS = 8


def gantt_for_terminal(result: Result, width: int, *, unicode: bool = True, rows: int = ROWS) -> str:
    """Nodes downwards, time to the right, at most `width` characters wide; a fuller block is a busier slice of time.

    A node is full when it runs as many jobs as it ever did. A single node (a pool of processors) is drawn as its used
    share instead, stacked over several lines. Of many nodes `rows` are shown, evenly spaced by name.
    """
    columns = columns_of(result)
    if not columns.placed.any():
        return "No job was started.\n"
    ran = [result.outcomes[i] for i in columns.placed.nonzero()[0]]
    names = sorted({name for job in ran for name in job.nodes}, key=natural)
    pooled = len(names) <= 1
    shown = names if len(names) <= rows else [names[i * len(names) // rows] for i in range(rows)]
    labels = [f"{100 * (i + 1) // POOL_ROWS} %" for i in reversed(range(POOL_ROWS))] if pooled else shown
    labels = [clipped(label, min(16, max(width // 4, 2))) for label in labels]
    margin = max(len(label) for label in labels)
    slices = max(1, width - margin - 2)
    filled = _pool(columns, slices) if pooled else _nodes(columns, shown, slices)
    marks = BLOCKS if unicode else ASCII
    edge = "│" if unicode else "|"
    lines = [f"{label:>{margin}}{edge}{_drawn(line, marks)}" for label, line in zip(labels, filled, strict=True)]
    lines.append(_axis(columns.span_ms, margin, slices, unicode))
    if len(shown) < len(names):
        lines.append(f"{len(shown)} of {len(names):,} nodes"[:width])
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _drawn(line: Floats, marks: str) -> str:
    """Anything above nothing gets at least the smallest mark: a short job should be seen."""
    top = len(marks) - 1
    return "".join(marks[min(top, max(1, round(float(part) * top)))] if part > 0 else marks[0] for part in line)


def _nodes(columns: Columns, shown: list[str], slices: int) -> Floats:
    row_of = {name: row for row, name in enumerate(shown)}
    pairs = [
        (row_of[name], i)
        for i in columns.placed.nonzero()[0]
        for name in dict.fromkeys(columns.result.outcomes[i].nodes)
        if name in row_of
    ]
    row = np.array([pair[0] for pair in pairs], dtype=np.int64)
    job = np.array([pair[1] for pair in pairs], dtype=np.int64)
    start, end = columns.started[job], np.maximum(columns.ended[job], columns.started[job] + 1)
    held = time_in_slices(row, len(shown), start, end, np.ones(len(job)), columns.span_ms, slices)
    return np.minimum(held / _most_at_once(row, len(shown), start, end)[:, None], 1.0)


def _most_at_once(row: np.ndarray, rows: int, start: np.ndarray, end: np.ndarray) -> Floats:
    """The largest number of intervals of each row that overlap; one that ends when another begins does not."""
    at, which = np.concatenate((end, start)), np.concatenate((row, row))
    change = np.concatenate((-np.ones(len(end)), np.ones(len(start))))
    order = np.lexsort((change, at, which))
    level = np.cumsum(change[order])  # each row begins and ends at zero
    most = np.ones(rows)
    np.maximum.at(most, which[order], level)
    return most


def _pool(columns: Columns, slices: int) -> Floats:
    job = columns.placed.nonzero()[0]
    start, end = columns.started[job], np.maximum(columns.ended[job], columns.started[job] + 1)
    held = time_in_slices(np.zeros(len(job), np.int64), 1, start, end, columns.share[job], columns.span_ms, slices)[0]
    return np.array([np.clip(held * POOL_ROWS - level, 0.0, 1.0) for level in reversed(range(POOL_ROWS))])


def _axis(span_ms: int, margin: int, slices: int, unicode: bool) -> str:
    name, size = time_unit(span_ms)
    right = f"{span_ms / size:.3g} {name}"
    line = "─" if unicode else "-"
    return " " * margin + ("└" if unicode else "+") + "0 " + line * max(0, slices - len(right) - 3) + f" {right}"
