"""What a Gantt chart shows: which jobs and rows, and where in a row each bar lies. Positions only, no drawing.

A chart of a hundred thousand bars shows nothing. So a chart of many jobs is of a window of time, the same for all
policies, around the longest queue of any of them; if that still holds too many, the jobs that took most of the cluster
are shown. It says how many that is. Ties go by name or id: the same result gives the same chart.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from hodei.sim.report.columns import Columns

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
