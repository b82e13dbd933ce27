"""Reference implementation of job affinity, spread and port rules: node by node, member by member, without caches."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

from hodei.engine.topology_index import domain_of
from hodei.engine.view import Member
from hodei.model.affinity import JobTerm, SpreadRule, all_match
from hodei.model.node import Node

Labels = Mapping[str, str]


class Cluster(Struct):
    nodes: list[Node]
    placed: list[tuple[Node, Member]]
    projects: dict[str, Labels]


def selects(term: JobTerm, owner: Member, other: Member, cluster: Cluster) -> bool:
    return term.matches(owner.job.project, other.job.labels, other.job.project, cluster.projects)


def together(a: Node, b: Node, topology: str) -> bool:
    return domain_of(a, topology) is not None and domain_of(a, topology) == domain_of(b, topology)


def refused_by_affinity(member: Member, node: Node, cluster: Cluster) -> bool:
    terms = member.task.job_affinity.required
    if any(domain_of(node, term.topology) is None for term in terms):
        return True
    matching = [home for home, other in cluster.placed if all(selects(term, member, other, cluster) for term in terms)]
    if all(any(together(node, home, term.topology) for home in matching) for term in terms):
        return False
    none_placed = not any(domain_of(home, term.topology) is not None for home in matching for term in terms)
    return not (none_placed and all(selects(term, member, member, cluster) for term in terms))


def refused_by_anti_affinity(member: Member, node: Node, cluster: Cluster) -> bool:
    return any(
        selects(term, member, other, cluster) and together(node, home, term.topology)
        for term in member.task.job_anti_affinity.required
        for home, other in cluster.placed
    )


def refused_by_residents(member: Member, node: Node, cluster: Cluster) -> bool:
    return any(
        selects(term, other, member, cluster) and together(node, home, term.topology)
        for home, other in cluster.placed
        for term in other.task.job_anti_affinity.required
    )


def attraction(member: Member, node: Node, cluster: Cluster, hard_weight: int) -> int:
    total = 0
    for home, other in cluster.placed:
        for sign, preferences in (
            (1, member.task.job_affinity.preferred),
            (-1, member.task.job_anti_affinity.preferred),
        ):
            total += sum(
                sign * preference.weight
                for preference in preferences
                if selects(preference.term, member, other, cluster) and together(node, home, preference.term.topology)
            )
        for sign, preferences in ((1, other.task.job_affinity.preferred), (-1, other.task.job_anti_affinity.preferred)):
            total += sum(
                sign * preference.weight
                for preference in preferences
                if selects(preference.term, other, member, cluster) and together(node, home, preference.term.topology)
            )
        total += hard_weight * sum(
            selects(term, other, member, cluster) and together(node, home, term.topology)
            for term in other.task.job_affinity.required
        )
    return total


def counts(rule: SpreadRule, member: Member, node: Node) -> bool:
    task = member.task
    if rule.honour_affinity:
        if any(node.labels.get(key) != value for key, value in task.node_selector.items()):
            return False
        terms = task.affinity.required
        if terms and not any(term.labels and all_match(term.labels, node.labels) for term in terms):
            return False
    hard = [taint for taint in node.taints if taint.effect != "PreferNoSchedule"]
    return not rule.honour_taints or all(any(t.tolerates(taint) for t in task.tolerations) for taint in hard)


def matching_on(rule: SpreadRule, member: Member, node: Node, cluster: Cluster) -> int:
    if not rule.selector:
        return 0
    return sum(
        home.name == node.name
        and other.job.project == member.job.project
        and all_match(rule.selector, other.job.labels)
        for home, other in cluster.placed
    )


def by_domain(rule: SpreadRule, rules: list[SpreadRule], member: Member, cluster: Cluster) -> dict[str, int]:
    out: dict[str, int] = {}
    for node in cluster.nodes:
        if all(domain_of(node, one.topology) is not None for one in rules) and counts(rule, member, node):
            domain = str(domain_of(node, rule.topology))
            out[domain] = out.get(domain, 0) + matching_on(rule, member, node, cluster)
    return out


def refused_by_spread(member: Member, node: Node, cluster: Cluster) -> bool:
    rules = [rule for rule in member.task.spread if rule.hard]
    for rule in rules:
        domain = domain_of(node, rule.topology)
        if domain is None:
            return True
        held = by_domain(rule, rules, member, cluster)
        least = min(held.values()) if len(held) >= rule.min_domains else 0
        own = rule.selector is not None and all_match(rule.selector, member.job.labels)
        if held.get(domain, 0) + own - least > rule.max_skew:
            return True
    return False


def spread_points(member: Member, remaining: list[Node], cluster: Cluster) -> dict[str, int]:
    """0 to 10,000 for each remaining node."""
    rules = [rule for rule in member.task.spread if not rule.hard]
    part = [node for node in remaining if all(domain_of(node, rule.topology) is not None for rule in rules)]
    weighted: dict[str, int] = {}
    for node in part:
        points = 0.0
        for rule in rules:
            if rule.topology in ("host", "kubernetes.io/hostname"):
                size, held = len(part), matching_on(rule, member, node, cluster)
            else:
                size = len({domain_of(other, rule.topology) for other in part})
                held = by_domain(rule, rules, member, cluster).get(str(domain_of(node, rule.topology)), 0)
            points += held * math.log(size + 2) + (rule.max_skew - 1)
        weighted[node.name] = math.floor(points + 0.5)
    out = {node.name: 0 for node in remaining}
    if weighted:
        low, high = min(weighted.values()), max(weighted.values())
        out |= {name: 10_000 * (high + low - value) // high if high else 10_000 for name, value in weighted.items()}
    return out


def port_taken(member: Member, node: Node, cluster: Cluster) -> bool:
    return any(
        home.name == node.name and wanted.clashes(held)
        for home, other in cluster.placed
        for held in other.task.ports
        for wanted in member.task.ports
    )
