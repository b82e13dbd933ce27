"""Pictures that compare policies: lines over time, distributions, and key figures as bars.

Each function takes all results and returns a `Picture`, or None if there is nothing to show. Call them within `report_style`.
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
    colour_of,
    dashes_of,
    legend_below_title,
    new_figure,
    shorten,
    time_axis,
)
from hodei.sim.report.table import (
    COLUMNS,
    Floats,
    ResultArrays,
    Row,
    best_of,
    cumulative,
    format_number,
    is_number,
    sample_times,
    sample_values,
    step_means,
    time_in_slices,
    unit_of,
    used_share,
)

# Over how long shares should be even: the default half-life of fair share.
FAIRNESS_WINDOW_MS = 7 * 86_400_000


def jain(amounts: Floats, counted: NDArray[np.bool_]) -> Floats:
    """Jain's index of each column over the rows where `counted` is true: 1 if all are equal, 1/n if one has everything. NaN if
    no row counts, 1 if all are zero."""
    some = np.where(counted, amounts, 0.0)
    users = counted.sum(axis=0).astype(np.float64)
    squares = users * (some**2).sum(axis=0)
    index = np.divide(some.sum(axis=0) ** 2, squares, out=np.ones_like(squares), where=squares > 0)
    return np.where(users > 0, index, np.nan)


def fairness_over_time(arrays: ResultArrays, slices: int) -> Floats:
    """Jain's index over the users with a pending or running job in a slice, of the share of its demand that each was served:
    running time over running and waiting time, weighted by dominant share. Users with little and with much demand count the
    same."""
    if not arrays.users:
        return np.full(slices, np.nan)
    served, demand = _served_and_demand(arrays, slices)
    active = demand > 1e-12
    return jain(np.divide(served, demand, out=np.zeros_like(served), where=active), active)


def even_shares_over_time(arrays: ResultArrays, slices: int, window_ms: int = FAIRNESS_WINDOW_MS) -> Floats:
    """Jain's index of what each user had over its even share, both over the last `window_ms`.

    The even share in a slice is the max-min fair division of what was in use among the users with demand: equal, but never
    more than requested. A user who requests half of everything while nine others wait is due a tenth.
    """
    if not arrays.users or not arrays.span_ms:
        return np.full(slices, np.nan)
    served, demand = _served_and_demand(arrays, slices)
    width = max(1, min(slices, round(window_ms * slices / arrays.span_ms)))
    had, due = _trailing_sum(served, width), _trailing_sum(_max_min_fair(demand, served.sum(axis=0)), width)
    active = due > 1e-12
    return jain(np.divide(had, due, out=np.zeros_like(had), where=active), active)


def _served_and_demand(arrays: ResultArrays, slices: int) -> tuple[Floats, Floats]:
    served = _by_user(arrays, arrays.share, slices)
    wait_end = np.where(arrays.placed, arrays.started, arrays.span_ms)
    weight = np.where(wait_end > arrays.submitted, arrays.share, 0.0)
    waited = time_in_slices(arrays.user, len(arrays.users), arrays.submitted, wait_end, weight, arrays.span_ms, slices)
    return served, served + waited


def _max_min_fair(demand: Floats, available: Floats) -> Floats:
    """For each column: `available` divided among the rows, equally but never more than their demand."""
    out = np.zeros_like(demand)
    for at in range(demand.shape[1]):
        left, rows = float(available[at]), len(demand)
        for row in np.argsort(demand[:, at], kind="stable"):
            out[row, at] = min(demand[row, at], left / rows)
            left, rows = left - out[row, at], rows - 1
    return out


def _trailing_sum(amounts: Floats, width: int) -> Floats:
    """For each slice the sum of the last `width` slices."""
    sums = np.cumsum(amounts, axis=1)
    sums[:, width:] -= sums[:, :-width].copy()
    return sums


def dominant_shares(arrays: ResultArrays, slices: int) -> Floats:
    """Per user (row) and slice: the largest share of any resource that the user's jobs held."""
    capacity: Resources = arrays.result.capacity
    share = np.zeros((len(arrays.users), slices))
    for name in sorted(capacity):
        if capacity[name] > 0 and arrays.users:
            requested = np.array([job.request.get(name, 0) for job in arrays.result.outcomes], dtype=np.float64)
            np.maximum(share, _by_user(arrays, requested / capacity[name], slices), out=share)
    return share


def _by_user(arrays: ResultArrays, weight: Floats, slices: int) -> Floats:
    ran = arrays.placed
    return time_in_slices(
        arrays.user[ran],
        len(arrays.users),
        arrays.started[ran],
        arrays.ended[ran],
        weight[ran],
        arrays.span_ms,
        slices,
    )


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 180  # of a line: with more, the lines of several policies blur
NODE_POINTS = 500
CDF_POINTS = 1000
SLICES = 150
TOP_USERS = 5
PANELS = 8
_WAIT_TICKS = (
    (1, "≤ 1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"), (3_600, "1 h"), (36_000, "10 h"), (86_400 * 2, "2 d"),
    (86_400 * 10, "10 d"), (86_400 * 100, "100 d"),
)  # fmt: skip


class Picture(Struct):
    """`name` is that of its file; `about` describes it; `titles` are shown when the pointer is on the element of that key;
    `group` is the policy, if it shows one policy alone."""

    name: str
    title: str
    about: str
    figure: Any
    titles: dict[str, str] = {}
    group: str = ""


def load_over_time(results: Sequence[ResultArrays]) -> Picture | None:
    shown = [(number, arrays) for number, arrays in enumerate(results) if arrays.result.samples]
    if not shown:
        return None
    resources = _resources([arrays for _, arrays in shown])
    figure = new_figure(3.0 + 2.2 * len(resources))
    *above, below = _stacked(figure, len(resources) + 1)
    above[0].set_title("Utilisation and queue depth")
    span = max(arrays.span_ms for _, arrays in shown)
    for axes, resource in zip(above, resources, strict=True):
        for number, arrays in shown:
            _steps(axes, arrays, number, used_share(arrays, resource) * 100)
        axes.set_ylabel(f"Used {resource} (%)")
        axes.set_ylim(0, max(102.0, axes.get_ylim()[1]))
        time_axis(axes, span, labelled=False)
    for number, arrays in shown:
        _steps(below, arrays, number, sample_values(arrays, "waiting"))
    below.set_ylabel("Pending jobs")
    below.set_ylim(bottom=0)
    below.locator_params(axis="y", integer=True)
    time_axis(below, span)
    legend_below_title(above[0])
    about = "Above, the used share of the cluster; below, the number of pending jobs. Each point is the mean of a slice of time."
    return Picture("load", "Utilisation and queue depth over time", about, figure)


def nodes_over_time(results: Sequence[ResultArrays]) -> Picture | None:
    """For each run: how many nodes were paid for, and on how many something ran."""
    shown = [(n, arrays) for n, arrays in enumerate(results) if arrays.result.nodes_used is not None]
    if not shown or not any(arrays.result.nodes_used.changes for _, arrays in shown):  # type: ignore[union-attr]
        return None
    figure = new_figure(0.9 + 1.75 * len(shown))
    all_axes = _stacked(figure, len(shown))
    ends = [arrays.result.nodes_used.changes[-1][0] - arrays.origin_ms for _, arrays in shown]  # type: ignore[union-attr]
    span = max(ends)
    most = 0
    for axes, end, (number, arrays) in zip(all_axes, ends, shown, strict=True):
        used = arrays.result.nodes_used
        assert used is not None
        at = np.array([at_ms for at_ms, _, _ in used.changes], dtype=np.int64) - arrays.origin_ms
        for place, filled in ((1, False), (2, True)):
            values = np.array([change[place] for change in used.changes], dtype=np.float64)
            times, held = step_means(at, values, end, NODE_POINTS)
            colour = colour_of(number)
            if filled:
                axes.fill_between(times, held, step="post", color=colour, alpha=0.35, linewidth=0, label="busy")
            else:
                axes.plot(times, held, drawstyle="steps-post", color=colour, label="paid")
        hours, wasted = used.paid_ms / 3_600_000, used.wasted_ms / 3_600_000
        about = f"{shorten(arrays.label, 28)}: {hours:,.0f} node-hours, {wasted:,.0f} of them idle, cost {used.cost_milli / 1000:,.0f}"
        axes.set_title(about, fontsize=10, pad=4)
        axes.set_ylabel("Nodes")
        axes.legend(loc="upper right", fontsize=8, ncols=2)
        time_axis(axes, span, labelled=axes is all_axes[-1])
        most = max(most, max(paid for _, paid, _ in used.changes))
    for axes in all_axes:
        axes.set_ylim(0, most * 1.25 or 1)
        axes.locator_params(axis="y", integer=True, nbins=5)
    about = (
        "The line shows how many nodes are paid for, the area on how many of them something runs. The rest is wasted."
    )
    return Picture("nodes", "Nodes paid for and used", about, figure)


def fragmentation_over_time(results: Sequence[ResultArrays]) -> Picture | None:
    about = (
        "The share of free capacity (of GPUs if jobs request them, else of cpu) in pieces too small for a typical job: the mean "
        "over the requests of the workload's first jobs. Lower is better."
    )
    unit = "Unusable share of free capacity (%)"
    return _sample_lines(results, "fragmentation", "Fragmentation over time", about, "fragmented", 0.1, unit)


def preemptions_over_time(results: Sequence[ResultArrays]) -> Picture | None:
    about = "Runs stopped for other jobs, since the start."
    return _sample_lines(
        results, "preemptions", "Preemptions over time", about, "preemptions", 1.0, "Preemptions so far"
    )


def fairness(results: Sequence[ResultArrays]) -> Picture | None:
    shown = [(n, c) for n, c in enumerate(results) if c.placed.any() and len(c.users) > 1 and c.span_ms > 0]
    if not shown:
        return None
    panels = shown[:PANELS]
    figure = new_figure(4.15 + 1.55 * len(panels))
    top, even, *rest = _stacked(figure, 2 + len(panels))
    top.set_title("Fairness between users")
    span = max(arrays.span_ms for _, arrays in shown)
    for number, arrays in shown:
        edges = np.linspace(0, arrays.span_ms, SLICES + 1)
        for axes, measure in ((top, fairness_over_time), (even, even_shares_over_time)):
            index = measure(arrays, SLICES)
            _line(axes, edges, np.append(index, index[-1]), arrays.label, number)
    top.set_ylabel("Jain's index\nof service")
    even.set_ylabel("Jain's index\nof even shares")
    for axes in (top, even):
        axes.set_ylim(0, 1.05)
        time_axis(axes, span, labelled=False)
    legend_below_title(top)
    most = _top_users([arrays for _, arrays in panels])
    for axes, (_, arrays) in zip(rest, panels, strict=True):
        _shares(axes, arrays, most, span)
        time_axis(axes, span, labelled=axes is rest[-1])
    level = max(axes.get_ylim()[1] for axes in rest)
    for axes in rest:
        axes.set_ylim(0, level)
    rest[0].legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=TOP_USERS + 1, fontsize=8, handlelength=1, columnspacing=1
    )
    about = (
        "Above, Jain's index over the users with a pending or running job: 1 if each was served the same share of its "
        "requests, 1/n if one of n got everything. Then the same for what each user had over the last seven days, relative to "
        "an even share: equal for all, but never more than requested. Below, for each policy, the dominant shares (the largest "
        "share of any resource) of the heaviest users, stacked."
    )
    if len(shown) > len(panels):
        about += f" Shares are shown for {len(panels)} of {len(shown)} policies."
    return Picture("fairness", "Fairness over time", about, figure)


def wait_cdf(results: Sequence[ResultArrays]) -> Picture | None:
    waits = [(arrays.started - arrays.submitted)[arrays.placed] / 1000 for arrays in results]
    picture = _cdf(results, waits, "wait-cdf", "How long jobs waited", "Wait (logarithmic)")
    if picture is None:
        return None
    axes = picture.figure.axes[0]
    most = max(float(wait.max(initial=1)) for wait in waits)
    ticks = [(at, text) for at, text in _WAIT_TICKS if at <= most] or list(_WAIT_TICKS[:1])
    axes.set_xlim(0.9, max(most * 1.15, 10))
    axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
    axes.minorticks_off()
    picture.about = "The share of jobs that waited at most this long; higher and further left is better."
    never = sum(int((~arrays.placed).sum()) for arrays in results)
    picture.about += f" Jobs that never started ({never:,} over all policies) are left out." if never else ""
    return picture


def slowdown_cdf(results: Sequence[ResultArrays]) -> Picture | None:
    from matplotlib.ticker import FuncFormatter

    slowdowns = [np.array(of_jobs(arrays.result.outcomes)) for arrays in results]
    picture = _cdf(results, slowdowns, "slowdown-cdf", "Bounded slowdown of jobs", "Bounded slowdown (logarithmic)")
    if picture is None:
        return None
    axes = picture.figure.axes[0]
    axes.set_xlim(0.95, max(max(float(s.max(initial=1)) for s in slowdowns) * 1.15, 10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.minorticks_off()
    picture.about = (
        "The share of jobs with at most this slowdown: waiting and running time over running time, with runs shorter than "
        "10 s counted as 10 s. 1 means no wait; higher and further left is better."
    )
    return picture


def key_figures(rows: Sequence[Row]) -> Picture | None:
    from matplotlib.ticker import FuncFormatter

    keys = ("bounded_slowdown", "mean_wait_s", "max_wait_s", "utilisation")
    # Without any wait there is nothing to draw about waits.
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
            text = format_number(row.get(column.key), column, size) + (" ★" if place in best else "")
            weight = "bold" if place in best else "normal"
            axes.annotate(text, (values[place], place), (4, 0), textcoords="offset points", va="center", weight=weight)
        better = "higher is better" if column.better > 0 else "lower is better"
        title = column.title[0].upper() + column.title[1:]
        axes.set_title(f"{title}{f' ({unit})' if unit else ''}", fontsize=10)
        axes.set_xlabel(better, fontsize=8.5)
        axes.set_xlim(0, (max(values) or 1) * 1.25)
        axes.set_yticks(list(places), [shorten(row["label"], 24) for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    grid[0].set_ylim(len(rows) - 0.4, -0.6)
    return Picture("numbers", "Key figures", "The best value of each is marked with a star.", figure)


def _sample_lines(
    results: Sequence[ResultArrays], name: str, title: str, about: str, field: str, scale: float, unit: str
) -> Picture | None:
    """One line per result for a field of the samples; None if it is zero throughout."""
    values = [sample_values(arrays, field) * scale for arrays in results]
    if not any(value.any() for value in values):
        return None
    figure = new_figure(3.2)
    axes = figure.add_subplot()
    axes.set_title(title)
    for number, (arrays, value) in enumerate(zip(results, values, strict=True)):
        _steps(axes, arrays, number, value)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="y", integer=True)
    time_axis(axes, max(arrays.span_ms for arrays in results))
    legend_below_title(axes)
    return Picture(name, title, about, figure)


def _cdf(
    results: Sequence[ResultArrays], values: Sequence[Floats], name: str, title: str, label: str
) -> Picture | None:
    if not any(len(value) for value in values):
        return None
    figure = new_figure(3.6)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xscale("log")
    for number, (arrays, value) in enumerate(zip(results, values, strict=True)):
        x, share = cumulative(value, 1.0, CDF_POINTS)
        if len(x):
            # Extend the line to both edges.
            x, share = np.concatenate(([1e-3], x, [1e12])), np.concatenate(([0.0], share, [share[-1]]))
            _line(axes, x, share * 100, arrays.label, number)
    axes.set_ylim(0, 102)
    axes.set_ylabel("Jobs (%)")
    axes.set_xlabel(label)
    legend_below_title(axes)
    return Picture(name, title, "", figure)


def _steps(axes: Axes, arrays: ResultArrays, number: int, values: Floats) -> None:
    times, held = step_means(sample_times(arrays), values, arrays.span_ms, POINTS)
    _line(axes, times, held, arrays.label, number)


def _line(axes: Axes, x: Floats, y: Floats, label: str, number: int) -> None:
    axes.plot(
        x, y, drawstyle="steps-post", color=colour_of(number), linestyle=dashes_of(number), label=shorten(label, 28)
    )


def _resources(results: Sequence[ResultArrays]) -> list[str]:
    """The resources whose utilisation is shown: the main one, and GPUs if any are used."""
    names = {arrays.resource for arrays in results}
    names |= {GPU for arrays in results if any(sample.used.get(GPU) for sample in arrays.result.samples)}
    return sorted(names)


def _stacked(figure: Figure, panels: int) -> list[Axes]:
    return [axes for (axes,) in figure.subplots(panels, 1, squeeze=False)]


def _top_users(results: Sequence[ResultArrays]) -> list[str]:
    """The heaviest users over all policies, so that a user has the same colour in all panels; ties by name."""
    total: dict[str, float] = {}
    for arrays in results:
        work = np.bincount(arrays.user, weights=arrays.work, minlength=len(arrays.users))
        for name, amount in zip(arrays.users, work.tolist(), strict=True):
            total[name] = total.get(name, 0.0) + amount
    return sorted(total, key=lambda name: (-total[name], name))[:TOP_USERS]


def _shares(axes: Axes, arrays: ResultArrays, most: Sequence[str], span: int) -> None:
    shares = dominant_shares(arrays, SLICES) * 100
    at = {name: i for i, name in enumerate(arrays.users)}
    layers = [shares[at[name]] if name in at else np.zeros(SLICES) for name in most]
    others = shares.sum(axis=0) - sum(layers)
    edges = np.linspace(0, arrays.span_ms, SLICES + 1)
    stack = [np.append(layer, layer[-1]) for layer in [*layers, np.maximum(others, 0)]]
    colours = [*(colour_of(i) for i in range(len(most))), REST]
    names = [*(shorten(name, 10) for name in most), "others"]
    axes.stackplot(edges, stack, colors=colours, labels=names, step="post", linewidth=0)
    axes.set_title(shorten(arrays.label, 28), fontsize=9.5, pad=4)
    axes.set_ylabel("Dominant\nshare (%)")
    axes.grid(color=GRID)
