"""Gantt charts: who ran where and when. One path per job, so that hovering finds all pieces of a gang at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hodei.model.quantity import format_duration
from hodei.model.resources import human_amount
from hodei.sim.metrics import user_of
from hodei.sim.report.columns import Columns, time_in_slices
from hodei.sim.report.lanes import Bar, Chart, Window, by_node, by_user
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
from hodei.sim.report.table import plain

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
