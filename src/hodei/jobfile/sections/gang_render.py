"""Rules about the members of a job together, as people write them. Keys that say nothing are empty."""

from __future__ import annotations

from typing import Any

from hodei.model.job import Checkpoint, Distribution, GangRules, JobSpec, TaskSpec
from hodei.model.quantity import format_duration


def task_rules(task: TaskSpec) -> dict[str, Any]:
    return {"min": task.min_count, "backends": list(task.backends), "binding": task.binding}


def job_rules(spec: JobSpec) -> dict[str, Any]:
    return {
        "gang": _gang(spec.gang),
        "per_node": spec.gang.per_node,
        "distribution": _distribution(spec.distribution),
        "checkpoint": _checkpoint(spec.checkpoint),
    }


def _gang(gang: GangRules) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if gang.topology:
        out["topology"] = gang.topology if gang.topology_required else {"key": gang.topology, "required": False}
    if gang.on_failure != "restart":
        out["on_failure"] = gang.on_failure
    if gang.assembly_timeout_ms:
        out["assembly_timeout"] = format_duration(gang.assembly_timeout_ms)
    if gang.elastic:
        out["elastic"] = True
    return out


def _distribution(distribution: Distribution) -> dict[str, Any]:
    if not distribution.model:
        return {}
    out: dict[str, Any] = {"model": distribution.model}
    if distribution.hub:
        out["hub"] = distribution.hub
    if distribution.transfer_costs:
        out["transfer_costs"] = [
            {"between": list(cost.between), "cost": cost.cost_milli / 1000} for cost in distribution.transfer_costs
        ]
    return out


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if checkpoint.signal:
        out["signal"] = checkpoint.signal
    if checkpoint.command:
        out["command"] = list(checkpoint.command)
    if checkpoint.timeout_ms != Checkpoint().timeout_ms:
        out["timeout"] = format_duration(checkpoint.timeout_ms)
    if checkpoint.file:
        out["file"] = checkpoint.file
    if checkpoint.every_ms:
        out["every"] = format_duration(checkpoint.every_ms)
    return out
