"""The profile that judges pods as kube-scheduler does unless told otherwise: its filters, its scores and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hodei.control.controller import Controller
from hodei.engine.assumed_volumes import AssumedVolumes
from hodei.engine.profile import Profile
from hodei.kube.api.requests import UNSAID
from hodei.kube.scheduler.translate import CORDON_TAINT
from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.plugins.registry import build_profile, called_for, queue_arguments
from hodei.plugins.volumes import Volumes

WEIGHTS = {
    "taints": 3,
    "affinity": 2,
    "spread": 2,
    "job_affinity": 2,
    "fit": 1,
    "balanced_allocation": 1,
    "image_locality": 1,
}
# The one line that pods wait in.
LINE = "default"
# What pods have no words for: where a job may run, and parts of devices.
_UNUSED = ("platform", "devices", "overcommit", "workload", "distribution")


def kube_profile(
    name: str = LINE,
    *,
    queue: str = "priority",
    queue_arguments: Mapping[str, Any] | None = None,
    weights: Mapping[str, int] = WEIGHTS,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    plugins: tuple[str, ...] = (),
    disabled: tuple[str, ...] = (),
) -> Profile:
    """`arguments`: what single plugins are told besides (`{"affinity": {"added": ...}}`)."""
    told = {"health": {"cordon_taint": CORDON_TAINT}, **(arguments or {})}
    return build_profile(
        name,
        queue=queue,
        queue_arguments=queue_arguments,
        plugins=("volumes", *plugins),
        disabled=(*_UNUSED, *disabled),
        scores=dict(weights),
        arguments=told,
    )


def live_profile(config: SchedulingConfig) -> Profile:
    """That of a live cluster, with what the operator says of the profile `default`."""
    wanted = config.profiles.get(LINE, ProfileConfig())
    options = {**wanted.options, "fit": {"unsaid": UNSAID, **wanted.options.get("fit", {})}}
    return kube_profile(
        queue=wanted.queue,
        queue_arguments=queue_arguments(wanted),
        weights=WEIGHTS if wanted.scores is None else wanted.scores,
        arguments=options,
        plugins=(*wanted.plugins, *called_for(config, wanted)),
        disabled=wanted.disable,
    )


def assumed_in(controller: Controller) -> AssumedVolumes:
    """The free volumes that decisions have given to claims; of nobody if the plugin is switched off."""
    for plugin in controller.engine.profiles[LINE].filters:
        if isinstance(plugin, Volumes):
            return plugin.assumed
    return AssumedVolumes()
