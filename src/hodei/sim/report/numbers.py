"""The numbers of a report: which there are, how each is written, and which value of a column is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from hodei.sim.metrics import summary
from hodei.sim.results import Result

Kind = Literal["count", "number", "percent", "duration"]


class Column(Struct, frozen=True):
    """`better` is -1 where the smallest value is the best, 1 where the largest is, 0 where no value is better."""

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
    Column("utilisation", "utilisation", "percent", 1, "used part of the cluster from first submission to last end"),
    Column("jain", "slowdown fairness", "number", 1, "Jain's index of the users' mean slowdowns: 1 if all are equal"),
    Column("preemptions", "preemptions", "count", -1, "runs stopped in favour of others"),
    Column("promises_broken", "promises broken", "count", -1, "starts later than had been promised"),
    Column("seconds", "simulator time", "duration", 0, "how long the simulation took"),
)

Row = dict[str, Any]
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


def rows_of(results: Sequence[Result]) -> list[Row]:
    """One row per result, in the order given: `label`, `policy`, `workload`, then every number known of it."""
    return [{"label": label, **numbers_of(result)} for label, result in zip(labels_of(results), results, strict=True)]


def labels_of(results: Sequence[Result]) -> list[str]:
    """The policy's name; with the workload's if there are several, with a number if that is still not unique."""
    several = len({result.workload for result in results}) > 1
    names = [f"{r.policy} · {r.workload}" if several else r.policy for r in results]
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if names.count(name) == 1 else f"{name} #{seen[name]}")
    return out


def numbers_of(result: Result) -> Row:
    """What `metrics.summary` says of it, with None in the place of a mean over no jobs: it must not win a column."""
    numbers: Row = dict(summary(result))
    started = sum(job.started_ms >= 0 for job in result.outcomes)
    numbers["never_started"] = max(result.unplaced, len(result.outcomes) - started)
    if not started:
        numbers |= dict.fromkeys(("mean_wait_s", "median_wait_s", "p95_wait_s", "max_wait_s"))
    if not numbers["finished"]:
        numbers |= dict.fromkeys(("bounded_slowdown", "jain", "utilisation"))
    return numbers


def best_of(column: Column, rows: Sequence[Row]) -> set[int]:
    """The rows that hold the best value as it is written; none where all are alike or no value is better."""
    values = {i: row[column.key] for i, row in enumerate(rows) if is_number(row.get(column.key))}
    if not column.better or not values:
        return set()
    size = unit_of(column, rows)[1]
    written = {i: write_number(value, column, size) for i, value in values.items()}
    best = max(values, key=lambda i: values[i] * column.better)
    return {i for i in written if written[i] == written[best]} if len(set(written.values())) > 1 else set()


def unit_of(column: Column, rows: Sequence[Row]) -> tuple[str, float]:
    """One unit for a whole column, so that its values can be compared at a glance: (name, seconds in it)."""
    if column.kind == "percent":
        return "%", 0.01
    if column.kind != "duration":
        return "", 1.0
    most = max((row[column.key] for row in rows if is_number(row.get(column.key))), default=0)
    return next(((unit, float(size)) for unit, size in _UNITS if most >= 2 * size), ("s", 1.0))


def write_number(value: Any, column: Column, size: float = 1.0) -> str:
    """`value` in units of `size`: whole for counts, three or more significant digits otherwise; a dash for none."""
    if not is_number(value):
        return "–"
    if column.kind == "count":
        return f"{value:,.0f}"
    scaled = value / size
    return f"{scaled:,.0f}" if abs(scaled) >= 1000 else f"{scaled:.1f}" if abs(scaled) >= 100 else f"{scaled:.2f}"


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
