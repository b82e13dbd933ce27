"""GPU last: nodes kept for GPU work by a soft taint (`cpu_jobs_on_gpus = "last"`) are used by other work only when nothing else
has room. It has no opinion where no node has that taint."""

from __future__ import annotations

from collections.abc import Hashable

from hodei.engine.nodes import Ints, Nodes
from hodei.engine.points import MAX_SCORE, Reads
from hodei.engine.view import Member, View
from hodei.model.node import GPU_ONLY, Taint
from hodei.plugins.taints import soft_taints, tolerated, tolerations_of

_TAINT = Taint(GPU_ONLY, effect="PreferNoSchedule")


class GpuLast:
    """A weight that decides whatever the other scores say: an operator's setting, not a preference."""

    name = "gpu_last"
    reads: Reads = "static"
    usual_weight = 1000

    def key(self, member: Member) -> Hashable:
        return tolerated(_TAINT, tolerations_of(member.task))

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        column = nodes.by("soft taints", soft_taints)
        if not any(_TAINT in taints for taints in column.values) or self.key(member):
            return None
        return column.numbers(lambda taints: 0 if _TAINT in taints else MAX_SCORE)
