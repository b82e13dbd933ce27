"""Who lives where: the members placed on the nodes, counted by topology domain for every rule that asks about them.

Members that no rule can tell apart are one `Kind`. A count for a rule is made once from all residents and then kept
up with each placing and release, so that asking again costs one look-up per node and no walk over members.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hodei.engine.view import Member
from hodei.model.node import Node
from hodei.model.rules import HostPort, JobTerm, Labels

if TYPE_CHECKING:
    from hodei.engine.nodes import Table

Ints = NDArray[np.int64]
_LOCATION = ("region", "zone", "datacenter", "rack")
NO_DOMAIN = -1


def domain_of(node: Node, topology: str) -> str | None:
    """The value of a topology key on a node: a label, or one of the words region, zone, datacenter, rack, host."""
    label = node.labels.get(topology)
    if label is not None:
        return label
    if topology == "host":
        return node.name
    if topology in _LOCATION:
        found: str = getattr(node.location, topology)
        return found or None
    return None


class Kind:
    """All that rules of others can see of a member, and the rules that it carries itself."""

    __slots__ = ("anti", "attract", "labels", "ports", "project", "repel", "required", "watched")

    def __init__(self, member: Member) -> None:
        task, job = member.task, member.job
        self.project, self.labels = job.project, job.labels
        self.required = task.job_affinity.required
        self.anti = task.job_anti_affinity.required
        self.attract = task.job_affinity.preferred
        self.repel = task.job_anti_affinity.preferred
        self.ports: tuple[HostPort, ...] = task.ports
        self.watched: list[tuple[DomainCount, int]] | None = None

    @property
    def has_rules(self) -> bool:
        return bool(self.required or self.anti or self.attract or self.repel)


def kind_key(member: Member) -> Hashable:
    task, job = member.task, member.job
    labels = tuple(sorted(job.labels.items())) if job.labels else ()
    near, away = task.job_affinity, task.job_anti_affinity
    if not (task.ports or near.required or near.preferred or away.required or away.preferred):
        return (job.project, labels)  # the most usual kind, and this is asked for every placing
    return (job.project, labels, near, away, task.ports)


class DomainCount:
    """How many residents for which `counts` says so are in each domain of a topology key. `version` counts the changes."""

    __slots__ = ("_ids", "by_domain", "counts", "domains", "generation", "topology", "total", "version")

    def __init__(self, topology: str, counts: Callable[[Kind], int]) -> None:
        self.topology = topology
        self.counts = counts
        self.generation = -1
        self.version = 0
        self.total = 0
        self._ids: NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self.by_domain: Ints = np.zeros(0, dtype=np.int64)
        self.domains: tuple[str | None, ...] = ()

    def rebuild(self, residents: Residents, table: Table) -> None:
        column = table.interned(("topology", self.topology), lambda node: domain_of(node, self.topology))
        self._ids, self.domains = column.ids, tuple(column.values)
        self.by_domain = np.zeros(len(self.domains), dtype=np.int64)
        self.total = 0
        self.generation = table.generation
        self.version += 1
        for row, held in enumerate(table.holds):
            for kind, number in held.kinds.items():
                weight = self.counts(kind)
                if weight:
                    self.add(row, weight * number)

    def add(self, row: int, amount: int) -> None:
        """Residents on nodes without the topology key belong to no domain: they are not counted."""
        domain = self._ids[row]
        self.version += 1
        if self.domains[domain] is not None:
            self.by_domain[domain] += amount
            self.total += amount

    def per_node(self, rows: slice | NDArray[np.intp]) -> Ints:
        """The count of each node's own domain; NO_DOMAIN where a node has none."""
        values = self.by_domain.copy()
        for number, domain in enumerate(self.domains):
            if domain is None:
                values[number] = NO_DOMAIN
        found: Ints = values[self._ids[rows]]
        return found


class Residents:
    """The kinds that live on the nodes of a table, and the counts that rules have asked for."""

    def __init__(self) -> None:
        self.projects: dict[str, Labels] = {}
        self.rules_version = 0
        self._kinds: dict[Hashable, Kind] = {}
        self._carriers: dict[Kind, int] = {}
        self._counts: dict[Hashable, DomainCount] = {}

    def kind_of(self, member: Member, table: Table) -> Kind:
        key = kind_key(member)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) > 100_000:
                self._forget_kinds(table)
            kind = self._kinds[key] = Kind(member)
        return kind

    def _forget_kinds(self, table: Table) -> None:
        """Let go of the kinds that live nowhere any more."""
        living = {kind for held in table.holds for kind in held.kinds}
        self._kinds = {key: kind for key, kind in self._kinds.items() if kind in living}

    def moved(self, kind: Kind, row: int, by: int, table: Table) -> None:
        """A member of `kind` came to (+1) or left (-1) a row."""
        if kind.has_rules or kind.ports:
            self._carried(kind, by)
        if not self._counts:
            return
        if kind.watched is None:
            kind.watched = [(count, weight) for count in self._counts.values() if (weight := count.counts(kind))]
        for count, weight in kind.watched:
            if count.generation == table.generation:
                count.add(row, by * weight)

    def left(self, kind: Kind, number: int) -> None:
        """Members that went with their node; counts are made anew in the new generation anyway."""
        if kind.has_rules or kind.ports:
            self._carried(kind, -number)

    def _carried(self, kind: Kind, by: int) -> None:
        self.rules_version += 1
        number = self._carriers.get(kind, 0) + by
        if number:
            self._carriers[kind] = number
        else:
            self._carriers.pop(kind, None)

    def carriers(self) -> Mapping[Kind, int]:
        """The kinds with rules (or ports) of their own that live somewhere, and how many of each."""
        return self._carriers

    def count(self, key: Hashable, topology: str, counts: Callable[[Kind], int], table: Table) -> DomainCount:
        """The count of that name, made if need be and up to date. Equal keys must mean equal `counts`."""
        found = self._counts.get((key, topology))
        if found is None:
            found = self._counts[key, topology] = DomainCount(topology, counts)
            for kind in self._kinds.values():
                if kind.watched is not None and (weight := found.counts(kind)):
                    kind.watched.append((found, weight))
        if found.generation != table.generation:
            found.rebuild(self, table)
        return found

    def matching(self, term: JobTerm, owner: str, table: Table) -> DomainCount:
        """How many members that `term` (of a job in project `owner`) means live in each domain."""
        projects = self.projects
        return self.count(
            ("term", term, owner), term.topology,
            lambda kind: int(term.matches(owner, kind.labels, kind.project, projects)), table,
        )  # fmt: skip
