"""Data locality: nodes that hold what the job reads (`inputs`), or stand near to where it is held."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from hodei.engine.nodes import Ints, Nodes
from hodei.engine.points import MAX_SCORE, Reads
from hodei.engine.view import Member, View
from hodei.model.node import Location, Node

_ON_THE_NODE = MAX_SCORE
_IN_THE_ZONE = 6_000
_IN_THE_REGION = 3_000

Held = tuple[tuple[str, ...], Location]


class DataLocality:
    """The mean over the job's inputs: 100 where the node itself holds one, 60 in the same zone, 30 in the same region.

    A zone or region holds what any of its nodes holds, and what the options say of it: `zones = {"eu-1a": ["imagenet"]}`
    and `regions = {"eu-1": ["imagenet"]}`, for data on storage that all nodes there share.
    """

    name = "data_locality"
    reads: Reads = "static"

    def __init__(
        self,
        zones: Mapping[str, Iterable[str]] | None = None,
        regions: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        self._zones = {zone: frozenset(data) for zone, data in (zones or {}).items()}
        self._regions = {region: frozenset(data) for region, data in (regions or {}).items()}

    def key(self, member: Member) -> Hashable:
        return member.job.inputs

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        inputs = member.job.inputs
        if not inputs:
            return None
        column = nodes.by("data and location", _held)
        wanted = frozenset(inputs)
        # Zones of the same name in two regions are two zones.
        zones = {
            (place.region, place.zone, name)
            for data, place in column.values
            if place.zone
            for name in wanted.intersection(data)
        }
        regions = {
            (place.region, name) for data, place in column.values if place.region for name in wanted.intersection(data)
        }

        def nearness(held: Held, name: str) -> int:
            data, place = held
            if name in data:
                return _ON_THE_NODE
            if (place.region, place.zone, name) in zones or name in self._zones.get(place.zone, ()):
                return _IN_THE_ZONE
            if (place.region, name) in regions or name in self._regions.get(place.region, ()):
                return _IN_THE_REGION
            return 0

        return column.numbers(lambda held: sum(nearness(held, name) for name in inputs) // len(inputs))


def _held(node: Node) -> Held:
    return node.data, node.location
