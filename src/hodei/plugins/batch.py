"""Batch queues: an order by properties of the jobs, and start reservations that keep the first jobs from starving.

`order`: fcfs, sjf (shortest), saf (smallest area), wfp3, unicef, f1 to f4 (published formulas) or hodei. `backfill`:
what may start behind a blocked job: nothing (none), jobs that do not delay the first one (easy), or jobs that delay
none of the first `reservation_depth` (conservative). `overrun`: backfilled runs that exceed their estimate continue
(let) or are stopped (stop). `fill`: the order of backfill: queue (the same), shortest, deadline (nearest first),
largest, or balanced (jobs that use the least used resources most). `lookahead`: how many pending jobs are considered,
in order; all of them if the order changes with time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hodei.engine.nodes import Ints
from hodei.engine.points import PendingColumns
from hodei.engine.view import Gang
from hodei.model.errors import InvalidInput
from hodei.model.explanation import PriorityTerm
from hodei.model.resources import format_duration, format_time, parse_duration_ms
from hodei.plugins.queues import Fifo

Floats = NDArray[np.float64]
_SCALE = 1000
_LARGEST = 1 << 60


class _Jobs:
    """The quantities of the published formulas: r estimate, n processors, s submission, w wait so far, in seconds."""

    def __init__(self, waiting: PendingColumns, now_ms: int) -> None:
        self.r: Floats = np.maximum(waiting.estimate_ms, 1) / 1000
        self.n: Floats = np.maximum(waiting.cpus, 1) / 1000
        self.s: Floats = np.maximum(waiting.submitted_ms / 1000, 1)
        self.w: Floats = np.maximum(now_ms - waiting.submitted_ms, 0) / 1000


ORDERS: dict[str, Callable[[_Jobs], Floats]] = {
    "sjf": lambda j: j.r,
    "saf": lambda j: j.r * j.n,
    "f1": lambda j: np.log10(j.r) * j.n + 870 * np.log10(j.s),
    "f2": lambda j: np.sqrt(j.r) * j.n + 25_600 * np.log10(j.s),
    "f3": lambda j: j.r * j.n + 6.86e6 * np.log10(j.s),
    "f4": lambda j: j.r * np.sqrt(j.n) + 5.3e5 * np.log10(j.s),
    # -(w/r)^3 * n as a logarithm: the same order without overflow.
    "wfp3": lambda j: -(3 * np.log(np.maximum(j.w, 1e-3) / j.r) + np.log(j.n)) * 1e6,
    "unicef": lambda j: -j.w / (np.maximum(np.log2(j.n), 1) * j.r) * 1e3,
}
# Orders in which jobs overtake each other while they wait.
REORDERING = ("wfp3", "unicef")
FILLS = ("queue", "shortest", "deadline", "largest", "balanced")
BACKFILLS = ("none", "easy", "conservative")
OVERRUNS = ("let", "stop")


class Batch(Fifo):
    name = "batch"
    ignores_priority = False

    def __init__(
        self,
        order: str = "fcfs",
        backfill: str = "easy",
        fill: str = "queue",
        lookahead: int = 5000,
        reservation_depth: int = 1000,
        default_estimate: str = "1h",
        doubling: str = "20h",
        overrun: str = "let",
    ) -> None:
        words = ((order, ("fcfs", "hodei", *ORDERS)), (backfill, BACKFILLS), (fill, FILLS), (overrun, OVERRUNS))
        for word, known in words:
            if word not in known:
                raise InvalidInput(f"a batch queue has no option {word!r}", hint=f"one of: {', '.join(known)}")
        self._order, self._fill, self.overrun = order, fill, overrun
        self._doubling_ms = parse_duration_ms(doubling)
        self._default_ms = parse_duration_ms(default_estimate)
        for word, amount, most in (
            ("lookahead", lookahead, 1_000_000),
            ("reservation_depth", reservation_depth, 100_000),
        ):
            if isinstance(amount, bool) or not isinstance(amount, int) or not 1 <= amount <= most:
                text = f"{word} of a batch queue is {amount!r}"
                raise InvalidInput(text, hint=f"write a whole number from 1 to {most}")
        self.reorders = order in REORDERING
        self.by_submission = order == "fcfs"
        self.balances = fill == "balanced"
        self.lookahead = lookahead
        self.reservation_depth = {"none": 0, "easy": 1, "conservative": reservation_depth}[backfill]

    def estimate_ms(self, gang: Gang) -> int:
        return gang.job.estimate_ms or gang.job.timeout_ms or self._default_ms

    def order(self, waiting: PendingColumns, now_ms: int) -> Ints:
        if self._order == "fcfs":
            return waiting.submitted_ms
        if self._order == "hodei":
            # Each doubling of the estimate costs `doubling` of waiting time (see own-policy.md).
            keys: Ints = waiting.submitted_ms + self._doubling_ms * _log2_milli(waiting.estimate_ms) // 1000
            return keys
        return _to_milli(ORDERS[self._order](_Jobs(waiting, now_ms)))

    def terms(self, gang: Gang) -> tuple[PriorityTerm, ...]:
        """For people: batch queues have no points; the smallest key is first."""
        estimate = format_duration(gang.expected_ms or gang.estimate_ms)
        terms = [
            PriorityTerm("order", 0, f"{self._order}, the smallest first"),
            PriorityTerm("submitted", 0, format_time(gang.submitted_ms)),
        ]
        if self._order == "hodei":
            cost = format_duration(self._doubling_ms)
            terms.append(PriorityTerm("estimate", 0, f"{estimate}; each doubling costs {cost} of waiting time"))
        elif self._order != "fcfs":
            terms.append(PriorityTerm("estimate", 0, estimate))
        return tuple(terms)

    def fill_order(self, waiting: PendingColumns, now_ms: int) -> Ints | None:
        if self._fill == "shortest":
            return waiting.estimate_ms
        if self._fill == "deadline":
            return np.where(waiting.deadline_ms > 0, waiting.deadline_ms - waiting.estimate_ms, _LARGEST)
        if self._fill == "largest":
            return -waiting.cpus
        return None


def _log2_milli(amount_ms: Ints) -> Ints:
    """Thousandths of the binary logarithm of whole seconds, rounded so that every machine agrees."""
    logs: Floats = np.log2(np.maximum(amount_ms // 1000, 1))
    return np.rint(1000 * logs).astype(np.int64)


def _to_milli(scores: Floats) -> Ints:
    """Rounded thousandths, so that every machine agrees."""
    return np.rint(np.clip(scores * _SCALE, -_LARGEST, _LARGEST)).astype(np.int64)
