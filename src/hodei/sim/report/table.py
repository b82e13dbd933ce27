"""The numbers of a report as a table (text, CSV, JSON), and a result as NumPy arrays for the pictures."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hodei.model.resources import Resources
from hodei.sim.metrics import Outcome, Result, Sample, main_resource, summary, user_of

Kind = Literal["count", "number", "percent", "duration"]


class Column(Struct, frozen=True):
    """`better`: -1 if lower is better, 1 if higher is better, 0 if neither."""

    key: str
    title: str
    kind: Kind
    better: Literal[-1, 0, 1]
    about: str


COLUMNS = (
    Column("jobs", "jobs", "count", 0, "jobs of the workload"),
    Column("never_started", "never started", "count", -1, "jobs that had not started when the simulation ended"),
    Column("bounded_slowdown", "bounded slowdown", "number", -1, "mean of (wait + run) / run, runs under 10 s as 10 s"),
    Column("mean_wait_s", "mean wait", "duration", -1, "mean time from submission to start"),
    Column("p95_wait_s", "p95 wait", "duration", -1, "19 of 20 jobs waited no longer than this"),
    Column("max_wait_s", "longest wait", "duration", -1, "the longest wait of all"),
    Column("starved", "starved", "count", -1, "jobs that waited more than seven days"),
    Column(
        "utilisation",
        "utilisation",
        "percent",
        1,
        "used share of the cluster from the first submission to the last end",
    ),
    Column("jain", "slowdown fairness", "number", 1, "Jain's index of the users' mean slowdowns: 1 if all are equal"),
    Column("preemptions", "preemptions", "count", -1, "runs stopped for other jobs"),
    Column("start_reservations_broken", "reservations broken", "count", -1, "starts later than reserved"),
    Column("cost", "cost", "number", -1, "of all nodes, from the order until they have stopped"),
    Column("node_hours", "node hours", "number", -1, "paid"),
    Column("wasted_hours", "wasted hours", "number", -1, "paid while nothing ran on the node"),
    Column("used_part", "used part", "percent", 1, "requested share of the paid nodes"),
    Column("nodes_started", "nodes started", "count", 0, "orders that were accepted"),
    Column("boots_failed", "boots failed", "count", 0, "ordered nodes that never became ready"),
    Column("orders_refused", "orders refused", "count", 0, "no capacity"),
    Column("reclaimed", "nodes reclaimed", "count", 0, "spot nodes that were taken back while they were paid for"),
    Column("seconds", "simulator time", "duration", 0, "how long the simulation took"),
)

Row = dict[str, Any]
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


def rows_of(results: Sequence[Result]) -> list[Row]:
    """One row per result: `label`, `policy`, `workload`, then all its numbers."""
    return [{"label": label, **numbers_of(result)} for label, result in zip(labels_of(results), results, strict=True)]


def labels_of(results: Sequence[Result]) -> list[str]:
    """The policy, with the workload if there are several, and with a number if that is not unique."""
    several = len({result.workload for result in results}) > 1
    names = [f"{r.policy} · {r.workload}" if several else r.policy for r in results]
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if names.count(name) == 1 else f"{name} #{seen[name]}")
    return out


def numbers_of(result: Result) -> Row:
    """`metrics.summary`, with None for means over no jobs, which must not count as the best."""
    numbers: Row = dict(summary(result))
    started = sum(job.started_ms >= 0 for job in result.outcomes)
    numbers["never_started"] = max(result.unplaced, len(result.outcomes) - started)
    if not started:
        numbers |= dict.fromkeys(("mean_wait_s", "median_wait_s", "p95_wait_s", "max_wait_s"))
    if not numbers["finished"]:
        numbers |= dict.fromkeys(("bounded_slowdown", "jain", "utilisation"))
    return numbers


def best_of(column: Column, rows: Sequence[Row]) -> set[int]:
    """The rows with the best value as displayed; none if all are equal or no value is better."""
    values = {i: row[column.key] for i, row in enumerate(rows) if is_number(row.get(column.key))}
    if not column.better or not values:
        return set()
    size = unit_of(column, rows)[1]
    written = {i: format_number(value, column, size) for i, value in values.items()}
    best = max(values, key=lambda i: values[i] * column.better)
    return {i for i in written if written[i] == written[best]} if len(set(written.values())) > 1 else set()


def unit_of(column: Column, rows: Sequence[Row]) -> tuple[str, float]:
    """One unit for the whole column, so that its values can be compared: (name, size in seconds)."""
    if column.kind == "percent":
        return "%", 0.01
    if column.kind != "duration":
        return "", 1.0
    most = max((row[column.key] for row in rows if is_number(row.get(column.key))), default=0)
    return next(((unit, float(size)) for unit, size in _UNITS if most >= 2 * size), ("s", 1.0))


def format_number(value: Any, column: Column, size: float = 1.0) -> str:
    """`value` in units of `size`: an integer for counts, else at least three significant digits; a dash for none."""
    if not is_number(value):
        return "–"
    if column.kind == "count":
        return f"{value:,.0f}"
    scaled = value / size
    return f"{scaled:,.0f}" if abs(scaled) >= 1000 else f"{scaled:.1f}" if abs(scaled) >= 100 else f"{scaled:.2f}"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


_GREEN, _RESET = "\x1b[1;32m", "\x1b[0m"


def draw_table(results: Sequence[Result], *, colour: bool = False, columns: Sequence[str] | None = None) -> str:
    """One line per result, numbers aligned, the best of each column marked with `*` (and green if `colour`). `columns`: only
    those with these keys."""
    if not results:
        return "No results.\n"
    rows = rows_of(results)
    shown = [column for column in shown_columns(rows) if columns is None or column.key in columns]
    best = {column.key: best_of(column, rows) for column in shown}
    units = {column.key: unit_of(column, rows) for column in shown}
    # Titles have one word per line, which keeps the columns narrow.
    titles = [["policy"], *([*c.title.split(" "), *([units[c.key][0]] if units[c.key][0] else [])] for c in shown)]
    height = max(len(title) for title in titles)
    heads = [[""] * (height - len(title)) + title for title in titles]
    cells = [
        [printable(row["label"]), *(format_number(row.get(c.key), c, units[c.key][1]) for c in shown)] for row in rows
    ]
    widths = [max(len(text) for text in [*head, *column]) for head, *column in zip(heads, *cells, strict=True)]
    lines = []
    for level in range(height):
        first, *others = (head[level] for head in heads)
        aligned = (word.rjust(width) + " " for word, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *aligned)).rstrip())
    lines.append("  ".join("-" * (width + (i > 0)) for i, width in enumerate(widths)))
    for number, line in enumerate(cells):
        out = [line[0].ljust(widths[0])]
        for column, text, width in zip(shown, line[1:], widths[1:], strict=True):
            is_best = number in best[column.key]
            cell = text.rjust(width) + ("*" if is_best else " ")
            out.append(f"{_GREEN}{cell}{_RESET}" if is_best and colour else cell)
        lines.append("  ".join(out).rstrip())
    if any(best.values()):
        lines.append("* best of its column")
    return "\n".join(lines) + "\n"


def shown_columns(rows: Sequence[Row]) -> list[Column]:
    """Without columns that are zero or unknown in every row, except for broken reservations, where zero is a result."""
    kept = ("jobs", "start_reservations_broken")
    return [c for c in COLUMNS if c.key in kept or any(row.get(c.key) for row in rows)]


def to_csv(rows: Sequence[Row]) -> str:
    """All numbers unrounded, in seconds and shares, one line per result. Nested numbers are named `outer.inner`."""
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
        out |= {f"{key}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {key: value}
    return out


def printable(text: str) -> str:
    """Replaces characters that would move a cursor or break a document."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ResultArrays(Struct):
    """A result as one array element per job. `label` is unique in the report. Times are relative to `origin_ms`. `placed` is
    False for jobs that never started; jobs still running at the end of the simulation end at `span_ms`. `share` is the
    dominant share of a job: its largest share of any resource of the cluster."""

    label: str
    result: Result
    resource: str
    origin_ms: int
    span_ms: int
    submitted: Ints
    started: Ints
    ended: Ints
    placed: NDArray[np.bool_]
    finished: NDArray[np.bool_]
    share: Floats
    user: Ints
    users: list[str]

    @property
    def work(self) -> Floats:
        """Dominant share times run time, in cluster-milliseconds."""
        return np.where(self.placed, self.share * (self.ended - self.started), 0.0)


def arrays_of(result: Result, label: str = "") -> ResultArrays:
    outcomes, samples = result.outcomes, result.samples
    submitted = _ints([job.submitted_ms for job in outcomes])
    started = _ints([job.started_ms for job in outcomes])
    ended = _ints([job.ended_ms for job in outcomes])
    placed = started >= 0
    finished = placed & (ended >= 0)
    times = [*submitted.tolist(), *(sample.at_ms for sample in samples[:1])]
    origin = min(times, default=0)
    last = max([origin, *times, *(sample.at_ms for sample in samples[-1:])])
    last = max(last, int(started.max(initial=origin)), int(ended.max(initial=origin)))
    names = [user_of(job) for job in outcomes]
    users = sorted(set(names))
    index = {name: i for i, name in enumerate(users)}
    return ResultArrays(
        label=label or result.policy,
        result=result,
        resource=main_resource(result),
        origin_ms=origin,
        span_ms=last - origin,
        submitted=submitted - origin,
        started=np.where(placed, started - origin, -1),
        ended=np.where(finished, ended - origin, np.where(placed, last - origin, -1)),
        placed=placed,
        finished=finished,
        share=_dominant_shares(outcomes, result.capacity),
        user=_ints([index[name] for name in names]),
        users=users,
    )


def _dominant_shares(outcomes: Sequence[Outcome], capacity: Resources) -> Floats:
    share = np.zeros(len(outcomes))
    for name in sorted(capacity):
        if capacity[name] > 0:
            requested = np.array([job.request.get(name, 0) for job in outcomes], dtype=np.float64)
            np.maximum(share, requested / capacity[name], out=share)
    return share


def used_share(arrays: ResultArrays, resource: str) -> Floats:
    capacity = arrays.result.capacity.get(resource, 0)
    used = np.array([sample.used.get(resource, 0) for sample in arrays.result.samples], dtype=np.float64)
    return used / capacity if capacity > 0 else used * 0


def sample_values(arrays: ResultArrays, field: str) -> Floats:
    return np.array([getattr(sample, field) for sample in arrays.result.samples], dtype=np.float64)


def sample_times(arrays: ResultArrays) -> Ints:
    samples: Sequence[Sample] = arrays.result.samples
    return _ints([sample.at_ms for sample in samples]) - arrays.origin_ms


def step_means(at: Ints, values: Floats, span_ms: int, most: int) -> tuple[Floats, Floats]:
    """A step function in at most `most` points: (times, values), each value valid until the next time. Many samples are
    averaged over equal slices of time, which keeps the area under the curve exact."""
    if len(at) == 0:
        return np.zeros(0), np.zeros(0)
    if len(at) < most or span_ms <= 0:
        times = np.append(at, max(span_ms, int(at[-1]))).astype(np.float64)
        return times[-most:], np.append(values, values[-1])[-most:]
    edges = np.linspace(0, span_ms, most)
    times = np.concatenate(([0], at, [max(span_ms, int(at[-1]))])).astype(np.float64)
    held = np.concatenate(([0.0], values))
    area = np.concatenate(([0.0], np.cumsum(held * np.diff(times))))
    means = np.diff(np.interp(edges, times, area)) / np.diff(edges)
    return edges, np.append(means, means[-1])


def time_in_slices(row: Ints, rows: int, start: Ints, end: Ints, weight: Floats, span_ms: int, slices: int) -> Floats:
    """For each of `slices` equal slices of time: `weight` times the share of it that [start, end) covers, summed by `row`."""
    size = max(span_ms, 1) / slices
    first, last = np.minimum(start / size, slices), np.minimum(end / size, slices)
    i, k = first.astype(np.int64), last.astype(np.int64)
    same = i == k
    wide = slices + 2  # an interval may end at, or begin after, the last edge
    flat = row * wide

    def summed(at: Ints, amount: Floats) -> Floats:
        added = np.bincount(flat + at, weights=amount, minlength=rows * wide)
        return added.astype(np.float64).reshape(rows, wide)  # bincount returns integers if there is no interval

    partial = summed(i, weight * np.where(same, last - first, i + 1 - first))
    partial += summed(k, weight * np.where(same, 0.0, last - k))
    full = summed(i + 1, np.where(same, 0.0, weight)) - summed(k, np.where(same, 0.0, weight))
    return (partial + np.cumsum(full, axis=1))[:, :slices]


def cumulative(values: Floats, least: float, most: int) -> tuple[Floats, Floats]:
    """The share of `values` at or below each x, in at most `most` points; values below `least` count as `least`."""
    if len(values) == 0:
        return np.zeros(0), np.zeros(0)
    ordered = np.sort(np.maximum(values, least))
    at = np.unique(np.linspace(0, len(ordered) - 1, min(most, len(ordered))).astype(np.int64))
    return ordered[at], (at + 1) / len(ordered)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
