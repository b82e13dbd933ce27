"""Free cores and GPUs of one node, and which of them a task gets.

Only tasks with a CPU binding get cores of their own; other work shares all cores within the allocated amounts. GPUs
are always assigned by number, whole or as a fraction of one. Best fit: the tightest slot is taken.
"""

from __future__ import annotations

from collections.abc import Iterable

from hodei.model.job import TaskSpec
from hodei.model.node import Grant, Node
from hodei.model.resources import CPU, GPU

WHOLE = 1000


def needs_devices(task: TaskSpec) -> bool:
    return bool(task.binding or task.request.get(GPU))


class DeviceSlots:
    """`gpus`: free thousandths per GPU; `cores`: free cores per socket; `sizes`: how many runs hold that many GPUs
    (0: a fraction of one). Changed only by `take` and `give`."""

    __slots__ = ("_socket_of", "cores", "gpus", "sizes")

    def __init__(self, node: Node) -> None:
        self.cores: list[set[int]] = [set(socket.cpus) for socket in node.sockets]
        self._socket_of = {gpu: number for number, socket in enumerate(node.sockets) for gpu in socket.gpus}
        self.gpus: dict[int, int] = gpus_of(node)
        self.sizes: dict[int, int] = {}

    def copy(self) -> DeviceSlots:
        clone = object.__new__(DeviceSlots)
        clone.cores = [set(cores) for cores in self.cores]
        clone._socket_of, clone.gpus, clone.sizes = self._socket_of, dict(self.gpus), dict(self.sizes)
        return clone

    def fits(self, task: TaskSpec) -> bool:
        return self.find(task) is not None

    def find(self, task: TaskSpec, gpu_wanted: int = -1) -> Grant | None:
        """The cores and GPUs that the task would get, or None. `gpu_wanted`: the preferred GPU for a fraction."""
        gpu, cores = task.request.get(GPU, 0), -(-task.request.get(CPU, 0) // WHOLE) if task.binding else 0
        if task.binding == "numa":
            return self._in_one_socket(cores, gpu, gpu_wanted)
        bound = self._cores(cores)
        given = self._gpus(self.gpus, gpu, gpu_wanted)
        return None if bound is None or given is None else Grant(bound, given)

    def take(self, grant: Grant) -> None:
        for cores in self.cores:
            cores.difference_update(grant.cpus)
        for gpu, milli in grant.gpus:
            if gpu in self.gpus:
                self.gpus[gpu] -= milli
        self._count(grant, 1)

    def give(self, grant: Grant, node: Node) -> None:
        for socket, cores in zip(node.sockets, self.cores, strict=True):
            cores.update(cpu for cpu in grant.cpus if cpu in socket.cpus)
        for gpu, milli in grant.gpus:
            if gpu in self.gpus:
                self.gpus[gpu] += milli
        self._count(grant, -1)

    def _count(self, grant: Grant, change: int) -> None:
        if grant.gpus:
            size = size_of(grant)
            self.sizes[size] = self.sizes.get(size, 0) + change
            if not self.sizes[size]:
                del self.sizes[size]

    def _in_one_socket(self, cores: int, gpu: int, gpu_wanted: int) -> Grant | None:
        for number in sorted(range(len(self.cores)), key=lambda number: (len(self.cores[number]), number)):
            if len(self.cores[number]) >= cores:
                here = {device: free for device, free in self.gpus.items() if self._socket_of.get(device) == number}
                given = self._gpus(here, gpu, gpu_wanted)
                if given is not None:
                    return Grant(tuple(sorted(self.cores[number])[:cores]), given)
        return None

    def _cores(self, count: int) -> tuple[int, ...] | None:
        """From one socket if possible, else from as few as possible."""
        if not count:
            return ()
        if sum(map(len, self.cores)) < count:
            return None
        fitting = [(len(cores), sorted(cores)) for cores in self.cores if len(cores) >= count]
        if fitting:
            return tuple(min(fitting)[1][:count])
        taken: list[int] = []
        for cores in sorted(self.cores, key=len, reverse=True):
            taken += sorted(cores)[: count - len(taken)]
        return tuple(sorted(taken))

    def _gpus(self, free: dict[int, int], amount: int, gpu_wanted: int) -> tuple[tuple[int, int], ...] | None:
        """Whole GPUs first, then the fraction from another GPU."""
        whole, part = divmod(amount, WHOLE)
        given: list[tuple[int, int]] = []
        if whole:
            chosen = self._nearest([gpu for gpu, left in sorted(free.items()) if left >= WHOLE], whole)
            if chosen is None:
                return None
            given = [(gpu, WHOLE) for gpu in chosen]
        if part:
            taken = dict(given)
            enough = [(left, gpu) for gpu, left in free.items() if left >= part and gpu not in taken]
            if not enough:
                return None
            tightest = min(enough)[1]
            given.append((gpu_wanted if any(gpu == gpu_wanted for _, gpu in enough) else tightest, part))
        return tuple(given)

    def _nearest(self, gpus: list[int], count: int) -> list[int] | None:
        """That many GPUs, from one socket if possible."""
        if len(gpus) < count:
            return None
        by_socket: dict[int, list[int]] = {}
        for gpu in gpus:
            by_socket.setdefault(self._socket_of.get(gpu, -1), []).append(gpu)
        fitting = [near for near in by_socket.values() if len(near) >= count]
        return (min(fitting, key=len) if fitting else gpus)[:count]


def size_of(grant: Grant) -> int:
    """How many GPUs a grant takes, a fraction beside whole ones counted as one; 0 for a fraction alone."""
    return 0 if len(grant.gpus) == 1 and grant.gpus[0][1] < WHOLE else len(grant.gpus)


def gpus_of(node: Node) -> dict[int, int]:
    """Each GPU by number with its allocatable thousandths: first those named by sockets, then as many as there are."""
    amount = node.capacity.get(GPU, 0)
    percent = node.overcommit_percent.get(GPU, 100)
    named = [gpu for socket in node.sockets for gpu in socket.gpus]
    numbers = _enough(named, -(-amount // WHOLE))
    return {gpu: min(WHOLE, amount - place * WHOLE) * percent // 100 for place, gpu in enumerate(numbers)}


def _enough(named: Iterable[int], count: int) -> list[int]:
    numbers = list(dict.fromkeys(named))[:count]
    following = 0
    while len(numbers) < count:
        if following not in numbers:
            numbers.append(following)
        following += 1
    return numbers
