"""A second implementation of the placement rules, simple and without code of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from hodei.model.facts import NodeOverridden
from hodei.model.job import JobSpec, TaskSpec, Toleration
from hodei.model.node import Grant, Node, Taint
from hodei.model.resources import Resources


class Overrides:
    """The changes of operators to one node."""

    def __init__(self) -> None:
        self.cordoned = False
        self.taints: dict[tuple[str, str], Taint | None] = {}

    def apply(self, fact: NodeOverridden) -> None:
        if fact.cordon is not None:
            self.cordoned = fact.cordon
        self.cordoned |= fact.drain
        for taint in fact.remove_taints:
            self.taints[taint.key, taint.effect] = None
        for taint in fact.add_taints:
            self.taints[taint.key, taint.effect] = taint

    def taints_of(self, node: Node) -> list[Taint]:
        all_taints = {(taint.key, taint.effect): taint for taint in node.taints} | self.taints
        return [taint for taint in all_taints.values() if taint is not None]


def refusals(spec: JobSpec, task: TaskSpec, node: Node, overrides: Overrides) -> list[str]:
    """Every required rule that the node breaks, except capacity."""
    broken = []
    if not node.ready:
        broken.append("it is not ready")
    if node.phase != "ready":
        broken.append(f"it is {node.phase}")
    if node.cordoned or overrides.cordoned:
        broken.append("it is cordoned")
    broken += [f"{key}={value}" for key, value in task.node_selector.items() if node.labels.get(key) != value]
    for taint in overrides.taints_of(node):
        if taint.effect != "PreferNoSchedule" and not any(_tolerates(t, taint) for t in task.tolerations):
            broken.append(f"taint {taint}")
    if spec.backend.mode == "specific" and node.backend not in spec.backend.names:
        broken.append(f"backend {node.backend}")
    return broken


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect not in ("", taint.effect):
        return False
    if toleration.operator == "Exists":
        return toleration.key in ("", taint.key)
    return bool(toleration.key) and (toleration.key, toleration.value) == (taint.key, taint.value)


def total(requests: Iterable[Resources]) -> dict[str, int]:
    out: Counter[str] = Counter()
    for request in requests:
        out.update(request)
    return {resource: amount for resource, amount in out.items() if amount}


def overcommitted(node: Node, requests: Iterable[Resources]) -> str:
    """The over-committed resource; "" if there is none."""
    for resource, amount in total(requests).items():
        allocatable = node.capacity.get(resource, 0) * node.overcommit_percent.get(resource, 100) // 100
        if amount > allocatable:
            return f"{resource} ({amount} of {allocatable})"
    return ""


def granted_twice(node: Node, grants: Iterable[Grant | None]) -> str:
    """A core or GPU that is granted too often; "" if there is none."""
    cores: Counter[int] = Counter()
    gpus: Counter[int] = Counter()
    for grant in grants:
        if grant is not None:
            cores.update(grant.cpus)
            for gpu, milli in grant.gpus:
                gpus[gpu] += milli
    existing = {cpu for socket in node.sockets for cpu in socket.cpus}
    for core, times in cores.items():
        if times > 1 or core not in existing:
            return f"core {core} ({times} times)"
    for gpu, milli in gpus.items():
        if milli > 1000:
            return f"GPU {gpu} ({milli} of 1000)"
    return ""


def wrong_grant(task: TaskSpec, grant: Grant | None) -> str:
    """What is wrong with the grant of cores and GPUs; "" if nothing is."""
    gpu, cpus = task.request.get("gpu", 0), -(-task.request["cpu"] // 1000) if task.binding else 0
    given = grant or Grant()
    if sum(milli for _, milli in given.gpus) != gpu:
        return f"{gpu} of GPUs requested, {given.gpus} granted"
    if len(given.cpus) != cpus:
        return f"{cpus} cores requested, {given.cpus} granted"
    return ""


def can_start(spec: JobSpec, nodes: Sequence[Node], overrides: Mapping[str, Overrides]) -> bool:
    """Whether the required members fit on these nodes when empty, by amounts alone. Tries every placement."""
    gang = [task for task in spec.tasks for _ in range(task.needed)]
    gang.sort(key=lambda task: -task.request["cpu"])
    places: list[list[Node]] = [list(nodes)]
    if spec.gang.topology and spec.gang.topology_required and spec.size > 1:
        values = sorted({node.labels.get(spec.gang.topology, "") for node in nodes} - {""})
        places = [[node for node in nodes if node.labels.get(spec.gang.topology) == value] for value in values]
    return any(_find_placement(spec, gang, place, overrides, {node.name: [] for node in place}) for place in places)


def _find_placement(
    spec: JobSpec,
    gang: list[TaskSpec],
    nodes: list[Node],
    overrides: Mapping[str, Overrides],
    taken: dict[str, list[Resources]],
) -> bool:
    if not gang:
        return True
    task = gang[0]
    for node in nodes:
        if node.phase == "potential":
            node = structs.replace(node, phase="ready")  # it would be ordered
        if refusals(spec, task, node, overrides.get(node.name, Overrides())):
            continue
        if not overcommitted(node, [*taken[node.name], task.request]):
            taken[node.name].append(task.request)
            if _find_placement(spec, gang[1:], nodes, overrides, taken):
                return True
            taken[node.name].pop()
    return False
