"""Devices: refuses nodes with enough in sum but not in one piece: fragmented GPUs, bound cores, cores on different
sockets.

`fit` refuses nodes where the amounts do not fit. For every node that passes, `DeviceSlots.find` succeeds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from hodei.engine.device_slots import WHOLE, DeviceSlots, gpus_of, needs_devices
from hodei.engine.explain import Change, lower_request
from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import NO_OPINION, Reads, Refusals, Trigger
from hodei.engine.view import Member, View
from hodei.model.job import Reason, TaskSpec
from hodei.model.node import Node
from hodei.model.resources import CPU, GPU, human_amount

_TEXTS = {
    "GPU_FRAGMENTED": "GPUs are free only in pieces",
    "NO_TOPOLOGY": "its cores are unknown",
    "NO_FREE_CORES": "not enough free cores to bind to",
    "NOT_IN_ONE_SOCKET": "no single socket has enough free cores and GPUs",
}


class Devices:
    name = "devices"
    reads: Reads = "usage"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def key(self, member: Member) -> Hashable:
        task = member.task
        if not needs_devices(task):
            return NO_OPINION
        return (task.request.get(GPU, 0), task.binding, task.request.get(CPU, 0) if task.binding else 0)

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        task = member.task
        if not needs_devices(task):
            return ()
        out: list[tuple[Mask, Reason]] = []
        amount = task.request.get(GPU, 0)
        if amount:
            in_pieces = (nodes.free(GPU) >= amount) & ~fits(nodes.gpus(), amount)
            never = nodes.by("gpus when empty", _gpus_when_empty).where(lambda gpus: not fits_one(gpus, amount))
            out.append((in_pieces & ~never, self._reason("GPU_FRAGMENTED", evictable=True)))
            out.append((in_pieces & never, self._reason("GPU_FRAGMENTED")))
        if task.binding:
            out += self._unbound(task, nodes)
        return out

    def _unbound(self, task: TaskSpec, nodes: Nodes) -> list[tuple[Mask, Reason]]:
        masks: dict[tuple[str, bool], Mask] = {}
        for place, (node, devices) in enumerate(zip(nodes.as_list(), nodes.devices(), strict=True)):
            code = _objection(task, devices) if node.sockets and devices is not None else "NO_TOPOLOGY"
            if code:
                # If it does not fit the idle node, preemption cannot help.
                evictable = code != "NO_TOPOLOGY" and DeviceSlots(node).fits(task)
                masks.setdefault((code, evictable), nodes.none())[place] = True
        return [(mask, self._reason(code, evictable)) for (code, evictable), mask in sorted(masks.items())]

    def _reason(self, code: str, evictable: bool = False) -> Reason:
        return Reason(self.name, code, _TEXTS[code], evictable=evictable)

    def lacks(self, member: Member, nodes: Nodes, view: View) -> tuple[int, str]:
        """The shortage of one node in thousandths of the request, and as text."""
        task, size, texts = member.task, 0, []
        amount = task.request.get(GPU, 0)
        if amount and int(nodes.free(GPU)[0]) >= amount and not fits(nodes.gpus(), amount)[0]:
            size += max(1, (amount - int(_largest(nodes.gpus(), amount)[0])) * 1000 // amount)
            pieces = [human_amount(GPU, free) for free in nodes.gpus()[0].tolist() if free > 0]
            texts.append(
                f"its GPUs are free only in pieces ({', '.join(pieces)}; {human_amount(GPU, amount)} requested)"
            )
        [node], [devices] = nodes.as_list(), nodes.devices()
        if task.binding and node.sockets and devices is not None and _objection(task, devices):
            cores = _cores(task)
            free = [len(socket) for socket in devices.cores]
            most = max(free) if task.binding == "numa" else sum(free)
            size += max(1, (cores - most) * 1000 // max(cores, 1))
            texts.append(f"has {' + '.join(map(str, free))} free cores in its sockets, {cores} requested")
        return size, ", ".join(texts)

    def suggest(self, member: Member, nodes: Nodes, view: View) -> Iterator[Change]:
        """GPUs: the most that some node has in one piece. Cores: no binding, a weaker one, or as many as one node has."""
        task = member.task
        amount = task.request.get(GPU, 0)
        if amount and len(nodes):
            most = int(_largest(nodes.gpus(), amount).max(initial=0))
            change = lower_request(task, GPU, min(most, amount - 1))
            if change.kind == "drop" or change.amount < amount:
                yield change
        if not task.binding:
            return
        yield Change("drop", f"drop binding to {_binding_text(task)}", {"binding": ""})
        if task.binding == "numa":
            yield Change("drop", "binding to any cores instead of those of one socket", {"binding": "cores"})
        known = [
            [len(socket) for socket in devices.cores]
            for devices in nodes.devices()
            if devices is not None and devices.cores
        ]
        free = max((max(each) if task.binding == "numa" else sum(each) for each in known), default=0)
        if 0 < free < _cores(task):
            yield lower_request(task, CPU, free * 1000)


def fits(gpus: Ints, amount: int) -> Mask:
    """Per row of free GPUs: whether the whole GPUs of `amount` are free, and the fraction on another one."""
    whole, part = divmod(amount, WHOLE)
    found: Mask = (gpus >= WHOLE).sum(axis=1) >= whole
    if part:
        found &= (gpus >= part).sum(axis=1) > whole
    return found


def fits_one(gpus: Sequence[int], amount: int) -> bool:
    return bool(fits(np.array([gpus], dtype=np.int64), amount)[0])


def _largest(gpus: Ints, amount: int) -> Ints:
    """The largest request up to `amount` that fits each row."""
    if not gpus.shape[1]:
        return np.zeros(len(gpus), dtype=np.int64)
    whole = np.minimum((gpus >= WHOLE).sum(axis=1), amount // WHOLE)
    descending = np.concatenate([-np.sort(-gpus, axis=1), np.zeros((len(gpus), 1), dtype=np.int64)], axis=1)
    rest = np.clip(descending[np.arange(len(gpus)), whole], 0, WHOLE - 1)
    found: Ints = np.minimum(whole * WHOLE + rest, amount)
    return found


def _gpus_when_empty(node: Node) -> tuple[int, ...]:
    return tuple(gpus_of(node).values())


def _objection(task: TaskSpec, devices: DeviceSlots) -> str:
    """Why the cores (and GPUs) of a node cannot be bound; "" if they can, or if only GPUs are missing."""
    cores, amount = _cores(task), task.request.get(GPU, 0)
    if sum(map(len, devices.cores)) < cores:
        return "NO_FREE_CORES"
    if task.binding != "numa":
        return ""
    if max(map(len, devices.cores), default=0) < cores:
        return "NOT_IN_ONE_SOCKET"
    gpus_fit = not amount or fits_one(list(devices.gpus.values()), amount)
    return "NOT_IN_ONE_SOCKET" if gpus_fit and not devices.fits(task) else ""


def _cores(task: TaskSpec) -> int:
    return -(-task.request.get(CPU, 0) // 1000)


def _binding_text(task: TaskSpec) -> str:
    return "the cores of one socket" if task.binding == "numa" else "cores"
