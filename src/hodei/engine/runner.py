"""Calls plugins and contains their failures, so that the cycle goes on.

A filter that fails refuses; a score that fails has no opinion. Failures are reported as faults of the plan, once per
plugin, point and gang in a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hodei.engine.nodes import Ints, Mask, Nodes, OneNode, Table
from hodei.engine.plan import Fault
from hodei.engine.points import MAX_SCORE, Bind, Filter, LayoutPoint, Layouts, Placed, Refusals, Score
from hodei.engine.view import Gang, Member, View
from hodei.model.ids import JobId
from hodei.model.job import Reason
from hodei.model.node import Grant
from hodei.model.resources import GPU

PLUGIN_FAILED = "PLUGIN_FAILED"


class Runner:
    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.job: JobId = 0
        self.failures = 0  # caches must not keep a substitute for a failed call

    def take_faults(self) -> list[Fault]:
        faults, self.faults = self.faults, []
        return faults

    def refusals(self, plugin: Filter, member: Member, nodes: Nodes, view: View) -> Refusals:
        try:
            pairs = list(plugin.filter(member, nodes, view))
            for mask, reason in pairs:
                if len(mask) != len(nodes) or mask.dtype != np.bool_ or not isinstance(reason, Reason):
                    raise TypeError(f"filter must return pairs of (bool array of {len(nodes)}, Reason)")
            return pairs
        except Exception as error:
            return [(~nodes.none(), self._report(plugin, "filter", error))]

    def refused(self, plugin: Filter, member: Member, nodes: Nodes, view: View) -> Mask | None:
        """All objections of the plugin in one mask; None for none."""
        pairs = self.refusals(plugin, member, nodes, view)
        if not pairs:
            return None
        mask = pairs[0][0]
        for more, _ in pairs[1:]:
            mask = mask | more
        return mask

    def score(self, plugin: Score, member: Member, nodes: Nodes, view: View) -> Ints | None:
        try:
            scores = plugin.score(member, nodes, view)
            if scores is not None and (len(scores) != len(nodes) or scores.dtype != np.int64):
                raise TypeError(f"score must return an int64 array of {len(nodes)}")
            # Below 0 means infeasible later on, so no score may be. Raw scores are normalised first.
            if scores is None or not len(scores) or hasattr(plugin, "normalize"):
                return scores
            # Checking is cheaper than clipping, and few plugins need it.
            return np.clip(scores, 0, MAX_SCORE) if scores.min() < 0 or scores.max() > MAX_SCORE else scores
        except Exception as error:
            self._report(plugin, "score", error)
            return None

    def refused_by_one(self, plugin: Any, member: Member, view: View, node: OneNode) -> bool:
        try:
            return any(mask for mask, _ in plugin.filter(member, node, view))
        except Exception as error:
            self._report(plugin, "filter", error)
            return True

    def score_of_one(self, plugin: Any, member: Member, view: View, node: OneNode) -> int:
        try:
            return min(max(int(plugin.score(member, node, view) or 0), 0), MAX_SCORE)
        except Exception as error:
            self._report(plugin, "score", error)
            return 0

    def normalize(self, plugin: Any, raw: Ints, feasible: Mask) -> Ints:
        try:
            normalized: Ints = plugin.normalize(raw, feasible)
            if normalized.shape != feasible.shape or normalized.dtype != np.int64:
                raise TypeError(f"normalize must return an int64 array of {len(feasible)}")
            return np.clip(normalized, 0, MAX_SCORE)
        except Exception as error:
            self._report(plugin, "normalize", error)
            return np.zeros(len(feasible), dtype=np.int64)

    def grant(self, choosers: Sequence[Any], member: Member, table: Table, row: int, view: View) -> Grant | None:
        """Devices for a member as the plugins choose; None if they have no preference."""
        devices = table.node_usage[row].devices
        if not choosers or devices is None or not member.task.request.get(GPU, 0) % 1000:
            return None
        for plugin in choosers:
            try:
                column = plugin.choose_gpu(member, table.view(slice(row, row + 1)), view)
                if column is not None:
                    return devices.find(member.task, list(devices.gpus)[column])
            except Exception as error:
                self._report(plugin, "choose_gpu", error)
        return None

    def layouts(self, plugin: LayoutPoint, gang: Gang, table: Table, view: View, *more: Any) -> Layouts | Reason | None:
        """Layouts for the gang; a Reason if the plugin failed."""
        try:
            found = plugin.layouts(gang, table, view, *more)
            if isinstance(found, Layouts):
                for layout in found.options:
                    if len(layout.rows) != len(gang.members) or any(
                        len(rows) != len(table.names) for rows in layout.rows
                    ):
                        raise TypeError("a layout must have one mask over all nodes for each of the gang's members")
            return found
        except Exception as error:
            return self._report(plugin, "layouts", error)

    def remaining_rows(
        self, plugin: Any, gang: Gang, member: Member, within: Mask | None, table: Table, view: View
    ) -> Mask | None:
        """Rows left to one more member; none if the plugin fails."""
        try:
            found: Mask = plugin.remaining_rows(gang, member, within, table, view)
            if len(found) != len(table.names) or found.dtype != np.bool_:
                raise TypeError(f"remaining_rows must return a bool array of {len(table.names)}")
            return found
        except Exception as error:
            self._report(plugin, "remaining_rows", error)
            return table.view().none()

    def ask(self, plugin: Any, point: str, *args: Any) -> Reason | None:
        """Any other point that may refuse; a failure refuses the gang."""
        try:
            reason = getattr(plugin, point)(*args)
            if reason is not None and not isinstance(reason, Reason):
                raise TypeError(f"{point} must return a Reason or None, not {type(reason).__name__}")
            return reason
        except Exception as error:
            return self._report(plugin, point, error)

    def bind(self, plugin: Bind, gang: Gang, placements: Sequence[Placed], view: View) -> list[Placed]:
        """Placements with details added; the plugin cannot move them, and a failure leaves them unchanged."""
        try:
            bound = list(plugin.bind(gang, placements, view))
            if [(placed.index, placed.row) for placed in bound] != [
                (placed.index, placed.row) for placed in placements
            ]:
                raise TypeError("bind must return the same placements, in order")
            return bound
        except Exception as error:
            self._report(plugin, "bind", error)
            return list(placements)

    def _report(self, plugin: Any, point: str, error: Exception) -> Reason:
        self.failures += 1
        text = f"{type(error).__name__}: {error}"[:300]
        fault = Fault(plugin.name, point, self.job, text)
        if fault not in self.faults[-8:]:
            self.faults.append(fault)
        return Reason(plugin.name, PLUGIN_FAILED, f"plugin {plugin.name} failed: {text}")
