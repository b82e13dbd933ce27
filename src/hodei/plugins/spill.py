"""Spill rules: some backends take overflow. A job uses them only if it would wait too long elsewhere, within a cost
limit.

The wait is counted from when the job was queued: until its forecast start, if there is one; otherwise until nodes
elsewhere are expected to have capacity, judging by what runs there; at least the time it has waited. Without a
forecast, jobs ahead in the queue are not considered, so a job spills too late rather than too early.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs

from hodei.engine.availability import FOREVER
from hodei.engine.nodes import Mask, Table
from hodei.engine.points import ANY_TRIGGER, Layout, Layouts, Placed
from hodei.engine.view import Gang, Member, View
from hodei.model.job import Reason
from hodei.model.resources import Resources, format_duration

HOUR_MS = 3_600_000
# With more nodes only the time that the job has waited counts: evaluating each node would be slow.
_MAX_NODES_EVALUATED = 200


class SpillRule(Struct, frozen=True):
    """To backend `to`, if the wait on the backends in `home` (empty: all without overflow) exceeds `wait_ms`, for at
    most `max_cost_milli` (None: no limit)."""

    to: str
    wait_ms: int = 0
    max_cost_milli: int | None = None
    home: tuple[str, ...] = ()


class Spill:
    name = "spill"
    requeue_on = ANY_TRIGGER
    needs_availability = True
    needs_forecasts = True

    def __init__(self, rules: Iterable[SpillRule | Mapping[str, Any]] = ()) -> None:
        self._rules = tuple(rule if isinstance(rule, SpillRule) else SpillRule(**rule) for rule in rules)
        self._to = frozenset(rule.to for rule in self._rules)

    def key(self, member: Member) -> Hashable:
        # The time of submission matters too, but among equal jobs the first submitted spills first.
        job, task = member.job, member.task
        length_ms = job.estimate_ms or job.timeout_ms
        return (job.backend, task.backends, tuple(task.request.items()), length_ms)

    def layouts(self, gang: Gang, table: Table, view: View) -> Layouts | None:
        """First the backends without overflow, then also those that the rules allow now."""
        column = table.view().by("backend", lambda node: node.backend)
        spills = column.where(lambda name: name in self._to)
        if not spills.any():
            return None
        home = ~spills
        opened, reason = home.copy(), None
        for rule in self._rules:
            there = column.where(rule.to.__eq__)
            if not there.any():
                continue
            elsewhere = home if not rule.home else column.where(rule.home.__contains__)
            allowed, kept = self._allowed(rule, gang, table, view, there, elsewhere)
            opened |= allowed
            reason = kept or reason
        options = [Layout((home,) * len(gang.members))]
        if (opened & spills).any():
            options.append(Layout((opened,) * len(gang.members)))
        return Layouts(
            options,
            reason or Reason(self.name, "SPILL_FULL", "no capacity here, nor on a backend that it may spill to"),
        )

    def bind(self, gang: Gang, placements: Sequence[Placed], view: View) -> Sequence[Placed]:
        """Adds a note to decisions on an overflow backend."""
        for placed in placements:
            rule = next((rule for rule in self._rules if rule.to == placed.node.backend), None)
            named = gang.job.backend.mode == "specific" and len(gang.job.backend.names) == 1
            if rule is not None and placed.decision is not None and not named:
                why = f": elsewhere it would wait longer than {format_duration(rule.wait_ms)}" if rule.wait_ms else ""
                note = f"spilled to backend {rule.to}{why or ': no capacity elsewhere'}"
                placed.decision = structs.replace(placed.decision, note=note)
        return placements

    def _allowed(
        self, rule: SpillRule, gang: Gang, table: Table, view: View, there: Mask, elsewhere: Mask
    ) -> tuple[Mask, Reason | None]:
        """The nodes of the rule's backend that the gang may use, and the reason if there are none."""
        nothing = np.zeros_like(there)
        wait_ms = self._wait_ms(gang, table, view, elsewhere)
        if wait_ms <= rule.wait_ms:
            text = (
                f"kept off backend {rule.to}: elsewhere it waits {format_duration(wait_ms)}, "
                f"and it spills only if that exceeds {format_duration(rule.wait_ms)}"
            )
            return nothing, Reason(self.name, "SPILL_NOT_YET", text)
        if rule.max_cost_milli is None:
            return there, None
        costs = table.view().by("cost", lambda node: node.cost_milli).numbers(int)
        length_ms = gang.expected_ms or gang.estimate_ms
        if not length_ms:
            free = there & (costs == 0)
            text = f"kept off backend {rule.to}: its cost there is unknown, because it has no estimate"
            return free, None if free.any() else Reason(self.name, "SPILL_COST_UNKNOWN", text)
        whole = costs * (max(gang.size, 1) * length_ms) // HOUR_MS
        cheap = there & (whole <= rule.max_cost_milli)
        if cheap.any():
            return cheap, None
        least = int(whole[there].min())
        text = f"kept off backend {rule.to}: it would cost {_money(least)}, over {_money(rule.max_cost_milli)}"
        return nothing, Reason(self.name, "SPILL_TOO_EXPENSIVE", text)

    def _wait_ms(self, gang: Gang, table: Table, view: View, elsewhere: Mask) -> int:
        since_ms = gang.queued_ms or gang.submitted_ms
        start_ms, availability = view.now_ms, view.availability
        if availability is not None:
            if gang.id in availability.forecasts:
                start_ms = max(start_ms, availability.forecasts[gang.id])
            elif elsewhere.sum() <= _MAX_NODES_EVALUATED:
                start_ms = max(start_ms, self._earliest(gang, table, view, elsewhere))
        return max(start_ms - since_ms, 0)

    def _earliest(self, gang: Gang, table: Table, view: View, elsewhere: Mask) -> int:
        """When every member has a node elsewhere, by expected ends; FOREVER if never, now if an end is unknown."""
        availability = view.availability
        assert availability is not None
        rows = [(table.nodes[row], table.allocatable[row]) for row in np.flatnonzero(elsewhere)]
        latest = view.now_ms
        for member, numbers in zip(gang.members, gang.needed, strict=True):
            if not numbers:
                continue
            soonest = FOREVER
            request = member.needs
            for node, allocatable in rows:
                if _may_use(member, node.backend) and _fits_idle(allocatable, request):
                    at_ms = availability.earliest(
                        node.name, request, gang.estimate_ms, view.now_ms, gang.id, gang.job.project
                    )  # fmt: skip
                    soonest = min(soonest, view.now_ms if at_ms is None else at_ms)
            latest = max(latest, soonest)
        return latest


def _may_use(member: Member, backend: str) -> bool:
    choice = member.job.backend
    if choice.mode == "specific" and backend not in choice.names:
        return False
    return not member.task.backends or backend in member.task.backends


def _fits_idle(allocatable: Resources, request: Resources) -> bool:
    return all(allocatable.get(resource, 0) >= amount for resource, amount in request.items())


def _money(milli: int) -> str:
    return f"{-(-milli // 10) / 100:.2f}"
