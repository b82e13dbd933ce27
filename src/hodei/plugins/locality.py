"""Locality: nodes near the job's location, near its inputs, or with its images; and where data may be used."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter

from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import MAX_SCORE, NO_OPINION, Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.job import Reason
from hodei.model.node import Location, Node

# From near to far: the first level that both have and share decides.
_LEVELS = (("rack", 10_000), ("datacenter", 8_000), ("zone", 6_000), ("region", 4_000))
_DISTANCE_SCORE = 3_000
_HALF_CIRCUMFERENCE_KM = 20_015


class Proximity:
    """Topology first, then distance."""

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
    """The same measure as a worker selection strategy."""

    name = "locality_aware"


def nearness(wanted: Location, here: Location) -> int:
    for level, score in _LEVELS:
        name = getattr(wanted, level)
        if name and name == getattr(here, level):
            return min(score, MAX_SCORE)
    kilometres = distance_km(wanted, here)
    if kilometres is None:
        return 0
    return _DISTANCE_SCORE - min(kilometres, _HALF_CIRCUMFERENCE_KM) * _DISTANCE_SCORE // _HALF_CIRCUMFERENCE_KM


def distance_km(a: Location, b: Location) -> int | None:
    """Great-circle distance in whole kilometres; None if a location is unknown."""
    if a.lat_micro is None or a.lng_micro is None or b.lat_micro is None or b.lng_micro is None:
        return None
    lat_a, lat_b = math.radians(a.lat_micro / 1e6), math.radians(b.lat_micro / 1e6)
    half_lat = (lat_b - lat_a) / 2
    half_lng = math.radians((b.lng_micro - a.lng_micro) / 1e6) / 2
    chord = math.sin(half_lat) ** 2 + math.cos(lat_a) * math.cos(lat_b) * math.sin(half_lng) ** 2
    return round(2 * 6371 * math.asin(min(1.0, math.sqrt(chord))))


_SAME_NODE = MAX_SCORE
_SAME_ZONE = 6_000
_SAME_REGION = 3_000

Held = tuple[tuple[str, ...], Location]


class DataLocality:
    """The mean over the job's inputs: 100 if the node holds one, 60 if its zone does, 30 if its region does.

    A zone or region holds what any of its nodes holds, and what the options add for shared storage: `zones = {"eu-1a":
    ["imagenet"]}`, `regions = {"eu-1": ["imagenet"]}`.
    """

    name = "data_locality"
    reads: Reads = "static"

    def __init__(
        self, zones: Mapping[str, Iterable[str]] | None = None, regions: Mapping[str, Iterable[str]] | None = None
    ) -> None:
        self._zones = {zone: frozenset(data) for zone, data in (zones or {}).items()}
        self._regions = {region: frozenset(data) for region, data in (regions or {}).items()}

    def key(self, member: Member) -> Hashable:
        return member.job.inputs

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        inputs = member.job.inputs
        if not inputs:
            return None
        column = nodes.by("data and location", attrgetter("data", "location"))
        wanted = frozenset(inputs)
        # Zones of the same name in two regions are different zones.
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
                return _SAME_NODE
            if (place.region, place.zone, name) in zones or name in self._zones.get(place.zone, ()):
                return _SAME_ZONE
            if (place.region, name) in regions or name in self._regions.get(place.region, ()):
                return _SAME_REGION
            return 0

        return column.numbers(lambda held: sum(nearness(held, name) for name in inputs) // len(inputs))


Regions = tuple[str, ...]


class DataRules:
    """`rules`: for each data set the regions, zones, data centers or backends where jobs may read it. `eu` includes
    every name that begins with `eu-`. A node without a location is in none."""

    name = "data_rules"
    reads: Reads = "static"
    requeue_on: tuple[Trigger, ...] = ("node_joined", "node_changed")

    def __init__(self, rules: Mapping[str, Sequence[str]] | None = None) -> None:
        self._rules = {dataset: tuple(places) for dataset, places in (rules or {}).items()}

    def key(self, member: Member) -> Hashable:
        return tuple(sorted(self._rules.keys() & set(member.job.inputs))) or NO_OPINION

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        out: list[tuple[Mask, Reason]] = []
        for dataset in sorted(self._rules.keys() & set(member.job.inputs)):
            allowed = self._rules[dataset]
            where = nodes.by("regions", _regions)
            text = f"data set {dataset} must stay in {' or '.join(allowed)}"
            out.append((~where.where(partial(_is_within, allowed)), Reason(self.name, "DATA_MUST_STAY", text)))
        return out


def _regions(node: Node) -> Regions:
    place = node.location
    return place.region, place.zone, place.datacenter, node.backend


def _is_within(allowed: Sequence[str], where: Regions) -> bool:
    return any(name == each or name.startswith(f"{each}-") for each in allowed for name in where if name)


_MB = 1024 * 1024
_LEAST, _MOST_EACH = 23 * _MB, 1000 * _MB
_POINT = MAX_SCORE // 100


class ImageLocality:
    """Prefers nodes that already hold a member's images, by the bytes that need not be pulled.

    Kubernetes' formula: the bytes of each image times the share of nodes that hold it (so that a node with a rare image
    does not attract everything), linear from 23 MB (0 points) to 1 GB per image (100 points).
    """

    name = "image_locality"
    reads: Reads = "static"

    def key(self, member: Member) -> Hashable:
        return member.task.images

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        images = member.task.images
        if not images:
            return None
        whole = nodes.table.view()
        total = nodes.zeros()
        for image in dict.fromkeys(images):
            name = image_with_tag(image)
            held = whole.by(("image", name), lambda node, name=name: _size(name, node)).numbers(int)  # type: ignore[misc]
            holders = int((held > 0).sum())
            # Floating point and truncation as in Kubernetes.
            spread = holders / max(len(held), 1)
            total = total + (held * spread).astype("int64")[nodes.rows] * images.count(image)
        most = _MOST_EACH * len(images)
        inside = nodes.lower(nodes.higher(total, _LEAST), most)
        return (inside - _LEAST) * 100 // (most - _LEAST) * _POINT


def _size(name: str, node: Node) -> int:
    images: Mapping[str, int] = node.images
    return images.get(name, 0)


def image_with_tag(image: str) -> str:
    """The image name with its tag; `latest` by default."""
    return image if image.rfind(":") > image.rfind("/") else f"{image}:latest"
