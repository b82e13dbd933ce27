"""Room: refuses nodes whose free resources are smaller than the request."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

from hodei.engine.nodes import Nodes
from hodei.engine.points import Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.decision import Reason
from hodei.model.resources import human_amount


class Fit:
    name = "fit"
    reads: Reads = "usage"
    plain = True
    cured_by: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        return tuple(member.task.request.items())

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        return [
            (nodes.free(resource) < amount, _insufficient(resource))
            for resource, amount in member.task.request.items()
            if amount
        ]

    def lacks(self, member: Member, nodes: Nodes, view: View) -> tuple[int, str]:
        """How much one node is short of, in thousandths of the request, and in words."""
        size, texts = 0, []
        for resource, amount in member.task.request.items():
            free = int(nodes.free(resource)[0])
            short = amount - free
            if amount and short > 0:
                size += max(1, short * 1000 // amount)
                texts.append(
                    f"lacks {human_amount(resource, short)} {resource}"
                    f" ({human_amount(resource, max(free, 0))} of {human_amount(resource, int(nodes.capacity(resource)[0]))} free,"
                    f" {human_amount(resource, amount)} asked)"
                )
        return size, ", ".join(texts)


@lru_cache(maxsize=1024)
def _insufficient(resource: str) -> Reason:
    code = "INSUFFICIENT_" + "".join(c if c.isalnum() else "_" for c in resource.upper())
    return Reason("fit", code, f"Insufficient {resource}", evictable=True)
