"""Workload types: a serverless job that accepts no cold start needs its image on the node; data processing needs
storage for its input and output.

Data sizes are checked, not reserved: a job that needs the space for itself requests `storage`.
"""

from __future__ import annotations

from collections.abc import Hashable

from hodei.engine.nodes import Mask, Nodes
from hodei.engine.points import NO_OPINION, Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.job import DataProcessing, Reason, Serverless
from hodei.model.resources import STORAGE, human_amount
from hodei.plugins.locality import image_with_tag


class Workload:
    name = "workload"
    reads: Reads = "usage"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        image, size = _needs(member)
        return (image, size) if image or size else NO_OPINION

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        image, size = _needs(member)
        out: list[tuple[Mask, Reason]] = []
        if image:
            cold = nodes.by(("cold for", image), lambda node: image not in node.images).where(bool)
            out.append((cold, Reason(self.name, "COLD_START", "its image is not on the node: it would start cold")))
        if size:
            # A node that does not report its storage is not checked.
            reports = nodes.by("reports its storage", lambda node: STORAGE in node.capacity).where(bool)
            text = f"less than {human_amount(STORAGE, size)} of storage is free for its input and output"
            # The task's own storage request is for the same data, so it is not added.
            short = reports & (nodes.free(STORAGE) < size)
            out.append((short, Reason(self.name, "NO_DATA_SPACE", text, evictable=True)))
        return out


def _needs(member: Member) -> tuple[str, int]:
    """The image that must be present, and the bytes of this member's part of the data."""
    workload = member.job.workload
    if type(workload) is Serverless:
        return (
            "" if workload.cold_start_acceptable else image_with_tag(member.task.image) if member.task.image else ""
        ), 0
    if type(workload) is DataProcessing:
        return "", -(-(workload.input_bytes + workload.output_bytes) // max(member.job.size, 1))
    return "", 0
