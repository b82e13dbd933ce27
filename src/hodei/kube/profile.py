"""The profile that judges pods as kube-scheduler does unless told otherwise: its filters, its scores and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hodei.engine.profile import Profile
from hodei.kube.translate import CORDON_TAINT
from hodei.plugins.registry import build_profile

WEIGHTS = {
    "taints": 3,
    "affinity": 2,
    "spread": 2,
    "job_affinity": 2,
    "fit": 1,
    "balanced_allocation": 1,
    "image_locality": 1,
}
# What pods have no words for: where a job may run, and parts of devices.
_UNUSED = ("platform", "devices", "distribution")


def kube_profile(
    name: str = "default-scheduler",
    *,
    queue: str = "priority",
    weights: Mapping[str, int] = WEIGHTS,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
) -> Profile:
    """`arguments`: what single plugins are told besides (`{"affinity": {"added": ...}}`)."""
    told = {"health": {"cordon_taint": CORDON_TAINT}, **(arguments or {})}
    return build_profile(
        name, queue=queue, plugins=("volumes",), disabled=_UNUSED, scores=dict(weights), arguments=told
    )
