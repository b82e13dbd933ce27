"""Host ports: refuses nodes where a placed member holds a port that the member needs."""

from __future__ import annotations

from collections.abc import Hashable

from hodei.engine.nodes import Mask, Nodes, Table
from hodei.engine.points import Reads, Refusals, Trigger
from hodei.engine.topology_index import EACH_NODE, DomainCount, Kind
from hodei.engine.view import Member, View
from hodei.model.affinity import HostPort
from hodei.model.job import Reason


class Ports:
    name = "ports"
    reads: Reads = "cluster"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "node_joined")

    def key(self, member: Member) -> Hashable:
        return member.task.ports

    def stamp(self, member: Member, table: Table) -> Hashable:
        ports = member.task.ports
        return tuple([_holders(port, table).version for port in ports]) if ports else 0

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        out: list[tuple[Mask, Reason]] = []
        for port in member.task.ports:
            in_use = _holders(port, nodes.table).per_node(nodes.rows) > 0
            out.append((in_use, Reason(self.name, "PORT_TAKEN", f"host port {_text(port)} is taken", evictable=True)))
        return out


def _holders(port: HostPort, table: Table) -> DomainCount:
    """How many members on each node hold a conflicting port."""

    def clashes(kind: Kind) -> int:
        return int(any(port.clashes(held) for held in kind.ports))

    return table.topology_index.count(("port", port), EACH_NODE, clashes, table)


def _text(port: HostPort) -> str:
    where = "" if port.ip == "0.0.0.0" else f" on {port.ip}"
    return f"{port.port}/{port.protocol}{where}"
