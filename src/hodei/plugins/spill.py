"""Spill rules: some backends are for the overflow. A job goes there only if it would wait too long elsewhere, and only if
it costs no more than it may.

How long it would wait elsewhere, counted from when it got in line: until its forecast start, if there is a forecast; else
until nodes elsewhere are expected to have room for it, going by what runs there; and never less than it has waited already.
Without a forecast those before it in line are not counted, so that it spills too late rather than too early.
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
# More nodes than these are not looked at one by one: then what a job has waited already is all that counts.
_NODES_LOOKED_AT = 200


class SpillRule(Struct, frozen=True):
    """To backend `to`, once the wait on the backends of `home` (none named: all that no rule spills to) is over `wait_ms`,
    for at most `max_cost_milli` (None: whatever it costs)."""

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
        # When a job may go depends on when it came too, but of those that are alike the first to come is the first to go.
        job, task = member.job, member.task
        length_ms = job.estimate_ms or job.timeout_ms
        return (job.backend, task.backends, tuple(task.request.items()), length_ms)

    def layouts(self, gang: Gang, table: Table, view: View) -> Layouts | None:
        """First everywhere that no rule spills to, then also where the rules let it go now."""
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
        return Layouts(options, reason or Reason(self.name, "SPILL_FULL", "no room here, nor where it may spill to"))

    def bind(self, gang: Gang, placements: Sequence[Placed], view: View) -> Sequence[Placed]:
        """Whoever goes to a backend for the overflow is told so."""
        for placed in placements:
            rule = next((rule for rule in self._rules if rule.to == placed.node.backend), None)
            asked = gang.job.backend.mode == "specific" and len(gang.job.backend.names) == 1
            if rule is not None and placed.decision is not None and not asked:
                why = f": elsewhere it would wait longer than {format_duration(rule.wait_ms)}" if rule.wait_ms else ""
                note = f"spilled to backend {rule.to}{why or ': there was no room elsewhere'}"
                placed.decision = structs.replace(placed.decision, note=note)
        return placements

    def _allowed(
        self, rule: SpillRule, gang: Gang, table: Table, view: View, there: Mask, elsewhere: Mask
    ) -> tuple[Mask, Reason | None]:
        """Which nodes of the rule's backend it may go to, and what keeps it off if it is none."""
        nothing = np.zeros_like(there)
        wait_ms = self._wait_ms(gang, table, view, elsewhere)
        if wait_ms <= rule.wait_ms:
            text = (
                f"kept off backend {rule.to}: elsewhere it waits {format_duration(wait_ms)}, "
                f"and goes there if that is over {format_duration(rule.wait_ms)}"
            )
            return nothing, Reason(self.name, "SPILL_NOT_YET", text)
        if rule.max_cost_milli is None:
            return there, None
        costs = table.view().by("cost", lambda node: node.cost_milli).numbers(int)
        length_ms = gang.expected_ms or gang.estimate_ms
        if not length_ms:
            free = there & (costs == 0)
            text = f"kept off backend {rule.to}: what it would cost there is not known, as it gives no estimate"
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
            elif elsewhere.sum() <= _NODES_LOOKED_AT:
                start_ms = max(start_ms, self._earliest(gang, table, view, elsewhere))
        return max(start_ms - since_ms, 0)

    def _earliest(self, gang: Gang, table: Table, view: View, elsewhere: Mask) -> int:
        """When each of its members has a node elsewhere, going by expected ends; FOREVER if one never has. Where a run
        that is in the way has no known end it may be any moment."""
        availability = view.availability
        assert availability is not None
        rows = [(table.nodes[row], table.allocatable[row]) for row in np.flatnonzero(elsewhere)]
        latest = view.now_ms
        for member, numbers in zip(gang.members, gang.needed, strict=True):
            if not numbers:
                continue
            soonest = FOREVER
            request = {name: amount for name, amount in member.task.request.items() if amount}
            for node, room in rows:
                if _may(member, node.backend) and _could(room, request):
                    at_ms = availability.earliest(
                        node.name, request, gang.estimate_ms, view.now_ms, gang.id, gang.job.project
                    )  # fmt: skip
                    soonest = min(soonest, view.now_ms if at_ms is None else at_ms)
            latest = max(latest, soonest)
        return latest


def _may(member: Member, backend: str) -> bool:
    choice = member.job.backend
    if choice.mode == "specific" and backend not in choice.names:
        return False
    return not member.task.backends or backend in member.task.backends


def _could(room: Resources, request: Resources) -> bool:
    """If it were empty."""
    return all(room.get(resource, 0) >= amount for resource, amount in request.items())


def _money(milli: int) -> str:
    return f"{-(-milli // 10) / 100:.2f}"
