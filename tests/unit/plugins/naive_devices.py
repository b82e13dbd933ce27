"""Reference implementation of `devices`: one node at a time, by trying every way to grant what is free."""

from __future__ import annotations

from itertools import combinations

from hodei.model.job import TaskSpec
from hodei.model.node import Grant, Node


class Host:
    """One node and what its runs hold, without any of the engine's own counting."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.held: list[tuple[dict[str, int], Grant | None]] = []

    def free_amount(self, resource: str) -> int:
        allocatable = self.node.capacity.get(resource, 0) * self.node.overcommit_percent.get(resource, 100) // 100
        return allocatable - sum(request.get(resource, 0) for request, _ in self.held)

    def free_cores(self) -> list[set[int]]:
        held = {cpu for _, grant in self.held if grant for cpu in grant.cpus}
        return [set(socket.cpus) - held for socket in self.node.sockets]

    def free_gpus(self) -> dict[int, int]:
        amount, percent = self.node.capacity.get("gpu", 0), self.node.overcommit_percent.get("gpu", 100)
        numbers = [gpu for socket in self.node.sockets for gpu in socket.gpus]
        numbers += [number for number in range(64) if number not in numbers]
        free = {}
        for gpu in numbers:
            if amount > 0:
                free[gpu] = min(amount, 1000) * percent // 100
                amount -= 1000
        for _, grant in self.held:
            for gpu, milli in grant.gpus if grant else ():
                if gpu in free:
                    free[gpu] -= milli
        return free

    def empty(self) -> Host:
        return Host(self.node)


def gpus_fit(free: dict[int, int], amount: int) -> bool:
    """Some whole GPUs, and one more where the rest fits."""
    whole, part = divmod(amount, 1000)
    idle = [gpu for gpu, left in free.items() if left >= 1000]
    for chosen in combinations(idle, whole):
        if not part or any(left >= part for gpu, left in free.items() if gpu not in chosen):
            return True
    return False


def refusals(task: TaskSpec, host: Host) -> set[tuple[str, bool]]:
    """The codes for this node, each with whether preemption could help: whether it would fit on the idle node."""
    empty = host.empty()
    gpus_when_empty = gpus_fit(empty.free_gpus(), task.request.get("gpu", 0))
    helps = {"GPU_FRAGMENTED": gpus_when_empty, "NO_TOPOLOGY": False}
    return {(code, helps.get(code, possible(task, empty))) for code in _codes(task, host)}


def _codes(task: TaskSpec, host: Host) -> set[str]:
    out: set[str] = set()
    amount, cores = task.request.get("gpu", 0), -(-task.request.get("cpu", 0) // 1000)
    enough_gpus = amount == 0 or gpus_fit(host.free_gpus(), amount)
    if amount and host.free_amount("gpu") >= amount and not enough_gpus:
        out.add("GPU_FRAGMENTED")
    if not task.binding:
        return out
    if not host.node.sockets:
        return out | {"NO_TOPOLOGY"}
    sockets = host.free_cores()
    if len(set().union(*sockets)) < cores:
        return out | {"NO_FREE_CORES"}
    if task.binding == "numa":
        large_enough = [number for number, free in enumerate(sockets) if len(free) >= cores]
        together = [number for number in large_enough if amount == 0 or gpus_fit(_gpus_of(host, number), amount)]
        if not large_enough or (enough_gpus and not together):
            out.add("NOT_IN_ONE_SOCKET")
    return out


def _gpus_of(host: Host, socket: int) -> dict[int, int]:
    return {gpu: left for gpu, left in host.free_gpus().items() if gpu in host.node.sockets[socket].gpus}


def possible(task: TaskSpec, host: Host) -> bool:
    """Whether its devices are free, regardless of plain amounts."""
    amount, cores = task.request.get("gpu", 0), -(-task.request.get("cpu", 0) // 1000)
    if not task.binding:
        return gpus_fit(host.free_gpus(), amount)
    sockets = host.free_cores()
    if task.binding == "cores":
        return len(set().union(*sockets)) >= cores and (amount == 0 or gpus_fit(host.free_gpus(), amount))
    return any(
        len(free) >= cores and (amount == 0 or gpus_fit(_gpus_of(host, number), amount))
        for number, free in enumerate(sockets)
    )
