"""One result as NumPy columns, and the sums over time that the pictures are drawn from.

Times are milliseconds since the first submission. Nothing here knows how a picture looks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hodei.model.resources import Resources
from hodei.sim.metrics import main_resource, user_of
from hodei.sim.results import Outcome, Result, Sample

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Columns(Struct):
    """`label` is unique in its report. A job that never started has `placed` False; one that was still running when the
    simulation stopped ends at `span_ms`. `share` is a job's dominant share: the largest part that it takes of any one
    resource of the whole cluster."""

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
        """Dominant share times run time: what a job took of the cluster, in cluster-milliseconds."""
        return np.where(self.placed, self.share * (self.ended - self.started), 0.0)


def columns_of(result: Result, label: str = "") -> Columns:
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
    return Columns(
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
            asked = np.array([job.request.get(name, 0) for job in outcomes], dtype=np.float64)
            np.maximum(share, asked / capacity[name], out=share)
    return share


def used_share(columns: Columns, resource: str) -> Floats:
    """The used part of a resource at each sample."""
    whole = columns.result.capacity.get(resource, 0)
    used = np.array([sample.used.get(resource, 0) for sample in columns.result.samples], dtype=np.float64)
    return used / whole if whole > 0 else used * 0


def of_samples(columns: Columns, field: str) -> Floats:
    return np.array([getattr(sample, field) for sample in columns.result.samples], dtype=np.float64)


def sample_times(columns: Columns) -> Ints:
    samples: Sequence[Sample] = columns.result.samples
    return _ints([sample.at_ms for sample in samples]) - columns.origin_ms


def step_means(at: Ints, values: Floats, span_ms: int, most: int) -> tuple[Floats, Floats]:
    """A step function in at most `most` points: (times, values), each value holding until the next time.

    Few samples are returned as they are; many are averaged over equal slices of time, which keeps the area under the
    curve exact.
    """
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
    """`weight` times the part of each of `slices` equal slices of time that [start, end) covers, summed by `row`."""
    size = max(span_ms, 1) / slices
    first, last = np.minimum(start / size, slices), np.minimum(end / size, slices)
    i, k = first.astype(np.int64), last.astype(np.int64)
    same = i == k
    wide = slices + 2  # an interval may end at, or begin after, the last edge
    flat = row * wide

    def summed(at: Ints, amount: Floats) -> Floats:
        added = np.bincount(flat + at, weights=amount, minlength=rows * wide)
        return added.astype(np.float64).reshape(rows, wide)  # without any interval they come as whole numbers

    partly = summed(i, weight * np.where(same, last - first, i + 1 - first))
    partly += summed(k, weight * np.where(same, 0.0, last - k))
    whole = summed(i + 1, np.where(same, 0.0, weight)) - summed(k, np.where(same, 0.0, weight))
    return (partly + np.cumsum(whole, axis=1))[:, :slices]


def cumulative(values: Floats, least: float, most: int) -> tuple[Floats, Floats]:
    """The share of `values` at or below each x, in at most `most` points; values below `least` count as `least`."""
    if len(values) == 0:
        return np.zeros(0), np.zeros(0)
    ordered = np.sort(np.maximum(values, least))
    at = np.unique(np.linspace(0, len(ordered) - 1, min(most, len(ordered))).astype(np.int64))
    return ordered[at], (at + 1) / len(ordered)


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
