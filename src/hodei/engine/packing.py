"""Bounded search for a placement of unequal members, tried only when the greedy placement fails.

Hardest members first (fewest feasible nodes), nodes by score, equal nodes tried once. Exact within its budget; beyond
it the gang waits.
"""

from __future__ import annotations

import numpy as np

from hodei.engine.nodes import Mask, Table
from hodei.engine.points import Layout, Placed
from hodei.engine.profile import Profile
from hodei.engine.ranking import Rankings
from hodei.engine.runner import Runner
from hodei.engine.view import Gang, Member, View
from hodei.model.job import Candidate, Decision

# Placements tried. Each costs time proportional to the nodes, so large clusters get fewer.
_BUDGET = 2000
_BUDGET_AT_LEAST = 100
_BUDGET_TIMES_NODES = 200_000
# Larger gangs are not searched: the budget would not suffice.
_MAX_MEMBERS = 64


def pack(
    gang: Gang, profile: Profile, rankings: Rankings, table: Table, view: View, layout: Layout | None = None
) -> list[Placed] | None:
    """Placements (in the table) in member order, or None with the table unchanged."""
    if gang.size > _MAX_MEMBERS:
        return None
    wanted = [(number, kind, member) for kind, number, member in gang.needed_members()]
    hardness = {
        kind: (
            rankings.of(profile, member, gang.shapes[kind], view).feasible,
            [-amount for _, amount in sorted(member.task.request.items())],
        )
        for kind, member in enumerate(gang.members)
    }
    if any(feasible == 0 for feasible, _ in hardness.values()):
        return None  # no order helps an infeasible member
    wanted.sort(key=lambda item: (hardness[item[1]], item[0]))
    search = _Search(gang, profile, rankings, table, view, layout, wanted)
    return sorted(search.placed, key=lambda placed: placed.index) if search.place(0, -1) else None


class _Search:
    def __init__(
        self,
        gang: Gang,
        profile: Profile,
        rankings: Rankings,
        table: Table,
        view: View,
        layout: Layout | None,
        wanted: list[tuple[int, int, Member]],
    ) -> None:
        self._gang, self._profile, self._rankings, self._table, self._view = gang, profile, rankings, table, view
        self._layout, self._wanted = layout, wanted
        self._budget = min(_BUDGET, max(_BUDGET_AT_LEAST, _BUDGET_TIMES_NODES // max(len(table.names), 1)))
        self.placed: list[Placed] = []

    def place(self, depth: int, last_row: int) -> bool:
        """Place members from `depth` on. Equal members take rows in ascending order, to try each set once."""
        if depth == len(self._wanted):
            return True
        index, kind, member = self._wanted[depth]
        same_kind = depth > 0 and self._wanted[depth - 1][1] == kind
        ranking = self._rankings.of(self._profile, member, self._gang.shapes[kind], self._view)
        order = ranking.order().copy()  # deeper members change the ranking
        if self._layout is not None:
            order[~self._layout.rows[kind]] = -1
        rows = np.flatnonzero(order >= 0)
        if same_kind:
            rows = rows[rows >= last_row]
        for row in rows[np.argsort(-order[rows], kind="stable")].tolist():
            if self._budget <= 0:
                return False
            self._budget -= 1
            if not self._is_allowed(member, row, ranking.runner):
                continue
            node = self._table.nodes[row]
            score = order.item(row) // ranking.weight if ranking.weight else 0
            decision = Decision(
                Candidate(node.name, score), feasible=ranking.feasible, nodes=len(order), profile=self._profile.name
            )
            grant = ranking.runner.grant(self._profile.gpu_choosers, member, self._table, row, self._view)
            grant = self._table.place(row, member.task.request, member, grant)
            self.placed.append(Placed(member, index, row, node, decision, grant))
            if self.place(depth + 1, row):
                return True
            self.placed.pop()
            self._table.release(row, member.task.request, member, grant)
        return False

    def _is_allowed(self, member: Member, row: int, runner: Runner) -> bool:
        """Whether layout plugins allow one more member there; else the whole result would be refused."""
        if self._layout is None or not self.placed:
            return True
        within: Mask | None = None
        for plugin in self._gang.layout_plugins:
            if hasattr(plugin, "remaining_rows"):
                if within is None:
                    within = np.zeros(len(self._table.names), dtype=np.bool_)
                    within[row] = True
                within = runner.remaining_rows(plugin, self._gang, member, within, self._table, self._view)
        return within is None or bool(within[row])
