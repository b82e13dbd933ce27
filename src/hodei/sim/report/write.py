"""Writes a report into a directory: the numbers as CSV and JSON, the pictures as files, and one page with everything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from hodei.model.errors import InvalidInput
from hodei.sim.report.columns import columns_of
from hodei.sim.report.lanes import window_of
from hodei.sim.report.numbers import Row, rows_of
from hodei.sim.report.page import Drawn, page
from hodei.sim.report.style import house_style, to_bytes, why_no_pictures
from hodei.sim.report.svg import finished, for_page
from hodei.sim.report.table import plain, to_csv, to_json
from hodei.sim.results import Result

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
