"""Spread: keeps the members that a rule means evenly over the domains of a topology key.

Semantics are those of Kubernetes' topology spread constraints: hard rules refuse, soft ones score with its formula.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from hodei.engine.nodes import Ints, Mask, Nodes, Table
from hodei.engine.points import MAX_SCORE, Reads, Refusals, Trigger
from hodei.engine.residents import EACH_NODE, DomainCount, Kind, domains
from hodei.engine.view import Member, View
from hodei.model.decision import Reason
from hodei.model.rules import SpreadRule
from hodei.model.selector import Requirement, all_match
from hodei.plugins.affinity import term_mask
from hodei.plugins.taints import hard_taints, tolerated

# Topologies in which every node is a domain: each node is judged by what lives on it alone.
_HOST = ("kubernetes.io/hostname", "host")
# The columns of a raw score, for each rule: the node's domain (-1: the node does not take part), how many matching
# members that domain holds, the rule's max skew, and whether every node is a domain.
_COLUMNS = 4


class Spread:
    name = "spread"
    reads: Reads = "cluster"
    cured_by: tuple[Trigger, ...] = ("run_placed", "run_ended", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        task, job = member.task, member.job
        if not task.spread:
            return None
        labels, selector = tuple(sorted(job.labels.items())), tuple(sorted(task.node_selector.items()))
        return (job.project, labels, task.spread, selector, task.affinity, task.tolerations)

    def stamp(self, member: Member, table: Table) -> Hashable:
        rules = member.task.spread
        if not rules:
            return 0
        return tuple([_living(rule.selector, member.job.project, table).version for rule in rules])

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        rules = [rule for rule in member.task.spread if rule.hard]
        if not rules:
            return ()
        table, rows = nodes.table, nodes.rows
        columns = [_Column(rule, table) for rule in rules]
        everywhere = _all_present(columns)
        out: list[tuple[Mask, Reason]] = []
        for rule, column in zip(rules, columns, strict=True):
            counted = everywhere & _included(rule, member, table)
            held = column.held(counted, member.job.project, table)
            own = int(rule.selector is not None and all_match(rule.selector, member.job.labels))
            crowded = column.present & (held[column.ids] + own - column.least(held, counted) > rule.max_skew)
            crowd = f"spread over {rule.topology} with a skew of at most {rule.max_skew} not met"
            missing = f"no {rule.topology} to spread over"
            out.append(((~column.present)[rows], Reason(self.name, "SPREAD", missing)))
            out.append((crowded[rows], Reason(self.name, "SPREAD", crowd, evictable=True)))
        return out

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        """Not yet points, but what `normalize` makes them of: `_COLUMNS` for each soft rule."""
        rules = [rule for rule in member.task.spread if not rule.hard]
        if not rules:
            return None
        table = nodes.table
        columns = [_Column(rule, table) for rule in rules]
        everywhere = _all_present(columns)
        raw = np.zeros((len(table.names), _COLUMNS * len(rules)), dtype=np.int64)
        for i, (rule, column) in enumerate(zip(rules, columns, strict=True)):
            if rule.topology in _HOST:
                held = _living(rule.selector, member.job.project, table).per_node(slice(None))
            else:
                counted = everywhere & _included(rule, member, table)
                held = column.held(counted, member.job.project, table)[column.ids]
            start = i * _COLUMNS
            raw[:, start] = np.where(everywhere, column.ids, -1)
            raw[:, start + 1] = held
            raw[:, start + 2] = rule.max_skew
            raw[:, start + 3] = rule.topology in _HOST
        found: Ints = raw[nodes.rows]
        return found

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        part = feasible & (raw[:, 0] >= 0)
        points = np.zeros(len(raw), dtype=np.float64)
        for start in range(0, raw.shape[1], _COLUMNS):
            ids, held, skew, host = raw[:, start : start + _COLUMNS].T
            size = np.count_nonzero(part) if host.any() else len(np.unique(ids[part]))
            # The more domains there are, the less one member in one of them says.
            points += held * math.log(size + 2) + (skew - 1)
        crowd = np.floor(points + 0.5).astype(np.int64)
        out = np.zeros(len(raw), dtype=np.int64)
        if part.any():
            low, high = int(crowd[part].min()), int(crowd[part].max())
            out[part] = MAX_SCORE * (high + low - crowd[part]) // high if high else MAX_SCORE
        return out


class _Column:
    """The domains of a rule's topology key over all nodes."""

    def __init__(self, rule: SpreadRule, table: Table) -> None:
        self.rule = rule
        self.ids: NDArray[np.intp]
        self.ids, names = domains(rule.topology, table)
        self.number = len(names)
        self.present: Mask = self.ids != names.index(None) if None in names else np.ones(len(self.ids), dtype=np.bool_)

    def held(self, counted: Mask, project: str, table: Table) -> Ints:
        """How many members that the rule means live in each domain, on the nodes that are counted."""
        living = _living(self.rule.selector, project, table).by_domain
        found = np.bincount(self.ids[counted], weights=living[counted], minlength=self.number)
        return found.astype(np.int64)

    def least(self, held: Ints, counted: Mask) -> int:
        """What the emptiest of the domains holds; none while there are fewer domains than the rule wants."""
        there = np.bincount(self.ids[counted], minlength=self.number) > 0
        return int(held[there].min()) if np.count_nonzero(there) >= max(self.rule.min_domains, 1) else 0


def _all_present(columns: Sequence[_Column]) -> Mask:
    """Nodes that lack one of the keys do not take part in any of the rules."""
    everywhere = columns[0].present
    for column in columns[1:]:
        everywhere = everywhere & column.present
    return everywhere


def _included(rule: SpreadRule, member: Member, table: Table) -> Mask:
    """The nodes that count, by what the rule says of affinity and taints."""
    nodes, task = table.view(), member.task
    counted = ~nodes.none()
    if rule.honour_affinity:
        for label, value in task.node_selector.items():
            counted &= nodes.matching(Requirement(label, "In", (value,)))
        if task.affinity.required:
            counted &= np.logical_or.reduce([term_mask(term, nodes) for term in task.affinity.required])
    if rule.honour_taints:
        taints = nodes.by("taints", hard_taints)
        counted &= taints.where(lambda held: all(tolerated(taint, task.tolerations) for taint in held))
    return counted


def _living(selector: tuple[Requirement, ...] | None, project: str, table: Table) -> DomainCount:
    """How many members that the selector means live on each node. An empty selector means none, as in Kubernetes."""

    def means(kind: Kind) -> int:
        return int(bool(selector) and kind.project == project and all_match(selector or (), kind.labels))

    return table.residents.count(("spread", selector, project), EACH_NODE, means, table)
