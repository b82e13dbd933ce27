"""Volumes: refuses nodes that cannot reach a member's storage, have no attachment left, or where another member uses a
volume exclusively.

Preemption cannot change where a volume is; it can change attachments and users.

A claim that waits for its node binds a free volume there. The choice is made when the member is placed (`assumed`), so
that no two claims count on the same volume: neither claims of one member nor those of members placed one after another.
The driver of the scheduler releases it when the cluster shows the binding, or when the placement failed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from hodei.engine.nodes import Mask, Nodes, Table
from hodei.engine.points import NO_OPINION, Placed, Reads, Refusals, Trigger
from hodei.engine.topology_index import EACH_NODE, AssumedVolumes, Attachments, Kind
from hodei.engine.view import Gang, Member, View
from hodei.model.affinity import NodeTerm, all_match
from hodei.model.job import Reason
from hodei.model.node import Node, Volume, VolumeCandidate, VolumeReach, VolumeReachKind
from hodei.plugins.affinity import term_mask

_OUT_OF_REACH: dict[VolumeReachKind, tuple[str, str]] = {
    "exists": ("VOLUME_NOT_HERE", "a volume cannot be reached from here"),
    "creatable": ("NO_VOLUME_TO_BIND", "no volume is free here, and none can be created here"),
    "space": ("NO_VOLUME_SPACE", "not enough free storage here to create a volume"),
    "zone": ("VOLUME_ZONE", "a volume is in another zone"),
}
_NONE_LEFT = Reason("volumes", *_OUT_OF_REACH["creatable"])
_FULL = Reason("volumes", "VOLUME_LIMIT", "no more volumes can be attached", evictable=True)
_NEVER_ENOUGH = Reason("volumes", "VOLUME_LIMIT", "it needs more volumes than can be attached")
_IN_USE_HERE = Reason("volumes", "VOLUME_IN_USE", "another job uses a volume here", evictable=True)
_IN_USE = Reason("volumes", "VOLUME_TAKEN", "a volume with a single user is in use", evictable=True)


class Volumes:
    name = "volumes"
    reads: Reads = "cluster"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def __init__(self) -> None:
        self.assumed = AssumedVolumes()

    def key(self, member: Member) -> Hashable:
        return member.task.volumes or NO_OPINION

    def stamp(self, member: Member, table: Table) -> Hashable:
        volumes = member.task.volumes
        if not any(volume.limit or volume.exclusive or volume.candidates for volume in volumes):
            return 0
        return (table.generation, table.topology_index.attachments_in(table).version, self.assumed.version)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        volumes = member.task.volumes
        if not volumes:
            return ()
        out = [*_out_of_reach(volumes, nodes)]
        attached = nodes.table.topology_index.attachments_in(nodes.table)
        for volume in volumes:
            if volume.exclusive == "anywhere" and attached.rows_of(volume.handle):
                out.append((~nodes.none(), _IN_USE))
            elif volume.exclusive == "node":
                out.append((_users(volume, nodes.table)[nodes.rows], _IN_USE_HERE))
        claims = [volume for volume in volumes if volume.candidates]
        if len(claims) > 1 or (claims and self.assumed.concerns(claims[0])):
            out.append((~_all_bindable(claims, self.assumed, nodes), _NONE_LEFT))
        return [*out, *_over_limit(volumes, attached, nodes)]

    def reserve(self, gang: Gang, placements: Sequence[Placed], view: View) -> Reason | None:
        """Assumes the free volumes that the members bind where they are placed."""
        taken: list[str] = []
        for placed in placements:
            claims = [volume for volume in placed.member.task.volumes if volume.candidates]
            chosen = _bind(claims, self.assumed, placed.node) if claims else {}
            if chosen is None:
                for claim in taken:
                    self.assumed.release(claim)
                return _NONE_LEFT
            for claim, name in chosen.items():
                self.assumed.take(name, claim)
                taken.append(claim)
        return None

    def unreserve(self, gang: Gang, placements: Sequence[Placed]) -> None:
        for placed in placements:
            for volume in placed.member.task.volumes:
                if volume.candidates:
                    self.assumed.release(volume.handle)


def _all_bindable(claims: Sequence[Volume], assumed: AssumedVolumes, nodes: Nodes) -> Mask:
    """Nodes where every claim gets its own free volume, or one can be created for it."""
    creatable_on = [_creatable(claim, nodes) for claim in claims]
    candidates = {candidate.name: candidate for claim in claims for candidate in claim.candidates}
    reachable = {name: _reachable(candidate, nodes) for name, candidate in candidates.items()}
    free = [[c.name for c in claim.candidates if assumed.is_free(c.name, claim.handle)] for claim in claims]
    counts = np.zeros((len(claims), len(nodes.none())), dtype=np.int64)
    for number, names in enumerate(free):
        for name in names:
            counts[number] += reachable[name]
        counts[number][creatable_on[number]] = len(claims)
    # By Hall's theorem it suffices that the n-th most restricted claim has at least n candidates; otherwise search.
    least = np.sort(counts, axis=0)
    enough: Mask = np.all(least >= np.arange(1, len(claims) + 1)[:, None], axis=0)
    for at in np.flatnonzero(~enough & (counts > 0).all(axis=0)):
        options = [
            None if creatable_on[n][at] else [name for name in names if reachable[name][at]]
            for n, names in enumerate(free)
        ]
        enough[at] = _match(options) is not None
    return enough


def _bind(claims: Sequence[Volume], assumed: AssumedVolumes, node: Node) -> dict[str, str] | None:
    """The volume of each claim on a node; None if there are too few. Claims without an entry need a new volume."""
    options: list[list[str]] = []
    for claim in claims:
        found = [candidate for candidate in claim.candidates if assumed.is_free(candidate.name, claim.handle)]
        options.append(
            [
                candidate.name
                for candidate in found
                if not candidate.terms or any(_term_matches(t, node) for t in candidate.terms)
            ]
        )
    must = [
        None
        if claim.creatable is not None
        and all(any(_term_matches(t, node) for t in reach.terms) for reach in claim.creatable)
        else some
        for claim, some in zip(claims, options, strict=True)
    ]
    found_for = _match(must)
    if found_for is None:
        return None
    # Claims that could be created take what is left: a free volume is preferred to a new one.
    taken = set(found_for.values())
    for number in range(len(claims)):
        if must[number] is None:
            name = next((name for name in options[number] if name not in taken), "")
            if name:
                found_for[number] = name
                taken.add(name)
    return {claims[number].handle: name for number, name in found_for.items()}


def _match(options: Sequence[list[str] | None]) -> dict[int, str] | None:
    """Bipartite matching: a different volume for each claim (None: it needs none); None if impossible."""
    holder: dict[str, int] = {}

    def assign(number: int, tried: set[str]) -> bool:
        for name in options[number] or ():
            if name not in tried:
                tried.add(name)
                if name not in holder or assign(holder[name], tried):
                    holder[name] = number
                    return True
        return False

    for number, names in enumerate(options):
        if names is not None and not assign(number, set()):
            return None
    return {number: name for name, number in holder.items()}


def _creatable(claim: Volume, nodes: Nodes) -> Mask:
    if claim.creatable is None:
        return nodes.none()
    hit = ~nodes.none()
    for reach in claim.creatable:
        hit = hit & _reached(reach, nodes)
    return hit


def _reachable(candidate: VolumeCandidate, nodes: Nodes) -> Mask:
    if not candidate.terms:
        return ~nodes.none()
    return _reached(VolumeReach("exists", candidate.terms), nodes)


def _reached(reach: VolumeReach, nodes: Nodes) -> Mask:
    hit = nodes.none()
    for term in reach.terms:
        hit = hit | term_mask(term, nodes)
    return hit


def _term_matches(term: NodeTerm, node: Node) -> bool:
    if not term.labels and not term.fields:
        return False  # as in Kubernetes, an empty term matches no node
    return all_match(term.labels, node.labels) and all_match(term.fields, {"metadata.name": node.name})


def _out_of_reach(volumes: tuple[Volume, ...], nodes: Nodes) -> list[tuple[Mask, Reason]]:
    out = []
    for volume in volumes:
        for reach in volume.reach:
            code, text = _OUT_OF_REACH[reach.kind]
            out.append((~_reached(reach, nodes), Reason("volumes", code, text)))
    return out


def _over_limit(volumes: tuple[Volume, ...], attached: Attachments, nodes: Nodes) -> list[tuple[Mask, Reason]]:
    """Nodes that cannot attach the volumes that they do not have yet; nodes without a limit are not checked."""
    out = []
    handles: dict[str, set[str]] = {}
    for volume in volumes:
        if volume.limit:
            handles.setdefault(volume.limit, set()).add(volume.handle)
    for limit, wanted in sorted(handles.items()):
        new = np.full(len(nodes.table.names), len(wanted), dtype=np.int64)
        for handle in wanted:
            new[attached.rows_of(handle)] -= 1
        most = nodes.by(("volume limit", limit), lambda node, limit=limit: node.volume_limits.get(limit, -1))  # type: ignore[misc]
        known = most.where(lambda number: number >= 0)
        allowed = most.numbers(int)
        # Members without new volumes fit on any node.
        full = known & (new[nodes.rows] > 0) & (attached.attached(limit)[nodes.rows] + new[nodes.rows] > allowed)
        never = full & (allowed < len(wanted))
        out += [(full & ~never, _FULL), (never, _NEVER_ENOUGH)]
    return out


def _users(volume: Volume, table: Table) -> Mask:
    """Nodes where another member uses a volume that cannot be shared on one node, unless all only read."""

    def clashes(kind: Kind) -> int:
        return int(
            any(held.handle == volume.handle and not (held.read_only and volume.read_only) for held in kind.volumes)
        )

    count = table.topology_index.count(("volume", volume.handle, volume.read_only), EACH_NODE, clashes, table)
    found: Mask = count.per_node(slice(None)) > 0
    return found
