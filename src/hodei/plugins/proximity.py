"""Proximity: nodes near the place that the job names (`near`), by topology first and by distance after that."""

from __future__ import annotations

import math
from collections.abc import Hashable

from hodei.engine.nodes import Ints, Nodes
from hodei.engine.points import MAX_SCORE, Reads
from hodei.engine.view import Member, View
from hodei.model.node import Location

# From near to far: the first level that both name and share decides.
_LEVELS = (("rack", 10_000), ("datacenter", 8_000), ("zone", 6_000), ("region", 4_000))
_DISTANCE_SCORE = 3_000
_HALF_WAY_ROUND_KM = 20_015


class Proximity:
    name = "proximity"
    reads: Reads = "static"

    def key(self, member: Member) -> Hashable:
        return member.job.near

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        wanted = member.job.near
        if wanted == Location():
            return None
        return nodes.by("location", lambda node: node.location).numbers(lambda here: nearness(wanted, here))


class LocalityAware(Proximity):
    """The same measure as a worker selection strategy of its own."""

    name = "locality_aware"


def nearness(wanted: Location, here: Location) -> int:
    for level, score in _LEVELS:
        name = getattr(wanted, level)
        if name and name == getattr(here, level):
            return min(score, MAX_SCORE)
    kilometres = distance_km(wanted, here)
    if kilometres is None:
        return 0
    return _DISTANCE_SCORE - min(kilometres, _HALF_WAY_ROUND_KM) * _DISTANCE_SCORE // _HALF_WAY_ROUND_KM


def distance_km(a: Location, b: Location) -> int | None:
    """Great-circle distance in whole kilometres; None when a place is not known."""
    if a.lat_micro is None or a.lng_micro is None or b.lat_micro is None or b.lng_micro is None:
        return None
    lat_a, lat_b = math.radians(a.lat_micro / 1e6), math.radians(b.lat_micro / 1e6)
    half_lat = (lat_b - lat_a) / 2
    half_lng = math.radians((b.lng_micro - a.lng_micro) / 1e6) / 2
    chord = math.sin(half_lat) ** 2 + math.cos(lat_a) * math.cos(lat_b) * math.sin(half_lng) ** 2
    return round(2 * 6371 * math.asin(min(1.0, math.sqrt(chord))))
