"""Spread: keeps the members that a rule selects evenly distributed over the domains of a topology key.

Semantics are those of Kubernetes' topology spread constraints: hard rules refuse, soft ones score with its formula.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from hodei.engine.nodes import Ints, Mask, Nodes, Table
from hodei.engine.points import MAX_SCORE, Reads, Refusals, Trigger
from hodei.engine.topology_index import EACH_NODE, DomainCount, Kind, domains
from hodei.engine.view import Member, View
from hodei.model.affinity import Requirement, SpreadRule, all_match
from hodei.model.job import Reason
from hodei.plugins.affinity import term_mask
from hodei.plugins.taints import hard_taints, is_tolerated

# Topologies in which every node is its own domain.
_HOST = ("kubernetes.io/hostname", "host")
# The columns of a raw score, per rule: the node's domain (-1: excluded, -2: without a domain of this rule), matching
# members in that domain, the rule's max skew, and whether every node is a domain.
_EXCLUDED, _NO_DOMAIN = -1, -2
_COLUMNS = 4


class Spread:
    name = "spread"
    reads: Reads = "cluster"
    requeue_on: tuple[Trigger, ...] = ("run_placed", "run_ended", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        task, job = member.task, member.job
        if not task.spread:
            return None
        labels, selector = tuple(sorted(member.labels.items())), tuple(sorted(task.node_selector.items()))
        return (job.project, labels, task.spread, selector, task.affinity, task.tolerations)

    def stamp(self, member: Member, table: Table) -> Hashable:
        """For hard rules the full domains, for soft rules the versions of the counts."""
        rules = member.task.spread
        if not rules:
            return 0
        hard = _hard(rules)
        out: list[Hashable] = [_full_domains(rule, hard, member, table).tobytes() for rule in hard]
        out += [_count_by_node(rule.selector, member.job.project, table).version for rule in rules if not rule.hard]
        return tuple(out)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        rules = _hard(member.task.spread)
        if not rules:
            return ()
        table, rows = nodes.table, nodes.rows
        out: list[tuple[Mask, Reason]] = []
        for rule in rules:
            column = _Column(rule, table)
            full = column.present & _full_domains(rule, rules, member, table)[column.ids]
            skew_text = f"spread over {rule.topology} with a skew of at most {rule.max_skew} not met"
            missing = f"no {rule.topology} to spread over"
            out.append(((~column.present)[rows], Reason(self.name, "SPREAD", missing)))
            out.append((full[rows], Reason(self.name, "SPREAD", skew_text, evictable=True)))
        return out

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        """Raw columns for `normalize`: `_COLUMNS` per soft rule."""
        rules = tuple([rule for rule in member.task.spread if not rule.hard])
        if not rules:
            return None
        table = nodes.table
        columns = [_Column(rule, table) for rule in rules]
        everywhere = _all_present(columns)
        raw = np.zeros((len(table.names), _COLUMNS * len(rules)), dtype=np.int64)
        for i, (rule, column) in enumerate(zip(rules, columns, strict=True)):
            if rule.topology in _HOST:
                held = _count_by_node(rule.selector, member.job.project, table).per_node(slice(None))
            else:
                held = _by_domain(rule, rules, member, table).by_domain[column.ids]
            start = i * _COLUMNS
            raw[:, start] = np.where(everywhere, np.where(column.present, column.ids, _NO_DOMAIN), _EXCLUDED)
            raw[:, start + 1] = np.where(column.present, held, 0)
            raw[:, start + 2] = np.where(column.present, rule.max_skew, 1)
            raw[:, start + 3] = rule.topology in _HOST
        found: Ints = raw[nodes.rows]
        return found

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        part = feasible & (raw[:, 0] != _EXCLUDED)
        points = np.zeros(len(raw), dtype=np.float64)
        for start in range(0, raw.shape[1], _COLUMNS):
            ids, held, skew, host = raw[:, start : start + _COLUMNS].T
            size = np.count_nonzero(part) if host.any() else len(np.unique(ids[part & (ids != _NO_DOMAIN)]))
            # With more domains, one member in one of them matters less.
            points += held * math.log(size + 2) + (skew - 1)
        skew_text = np.floor(points + 0.5).astype(np.int64)
        out = np.zeros(len(raw), dtype=np.int64)
        if part.any():
            low, high = int(skew_text[part].min()), int(skew_text[part].max())
            out[part] = MAX_SCORE * (high + low - skew_text[part]) // high if high else MAX_SCORE
        return out


class _Column:
    """The domains of a rule's topology key over all nodes."""

    def __init__(self, rule: SpreadRule, table: Table) -> None:
        self.rule = rule
        self.ids: NDArray[np.intp]
        self.ids, names = domains(rule.topology, table)
        self.present: Mask = self.ids != names.index(None) if None in names else np.ones(len(self.ids), dtype=np.bool_)


def _all_present(columns: Sequence[_Column]) -> Mask:
    """Nodes that lack one of the keys are excluded from all rules, except for keyless rules."""
    everywhere = np.ones(len(columns[0].ids), dtype=np.bool_)
    for column in columns:
        if not column.rule.keyless:
            everywhere &= column.present
    return everywhere


def _included(rule: SpreadRule, member: Member, table: Table) -> Mask:
    """The nodes that count, by the rule's settings for affinity and taints."""
    nodes, task = table.view(), member.task
    counted = ~nodes.none()
    if rule.honour_affinity:
        for label, value in task.node_selector.items():
            counted &= nodes.matching(Requirement(label, "In", (value,)))
        if task.affinity.required:
            counted &= np.logical_or.reduce([term_mask(term, nodes) for term in task.affinity.required])
    if rule.honour_taints:
        taints = nodes.by("taints", hard_taints)
        counted &= taints.where(lambda held: all(is_tolerated(taint, task.tolerations) for taint in held))
    return counted


def _hard(rules: tuple[SpreadRule, ...]) -> tuple[SpreadRule, ...]:
    return tuple([rule for rule in rules if rule.hard])


def _full_domains(rule: SpreadRule, rules: tuple[SpreadRule, ...], member: Member, table: Table) -> Mask:
    """The domains of one of the hard `rules` where this member would exceed the skew."""
    count = _by_domain(rule, rules, member, table)
    held, there = count.by_domain, count.there
    # The minimum is 0 while there are fewer domains than `min_domains`.
    enough = np.count_nonzero(there) >= max(rule.min_domains, 1)
    least = held[there].min() if enough else 0
    own = int(rule.selector is not None and all_match(rule.selector, member.labels))
    full: Mask = held + own - least > rule.max_skew
    return full


def _by_domain(rule: SpreadRule, rules: tuple[SpreadRule, ...], member: Member, table: Table) -> DomainCount:
    """Matching members per domain, on nodes with the keys of all `rules` that affinity and taints let count."""
    project, task = member.job.project, member.task

    def means(kind: Kind) -> int:
        return _selects(rule.selector, project, kind)

    def among(table: Table) -> Mask:
        return _all_present([_Column(other, table) for other in rules]) & _included(rule, member, table)

    where = (tuple(sorted(task.node_selector.items())), task.affinity.required) if rule.honour_affinity else None
    tolerated_taints = task.tolerations if rule.honour_taints else None
    topologies = tuple([(other.topology, other.keyless) for other in rules])
    key = ("spread", rule.selector, project, topologies, where, tolerated_taints)
    return table.topology_index.count(key, rule.topology, means, table, among)


def _count_by_node(selector: tuple[Requirement, ...] | None, project: str, table: Table) -> DomainCount:
    """Matching members per node."""

    def means(kind: Kind) -> int:
        return _selects(selector, project, kind)

    return table.topology_index.count(("spread", selector, project), EACH_NODE, means, table)


def _selects(selector: tuple[Requirement, ...] | None, project: str, kind: Kind) -> int:
    """An empty selector matches none, and terminating members do not count, as in Kubernetes."""
    return int(
        bool(selector) and kind.project == project and not kind.stopping and all_match(selector or (), kind.labels)
    )
