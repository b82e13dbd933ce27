"""How evenly a policy served the users, slice of time by slice of time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hodei.model.resources import Resources
from hodei.sim.report.columns import Columns, Floats, time_in_slices

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
