"""Capacity that can be ordered: nodes that a backend starts and stops, and what the planner wants of them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.model.ids import JobId, NodeName
from hodei.model.node import Node

OrderPhase = Literal["starting", "ready", "draining", "stopping"]
# A backend has no capacity of this kind now; another group, zone or backend may have.
NO_CAPACITY = "NO_CAPACITY"


class NodeOrder(Struct, frozen=True, omit_defaults=True):
    """A node that was ordered and costs money until its backend reports it stopped. It is stored before the order is sent,
    so that a restart neither forgets the node nor orders it twice. `node`: as it was offered. `changed_ms`: since when it
    is in this phase; `idle_ms`: since when nothing runs on it, 0 while something does."""

    node: Node
    phase: OrderPhase
    ordered_ms: int
    changed_ms: int
    ready_ms: int = 0
    idle_ms: int = 0

    @property
    def name(self) -> NodeName:
        return self.node.name


class PlannedNode(Struct, frozen=True, omit_defaults=True):
    """A potential node that should be ordered now, and the jobs that it is for."""

    node: NodeName
    jobs: tuple[JobId, ...] = ()


class CapacityOutlook(Struct, frozen=True, omit_defaults=True):
    """What new nodes mean for a pending job: it would start at `ready_ms` on `nodes` nodes of `group`, for `cost_milli` an
    hour. `note`: why they are not ordered for it; "": they are."""

    job: JobId
    group: str = ""
    nodes: int = 0
    ready_ms: int = 0
    cost_milli: int = 0
    note: str = ""


class CapacityPlan(Struct, frozen=True, omit_defaults=True):
    """`drain`: nodes whose work fits on others, so that they can be emptied and released. `keep`: ready nodes of gangs that
    wait for further nodes to start."""

    made_ms: int = 0
    order: tuple[PlannedNode, ...] = ()
    drain: tuple[NodeName, ...] = ()
    outlooks: tuple[CapacityOutlook, ...] = ()
    keep: tuple[NodeName, ...] = ()
