"""Job affinity and anti-affinity, in both directions: the member's rules about placed jobs, and theirs about it.

Semantics are those of Kubernetes' inter-pod affinity. Counts come from `engine.topology_index`, which updates them with
each placement, so that evaluating again costs one lookup per node.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from hodei.engine.nodes import Ints, Mask, Nodes, Table
from hodei.engine.plan import EXISTING_ANTI_AFFINITY
from hodei.engine.points import MAX_SCORE, Reads, Refusals, Trigger
from hodei.engine.topology_index import DomainCount, Kind, Rule, TopologyIndex
from hodei.engine.view import Member, View
from hodei.model.affinity import JobTerm
from hodei.model.job import Reason, TaskSpec


class JobAffinityPlugin:
    """`hard_weight`: how strongly the required affinity of placed members attracts others (0: not at all)."""

    name = "job_affinity"
    reads: Reads = "cluster"
    needs_residents = True
    requeue_on: tuple[Trigger, ...] = ("run_placed", "run_ended", "node_joined", "node_changed")

    def __init__(self, *, hard_weight: int = 1) -> None:
        if not 0 <= hard_weight <= 100:
            raise ValueError("hard_weight must be from 0 to 100")
        self.hard_weight = hard_weight

    def key(self, member: Member) -> Hashable:
        task, job = member.task, member.job
        if not _has_rules(task):
            return None  # rules of placed members are covered by the stamp
        labels = tuple(sorted(member.labels.items()))
        return (job.project, labels, task.job_affinity, task.job_anti_affinity)

    def stamp(self, member: Member, table: Table) -> Hashable:
        if table.topology_index.no_terms and not _has_rules(member.task):
            return 0
        counts = [
            *self._affinity_counts(member, table),
            *(count for _, count in self._anti_affinity_counts(member, table)),
            *(count for _, count in self._existing_anti_affinity(member, table)),
            *(count for count, _ in self._weighted_counts(member, table)),
        ]
        return tuple([count.version for count in counts])

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        table, rows = nodes.table, nodes.rows
        out: list[tuple[Mask, Reason]] = []
        required = member.task.job_affinity.required
        counts = self._affinity_counts(member, table)
        first = not any(count.total for count in counts) and _selects_itself(required, member, table.topology_index)
        for term, count in zip(required, counts, strict=True):
            # The first member of a self-selecting group may use any domain.
            refused = count.per_node(rows) < (0 if first else 1)
            out.append((refused, Reason(self.name, "JOB_AFFINITY", _text("job affinity", term, "not met"))))
        for term, count in self._anti_affinity_counts(member, table):
            text = _text("job anti-affinity", term, "not met")
            out.append((count.per_node(rows) > 0, Reason(self.name, "JOB_ANTI_AFFINITY", text, evictable=True)))
        for (term, _), count in self._existing_anti_affinity(member, table):
            text = _text("anti-affinity", term, "of jobs already there")
            out.append((count.per_node(rows) > 0, Reason(self.name, EXISTING_ANTI_AFFINITY, text, evictable=True)))
        return out

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        raw = nodes.zeros()
        for count, weight in self._weighted_counts(member, nodes.table):
            raw = raw + count.per_node(nodes.rows, absent=0) * weight
        return raw if raw.any() else None

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        left = raw[feasible]
        low, high = (int(left.min()), int(left.max())) if left.size else (0, 0)
        return (raw - low) * MAX_SCORE // (high - low) if high > low else np.zeros_like(raw)

    def _affinity_counts(self, member: Member, table: Table) -> list[DomainCount]:
        """For each required term: placed members that meet all terms, by the domains of this one."""
        required, owner = member.task.job_affinity.required, member.job.project
        topology_index = table.topology_index
        projects = topology_index.projects

        def meets_all(kind: Kind) -> int:
            return int(all(term.matches(owner, kind.labels, kind.project, projects) for term in required))

        return [topology_index.count(("all", required, owner), term.topology, meets_all, table) for term in required]

    def _anti_affinity_counts(self, member: Member, table: Table) -> list[tuple[JobTerm, DomainCount]]:
        owner, topology_index = member.job.project, table.topology_index
        return [(term, topology_index.matching(term, owner, table)) for term in member.task.job_anti_affinity.required]

    def _existing_anti_affinity(self, member: Member, table: Table) -> list[tuple[Rule, DomainCount]]:
        """Anti-affinity rules of placed members that select this member, and where their owners are."""
        topology_index = table.topology_index
        if not topology_index.anti_affinity_terms:
            return []
        return [
            (rule, _carriers(rule, table))
            for rule in topology_index.anti_affinity_terms.meaning(member, topology_index.projects)
        ]

    def _weighted_counts(self, member: Member, table: Table) -> list[tuple[DomainCount, int]]:
        """What makes a domain better or worse, with its weight: preferences of the member and of placed members."""
        task, owner, topology_index = member.task, member.job.project, table.topology_index
        out = [
            (topology_index.matching(preference.term, owner, table), preference.weight)
            for preference in task.job_affinity.preferred
        ]
        out += [
            (topology_index.matching(preference.term, owner, table), -preference.weight)
            for preference in task.job_anti_affinity.preferred
        ]
        if topology_index.preference_terms:
            for rule in topology_index.preference_terms.meaning(member, topology_index.projects):
                out.append((_preference_count(rule, self.hard_weight, table), 1))
        return out


def _has_rules(task: TaskSpec) -> bool:
    near, away = task.job_affinity, task.job_anti_affinity
    return bool(near.required or away.required or near.preferred or away.preferred)


def _selects_itself(terms: tuple[JobTerm, ...], member: Member, topology_index: TopologyIndex) -> bool:
    """Whether a member meets all of its own terms."""
    job, labels = member.job, member.labels
    return all(term.matches(job.project, labels, job.project, topology_index.projects) for term in terms)


def _carriers(rule: Rule, table: Table) -> DomainCount:
    """Where members with this anti-affinity are placed."""
    term, owner = rule

    def carries(kind: Kind) -> int:
        return int(kind.project == owner and term in kind.anti)

    return table.topology_index.count(("anti", term, owner), term.topology, carries, table)


def _preference_count(rule: Rule, hard_weight: int, table: Table) -> DomainCount:
    """How strongly members with this term attract (below 0: repel) the members it selects."""
    term, owner = rule

    def weight_of(kind: Kind) -> int:
        if kind.project != owner:
            return 0
        return (
            sum(preference.weight for preference in kind.attract if preference.term == term)
            - sum(preference.weight for preference in kind.repel if preference.term == term)
            + hard_weight * kind.required.count(term)
        )

    return table.topology_index.count(("weight_of", term, owner, hard_weight), term.topology, weight_of, table)


def _text(what: str, term: JobTerm, how: str) -> str:
    return f"{what} {str(term)[:400]} {how}"
