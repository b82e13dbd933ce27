"""Writes a report into a directory: the numbers as CSV and JSON, the pictures as files, and one page with everything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from hodei.model.errors import InvalidInput
from hodei.sim.metrics import Result
from hodei.sim.report.gantt import natural, window_of
from hodei.sim.report.page import Drawn, page
from hodei.sim.report.style import clipped, finished, for_page, house_style, time_unit, to_bytes, why_no_pictures
from hodei.sim.report.table import Columns, Floats, Row, columns_of, plain, rows_of, time_in_slices, to_csv, to_json

FORMATS = ("svg", "png")
BARS = 2000  # on one Gantt chart
BARS_IN_ALL = 12_000  # on all charts of a page, which must stay small enough to open


def write_report(results: Sequence[Result], out: Path, *, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Writes into `out` (made if absent, files of the same names replaced) and returns what was written, page last.

    Without Matplotlib there are no pictures: the page says so, and `why_no_pictures` gives the words.
    """
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown:
        raise InvalidInput(f"{unknown[0][:40]!r} is not a picture format", hint=f"use {' or '.join(FORMATS)}")
    rows = [{**row, "label": plain(row["label"])} for row in rows_of(results)]
    out.mkdir(parents=True, exist_ok=True)
    written = [_write(out / "summary.csv", to_csv(rows)), _write(out / "summary.json", to_json(rows))]
    drawn: list[Drawn] = []
    notes = [why_no_pictures()] if why_no_pictures() else []
    if not notes:
        for name, picture, files in _pictures(results, rows, formats):
            drawn.append(picture)
            written += [_write(out / f"{name}.{form}", content) for form, content in files]
        notes = _left_out(results, drawn)
    written.append(_write(out / "index.html", page(rows, drawn, notes)))
    return written


def _pictures(
    results: Sequence[Result], rows: Sequence[Row], formats: Sequence[str]
) -> Iterator[tuple[str, Drawn, list[tuple[str, bytes]]]]:
    # Imported here because drawing needs Matplotlib, and the rest of a report does not.
    from hodei.sim.report import gantt, pictures

    all_columns = [columns_of(result, row["label"]) for result, row in zip(results, rows, strict=True)]
    bars = min(BARS, BARS_IN_ALL // (2 * max(len(results), 1)))
    names: set[str] = set()
    with house_style():
        drawings = [
            partial(pictures.main_numbers, rows),
            partial(pictures.load_over_time, all_columns),
            partial(pictures.wait_cdf, all_columns),
            partial(pictures.slowdown_cdf, all_columns),
            partial(pictures.fairness, all_columns),
            partial(pictures.fragmentation_over_time, all_columns),
            partial(pictures.preemptions_over_time, all_columns),
        ]
        window = window_of(all_columns, bars)
        for columns in all_columns:
            drawings.append(partial(gantt.gantt_by_node, columns, bars, window))
            drawings.append(partial(gantt.gantt_by_user, columns, bars, window))
        for draw in drawings:
            picture = draw()
            if picture is None:
                continue
            name = _file_name(f"{picture.name}-{picture.group}" if picture.group else picture.name, names)
            raw = to_bytes(picture.figure, "svg").decode()
            svg = finished(raw, picture.title, picture.about, picture.titles)
            files = [(f, svg.encode() if f == "svg" else to_bytes(picture.figure, f)) for f in dict.fromkeys(formats)]
            inline = for_page(svg, name, picture.title)
            yield name, Drawn(name, picture.title, picture.about, inline, picture.group), files


def _left_out(results: Sequence[Result], drawn: Sequence[Drawn]) -> list[str]:
    """Why a picture that one might look for is not there."""
    if not results:
        return []
    there = {picture.name for picture in drawn}
    reasons = {
        "load": "No samples of the load were recorded, so there is no picture of utilisation.",
        "wait-cdf": "No job was started, so there is nothing to show about waits.",
        "preemptions": "No job was preempted under any policy.",
        "fragmentation": "All that was free could be used at all times (a single node has no pieces): no fragmentation.",
    }
    return [reason for name, reason in reasons.items() if name not in there]


def _file_name(wanted: str, taken: set[str]) -> str:
    base = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")[:80]
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    taken.add(name)
    return name


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# -------------------------------------------------------------------------------------------- terminal
# A Gantt chart in text, for a quick look without leaving the terminal.


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
    overrides = BLOCKS if unicode else ASCII
    edge = "│" if unicode else "|"
    lines = [f"{label:>{margin}}{edge}{_drawn(line, overrides)}" for label, line in zip(labels, filled, strict=True)]
    lines.append(_axis(columns.span_ms, margin, slices, unicode))
    if len(shown) < len(names):
        lines.append(f"{len(shown)} of {len(names):,} nodes"[:width])
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _drawn(line: Floats, overrides: str) -> str:
    """Anything above nothing gets at least the smallest mark: a short job should be seen."""
    top = len(overrides) - 1
    return "".join(overrides[min(top, max(1, round(float(part) * top)))] if part > 0 else overrides[0] for part in line)


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
