"""Placed members counted by topology domain, for affinity, spread, port and volume rules.

Members that no rule distinguishes form one `Kind`. A count is built once from all placed members, then updated with
each placement and release, so that reading it costs one lookup per node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import count as counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hodei.engine.view import Member
from hodei.model.affinity import HostPort, JobTerm, Labels
from hodei.model.node import Node, Volume

if TYPE_CHECKING:
    from hodei.engine.nodes import Table

Ints = NDArray[np.int64]
Rule = tuple[JobTerm, str]
_LOCATION = ("region", "zone", "datacenter", "rack")
NO_DOMAIN = -1
EACH_NODE = ""  # every node is its own domain, whatever its labels
# Rules disappear with their jobs; unused counts are dropped.
_COUNTS_KEPT = 1024
# Unique, so that a rebuilt count differs from the dropped one.
_versions = counter(1)


def domain_of(node: Node, topology: str) -> str | None:
    """A node's domain: the value of a label, or of region, zone, datacenter, rack, host, backend."""
    label = node.labels.get(topology)
    if label is not None:
        return label
    if topology == "host":
        return node.name
    if topology == "backend":
        return node.backend
    if topology in _LOCATION:
        found: str = getattr(node.location, topology)
        return found or None
    return None


class Kind:
    """What rules of other jobs see of a member, and its own rules."""

    __slots__ = ("anti", "attract", "labels", "ports", "project", "repel", "required", "stopping", "volumes", "watched")

    def __init__(self, member: Member) -> None:
        task, job = member.task, member.job
        self.project, self.labels = job.project, member.labels
        self.required = task.job_affinity.required
        self.anti = task.job_anti_affinity.required
        self.attract = task.job_affinity.preferred
        self.repel = task.job_anti_affinity.preferred
        self.ports: tuple[HostPort, ...] = task.ports
        self.volumes: tuple[Volume, ...] = task.volumes
        self.stopping = member.stopping
        self.watched: list[tuple[DomainCount, int]] | None = None

    @property
    def has_rules(self) -> bool:
        return bool(self.required or self.anti or self.attract or self.repel)


def kind_key(member: Member) -> Hashable:
    task, job = member.task, member.job
    labels = tuple(sorted(member.labels.items())) if job.labels or task.labels else ()
    near, away = task.job_affinity, task.job_anti_affinity
    if not (task.ports or near.required or near.preferred or away.required or away.preferred or task.volumes):
        # the most frequent case, evaluated for every placement
        return (job.project, labels, True) if member.stopping else (job.project, labels)
    return (job.project, labels, near, away, task.ports, task.volumes, member.stopping)


class DomainCount:
    """Placed members selected by `counts`, per domain of a topology key. `version` changes with every change.

    `among`: the nodes that count, if not all; depends on node properties only. `there`: domains with nodes that
    count.
    """

    __slots__ = (
        "_absent", "_among", "by_domain", "counts", "domains", "generation", "ids", "there", "topology", "total", "version",
    )  # fmt: skip

    def __init__(
        self, topology: str, counts: Callable[[Kind], int], among: Callable[[Table], NDArray[np.bool_]] | None = None
    ) -> None:
        self.topology = topology
        self.counts = counts
        self._among = among
        self.there: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.generation = -1
        self.version = 0
        self.total = 0
        self._absent = NO_DOMAIN
        self.ids: NDArray[np.intp] = np.zeros(0, dtype=np.intp)
        self.by_domain: Ints = np.zeros(0, dtype=np.int64)
        self.domains: tuple[str | None, ...] = ()

    def rebuild(self, table: Table) -> None:
        self.ids, self.domains = domains(self.topology, table)
        if self._among is not None:
            if None not in self.domains:
                self.domains = (*self.domains, None)
            self.ids = np.where(self._among(table), self.ids, self.domains.index(None))
        self._absent = self.domains.index(None) if None in self.domains else NO_DOMAIN
        self.there = np.bincount(self.ids, minlength=len(self.domains)) > 0
        if self._absent != NO_DOMAIN:
            self.there[self._absent] = False
        self.by_domain = np.zeros(len(self.domains), dtype=np.int64)
        self.total = 0
        self.generation = table.generation
        self.version = next(_versions)
        weights: dict[Kind, int] = {}
        for row, held in enumerate(table.node_usage):
            for kind, number in held.kinds.items():
                weight = weights.get(kind)
                if weight is None:
                    weight = weights[kind] = self.counts(kind)
                if weight:
                    self.add(row, weight * number)

    def add(self, row: int, amount: int) -> None:
        """Members on nodes without the topology key are not counted."""
        domain = self.ids[row]
        if domain != self._absent:
            self.version = next(_versions)
            self.by_domain[domain] += amount
            self.total += amount

    def per_node(self, rows: slice | NDArray[np.intp], absent: int = NO_DOMAIN) -> Ints:
        """The count of each node's domain; `absent` where a node has none."""
        values = self.by_domain
        if self._absent != NO_DOMAIN:
            values = values.copy()
            values[self._absent] = absent
        found: Ints = values[self.ids[rows]]
        return found


def domains(topology: str, table: Table) -> tuple[NDArray[np.intp], tuple[str | None, ...]]:
    """The domain id of each node, and the domain names (None: nodes without the key)."""
    if topology == EACH_NODE:
        return np.arange(len(table.names)), tuple(table.names)
    column = table.interned(("topology", topology), lambda node: domain_of(node, topology))
    return column.ids, tuple(column.values)


class CarriedTerms:
    """Affinity terms of placed members, each with its owner's project, indexed by label."""

    def __init__(self) -> None:
        self._carried: dict[Rule, int] = {}
        # Terms that require one value of one label are indexed by it, all others under None.
        self._by_label: dict[tuple[str, str] | None, dict[Rule, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._carried)

    def add(self, term: JobTerm, owner: str) -> None:
        rule = (term, owner)
        self._carried[rule] = self._carried.get(rule, 0) + 1
        if term.selector is not None:
            self._by_label.setdefault(_label_of(term), {})[rule] = None

    def remove(self, term: JobTerm, owner: str) -> None:
        rule = (term, owner)
        self._carried[rule] -= 1
        if not self._carried[rule]:
            del self._carried[rule]
            label = self._by_label.get(_label_of(term), {})
            label.pop(rule, None)
            if not label:
                self._by_label.pop(_label_of(term), None)

    def meaning(self, member: Member, projects: Mapping[str, Labels]) -> list[Rule]:
        """The rules that select this member."""
        labels, project = member.labels, member.job.project
        return [
            rule
            for label in (None, *labels.items())
            for rule in self._by_label.get(label, ())
            if rule[0].matches(rule[1], labels, project, projects)
        ]


def _label_of(term: JobTerm) -> tuple[str, str] | None:
    for requirement in term.selector or ():
        if requirement.operator == "In" and len(requirement.values) == 1:
            return (requirement.key, requirement.values[0])
    return None


class TopologyIndex:
    """The kinds on the nodes of a table, and the counts that rules use."""

    def __init__(self) -> None:
        self.projects: dict[str, Labels] = {}
        self.anti_affinity_terms = CarriedTerms()  # required
        self.preference_terms = CarriedTerms()  # required and preferred terms that affect scores
        self.no_terms = True  # no terms of either kind
        self._kinds: dict[Hashable, Kind] = {}
        self._carriers: dict[Kind, int] = {}
        self._counts: dict[Hashable, DomainCount] = {}
        self._attachments: Attachments | None = None  # built on first use

    def attachments_in(self, table: Table) -> Attachments:
        """Attached volumes, up to date."""
        if self._attachments is None or self._attachments.generation != table.generation:
            self._attachments = Attachments(table)
        return self._attachments

    def kind_of(self, member: Member, table: Table) -> Kind:
        key = kind_key(member)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) > 100_000:
                self._drop_kinds(table)
            kind = self._kinds[key] = Kind(member)
        return kind

    def _drop_kinds(self, table: Table) -> None:
        """Drop kinds without placed members."""
        placed = {kind for held in table.node_usage for kind in held.kinds}
        self._kinds = {key: kind for key, kind in self._kinds.items() if kind in placed}

    def moved(self, kind: Kind, row: int, by: int, table: Table) -> None:
        """A member of `kind` was placed on (+1) or released from (-1) a row."""
        if kind.has_rules or kind.ports:
            self._carried(kind, by)
        attachments = self._attachments
        if attachments is not None and kind.volumes and attachments.generation == table.generation:
            attachments.moved(kind.volumes, row, by)
        if not self._counts:
            return
        if kind.watched is None:
            kind.watched = [(count, weight) for count in self._counts.values() if (weight := count.counts(kind))]
        for count, weight in kind.watched:
            if count.generation == table.generation:
                count.add(row, by * weight)

    def left(self, kind: Kind, number: int) -> None:
        """Members removed with their node; counts are rebuilt in the new generation."""
        if kind.has_rules or kind.ports:
            self._carried(kind, -number)

    def _carried(self, kind: Kind, by: int) -> None:
        before = self._carriers.get(kind, 0)
        now = before + by
        if now:
            self._carriers[kind] = now
        else:
            self._carriers.pop(kind, None)
        if bool(before) != bool(now):
            for carried, terms in (
                (self.anti_affinity_terms, kind.anti),
                (
                    self.preference_terms,
                    (*kind.required, *(preference.term for preference in (*kind.attract, *kind.repel))),
                ),
            ):
                for term in terms:
                    (carried.add if now else carried.remove)(term, kind.project)
            self.no_terms = not self.anti_affinity_terms and not self.preference_terms

    def count(
        self,
        key: Hashable,
        topology: str,
        counts: Callable[[Kind], int],
        table: Table,
        among: Callable[[Table], NDArray[np.bool_]] | None = None,
    ) -> DomainCount:
        """The up-to-date count for `key`. Equal keys must mean equal `counts` and `among`."""
        found = self._counts.pop((key, topology), None)
        if found is None:
            if len(self._counts) >= _COUNTS_KEPT:
                self._drop_counts()
            found = DomainCount(topology, counts, among)
            for kind in self._kinds.values():
                if kind.watched is not None and (weight := found.counts(kind)):
                    kind.watched.append((found, weight))
        self._counts[key, topology] = found  # most recently used last
        if found.generation != table.generation:
            found.rebuild(table)
        return found

    def _drop_counts(self) -> None:
        """Drop the older half."""
        for old in list(self._counts)[: _COUNTS_KEPT // 2]:
            del self._counts[old]
        for kind in self._kinds.values():
            kind.watched = None

    def matching(self, term: JobTerm, owner: str, table: Table) -> DomainCount:
        """Placed members per domain selected by `term` of a job in project `owner`."""
        projects = self.projects
        return self.count(
            ("term", term, owner), term.topology,
            lambda kind: int(term.matches(owner, kind.labels, kind.project, projects)), table,
        )  # fmt: skip


# A volume that several members of a node use counts once. Counts are built on first use (and again for a new table
# generation), then updated with each placement and release.


class Attachments:
    """Volumes attached to each node. `version` counts the changes."""

    __slots__ = ("_counts", "_size", "_users", "generation", "version")

    def __init__(self, table: Table) -> None:
        self.generation = table.generation
        self.version = 0
        self._size = len(table.names)
        self._users: dict[str, dict[int, int]] = {}  # by handle: members using it per row
        self._counts: dict[str, Ints] = {}  # by limit: volumes of that kind per row
        for row, held in enumerate(table.node_usage):
            for kind, number in held.kinds.items():
                if kind.volumes:
                    self.moved(kind.volumes, row, number)

    def moved(self, volumes: Iterable[Volume], row: int, by: int) -> None:
        """That many members with these volumes were placed on a row (below 0: released)."""
        self.version += 1
        for volume in volumes:
            users = self._users.setdefault(volume.handle, {})
            before = users.get(row, 0)
            users[row] = before + by
            if not users[row]:
                del users[row]
            if volume.limit and bool(before) != bool(before + by):
                self.attached(volume.limit)[row] += 1 if by > 0 else -1
            if not users:
                del self._users[volume.handle]

    def attached(self, limit: str) -> Ints:
        """Volumes of that kind per node."""
        found = self._counts.get(limit)
        if found is None:
            found = self._counts[limit] = np.zeros(self._size, dtype=np.int64)
        return found

    def rows_of(self, handle: str) -> list[int]:
        return sorted(self._users.get(handle, ()))


class AssumedVolumes:
    """Volumes assigned to claims until the cluster shows the binding or the decision fails."""

    def __init__(self) -> None:
        self.version = 0
        self._claim_of: dict[str, str] = {}
        self._volume_of: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._claim_of)

    def take(self, volume: str, claim: str) -> None:
        self.release(claim)
        self._claim_of[volume], self._volume_of[claim] = claim, volume
        self.version += 1

    def release(self, claim: str) -> None:
        volume = self._volume_of.pop(claim, None)
        if volume is not None:
            del self._claim_of[volume]
            self.version += 1

    def of(self, claim: str) -> str:
        """The volume assigned to a claim; "" for none."""
        return self._volume_of.get(claim, "")

    def is_free(self, volume: str, claim: str) -> bool:
        return self._claim_of.get(volume, claim) == claim

    def concerns(self, wanted: Volume) -> bool:
        """Whether one of its choices is assigned to another claim."""
        return any(not self.is_free(choice.name, wanted.handle) for choice in wanted.candidates)

    def claims(self) -> dict[str, str]:
        return dict(self._volume_of)
