"""The fence around plugins: whatever one does, the cycle goes on.

A filter that fails refuses (nothing is placed on a rule that could not be read); a score that fails has no opinion.
Both are reported as faults of the plan, once per plugin, point and cycle for each gang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hodei.engine.nodes import Ints, Mask, Nodes, OneNode, Table
from hodei.engine.plan import Fault
from hodei.engine.points import MAX_SCORE, Bind, Filter, LayoutPoint, Layouts, Placed, Refusals, Score
from hodei.engine.view import Gang, Member, View
from hodei.model.decision import Reason
from hodei.model.ids import JobId
from hodei.model.node import Grant
from hodei.model.resources import GPU

PLUGIN_FAILED = "PLUGIN_FAILED"


class Runner:
    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.job: JobId = 0
        self.failures = 0  # counted, so that the caches do not keep a stand-in for an answer

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
        """All the plugin's objections in one mask; None for none."""
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
            # Below 0 means "cannot take it" further on; no score may say that. Raw scores are normalised first.
            if scores is None or not len(scores) or hasattr(plugin, "normalize"):
                return scores
            # Looking first is cheaper than clipping, and few plugins need it.
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
        """The parts of a node for a member by what the plugins say of its GPUs; None if nobody minds which."""
        parts = table.holds[row].parts
        if not choosers or parts is None or not member.task.request.get(GPU, 0) % 1000:
            return None
        for plugin in choosers:
            try:
                column = plugin.choose_gpu(member, table.view(slice(row, row + 1)), view)
                if column is not None:
                    return parts.find(member.task, list(parts.gpus)[column])
            except Exception as error:
                self._report(plugin, "choose_gpu", error)
        return None

    def layouts(self, plugin: LayoutPoint, gang: Gang, table: Table, view: View, *more: Any) -> Layouts | Reason | None:
        """How the gang may lie; a Reason if the plugin failed, which refuses the gang. `more`: what it wants to know besides."""
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

    def still_open(
        self, plugin: Any, gang: Gang, member: Member, within: Mask | None, table: Table, view: View
    ) -> Mask | None:
        """What a layout leaves to one more member; if the plugin fails, nothing."""
        try:
            found: Mask = plugin.still_open(gang, member, within, table, view)
            if len(found) != len(table.names) or found.dtype != np.bool_:
                raise TypeError(f"still_open must return a bool array of {len(table.names)}")
            return found
        except Exception as error:
            self._report(plugin, "still_open", error)
            return table.view().none()

    def ask(self, plugin: Any, point: str, *args: Any) -> Reason | None:
        """Any other point that may say no; a failure is a refusal of the gang."""
        try:
            reason = getattr(plugin, point)(*args)
            if reason is not None and not isinstance(reason, Reason):
                raise TypeError(f"{point} must return a Reason or None, not {type(reason).__name__}")
            return reason
        except Exception as error:
            return self._report(plugin, point, error)

    def bind(self, plugin: Bind, gang: Gang, placements: Sequence[Placed], view: View) -> list[Placed]:
        """The placements with what the plugin adds to them; it cannot move them, and if it fails they stay as they are."""
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
