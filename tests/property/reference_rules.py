"""A reference implementation of the rules of the engine, simple and slow, without its code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from hodei.model.affinity import Requirement
from hodei.model.job import JobSpec, TaskSpec, Toleration
from hodei.model.node import Node, Taint

ARCHITECTURES = {"x86_64": "amd64", "x64": "amd64", "aarch64": "arm64"}


def refusals(spec: JobSpec, task: TaskSpec, node: Node) -> list[str]:
    """Every required rule that the node breaks, without capacity."""
    broken = []
    if not node.ready:
        broken.append("not ready")
    if node.cordoned:
        broken.append("cordoned")
    for key, value in task.node_selector.items():
        if node.labels.get(key) != value:
            broken.append(f"selector {key}={value}")
    required = task.affinity.required
    if required and not any(
        (term.labels or term.fields)
        and all(meets(requirement, node.labels) for requirement in term.labels)
        and all(meets(requirement, {"metadata.name": node.name}) for requirement in term.fields)
        for term in required
    ):
        broken.append("affinity")
    for taint in node.taints:
        if taint.effect in ("NoSchedule", "NoExecute") and not any(tolerates(t, taint) for t in task.tolerations):
            broken.append(f"taint {taint}")
    if task.arch and canonical(task.arch) != canonical(node.arch):
        broken.append("architecture")
    if task.gpu_type and task.gpu_type.lower() != node.gpu_type.lower():
        broken.append("gpu type")
    if spec.backend.mode == "specific" and node.backend not in spec.backend.names:
        broken.append("backend")
    return broken


def canonical(arch: str) -> str:
    return ARCHITECTURES.get(arch.lower(), arch.lower())


def meets(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    present, value = requirement.key in labels, labels.get(requirement.key, "")
    if requirement.operator == "In":
        return present and value in requirement.values
    if requirement.operator == "NotIn":
        return not (present and value in requirement.values)
    if requirement.operator == "Exists":
        return present
    if requirement.operator == "DoesNotExist":
        return not present
    if not value.lstrip("+-").isdigit():
        return False
    bound = int(requirement.values[0])
    return int(value) > bound if requirement.operator == "Gt" else int(value) < bound


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    effect = toleration.effect in ("", taint.effect)
    if toleration.key == "":
        return toleration.operator == "Exists" and effect
    same = toleration.key == taint.key and effect
    return same and (toleration.operator == "Exists" or toleration.value == taint.value)


def fits(task: TaskSpec, node: Node, used: Mapping[str, int]) -> bool:
    return all(
        amount == 0 or used.get(name, 0) + amount <= node.capacity.get(name, 0) for name, amount in task.request.items()
    )


def members(spec: JobSpec) -> list[TaskSpec]:
    return [task for task in spec.tasks for _ in range(task.count)]


def can_start(spec: JobSpec, nodes: Sequence[Node], used: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether all needed members can be placed. Every combination is tried."""
    return next(placements(spec, nodes, used), None) is not None


def placements(
    spec: JobSpec, nodes: Sequence[Node], used: Mapping[str, Mapping[str, int]]
) -> Iterator[tuple[Node, ...]]:
    gang = [task for task in spec.tasks for _ in range(task.needed)]
    candidates = []
    for task in gang:
        allowed = [node for node in nodes if not refusals(spec, task, node) and fits(task, node, used[node.name])]
        candidates.append(allowed)
    for placement in product(*candidates):
        usage = {node.name: dict(used[node.name]) for node in nodes}
        for task, node in zip(gang, placement, strict=True):
            if not fits(task, node, usage[node.name]):
                break
            for name, amount in task.request.items():
                usage[node.name][name] = usage[node.name].get(name, 0) + amount
        else:
            yield placement
