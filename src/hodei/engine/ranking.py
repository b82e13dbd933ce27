"""Filters and scores of one shape over all nodes, updated row by row.

Two exact caches: a `_Memo` is one plugin's answer for one key, shared by all shapes with that key; a `Ranking` is the
sum for one shape. Placing the ten-thousandth equal member calls the plugins for one node, not five thousand.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from functools import partial
from typing import Any, Literal

import numpy as np

from hodei.engine.nodes import Ints, Mask, Nodes, OneNode, Rows, Table
from hodei.engine.points import NO_OPINION, reads_of
from hodei.engine.profile import Profile, key_of
from hodei.engine.runner import Runner
from hodei.engine.view import Member, View
from hodei.model.job import Candidate, Decision, ScoreTerm

_RANKINGS_KEPT = 256
_MEMOS_KEPT = 1024
# With more changed rows, one array call is cheaper than one call per row.
_FEW_ROWS = 8


def _changed(table: Table, seen: int) -> Collection[int]:
    """Rows changed since `seen`; all rows if that is cheaper."""
    changes = table.changes
    if len(changes) == seen + 1:
        return changes[seen:]  # the most frequent case
    if len(changes) - seen >= len(table.names):
        return range(len(table.names))
    return set(changes[seen:])


class _Memo:
    """One plugin's answer over all rows. `array` is None if the plugin has no opinion."""

    __slots__ = ("_ask", "_live", "_runner", "_scalar", "_seen", "array", "generation")

    def __init__(
        self,
        runner: Runner,
        ask: Callable[[Nodes], Any],
        *,
        live: bool = True,
        scalar: Callable[[OneNode], int] | None = None,
    ) -> None:
        self._runner = runner
        self._ask = ask
        self._live = live
        self._scalar = scalar
        self._seen = 0
        self.generation = -1
        self.array: Any = None

    @property
    def void(self) -> bool:
        """The plugin failed: the array is a substitute, recomputed next time."""
        return self.generation < 0

    def refresh(self, table: Table) -> None:
        changes = table.changes
        if self.generation == table.generation and (not self._live or self._seen == len(changes)):
            return
        failures = self._runner.failures
        rows = _changed(table, self._seen) if self.generation == table.generation else ()
        if self.generation != table.generation:
            answer = self._ask(table.view())
            # A plugin may return an array that it (or the table) owns; this one is modified.
            self.array = None if answer is None else answer.copy()
            self.generation = table.generation
        elif self._scalar is not None and self.array is not None and len(rows) <= _FEW_ROWS:
            for row in rows:
                self.array[row] = self._scalar(table.one_node(row))
        else:
            self._refresh_rows(table, np.array(sorted(rows), dtype=np.intp))
        self._seen = len(changes)
        if self._runner.failures != failures:
            self.generation = -1

    def _refresh_rows(self, table: Table, rows: Rows) -> None:
        answer = self._ask(table.view(rows))
        if answer is not None:
            if self.array is None:
                self.array = np.zeros(len(table.names), dtype=answer.dtype)
            self.array[rows] = answer
        elif self.array is not None:
            self.array[rows] = 0


class Ranking:
    """The answer for one shape: `rank` is the weighted score of feasible nodes, -1 elsewhere."""

    __slots__ = (
        "_always_rebuild",
        "_filters",
        "_generation",
        "_live",
        "_normal",
        "_refused",
        "_scalar",
        "_seen",
        "_stamps",
        "_static_total",
        "_table",
        "feasible",
        "profile",
        "rank",
        "runner",
        "terms",
        "weight",
    )  # fmt: skip

    def __init__(self, table: Table, profile: Profile, runner: Runner) -> None:
        self._table = table
        self.profile = profile
        self.runner = runner
        self._generation = -1
        self._seen = 0
        self._always_rebuild = False
        self._stamps: list[tuple[Any, Hashable]] = []
        self._live: list[_Memo] = []  # those of `_filters`, `_scalar` and `_normal`
        self._filters: list[_Memo] = []
        self._scalar: list[tuple[int, _Memo]] = []
        self._normal: list[tuple[Any, int, _Memo]] = []
        self.terms: list[tuple[str, int, _Memo, Any]] = []
        self._refused: Mask = np.zeros(0, dtype=np.bool_)
        self._static_total: Ints = np.zeros(0, dtype=np.int64)
        self.rank: Ints = np.zeros(0, dtype=np.int64)
        self.feasible = 0
        self.weight = 0

    def refresh(self, memos: Memos, member: Member, view: View) -> None:
        table = self._table
        if self._generation != table.generation or self._always_rebuild or self._is_stale(member):
            self._build(memos, member, view)
        elif self._seen != len(table.changes):
            trace = _changed(table, self._seen)
            for memo in self._live:
                memo.refresh(table)
                self._always_rebuild |= memo.void
            if len(trace) <= _FEW_ROWS:
                for row in trace:
                    self._sum_row(row)
            else:
                self._sum_all()
        self._seen = len(table.changes)

    def _is_stale(self, member: Member) -> bool:
        try:
            for plugin, stamp in self._stamps:
                if plugin.stamp(member, self._table) != stamp:
                    return True
        except Exception:
            return True
        return False

    def _build(self, memos: Memos, member: Member, view: View) -> None:
        table, profile = self._table, self.profile
        self._generation = table.generation
        self._always_rebuild = False
        self._stamps = []
        self._filters, self._scalar, self._normal, self.terms = [], [], [], []
        self._refused = np.zeros(len(table.names), dtype=np.bool_)
        self._static_total = np.zeros(len(table.names), dtype=np.int64)
        self.weight = 0
        for plugin in profile.filters:
            key = key_of(plugin, member)
            if key == NO_OPINION:
                continue
            memo, reads = memos.of("filter", plugin, key, member, view), reads_of(plugin)
            memo.refresh(table)
            self._note(plugin, memo, member)
            if reads == "static":
                if memo.array is not None:
                    self._refused |= memo.array
            elif memo.array is not None or reads == "usage":
                # A plugin that reads the cluster and has no opinion is skipped until its stamp changes.
                self._filters.append(memo)
        for weighted in profile.scores:
            key = key_of(weighted.plugin, member)
            if key == NO_OPINION:
                continue
            memo = memos.of("score", weighted.plugin, key, member, view)
            memo.refresh(table)
            self._note(weighted.plugin, memo, member)
            if memo.array is None:
                continue
            self.weight += weighted.weight
            if hasattr(weighted.plugin, "normalize"):
                self._normal.append((weighted.plugin, weighted.weight, memo))
                self.terms.append((weighted.plugin.name, weighted.weight, memo, weighted.plugin))
                continue
            self.terms.append((weighted.plugin.name, weighted.weight, memo, None))
            if reads_of(weighted.plugin) == "static":
                self._static_total += memo.array * weighted.weight
            else:
                self._scalar.append((weighted.weight, memo))
        scores = (memo for _, memo in self._scalar), (memo for _, _, memo in self._normal)
        self._live = [*self._filters, *scores[0], *scores[1]]
        self._sum_all()

    def _note(self, plugin: Any, memo: _Memo, member: Member) -> None:
        if memo.void:
            self._always_rebuild = True
        elif reads_of(plugin) == "cluster" and all(plugin is not noted for noted, _ in self._stamps):
            stamp = stamp_of(plugin, member, self._table)
            if stamp is None:
                self._always_rebuild = True
            else:
                self._stamps.append((plugin, stamp))

    def _sum_all(self) -> None:
        refused = self._refused.copy()
        for memo in self._filters:
            if memo.array is not None:
                refused |= memo.array
        total = self._static_total.copy()
        for weight, memo in self._scalar:
            total += memo.array * weight
        np.putmask(total, refused, -1)
        self.rank = total
        self.feasible = len(total) - int(np.count_nonzero(refused))

    def _sum_row(self, row: int) -> None:
        total = -1
        if not self._refused.item(row):
            for memo in self._filters:
                if memo.array is not None and memo.array.item(row):
                    break
            else:
                total = self._static_total.item(row)
                for weight, memo in self._scalar:
                    total += memo.array.item(row) * weight
        self.feasible += (total >= 0) - (self.rank.item(row) >= 0)
        self.rank[row] = total

    def order(self) -> Ints:
        """The final score per row, normalised scores included; -1 where infeasible."""
        return self._order(self._normalized())

    def _order(self, normalized: dict[str, Ints]) -> Ints:
        if not normalized:
            return self.rank
        feasible = self.rank >= 0
        total = self.rank.copy()
        for plugin, weight, _ in self._normal:
            total[feasible] += normalized[plugin.name][feasible] * weight
        return total

    @property
    def only_fit_reads_usage(self) -> bool:
        """Whether no filter but `fit` depends on usage."""
        return not self._always_rebuild and len(self._filters) <= 1

    def static_feasible(self) -> Mask:
        """Nodes that filters independent of usage allow."""
        found: Mask = ~self._refused
        return found

    def best(self, within: Mask | None = None) -> int:
        """The best row, ties to the first name; -1 if there is none."""
        if not self.feasible:
            return -1
        order = self.order() if within is None else np.where(within, self.order(), -1)
        row = int(order.argmax())
        return row if order.item(row) >= 0 else -1

    def decide(self, within: Mask | None = None, *, runners_up: int = 2) -> tuple[int, Decision] | None:
        """The best row, with scores and runners-up."""
        feasible = self.feasible
        if not feasible:
            return None
        normalized = self._normalized()
        order = self._order(normalized)
        if within is not None:
            order = np.where(within, order, -1)
            feasible = int(np.count_nonzero(order >= 0))
            if not feasible:
                return None
        best: list[tuple[int, int]] = []
        for _ in range(min(1 + runners_up, feasible)):
            row = int(order.argmax())
            best.append((row, order.item(row)))
            order[row] = -1  # to find the next best; restored below
        for row, value in best:
            order[row] = value
        chosen, *others = [self._candidate(row, value, normalized) for row, value in best]
        decision = Decision(
            chosen=chosen, runners_up=tuple(others), feasible=feasible, nodes=len(order), profile=self.profile.name
        )
        return best[0][0], decision

    def candidate(self, row: int) -> Candidate | None:
        """One node with its score terms; None if infeasible."""
        normalized = self._normalized()
        total = self._order(normalized).item(row)
        return self._candidate(row, total, normalized) if total >= 0 else None

    def _normalized(self) -> dict[str, Ints]:
        if not self._normal or not self.feasible:
            return {}
        feasible = self.rank >= 0
        return {plugin.name: self.runner.normalize(plugin, memo.array, feasible) for plugin, _, memo in self._normal}

    def _candidate(self, row: int, total: int, normalized: dict[str, Ints]) -> Candidate:
        terms = []
        for name, weight, memo, normalizer in self.terms:
            array = memo.array if normalizer is None else normalized[name]
            terms.append(ScoreTerm(name, array.item(row), weight))
        return Candidate(self._table.names[row], total // self.weight if self.weight else 0, tuple(terms))


def stamp_of(plugin: Any, member: Member, table: Table) -> Hashable:
    make = getattr(plugin, "stamp", None)
    try:
        return None if make is None else make(member, table)
    except Exception:
        return None


class Memos:
    """Every plugin's answers by (plugin, point, key); least recently used are dropped."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._kept: OrderedDict[Hashable, _Memo] = OrderedDict()

    def of(
        self, point: Literal["filter", "score"], plugin: Any, plugin_key: Hashable, member: Member, view: View
    ) -> _Memo:
        """`plugin_key`: the plugin's key of this member."""
        reads, key = reads_of(plugin), (id(plugin), point, plugin_key)
        if reads != "cluster":
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        runner = self._runner
        many, one = (
            (runner.refused, runner.refused_by_one) if point == "filter" else (runner.score, runner.score_of_one)
        )
        scalar = partial(one, plugin, member, view) if getattr(plugin, "scalar", False) else None
        memo = _Memo(runner, lambda nodes: many(plugin, member, nodes, view), live=reads == "usage", scalar=scalar)
        if reads != "cluster":
            self._kept[key] = memo
            if len(self._kept) > _MEMOS_KEPT:
                self._kept.popitem(last=False)
        return memo


class Rankings:
    """The rankings of all shapes in use; least recently used are dropped."""

    def __init__(self, table: Table, runner: Runner) -> None:
        self._table = table
        self._runner = runner
        self._memos = Memos(runner)
        self._kept: OrderedDict[Hashable, Ranking] = OrderedDict()

    def of(self, profile: Profile, member: Member, shape: Hashable, view: View) -> Ranking:
        ranking = self._kept.get(shape)
        if ranking is None:
            ranking = self._kept[shape] = Ranking(self._table, profile, self._runner)
            if len(self._kept) > _RANKINGS_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(shape)
        ranking.refresh(self._memos, member, view)
        return ranking
