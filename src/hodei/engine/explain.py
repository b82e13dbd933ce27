"""Explains refusals: every objection of every filter, by the plugin calls that decide.

All filters run, not only up to the first refusal. The nearest miss is the node with the fewest objections, then the
smallest shortage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from hodei.engine.nodes import Ints, Mask, Table
from hodei.engine.profile import Profile
from hodei.engine.runner import Runner
from hodei.engine.view import Member, View
from hodei.model.explanation import Blocker, NearestMiss
from hodei.model.job import Reason, Verdict

NODES_SHOWN = 50
_VERDICT_NODES = 5


class Objections(Struct):
    """The objections of all filters to one member: a mask of nodes per reason."""

    pairs: list[tuple[Mask, Reason]]
    refused: Mask

    @property
    def for_capacity(self) -> bool:
        """Whether preemption could make some node feasible."""
        closed = np.zeros_like(self.refused)
        for mask, reason in self.pairs:
            if not reason.evictable:
                closed |= mask
        return bool((self.refused & ~closed).any())

    @property
    def feasible(self) -> int:
        return int((~self.refused).sum())


def objections(profile: Profile, runner: Runner, member: Member, table: Table, view: View) -> Objections:
    nodes = table.view()
    pairs: list[tuple[Mask, Reason]] = []
    refused = nodes.none()
    for plugin in profile.filters:
        for mask, reason in runner.refusals(plugin, member, nodes, view):
            if np.count_nonzero(mask):
                pairs.append((mask, reason))
                refused = refused | mask
    if len(pairs) > 1:
        pairs.sort(key=lambda pair: (-int(np.count_nonzero(pair[0])), pair[1].code, pair[1].text))
    return Objections(pairs, refused)


def verdicts(found: Objections, table: Table) -> tuple[Verdict, ...]:
    """The short form in a plan."""
    return tuple(
        Verdict(reason, int(np.count_nonzero(mask)), _names(table, mask, _VERDICT_NODES))
        for mask, reason in found.pairs
    )


def blockers(found: Objections, table: Table, task: str) -> tuple[Blocker, ...]:
    """The long form in `why`."""
    return tuple(
        Blocker(
            reason.code,
            reason.text,
            reason.plugin,
            task,
            int(mask.sum()),
            _names(table, mask, NODES_SHOWN),
            reason.hint,
        )
        for mask, reason in found.pairs
    )


def nearest_miss(found: Objections, profile: Profile, member: Member, table: Table, view: View) -> NearestMiss | None:
    if not found.pairs or not table.names or not found.refused.all():
        return None
    count: Ints = np.zeros(len(table.names), dtype=np.int64)
    for mask, _ in found.pairs:
        count += mask
    rows = np.flatnonzero(count == count.min())
    lacking = {int(row): _lacks(profile, member, table, int(row), view) for row in rows[:NODES_SHOWN]}
    row = min(lacking, key=lambda row: (lacking[row][0], table.names[row]))
    texts = [lacking[row][1]] if lacking[row][1] else []
    texts += [reason.text for mask, reason in found.pairs if mask[row] and reason.plugin not in lacking[row][2]]
    return NearestMiss(table.names[row], "; ".join(texts), member.task.name)


def shortage(profile: Profile, member: Member, table: Table, row: int, view: View) -> str:
    """What one node lacks, as text; "" if nothing measurable."""
    return _lacks(profile, member, table, row, view)[1]


def _lacks(profile: Profile, member: Member, table: Table, row: int, view: View) -> tuple[int, str, set[str]]:
    """The shortage measured by plugins with `lacks`: size, text, and the plugins' names."""
    size, texts, by = 0, [], set()
    for plugin in profile.filters:
        measure = getattr(plugin, "lacks", None)
        if measure is not None:
            amount, text = measure(member, table.view(slice(row, row + 1)), view)
            if amount:
                size += amount
                texts.append(text)
                by.add(plugin.name)
    return size, "; ".join(texts), by


def summary(verdicts: Sequence[Verdict], nodes: int) -> str:
    """One line in the style of Kubernetes: `0/3 nodes are available: 2 Insufficient cpu, ...`."""
    gang_wide = [verdict.reason.text for verdict in verdicts if not verdict.count]
    if gang_wide:
        return "; ".join(gang_wide)
    if not nodes:
        return "no nodes have joined yet"
    parts = ", ".join(f"{verdict.count} {verdict.reason.text}" for verdict in verdicts)
    return f"0/{nodes} nodes are available: {parts}"


def _names(table: Table, mask: Mask, limit: int) -> tuple[str, ...]:
    rows = np.flatnonzero(mask[:1024])
    if len(rows) < limit:
        rows = np.flatnonzero(mask)
    return tuple([table.names[row] for row in rows[:limit]])
