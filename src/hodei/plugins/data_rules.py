"""Data rules: a job that reads a certain data set runs only where that data set may be."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial

from hodei.engine.nodes import Mask, Nodes
from hodei.engine.points import NO_OPINION, Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.job import Reason
from hodei.model.node import Node

Where = tuple[str, ...]


class DataRules:
    """`rules`: for each data set where it must stay: names of regions, zones, data centers or backends. `eu` is also all
    that begins with `eu-`. A node that says nothing of where it stands is nowhere."""

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
            where = nodes.by("where it stands", _where)
            text = f"data set {dataset} must stay in {' or '.join(allowed)}"
            out.append((~where.where(partial(_inside, allowed)), Reason(self.name, "DATA_MUST_STAY", text)))
        return out


def _where(node: Node) -> Where:
    place = node.location
    return place.region, place.zone, place.datacenter, node.backend


def _inside(allowed: Sequence[str], where: Where) -> bool:
    return any(name == each or name.startswith(f"{each}-") for each in allowed for name in where if name)
