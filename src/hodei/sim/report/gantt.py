"""Gantt charts, as pictures and as text. A job is one path, so that hovering highlights all pieces of a gang."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from hodei.model.resources import format_duration, human_amount
from hodei.sim.metrics import Result, user_of
from hodei.sim.report.pictures import Picture
from hodei.sim.report.style import (
    GRID,
    PAPER,
    REST,
    colour_of,
    legend_below_title,
    new_figure,
    shorten,
    time_axis,
    time_unit,
)
from hodei.sim.report.table import Floats, ResultArrays, arrays_of, printable, time_in_slices

NODES_SHOWN = 40
USERS_SHOWN = 20
MAX_LANES = 400  # thinner bars could not be distinguished
PIECES_PER_JOB = 64  # in the gaps of a pool
LEAST_WIDTH = 0.0008  # share of the time shown: shorter bars would be invisible


class Piece(Struct, frozen=True):
    """A rectangle: `low` to `high` in rows (row 0 is [0, 1)), `start` to `end` in milliseconds."""

    low: float
    high: float
    start: float
    end: float


class Bar(Struct, frozen=True):
    """A job on the chart: its index in the outcomes, and its rectangles."""

    job: int
    pieces: tuple[Piece, ...]


class Window(Struct, frozen=True):
    """A part of the simulated time, in milliseconds; `complete` if it is all of it."""

    start: float
    end: float
    complete: bool


class Chart(Struct):
    """`rows` from top to bottom; `all_rows`: how many there are in total; `jobs`: those that ran in the window."""

    rows: list[str]
    bars: list[Bar]
    all_rows: int
    jobs: list[int]
    window: Window
    pooled: bool = False


def window_of(results: Sequence[ResultArrays], most: int) -> Window:
    """All of the time if no policy ran more than `most` jobs. Else the part around the longest queue with so many jobs, but at
    least a five-hundredth; then only the largest jobs are shown."""
    span = max((arrays.span_ms for arrays in results), default=0)
    if all(int(arrays.placed.sum()) <= most for arrays in results):
        return Window(0.0, float(span), True)
    middle = max((_longest_queue(arrays) for arrays in results), key=lambda found: (found[0], -found[1]))[1]
    low, high = span // 1000, span
    while low < high:
        half = (low + high + 1) // 2
        held = max(len(_within(arrays, Window(middle - half, middle + half, False))) for arrays in results)
        low, high = (half, high) if held <= most else (low, half - 1)
    return Window(float(max(0, middle - low)), float(min(span, middle + low)), False)


def chart_by_node(arrays: ResultArrays, most: int, window: Window) -> Chart:
    """One row per node. A single node (a pool of processors) is split by the shares of jobs."""
    outcomes = arrays.result.outcomes
    ran = _within(arrays, window)
    names = sorted({name for i in ran for name in outcomes[i].nodes}, key=natural_key)
    if len(names) <= 1:
        bars = _pool_bars(arrays, largest_jobs(arrays, ran, most), window)
        return Chart([*names] or ["the cluster"], bars, 1, ran, window, pooled=True)
    shown = [names[i * len(names) // NODES_SHOWN] for i in range(NODES_SHOWN)] if len(names) > NODES_SHOWN else names
    row_of = {name: row for row, name in enumerate(shown)}
    on_rows = [i for i in ran if any(name in row_of for name in outcomes[i].nodes)]
    rows_of_jobs = [
        (i, [row_of[name] for name in dict.fromkeys(outcomes[i].nodes) if name in row_of])
        for i in largest_jobs(arrays, on_rows, most)
    ]
    return Chart(shown, _assign_lanes(arrays, rows_of_jobs, len(shown), 2 * most, window), len(names), ran, window)


def chart_by_user(arrays: ResultArrays, most: int, window: Window) -> Chart:
    """One row per user, the heaviest in the window first."""
    ran = _within(arrays, window)
    held: dict[int, float] = {}
    for i in ran:
        part = min(float(arrays.ended[i]), window.end) - max(float(arrays.started[i]), window.start)
        held[int(arrays.user[i])] = held.get(int(arrays.user[i]), 0.0) + part * float(arrays.share[i])
    order = sorted(held, key=lambda user: (-held[user], arrays.users[user]))
    row_of = {user: row for row, user in enumerate(order[:USERS_SHOWN])}
    on_rows = [i for i in ran if int(arrays.user[i]) in row_of]
    rows_of_jobs = [(i, [row_of[int(arrays.user[i])]]) for i in largest_jobs(arrays, on_rows, most)]
    rows = [arrays.users[user] for user in row_of]
    return Chart(rows, _assign_lanes(arrays, rows_of_jobs, len(rows), 2 * most, window), len(order), ran, window)


def _within(arrays: ResultArrays, window: Window) -> list[int]:
    """Jobs that ran in the window."""
    ran = arrays.placed & (arrays.started <= window.end) & (arrays.ended >= window.start)
    return [int(i) for i in ran.nonzero()[0]]


def _longest_queue(arrays: ResultArrays) -> tuple[int, int]:
    """The maximum number of pending jobs, and when it was first reached."""
    submitted, started = arrays.submitted, arrays.started[arrays.placed]
    at = np.concatenate((started, submitted))
    change = np.concatenate((np.full(len(started), -1), np.full(len(submitted), 1)))
    order = np.lexsort((change, at))
    depth = np.cumsum(change[order])
    if len(depth) == 0:
        return 0, 0
    first = int(depth.argmax())
    return int(depth[first]), int(at[order][first])


def largest_jobs(arrays: ResultArrays, jobs: Iterable[int], most: int) -> list[int]:
    """The `most` jobs with the most work, in order of start."""
    work, outcomes = arrays.work, arrays.result.outcomes
    chosen = heapq.nsmallest(most, jobs, key=lambda i: (-work[i], outcomes[i].id))
    return sorted(chosen, key=lambda i: (int(arrays.started[i]), outcomes[i].id))


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts n2 before n10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))


def _assign_lanes(
    arrays: ResultArrays, rows_of_jobs: Sequence[tuple[int, list[int]]], rows: int, most_pieces: int, window: Window
) -> list[Bar]:
    """Each bar gets the lowest free lane of its row; without a free lane it is left out."""
    limit = max(1, MAX_LANES // max(rows, 1))
    free_at: list[list[float]] = [[] for _ in range(rows)]
    taken: list[tuple[int, list[tuple[int, int]], float, float]] = []
    pieces = 0
    for job, in_rows in rows_of_jobs:
        start, end = float(arrays.started[job]), float(arrays.ended[job])
        spots = []
        for row in in_rows:
            lanes = free_at[row]
            lane = next((n for n, free in enumerate(lanes) if free <= start), len(lanes))
            if lane < limit and pieces < most_pieces:
                lanes[lane : lane + 1] = [max(end, start + 1)]
                spots.append((row, lane))
                pieces += 1
        if spots:
            taken.append((job, spots, *_clip(start, end, window)))
    return [Bar(job, tuple(_lane_piece(r, n, len(free_at[r]), a, z) for r, n in spots)) for job, spots, a, z in taken]


def _lane_piece(row: int, lane: int, lanes: int, start: float, end: float) -> Piece:
    high = 0.84 / lanes
    return Piece(row + 0.08 + lane * high, row + 0.08 + (lane + 1) * high, start, end)


def _clip(start: float, end: float, window: Window) -> tuple[float, float]:
    """The part of a run in the window, at least as wide as can be seen."""
    least = (window.end - window.start) * LEAST_WIDTH
    start = min(max(start, window.start), window.end - least)
    return start, max(min(end, window.end), start + least)


def _pool_bars(arrays: ResultArrays, chosen: Sequence[int], window: Window) -> list[Bar]:
    """Bars as high as the share of the job, from the bottom up, in one gap if one is large enough."""
    gaps: list[tuple[float, float]] = [(0.0, 1.0)]
    running: list[tuple[float, int, list[tuple[float, float]]]] = []
    bars = []
    for job in chosen:
        start, end = float(arrays.started[job]), float(arrays.ended[job])
        while running and running[0][0] <= start:
            gaps = _merged([*gaps, *heapq.heappop(running)[2]])
        spans, gaps = _allocate(gaps, min(1.0, float(arrays.share[job])))
        if end > start:
            heapq.heappush(running, (end, job, spans))
        else:
            gaps = _merged([*gaps, *spans])
        start, end = _clip(start, end, window)
        # Rows count from the top, processors from the bottom.
        bars.append(Bar(job, tuple(Piece(1 - high, 1 - low, start, end) for low, high in spans)))
    return [bar for bar in bars if bar.pieces]


def _allocate(
    gaps: list[tuple[float, float]], share: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(allocated, remaining) gaps: best fit if one gap is large enough, else from the lowest up."""
    if share <= 0:
        return [], gaps
    fitting = min(
        (gap for gap in gaps if gap[1] - gap[0] >= share - 1e-9), key=lambda g: (g[1] - g[0], g), default=None
    )
    if fitting is not None:
        cut = (fitting[0], fitting[0] + share)
        rest = [gap for gap in gaps if gap != fitting]
        return [cut], _merged([*rest, (cut[1], fitting[1])])
    taken: list[tuple[float, float]] = []
    left = []
    for low, high in gaps:
        part = min(high - low, share)
        if part > 1e-9 and len(taken) < PIECES_PER_JOB:
            taken.append((low, low + part))
            share -= part
            low += part
        left.append((low, high))
    return taken, _merged(left)


def _merged(gaps: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for low, high in sorted(gaps):
        if high - low <= 1e-9:
            continue
        if out and low - out[-1][1] <= 1e-9:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return out


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as Outline

TOP_USERS = 5
SLICES = 300
_KINDS = {"head": "first in queue", "backfill": "backfilled", "spill": "spilled"}
_KIND_COLOURS = {"head": colour_of(0), "backfill": colour_of(4), "spill": colour_of(2)}


def gantt_by_node(arrays: ResultArrays, most: int, window: Window) -> Picture | None:
    """Bars coloured by user."""
    chart = chart_by_node(arrays, most, window)
    heaviest = _heaviest(chart, arrays)
    colour = {name: colour_of(i) for i, name in enumerate(heaviest)}
    outcomes = arrays.result.outcomes
    legend = [(shorten(name, 16), colour[name]) for name in heaviest]
    if {user_of(outcomes[bar.job]) for bar in chart.bars} - set(heaviest):
        legend.append(("others", REST))
    rows = "pool" if chart.pooled else "node"
    return _draw(arrays, chart, rows, legend, lambda job: colour.get(user_of(outcomes[job]), REST))


def gantt_by_user(arrays: ResultArrays, most: int, window: Window) -> Picture | None:
    """Bars coloured by how the job was started."""
    chart = chart_by_user(arrays, most, window)
    outcomes = arrays.result.outcomes
    present = {outcomes[bar.job].kind for bar in chart.bars}
    legend = [(text, _KIND_COLOURS[kind]) for kind, text in _KINDS.items() if kind in present]
    return _draw(arrays, chart, "user", legend, lambda job: _KIND_COLOURS[outcomes[job].kind])


def _draw(
    arrays: ResultArrays, chart: Chart, rows: str, legend: list[tuple[str, str]], colour: Callable[[int], str]
) -> Picture | None:
    from matplotlib.collections import PathCollection
    from matplotlib.patches import Patch
    from matplotlib.path import Path as Outline

    if not chart.bars:
        return None
    count = len(chart.rows)
    figure = new_figure(4.6 if chart.pooled else 1.5 + min(max(count * 0.21, 1.2), 7.5))
    axes = figure.add_subplot()
    subject = {"pool": "Jobs in the pool", "node": "Jobs by node", "user": "Jobs by user"}[rows]
    axes.set_title(f"{subject}: {shorten(arrays.label, 28)}")
    # Matplotlib draws a single outline as a marker, which cannot be hovered; the empty one prevents that.
    outlines = [*(_outline(bar) for bar in chart.bars), Outline([(-1, -1)])]
    fills = [*(colour(bar.job) for bar in chart.bars), "none"]
    bars = PathCollection(outlines, facecolors=fills, edgecolors=PAPER, linewidths=0.25)
    bars.set_urls([*(f"job:{bar.job}" for bar in chart.bars), None])
    bars.set_gid("bars")
    axes.add_collection(bars, autolim=False)
    axes.set_ylim(count, 0)
    time_axis(axes, chart.window.end, start=chart.window.start)
    if chart.pooled:
        if _part_shown(chart, arrays) < 0.9:
            _backdrop(axes, arrays)
            legend = [*legend, ("all jobs together", GRID)]
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["100", "75", "50", "25", "0"])
        axes.set_ylabel(f"Share of {shorten(chart.rows[0])} (%)")
    else:
        axes.set_yticks([row + 0.5 for row in range(count)], [shorten(name) for name in chart.rows])
        axes.tick_params(axis="y", length=0, labelsize=7.5 if count > 25 else 8.5)
        axes.grid(axis="y", visible=False)
    legend_below_title(axes, [Patch(color=fill, label=text) for text, fill in legend])
    note = _note(chart, arrays, rows)
    axes.set_xlabel(f"{axes.get_xlabel()}\n{note}")
    about = {
        "pool": "Each bar is a job, as high as its share of the pool and coloured by user.",
        "node": "Each bar is a job on one node, coloured by user. A gang has a bar on each of its nodes.",
        "user": "Each bar is a job in the row of its user, the heaviest user on top, coloured by how it was started.",
    }[rows]
    kind = "user" if rows == "user" else "node"
    titles = {f"job:{bar.job}": _title(arrays, bar.job) for bar in chart.bars}
    title = f"{subject} under {printable(arrays.label)}"
    return Picture(f"gantt-{kind}", title, f"{about} It {note}.", figure, titles, group=arrays.label)


def _backdrop(axes: Axes, arrays: ResultArrays) -> None:
    """The total use of the pool, so that jobs too small to be shown do not look like free capacity."""
    ran = arrays.placed
    row = np.zeros(int(ran.sum()), dtype=np.int64)
    held = time_in_slices(row, 1, arrays.started[ran], arrays.ended[ran], arrays.share[ran], arrays.span_ms, SLICES)
    edges = np.linspace(0, arrays.span_ms, SLICES + 1)
    level = 1 - np.append(held[0], held[0][-1])
    axes.fill_between(edges, level, 1, step="post", color=GRID, linewidth=0, zorder=0.5)


def _note(chart: Chart, arrays: ResultArrays, rows: str) -> str:
    """`shows 2,000 of 77,199 jobs: days 36.2 to 41.7, around the longest queue; 40 of 1,213 nodes`"""
    shown, ran = len(chart.bars), int(arrays.placed.sum())
    if shown != ran:
        note = f"shows {shown:,} of {ran:,} jobs"
    else:
        note = f"shows all {shown:,} jobs" if ran > 1 else "shows one job"
    if not chart.window.complete:
        unit, size = time_unit(chart.window.end)
        note += f": {unit} {chart.window.start / size:.1f} to {chart.window.end / size:.1f}, around the longest queue"
    if shown < len(chart.jobs) and chart.all_rows == len(chart.rows):
        note += f"; the largest, {_part_shown(chart, arrays):.0%} of the work"
    if chart.all_rows > len(chart.rows):
        note += f"; {len(chart.rows)} of {chart.all_rows:,} {rows}s"
    return note


def _heaviest(chart: Chart, arrays: ResultArrays) -> list[str]:
    """The users whose jobs cover most of the chart; ties by name."""
    held: dict[str, float] = {}
    for bar in chart.bars:
        user = user_of(arrays.result.outcomes[bar.job])
        held[user] = held.get(user, 0.0) + sum((p.end - p.start) * (p.high - p.low) for p in bar.pieces)
    return sorted(held, key=lambda user: (-held[user], user))[:TOP_USERS]


def _part_shown(chart: Chart, arrays: ResultArrays) -> float:
    work = arrays.work
    return sum(float(work[bar.job]) for bar in chart.bars) / (float(work[chart.jobs].sum()) or 1.0)


def _outline(bar: Bar) -> Outline:
    from matplotlib.path import Path as Outline

    corners: list[tuple[float, float]] = []
    codes: list[np.uint8] = []
    for piece in bar.pieces:
        low, high = piece.low, piece.high
        corners += [(piece.start, low), (piece.end, low), (piece.end, high), (piece.start, high), (piece.start, low)]
        codes += [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    return Outline(corners, codes)


def _title(arrays: ResultArrays, index: int) -> str:
    job = arrays.result.outcomes[index]
    request = ", ".join(
        f"{human_amount(name, amount)} {name}" for name, amount in sorted(job.request.items()) if amount
    )
    started, waited = int(arrays.started[index]), int(arrays.started[index] - arrays.submitted[index])
    ran = format_duration(_rounded(int(arrays.ended[index]) - started))
    lines = [
        f"Job {job.id}" + (f" ({shorten(job.name, 40)})" if job.name else "") + f" of {shorten(user_of(job), 40)}",
        f"{request or 'no resources'}" + (f", {job.size} members" if job.size > 1 else ""),
        f"waited {format_duration(_rounded(waited))}, ran {ran}{'' if arrays.finished[index] else ' so far'}",
        f"started at +{format_duration(_rounded(started))}, {_KINDS[job.kind]}",
    ]
    if job.preemptions:
        lines.append(f"preempted {job.preemptions} times" if job.preemptions > 1 else "preempted once")
    return "\n".join(lines)


def _rounded(ms: int) -> int:
    return ms if ms < 10_000 else ms // 1000 * 1000


BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*%#"
TEXT_ROWS = 24
POOL_ROWS = 8


def gantt_for_terminal(result: Result, width: int, *, unicode: bool = True, rows: int = TEXT_ROWS) -> str:
    """Nodes downwards, time to the right, at most `width` characters wide; a fuller block is a busier slice of time. A node is
    full when it runs its maximum number of jobs. A single node (a pool of processors) is shown as its used share, over several
    lines. Of many nodes `rows` are shown, evenly spaced by name."""
    arrays = arrays_of(result)
    if not arrays.placed.any():
        return "No job was started.\n"
    ran = [result.outcomes[i] for i in arrays.placed.nonzero()[0]]
    names = sorted({name for job in ran for name in job.nodes}, key=natural_key)
    pooled = len(names) <= 1
    shown = names if len(names) <= rows else [names[i * len(names) // rows] for i in range(rows)]
    labels = [f"{100 * (i + 1) // POOL_ROWS} %" for i in reversed(range(POOL_ROWS))] if pooled else shown
    labels = [shorten(label, min(16, max(width // 4, 2))) for label in labels]
    margin = max(len(label) for label in labels)
    slices = max(1, width - margin - 2)
    filled = _pool_lines(arrays, slices) if pooled else _node_lines(arrays, shown, slices)
    symbols = BLOCKS if unicode else ASCII
    edge = "│" if unicode else "|"
    lines = [f"{label:>{margin}}{edge}{_symbols(line, symbols)}" for label, line in zip(labels, filled, strict=True)]
    lines.append(_text_axis(arrays.span_ms, margin, slices, unicode))
    if len(shown) < len(names):
        lines.append(f"{len(shown)} of {len(names):,} nodes"[:width])
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _symbols(line: Floats, symbols: str) -> str:
    """Values above zero get at least the smallest symbol, so that short jobs are visible."""
    top = len(symbols) - 1
    return "".join(symbols[min(top, max(1, round(float(part) * top)))] if part > 0 else symbols[0] for part in line)


def _node_lines(arrays: ResultArrays, shown: list[str], slices: int) -> Floats:
    row_of = {name: row for row, name in enumerate(shown)}
    pairs = [
        (row_of[name], i)
        for i in arrays.placed.nonzero()[0]
        for name in dict.fromkeys(arrays.result.outcomes[i].nodes)
        if name in row_of
    ]
    row = np.array([pair[0] for pair in pairs], dtype=np.int64)
    job = np.array([pair[1] for pair in pairs], dtype=np.int64)
    start, end = arrays.started[job], np.maximum(arrays.ended[job], arrays.started[job] + 1)
    held = time_in_slices(row, len(shown), start, end, np.ones(len(job)), arrays.span_ms, slices)
    return np.minimum(held / _most_at_once(row, len(shown), start, end)[:, None], 1.0)


def _most_at_once(row: np.ndarray, rows: int, start: np.ndarray, end: np.ndarray) -> Floats:
    """The maximum number of overlapping intervals of each row; touching intervals do not overlap."""
    at, which = np.concatenate((end, start)), np.concatenate((row, row))
    change = np.concatenate((-np.ones(len(end)), np.ones(len(start))))
    order = np.lexsort((change, at, which))
    level = np.cumsum(change[order])  # each row starts and ends at zero
    most = np.ones(rows)
    np.maximum.at(most, which[order], level)
    return most


def _pool_lines(arrays: ResultArrays, slices: int) -> Floats:
    job = arrays.placed.nonzero()[0]
    start, end = arrays.started[job], np.maximum(arrays.ended[job], arrays.started[job] + 1)
    held = time_in_slices(np.zeros(len(job), np.int64), 1, start, end, arrays.share[job], arrays.span_ms, slices)[0]
    return np.array([np.clip(held * POOL_ROWS - level, 0.0, 1.0) for level in reversed(range(POOL_ROWS))])


def _text_axis(span_ms: int, margin: int, slices: int, unicode: bool) -> str:
    name, size = time_unit(span_ms)
    right = f"{span_ms / size:.3g} {name}"
    line = "─" if unicode else "-"
    return " " * margin + ("└" if unicode else "+") + "0 " + line * max(0, slices - len(right) - 3) + f" {right}"
