"""Volumes: refuses nodes that a member's storage can not be reached from, that have no place left to attach it, or where
somebody else has it to themselves.

Where a volume is can not be changed by stopping others; how many are attached, and who uses one, can.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from hodei.engine.attachments import Attachments
from hodei.engine.nodes import Mask, Nodes, Table
from hodei.engine.points import SILENT, Reads, Refusals, Trigger
from hodei.engine.residents import EACH_NODE, Kind
from hodei.engine.view import Member, View
from hodei.model.decision import Reason
from hodei.model.volume import ReachKind, Volume
from hodei.plugins.affinity import term_mask

_OUT_OF_REACH: dict[ReachKind, tuple[str, str]] = {
    "there": ("VOLUME_NOT_HERE", "a volume can not be reached from here"),
    "could_be": ("NO_VOLUME_TO_BIND", "no volume is free here, or could be made here"),
    "zone": ("VOLUME_ZONE", "a volume is in another zone"),
}
_FULL = Reason("volumes", "VOLUME_LIMIT", "no more volumes can be attached", evictable=True)
_FULL_FOR_EVER = Reason("volumes", "VOLUME_LIMIT", "so many volumes can not be attached")
_IN_USE_HERE = Reason("volumes", "VOLUME_IN_USE", "a volume is in use here by another", evictable=True)
_IN_USE = Reason("volumes", "VOLUME_TAKEN", "a volume that only one may use is in use", evictable=True)


class Volumes:
    name = "volumes"
    reads: Reads = "cluster"
    cured_by: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        return member.task.volumes or SILENT

    def stamp(self, member: Member, table: Table) -> Hashable:
        volumes = member.task.volumes
        if not any(volume.limit or volume.alone for volume in volumes):
            return 0
        return (table.generation, table.residents.attachments_in(table).version)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        volumes = member.task.volumes
        if not volumes:
            return ()
        out = [*_out_of_reach(volumes, nodes)]
        attached = nodes.table.residents.attachments_in(nodes.table)
        for volume in volumes:
            if volume.alone == "anywhere" and attached.rows_of(volume.handle):
                out.append((~nodes.none(), _IN_USE))
            elif volume.alone == "node":
                out.append((_users(volume, nodes.table)[nodes.rows], _IN_USE_HERE))
        return [*out, *_over_the_limit(volumes, attached, nodes)]


def _out_of_reach(volumes: tuple[Volume, ...], nodes: Nodes) -> list[tuple[Mask, Reason]]:
    out = []
    for volume in volumes:
        for reach in volume.reach:
            hit = nodes.none()
            for term in reach.terms:
                hit = hit | term_mask(term, nodes)
            code, text = _OUT_OF_REACH[reach.kind]
            out.append((~hit, Reason("volumes", code, text)))
    return out


def _over_the_limit(volumes: tuple[Volume, ...], attached: Attachments, nodes: Nodes) -> list[tuple[Mask, Reason]]:
    """Nodes that can not take those of the volumes which they do not have already; nodes that name no limit have none."""
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
        # Who brings nothing new is no burden, however full the node is.
        full = known & (new[nodes.rows] > 0) & (attached.attached(limit)[nodes.rows] + new[nodes.rows] > allowed)
        never = full & (allowed < len(wanted))
        out += [(full & ~never, _FULL), (never, _FULL_FOR_EVER)]
    return out


def _users(volume: Volume, table: Table) -> Mask:
    """The nodes where another uses a volume that can not be shared on one node, unless all of them only read."""

    def clashes(kind: Kind) -> int:
        return int(
            any(held.handle == volume.handle and not (held.read_only and volume.read_only) for held in kind.volumes)
        )

    count = table.residents.count(("volume", volume.handle, volume.read_only), EACH_NODE, clashes, table)
    found: Mask = count.per_node(slice(None)) > 0
    return found
