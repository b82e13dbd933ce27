"""Gantt charts: who ran where and when. One path per job, so that hovering finds all pieces of a gang at once."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from hodei.model.resources import format_duration, human_amount
from hodei.sim.metrics import user_of
from hodei.sim.report.pictures import Picture
from hodei.sim.report.style import (
    GRID,
    PAPER,
    REST,
    clipped,
    colour_of,
    legend_below_title,
    new_figure,
    time_axis,
    time_unit,
)
from hodei.sim.report.table import Columns, plain, time_in_slices

# ----------------------------------------------------------------------------------------------- lanes
# What a Gantt chart shows: which jobs and rows, and where in a row each bar lies. Positions only, no drawing.


NODES_SHOWN = 40
USERS_SHOWN = 20
LANES_IN_ALL = 400  # thinner bars than this allows could not be told apart
PIECES_PER_JOB = 64  # of a job spread over the gaps of one pool
LEAST_WIDTH = 0.0008  # of the time shown: what is shorter is drawn this wide, or nobody would see it


class Piece(Struct, frozen=True):
    """A rectangle: `low` to `high` in rows (row 0 is [0, 1)), `start` to `end` in milliseconds."""

    low: float
    high: float
    start: float
    end: float


class Bar(Struct, frozen=True):
    """A job on the chart: an index into the outcomes, and a piece for each place it is drawn at."""

    job: int
    pieces: tuple[Piece, ...]


class Window(Struct, frozen=True):
    """A part of the time, in milliseconds; `whole` if it is all of it."""

    start: float
    end: float
    whole: bool


class Chart(Struct):
    """`rows` from top to bottom; `all_rows` says how many there were to show, `jobs` which jobs ran in the window."""

    rows: list[str]
    bars: list[Bar]
    all_rows: int
    jobs: list[int]
    window: Window
    pooled: bool = False


def window_of(all_columns: Sequence[Columns], most: int) -> Window:
    """All of the time if no policy ran more than `most` jobs; else as much of it around the longest queue as holds so
    many, but not less than a five-hundredth: then the largest jobs are chosen."""
    span = max((columns.span_ms for columns in all_columns), default=0)
    if all(int(columns.placed.sum()) <= most for columns in all_columns):
        return Window(0.0, float(span), True)
    middle = max((_longest_queue(columns) for columns in all_columns), key=lambda found: (found[0], -found[1]))[1]
    low, high = span // 1000, span
    while low < high:
        half = (low + high + 1) // 2
        held = max(len(_within(columns, Window(middle - half, middle + half, False))) for columns in all_columns)
        low, high = (half, high) if held <= most else (low, half - 1)
    return Window(float(max(0, middle - low)), float(min(span, middle + low)), False)


def by_node(columns: Columns, most: int, window: Window) -> Chart:
    """A row per node. With a single node (a pool of processors) the row is split by the jobs' shares of it."""
    outcomes = columns.result.outcomes
    ran = _within(columns, window)
    names = sorted({name for i in ran for name in outcomes[i].nodes}, key=natural)
    if len(names) <= 1:
        bars = _pool(columns, largest(columns, ran, most), window)
        return Chart([*names] or ["the cluster"], bars, 1, ran, window, pooled=True)
    shown = [names[i * len(names) // NODES_SHOWN] for i in range(NODES_SHOWN)] if len(names) > NODES_SHOWN else names
    row_of = {name: row for row, name in enumerate(shown)}
    on_rows = [i for i in ran if any(name in row_of for name in outcomes[i].nodes)]
    wanted = [
        (i, [row_of[name] for name in dict.fromkeys(outcomes[i].nodes) if name in row_of])
        for i in largest(columns, on_rows, most)
    ]
    return Chart(shown, _in_lanes(columns, wanted, len(shown), 2 * most, window), len(names), ran, window)


def by_user(columns: Columns, most: int, window: Window) -> Chart:
    """A row per user, on top who had most in the window."""
    ran = _within(columns, window)
    held: dict[int, float] = {}
    for i in ran:
        part = min(float(columns.ended[i]), window.end) - max(float(columns.started[i]), window.start)
        held[int(columns.user[i])] = held.get(int(columns.user[i]), 0.0) + part * float(columns.share[i])
    order = sorted(held, key=lambda user: (-held[user], columns.users[user]))
    row_of = {user: row for row, user in enumerate(order[:USERS_SHOWN])}
    on_rows = [i for i in ran if int(columns.user[i]) in row_of]
    wanted = [(i, [row_of[int(columns.user[i])]]) for i in largest(columns, on_rows, most)]
    rows = [columns.users[user] for user in row_of]
    return Chart(rows, _in_lanes(columns, wanted, len(rows), 2 * most, window), len(order), ran, window)


def _within(columns: Columns, window: Window) -> list[int]:
    """Jobs that ran in the window, if only for a moment."""
    ran = columns.placed & (columns.started <= window.end) & (columns.ended >= window.start)
    return [int(i) for i in ran.nonzero()[0]]


def _longest_queue(columns: Columns) -> tuple[int, int]:
    """(jobs, when): the most jobs that ever waited, and the first moment they did."""
    came, went = columns.submitted, columns.started[columns.placed]
    at = np.concatenate((went, came))
    change = np.concatenate((np.full(len(went), -1), np.full(len(came), 1)))
    order = np.lexsort((change, at))
    depth = np.cumsum(change[order])
    if len(depth) == 0:
        return 0, 0
    first = int(depth.argmax())
    return int(depth[first]), int(at[order][first])


def largest(columns: Columns, jobs: Iterable[int], most: int) -> list[int]:
    """The `most` jobs that took most of the cluster, in order of start."""
    work, outcomes = columns.work, columns.result.outcomes
    chosen = heapq.nsmallest(most, jobs, key=lambda i: (-work[i], outcomes[i].id))
    return sorted(chosen, key=lambda i: (int(columns.started[i]), outcomes[i].id))


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts n2 before n10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))


def _in_lanes(
    columns: Columns, wanted: Sequence[tuple[int, list[int]]], rows: int, most_pieces: int, window: Window
) -> list[Bar]:
    """Each bar in the lowest lane of its row that is free; a bar that finds none is left out."""
    limit = max(1, LANES_IN_ALL // max(rows, 1))
    free_at: list[list[float]] = [[] for _ in range(rows)]
    taken: list[tuple[int, list[tuple[int, int]], float, float]] = []
    pieces = 0
    for job, in_rows in wanted:
        start, end = float(columns.started[job]), float(columns.ended[job])
        spots = []
        for row in in_rows:
            lanes = free_at[row]
            lane = next((n for n, free in enumerate(lanes) if free <= start), len(lanes))
            if lane < limit and pieces < most_pieces:
                lanes[lane : lane + 1] = [max(end, start + 1)]
                spots.append((row, lane))
                pieces += 1
        if spots:
            taken.append((job, spots, *_drawn(start, end, window)))
    return [Bar(job, tuple(_lane_piece(r, n, len(free_at[r]), a, z) for r, n in spots)) for job, spots, a, z in taken]


def _lane_piece(row: int, lane: int, lanes: int, start: float, end: float) -> Piece:
    high = 0.84 / lanes
    return Piece(row + 0.08 + lane * high, row + 0.08 + (lane + 1) * high, start, end)


def _drawn(start: float, end: float, window: Window) -> tuple[float, float]:
    """The part of a run that lies in the window, wide enough to be seen."""
    least = (window.end - window.start) * LEAST_WIDTH
    start = min(max(start, window.start), window.end - least)
    return start, max(min(end, window.end), start + least)


def _pool(columns: Columns, chosen: Sequence[int], window: Window) -> list[Bar]:
    """Jobs as high as their share of the pool, from the bottom up, in one gap if one is wide enough."""
    gaps: list[tuple[float, float]] = [(0.0, 1.0)]
    running: list[tuple[float, int, list[tuple[float, float]]]] = []
    bars = []
    for job in chosen:
        start, end = float(columns.started[job]), float(columns.ended[job])
        while running and running[0][0] <= start:
            gaps = _merged([*gaps, *heapq.heappop(running)[2]])
        spans, gaps = _take(gaps, min(1.0, float(columns.share[job])))
        if end > start:
            heapq.heappush(running, (end, job, spans))
        else:
            gaps = _merged([*gaps, *spans])
        start, end = _drawn(start, end, window)
        # Rows count from the top of the picture, processors from its bottom.
        bars.append(Bar(job, tuple(Piece(1 - high, 1 - low, start, end) for low, high in spans)))
    return [bar for bar in bars if bar.pieces]


def _take(
    gaps: list[tuple[float, float]], wanted: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(what was taken, what is left) of gaps in order: the tightest gap that holds all, else from the lowest up."""
    if wanted <= 0:
        return [], gaps
    whole = min((gap for gap in gaps if gap[1] - gap[0] >= wanted - 1e-9), key=lambda g: (g[1] - g[0], g), default=None)
    if whole is not None:
        cut = (whole[0], whole[0] + wanted)
        rest = [gap for gap in gaps if gap != whole]
        return [cut], _merged([*rest, (cut[1], whole[1])])
    taken: list[tuple[float, float]] = []
    left = []
    for low, high in gaps:
        part = min(high - low, wanted)
        if part > 1e-9 and len(taken) < PIECES_PER_JOB:
            taken.append((low, low + part))
            wanted -= part
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


# ----------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as Outline

TOP_USERS = 5
SLICES = 300
_KINDS = {"head": "first in line", "backfill": "filled a gap", "spill": "took spare room"}
_KIND_COLOURS = {"head": colour_of(0), "backfill": colour_of(4), "spill": colour_of(2)}


def gantt_by_node(columns: Columns, most: int, window: Window) -> Picture | None:
    """Bars coloured by user: who held what."""
    chart = by_node(columns, most, window)
    heaviest = _heaviest(chart, columns)
    colour = {name: colour_of(i) for i, name in enumerate(heaviest)}
    outcomes = columns.result.outcomes
    legend = [(clipped(name, 16), colour[name]) for name in heaviest]
    if {user_of(outcomes[bar.job]) for bar in chart.bars} - set(heaviest):
        legend.append(("others", REST))
    rows = "pool" if chart.pooled else "node"
    return _draw(columns, chart, rows, legend, lambda job: colour.get(user_of(outcomes[job]), REST))


def gantt_by_user(columns: Columns, most: int, window: Window) -> Picture | None:
    """Bars coloured by the way the job came to start."""
    chart = by_user(columns, most, window)
    outcomes = columns.result.outcomes
    present = {outcomes[bar.job].kind for bar in chart.bars}
    legend = [(words, _KIND_COLOURS[kind]) for kind, words in _KINDS.items() if kind in present]
    return _draw(columns, chart, "user", legend, lambda job: _KIND_COLOURS[outcomes[job].kind])


def _draw(
    columns: Columns, chart: Chart, rows: str, legend: list[tuple[str, str]], colour: Callable[[int], str]
) -> Picture | None:
    from matplotlib.collections import PathCollection
    from matplotlib.patches import Patch
    from matplotlib.path import Path as Outline

    if not chart.bars:
        return None
    count = len(chart.rows)
    figure = new_figure(4.6 if chart.pooled else 1.5 + min(max(count * 0.21, 1.2), 7.5))
    axes = figure.add_subplot()
    what = {"pool": "Jobs in the pool", "node": "Jobs by node", "user": "Jobs by user"}[rows]
    axes.set_title(f"{what}: {clipped(columns.label, 28)}")
    # The last, empty outline keeps Matplotlib from drawing a single bar as a marker, which cannot be hovered.
    outlines = [*(_outline(bar) for bar in chart.bars), Outline([(-1, -1)])]
    fills = [*(colour(bar.job) for bar in chart.bars), "none"]
    bars = PathCollection(outlines, facecolors=fills, edgecolors=PAPER, linewidths=0.25)
    bars.set_urls([*(f"job:{bar.job}" for bar in chart.bars), None])
    bars.set_gid("bars")
    axes.add_collection(bars, autolim=False)
    axes.set_ylim(count, 0)
    time_axis(axes, chart.window.end, start=chart.window.start)
    if chart.pooled:
        if _part_shown(chart, columns) < 0.9:
            _backdrop(axes, columns)
            legend = [*legend, ("all jobs together", GRID)]
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["100", "75", "50", "25", "0"])
        axes.set_ylabel(f"Share of {clipped(chart.rows[0])} (%)")
    else:
        axes.set_yticks([row + 0.5 for row in range(count)], [clipped(name) for name in chart.rows])
        axes.tick_params(axis="y", length=0, labelsize=7.5 if count > 25 else 8.5)
        axes.grid(axis="y", visible=False)
    legend_below_title(axes, [Patch(color=fill, label=words) for words, fill in legend])
    note = _note(chart, columns, rows)
    axes.set_xlabel(f"{axes.get_xlabel()}\n{note}")
    about = {
        "pool": "Each bar is a job, as high as its share of the pool; its colour is its user's.",
        "node": "Each bar is a job on one node; its colour is its user's. A gang has a bar on each of its nodes.",
        "user": "Each bar is a job in its user's row, the heaviest user on top; its colour says how it came to start.",
    }[rows]
    kind = "user" if rows == "user" else "node"
    titles = {f"job:{bar.job}": _title(columns, bar.job) for bar in chart.bars}
    title = f"{what} under {plain(columns.label)}"
    return Picture(f"gantt-{kind}", title, f"{about} It {note}.", figure, titles, group=columns.label)


def _backdrop(axes: Axes, columns: Columns) -> None:
    """What the pool held in all, so that the room of jobs too small to be shown does not look free."""
    ran = columns.placed
    row = np.zeros(int(ran.sum()), dtype=np.int64)
    held = time_in_slices(row, 1, columns.started[ran], columns.ended[ran], columns.share[ran], columns.span_ms, SLICES)
    edges = np.linspace(0, columns.span_ms, SLICES + 1)
    level = 1 - np.append(held[0], held[0][-1])
    axes.fill_between(edges, level, 1, step="post", color=GRID, linewidth=0, zorder=0.5)


def _note(chart: Chart, columns: Columns, rows: str) -> str:
    """`shows 2,000 of 77,199 jobs: days 36.2 to 41.7, around the longest queue; 40 of 1,213 nodes`"""
    shown, ran = len(chart.bars), int(columns.placed.sum())
    note = (
        f"shows {shown:,} of {ran:,} jobs"
        if shown != ran
        else f"shows all {shown:,} jobs"
        if ran > 1
        else "shows one job"
    )
    if not chart.window.whole:
        unit, size = time_unit(chart.window.end)
        note += f": {unit} {chart.window.start / size:.1f} to {chart.window.end / size:.1f}, around the longest queue"
    if shown < len(chart.jobs) and chart.all_rows == len(chart.rows):
        note += f"; the largest, {_part_shown(chart, columns):.0%} of the work"
    if chart.all_rows > len(chart.rows):
        note += f"; {len(chart.rows)} of {chart.all_rows:,} {rows}s"
    return note


def _heaviest(chart: Chart, columns: Columns) -> list[str]:
    """The users whose jobs cover most of the chart; ties by name."""
    held: dict[str, float] = {}
    for bar in chart.bars:
        user = user_of(columns.result.outcomes[bar.job])
        held[user] = held.get(user, 0.0) + sum((p.end - p.start) * (p.high - p.low) for p in bar.pieces)
    return sorted(held, key=lambda user: (-held[user], user))[:TOP_USERS]


def _part_shown(chart: Chart, columns: Columns) -> float:
    work = columns.work
    return sum(float(work[bar.job]) for bar in chart.bars) / (float(work[chart.jobs].sum()) or 1.0)


def _outline(bar: Bar) -> Outline:
    from matplotlib.path import Path as Outline

    corners: list[tuple[float, float]] = []
    codes: list[np.uint8] = []
    for piece in bar.pieces:
        corners += [
            (piece.start, piece.low),
            (piece.end, piece.low),
            (piece.end, piece.high),
            (piece.start, piece.high),
        ]
        corners.append((piece.start, piece.low))
        codes += [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    return Outline(corners, codes)


def _title(columns: Columns, index: int) -> str:
    job = columns.result.outcomes[index]
    asked = ", ".join(f"{human_amount(name, amount)} {name}" for name, amount in sorted(job.request.items()) if amount)
    began, waited = int(columns.started[index]), int(columns.started[index] - columns.submitted[index])
    ran = format_duration(_rounded(int(columns.ended[index]) - began))
    lines = [
        f"Job {job.id}" + (f" ({clipped(job.name, 40)})" if job.name else "") + f" of {clipped(user_of(job), 40)}",
        f"{asked or 'no resources'}" + (f", {job.size} members" if job.size > 1 else ""),
        f"waited {format_duration(_rounded(waited))}, "
        + (f"ran {ran}" if columns.finished[index] else f"ran {ran} so far"),
        f"started at +{format_duration(_rounded(began))}, {_KINDS[job.kind]}",
    ]
    if job.preemptions:
        lines.append(f"preempted {job.preemptions} times" if job.preemptions > 1 else "preempted once")
    return "\n".join(lines)


def _rounded(ms: int) -> int:
    return ms if ms < 10_000 else ms // 1000 * 1000
