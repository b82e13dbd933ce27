"""The pictures that compare policies: lines over time, distributions, and the main numbers as bars.

Each function takes all results and gives a `Picture`, or None where there is nothing to see. They are called within
`house_style`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hodei.model.resources import GPU, Resources
from hodei.sim.metrics import slowdowns as of_jobs
from hodei.sim.report.style import (
    GRID,
    REST,
    clipped,
    colour_of,
    dashes_of,
    legend_below_title,
    new_figure,
    time_axis,
)
from hodei.sim.report.table import (
    COLUMNS,
    Columns,
    Floats,
    Row,
    best_of,
    cumulative,
    is_number,
    of_samples,
    sample_times,
    step_means,
    time_in_slices,
    unit_of,
    used_share,
    write_number,
)

# -------------------------------------------------------------------------------------------- fairness
# How evenly a policy served the users, slice of time by slice of time.


MEMORY_MS = 7 * 86_400_000
"""Over how long shares are to be even: the half-life that fair share forgets by, unless a server is told otherwise."""


def jain(amounts: Floats, counted: NDArray[np.bool_]) -> Floats:
    """Jain's index of each column over the rows where `counted` is true: 1 if all got the same, 1/n if one got all.

    NaN where nobody counts; 1 where all got nothing, which is even too.
    """
    some = np.where(counted, amounts, 0.0)
    users = counted.sum(axis=0).astype(np.float64)
    squares = users * (some**2).sum(axis=0)
    index = np.divide(some.sum(axis=0) ** 2, squares, out=np.ones_like(squares), where=squares > 0)
    return np.where(users > 0, index, np.nan)


def fairness_over_time(columns: Columns, slices: int) -> Floats:
    """Jain's index over the users that had a job waiting or running in a slice.

    What is compared is the part of its demand that each of them got: time running over time running and waiting, both
    weighed by the jobs' dominant shares. So a user who wants little and gets it counts the same as one who wants much
    and gets it.
    """
    if not columns.users:
        return np.full(slices, np.nan)
    served, wanted = _served_and_wanted(columns, slices)
    active = wanted > 1e-12
    return jain(np.divide(served, wanted, out=np.zeros_like(served), where=active), active)


def even_shares_over_time(columns: Columns, slices: int, memory_ms: int = MEMORY_MS) -> Floats:
    """Jain's index of what each user had over what would have been even, both over the last `memory_ms`.

    Even in a slice: what was in use then, dealt out to those with a job waiting or running, the same to each but to nobody
    more than it asked for. So one who asks for half of everything while nine others wait is due a tenth, not a half.
    """
    if not columns.users or not columns.span_ms:
        return np.full(slices, np.nan)
    served, wanted = _served_and_wanted(columns, slices)
    width = max(1, min(slices, round(memory_ms * slices / columns.span_ms)))
    had, due = _trailing(served, width), _trailing(_dealt_evenly(wanted, served.sum(axis=0)), width)
    active = due > 1e-12
    return jain(np.divide(had, due, out=np.zeros_like(had), where=active), active)


def _served_and_wanted(columns: Columns, slices: int) -> tuple[Floats, Floats]:
    served = _by_user(columns, columns.share, slices)
    waited_until = np.where(columns.placed, columns.started, columns.span_ms)
    weight = np.where(waited_until > columns.submitted, columns.share, 0.0)
    waited = time_in_slices(
        columns.user, len(columns.users), columns.submitted, waited_until, weight, columns.span_ms, slices
    )
    return served, served + waited


def _dealt_evenly(wanted: Floats, there: Floats) -> Floats:
    """For each column: `there` dealt out to the rows, the same to each but to none more than it wants."""
    out = np.zeros_like(wanted)
    for at in range(wanted.shape[1]):
        left, hungry = float(there[at]), len(wanted)
        for row in np.argsort(wanted[:, at], kind="stable"):
            out[row, at] = min(wanted[row, at], left / hungry)
            left, hungry = left - out[row, at], hungry - 1
    return out


def _trailing(amounts: Floats, width: int) -> Floats:
    """For each slice the sum of it and those before it, `width` in all."""
    sums = np.cumsum(amounts, axis=1)
    sums[:, width:] -= sums[:, :-width].copy()
    return sums


def dominant_shares(columns: Columns, slices: int) -> Floats:
    """Per user (row) and slice: the largest part of any one resource that the user's jobs held."""
    capacity: Resources = columns.result.capacity
    share = np.zeros((len(columns.users), slices))
    for name in sorted(capacity):
        if capacity[name] > 0 and columns.users:
            asked = np.array([job.request.get(name, 0) for job in columns.result.outcomes], dtype=np.float64)
            np.maximum(share, _by_user(columns, asked / capacity[name], slices), out=share)
    return share


def _by_user(columns: Columns, weight: Floats, slices: int) -> Floats:
    ran = columns.placed
    return time_in_slices(
        columns.user[ran],
        len(columns.users),
        columns.started[ran],
        columns.ended[ran],
        weight[ran],
        columns.span_ms,
        slices,
    )


# ----------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 180  # of a line: more would blur the lines of several policies into one another
CDF_POINTS = 1000
SLICES = 150
TOP_USERS = 5
PANELS = 8
_WAIT_TICKS = (
    (1, "≤ 1 s"),
    (10, "10 s"),
    (60, "1 min"),
    (600, "10 min"),
    (3_600, "1 h"),
    (36_000, "10 h"),
    (86_400 * 2, "2 d"),
    (86_400 * 10, "10 d"),
    (86_400 * 100, "100 d"),
)


class Picture(Struct):
    """`name` is its file's; `about` says in words what it shows and how to read it; `titles` are shown on hovering the
    element of that key."""

    name: str
    title: str
    about: str
    figure: Any
    titles: dict[str, str] = {}
    group: str = ""


def load_over_time(all_columns: Sequence[Columns]) -> Picture | None:
    shown = [(number, columns) for number, columns in enumerate(all_columns) if columns.result.samples]
    if not shown:
        return None
    resources = _resources([columns for _, columns in shown])
    figure = new_figure(3.0 + 2.2 * len(resources))
    *above, below = _stacked(figure, len(resources) + 1)
    above[0].set_title("Utilisation and queue depth")
    span = max(columns.span_ms for _, columns in shown)
    for axes, resource in zip(above, resources, strict=True):
        for number, columns in shown:
            _steps(axes, columns, number, used_share(columns, resource) * 100)
        axes.set_ylabel(f"Used {resource} (%)")
        axes.set_ylim(0, max(102.0, axes.get_ylim()[1]))
        time_axis(axes, span, labelled=False)
    for number, columns in shown:
        _steps(below, columns, number, of_samples(columns, "waiting"))
    below.set_ylabel("Jobs waiting")
    below.set_ylim(bottom=0)
    below.locator_params(axis="y", integer=True)
    time_axis(below, span)
    legend_below_title(above[0])
    about = (
        "Above, the used part of the cluster; below, how many jobs wait. Each point is the mean of its slice of time."
    )
    return Picture("load", "Utilisation and queue depth over time", about, figure)


def fragmentation_over_time(all_columns: Sequence[Columns]) -> Picture | None:
    about = (
        "The part of what is free (of GPUs where jobs ask for them, else of cpu) that a typical job could not use: it is in "
        "pieces too small for it. The mean over what the workload's first jobs ask for. Lower is better."
    )
    return _one_line_each(
        all_columns,
        "fragmentation",
        "Fragmentation over time",
        about,
        "fragmented",
        0.1,
        "Unusable part of what is free (%)",
    )


def preemptions_over_time(all_columns: Sequence[Columns]) -> Picture | None:
    about = "Runs stopped in favour of others, counted from the beginning."
    return _one_line_each(
        all_columns, "preemptions", "Preemptions over time", about, "preemptions", 1.0, "Preemptions so far"
    )


def fairness(all_columns: Sequence[Columns]) -> Picture | None:
    shown = [(n, c) for n, c in enumerate(all_columns) if c.placed.any() and len(c.users) > 1 and c.span_ms > 0]
    if not shown:
        return None
    panels = shown[:PANELS]
    figure = new_figure(4.15 + 1.55 * len(panels))
    top, even, *rest = _stacked(figure, 2 + len(panels))
    top.set_title("Fairness between users")
    span = max(columns.span_ms for _, columns in shown)
    for number, columns in shown:
        edges = np.linspace(0, columns.span_ms, SLICES + 1)
        for axes, measure in ((top, fairness_over_time), (even, even_shares_over_time)):
            index = measure(columns, SLICES)
            _line(axes, edges, np.append(index, index[-1]), columns.label, number)
    top.set_ylabel("Jain's index\nof service")
    even.set_ylabel("Jain's index\nof even shares")
    for axes in (top, even):
        axes.set_ylim(0, 1.05)
        time_axis(axes, span, labelled=False)
    legend_below_title(top)
    most = _top_users([columns for _, columns in panels])
    for axes, (_, columns) in zip(rest, panels, strict=True):
        _shares(axes, columns, most, span)
        time_axis(axes, span, labelled=axes is rest[-1])
    level = max(axes.get_ylim()[1] for axes in rest)
    for axes in rest:
        axes.set_ylim(0, level)
    rest[0].legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=TOP_USERS + 1, fontsize=8, handlelength=1, columnspacing=1
    )
    about = (
        "Above, Jain's index over the users with a job waiting or running: 1 if each got the same part of what it asked "
        "for, 1/n if one of n got everything. Then the same of what each got over the last seven days beside an even "
        "share: the same for all, but for nobody more than it asked for. Below, for each policy, the dominant shares (the "
        "largest part of any one resource) of the heaviest users, stacked."
    )
    if len(shown) > len(panels):
        about += f" Shares are shown for {len(panels)} of {len(shown)} policies."
    return Picture("fairness", "Fairness over time", about, figure)


def wait_cdf(all_columns: Sequence[Columns]) -> Picture | None:
    waits = [(columns.started - columns.submitted)[columns.placed] / 1000 for columns in all_columns]
    picture = _cdf(all_columns, waits, "wait-cdf", "How long jobs waited", "Wait (logarithmic)")
    if picture is None:
        return None
    axes = picture.figure.axes[0]
    most = max(float(wait.max(initial=1)) for wait in waits)
    ticks = [(at, text) for at, text in _WAIT_TICKS if at <= most] or list(_WAIT_TICKS[:1])
    axes.set_xlim(0.9, max(most * 1.15, 10))
    axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
    axes.minorticks_off()
    picture.about = "The part of the jobs that waited at most this long; higher and further left is better."
    never = sum(int((~columns.placed).sum()) for columns in all_columns)
    picture.about += f" Jobs that never started ({never:,} over all policies) are left out." if never else ""
    return picture


def slowdown_cdf(all_columns: Sequence[Columns]) -> Picture | None:
    from matplotlib.ticker import FuncFormatter

    slowdowns = [np.array(of_jobs(columns.result.outcomes)) for columns in all_columns]
    picture = _cdf(all_columns, slowdowns, "slowdown-cdf", "Bounded slowdown of jobs", "Bounded slowdown (logarithmic)")
    if picture is None:
        return None
    axes = picture.figure.axes[0]
    axes.set_xlim(0.95, max(max(float(s.max(initial=1)) for s in slowdowns) * 1.15, 10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.minorticks_off()
    picture.about = (
        "The part of the jobs slowed down at most this much: time waiting and running over time running, where a run "
        "shorter than 10 s counts as 10 s. 1 means no wait at all; higher and further left is better."
    )
    return picture


def main_numbers(rows: Sequence[Row]) -> Picture | None:
    from matplotlib.ticker import FuncFormatter

    keys = ("bounded_slowdown", "mean_wait_s", "max_wait_s", "utilisation")
    # Where nobody waited at all there is nothing to draw about waits.
    chosen = [c for c in COLUMNS if c.key in keys and any(is_number(r.get(c.key)) and r[c.key] for r in rows)]
    if not chosen:
        return None
    across = min(2, len(chosen))
    down = -(-len(chosen) // across)
    figure = new_figure(0.5 + down * (0.75 + 0.26 * len(rows)))
    grid = figure.subplots(down, across, squeeze=False, sharey=True).ravel().tolist()
    for axes in grid[len(chosen) :]:
        axes.set_visible(False)
    for axes, column in zip(grid, chosen, strict=False):
        unit, size = unit_of(column, rows)
        values = [row[column.key] / size if is_number(row.get(column.key)) else 0.0 for row in rows]
        best = best_of(column, rows)
        places = range(len(rows))
        axes.barh(places, values, height=0.68, color=[colour_of(n) for n in places])
        for place, row in enumerate(rows):
            text = write_number(row.get(column.key), column, size) + (" ★" if place in best else "")
            weight = "bold" if place in best else "normal"
            axes.annotate(text, (values[place], place), (4, 0), textcoords="offset points", va="center", weight=weight)
        better = "higher is better" if column.better > 0 else "lower is better"
        title = column.title[0].upper() + column.title[1:]
        axes.set_title(f"{title}{f' ({unit})' if unit else ''}", fontsize=10)
        axes.set_xlabel(better, fontsize=8.5)
        axes.set_xlim(0, (max(values) or 1) * 1.25)
        axes.set_yticks(list(places), [clipped(row["label"], 24) for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    grid[0].set_ylim(len(rows) - 0.4, -0.6)
    return Picture("numbers", "The main numbers", "The best value of each is marked with a star.", figure)


def _one_line_each(
    all_columns: Sequence[Columns], name: str, title: str, about: str, field: str, scale: float, unit: str
) -> Picture | None:
    """None if the field is zero throughout: a flat line at zero is no picture."""
    values = [of_samples(columns, field) * scale for columns in all_columns]
    if not any(value.any() for value in values):
        return None
    figure = new_figure(3.2)
    axes = figure.add_subplot()
    axes.set_title(title)
    for number, (columns, value) in enumerate(zip(all_columns, values, strict=True)):
        _steps(axes, columns, number, value)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", integer=True)
    time_axis(axes, max(columns.span_ms for columns in all_columns))
    legend_below_title(axes)
    return Picture(name, title, about, figure)


def _cdf(all_columns: Sequence[Columns], values: Sequence[Floats], name: str, title: str, label: str) -> Picture | None:
    if not any(len(value) for value in values):
        return None
    figure = new_figure(3.6)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xscale("log")
    for number, (columns, value) in enumerate(zip(all_columns, values, strict=True)):
        x, share = cumulative(value, 1.0, CDF_POINTS)
        if len(x):
            # Up from zero at the left edge, and on to the right edge once all are counted.
            x, share = np.concatenate(([1e-3], x, [1e12])), np.concatenate(([0.0], share, [share[-1]]))
            _line(axes, x, share * 100, columns.label, number)
    axes.set_ylim(0, 102)
    axes.set_ylabel("Jobs (%)")
    axes.set_xlabel(label)
    legend_below_title(axes)
    return Picture(name, title, "", figure)


def _steps(axes: Axes, columns: Columns, number: int, values: Floats) -> None:
    times, held = step_means(sample_times(columns), values, columns.span_ms, POINTS)
    _line(axes, times, held, columns.label, number)


def _line(axes: Axes, x: Floats, y: Floats, label: str, number: int) -> None:
    axes.plot(
        x, y, drawstyle="steps-post", color=colour_of(number), linestyle=dashes_of(number), label=clipped(label, 28)
    )


def _resources(all_columns: Sequence[Columns]) -> list[str]:
    """What utilisation is shown of: the main resource, and GPUs wherever some are used."""
    names = {columns.resource for columns in all_columns}
    names |= {GPU for columns in all_columns if any(sample.used.get(GPU) for sample in columns.result.samples)}
    return sorted(names)


def _stacked(figure: Figure, panels: int) -> list[Axes]:
    return [axes for (axes,) in figure.subplots(panels, 1, squeeze=False)]


def _top_users(all_columns: Sequence[Columns]) -> list[str]:
    """The heaviest users over all policies, so that a user has one colour in all panels; ties by name."""
    total: dict[str, float] = {}
    for columns in all_columns:
        work = np.bincount(columns.user, weights=columns.work, minlength=len(columns.users))
        for name, amount in zip(columns.users, work.tolist(), strict=True):
            total[name] = total.get(name, 0.0) + amount
    return sorted(total, key=lambda name: (-total[name], name))[:TOP_USERS]


def _shares(axes: Axes, columns: Columns, most: Sequence[str], span: int) -> None:
    shares = dominant_shares(columns, SLICES) * 100
    at = {name: i for i, name in enumerate(columns.users)}
    layers = [shares[at[name]] if name in at else np.zeros(SLICES) for name in most]
    others = shares.sum(axis=0) - sum(layers)
    edges = np.linspace(0, columns.span_ms, SLICES + 1)
    stack = [np.append(layer, layer[-1]) for layer in [*layers, np.maximum(others, 0)]]
    colours = [*(colour_of(i) for i in range(len(most))), REST]
    names = [*(clipped(name, 10) for name in most), "others"]
    axes.stackplot(edges, stack, colors=colours, labels=names, step="post", linewidth=0)
    axes.set_title(clipped(columns.label, 28), fontsize=9.5, pad=4)
    axes.set_ylabel("Dominant\nshare (%)")
    axes.grid(color=GRID)
