"""What a pod asks for, by upstream's formula.

The running containers and the sidecars together, or the largest moment while it starts, whichever is more; what is said for
the pod as a whole instead of that; its overhead on top; and one of the node's places for pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from hodei.kube.api.objects import Container, ContainerStatus, Pod, Quantities
from hodei.kube.api.quantities import amounts
from hodei.model.quantity import MAX_AMOUNT
from hodei.model.resources import CPU, MEMORY, Resources

PODS = "pods"
# What a container counts for in scores (never in room) that does not say what it needs.
STAND_INS: Resources = {CPU: 100, MEMORY: 200 * 2**20}
# Under these names a node's table holds what pods are taken to use that do not say; nobody is ever refused for them.
UNSAID = {CPU: "cpu~unsaid", MEMORY: "memory~unsaid"}
_POD_LEVEL = (CPU, MEMORY)


class Counting(Struct, frozen=True):
    """`ignored`: extended resources that somebody else looks after, by name or by domain (`example.com`).
    `stand_ins`: amounts for containers that do not say theirs."""

    ignored: frozenset[str] = frozenset()
    stand_ins: Resources = {}


PLAIN = Counting()


def requests_of(pod: Pod, counting: Counting = PLAIN) -> Resources:
    """What the pod takes of a node; one that is bound and being resized takes the larger of what it has and what it wants."""
    spec, status = pod.spec, pod.status
    actual = _statuses(pod, status.container_statuses)
    starting = _statuses(pod, status.init_container_statuses)
    infeasible = _resize(pod) == "Infeasible"

    def of(container: Container, known: Mapping[str, ContainerStatus]) -> Resources:
        wanted = _wanted(container.resources.requests, container.resources.limits)
        said = known.get(container.name)
        if said is not None and said.resources is not None:
            has = larger(amounts(said.resources.requests), amounts(said.allocated_resources))
            wanted = has if infeasible else larger(wanted, has)
        return {**counting.stand_ins, **wanted}

    total: Resources = {}
    for container in spec.containers:
        total = added(total, of(container, actual))
    sidecars: Resources = {}
    first: Resources = {}
    for container in spec.init_containers:
        own = of(container, starting)
        if container.restart_policy == "Always":
            sidecars = added(sidecars, own)
            first = larger(first, sidecars)
        else:
            first = larger(first, added(own, sidecars))
    total = larger(added(total, sidecars), first)
    if spec.resources is not None:
        whole = _wanted(spec.resources.requests, spec.resources.limits)
        total |= {name: much for name, much in whole.items() if name in _POD_LEVEL or name.startswith("hugepages-")}
    total = added(total, amounts(spec.overhead))
    total.pop(PODS, None)
    return {name: much for name, much in total.items() if not _ignored(name, counting)} | {PODS: 1}


def added(a: Resources, b: Resources) -> Resources:
    """No more than the largest amount: what many containers ask for together is bounded as one is."""
    return {name: min(a.get(name, 0) + b.get(name, 0), MAX_AMOUNT) for name in (*a, *b)}


def larger(a: Resources, b: Resources) -> Resources:
    return {name: max(a.get(name, 0), b.get(name, 0)) for name in (*a, *b)}


def resize_is_deferred(pod: Pod) -> bool:
    """It is bound and waits for room to grow in its place: what it holds now is its own already."""
    return _resize(pod) == "Deferred"


def _resize(pod: Pod) -> str:
    pending = pod.condition("PodResizePending")
    return pending.reason if pending is not None else ""


def _wanted(requests: Quantities, limits: Quantities) -> Resources:
    """The API fills in a request from its limit; a pod that has not been there yet gets the same."""
    return amounts({**limits, **requests} if limits else requests)


def _statuses(pod: Pod, given: Iterable[ContainerStatus]) -> dict[str, ContainerStatus]:
    return {status.name: status for status in given} if pod.spec.node_name else {}


def _ignored(name: str, counting: Counting) -> bool:
    return bool(counting.ignored) and (name in counting.ignored or name.partition("/")[0] in counting.ignored)
