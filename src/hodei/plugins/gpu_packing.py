"""GPU placement heuristics: which feasible node keeps the others free.

They follow the simulator of "Beware of Fragmentation" (USENIX ATC 2023), in steps of a hundredth as it does: ties are
common and go to the smallest name, which packs better than a finer score. Amounts are relative to the largest node.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hodei.engine.device_slots import WHOLE
from hodei.engine.nodes import Ints, Mask, Nodes
from hodei.engine.points import MAX_SCORE, NO_OPINION, Reads
from hodei.engine.view import Member, View
from hodei.model.resources import CPU, GPU

POINT = MAX_SCORE // 100


def cpu_and_gpu(member: Member) -> tuple[int, int]:
    return member.task.request.get(CPU, 0), member.task.request.get(GPU, 0)


def free_after(member: Member, nodes: Nodes) -> Ints:
    """What stays free on a node after placement, in ten-thousandths of the largest node: half cpu, half GPUs."""
    cpu, gpu = cpu_and_gpu(member)
    left = nodes.zeros()
    for resource, requested in ((CPU, cpu), (GPU, gpu)):
        left = left + np.maximum(nodes.free(resource) - requested, 0) * (MAX_SCORE // 2) // max(
            nodes.largest(resource), 1
        )
    return left


class _ByRequest:
    """Depends only on cpu and GPUs."""

    name = ""
    reads: Reads = "usage"

    def key(self, member: Member) -> Hashable:
        return cpu_and_gpu(member)


class GpuBestfit(_ByRequest):
    """The node with the least left free."""

    name = "gpu_bestfit"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        return np.maximum(MAX_SCORE - free_after(member, nodes), 0)


class GpuDotprod(_ByRequest):
    """The node whose free cpu and GPUs are least like the request in direction and size (Tetris, inverted to pack)."""

    name = "gpu_dotprod"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        similarity = nodes.zeros()
        for resource, requested in zip((CPU, GPU), cpu_and_gpu(member), strict=True):
            most = max(nodes.largest(resource), 1)
            # Millionths, half for each resource: the sum is at most a million.
            similarity = similarity + (np.maximum(nodes.free(resource), 0) * 1000 // most) * (requested * 500 // most)
        steps = (1_000_000 - np.minimum(similarity, 1_000_000)) // 10_000
        return steps * POINT


class _GpuOnly:
    """No opinion on members without GPUs."""

    name = ""
    reads: Reads = "usage"

    def key(self, member: Member) -> Hashable:
        return member.task.request.get(GPU, 0) or NO_OPINION


class GpuPacking(_GpuOnly):
    """Shared GPUs first, the fullest of them; then free GPUs of nodes in use; idle nodes last, small ones first."""

    name = "gpu_packing"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        amount = member.task.request.get(GPU, 0)
        if not amount:
            return None
        gpus = nodes.gpus()
        whole, part = divmod(amount, WHOLE)
        idle = (gpus == WHOLE).sum(axis=1)
        tightest = np.where(gpus >= part, gpus, WHOLE).min(axis=1, initial=WHOLE)
        opened = whole + ((tightest == WHOLE) & (part > 0))
        shared = 100 - tightest // 100
        points = np.where(opened > 0, np.maximum(50 - opened, 33), np.maximum(shared, 50))
        unused = idle == (gpus >= 0).sum(axis=1)
        points = np.where(unused, np.maximum(33 - idle, 0), points)
        found: Ints = (points * POINT).astype(np.int64)
        return found


class GpuClustering(_GpuOnly):
    """With members that use as many GPUs, away from others; among these the fullest node."""

    name = "gpu_clustering"

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        amount = member.task.request.get(GPU, 0)
        if not amount:
            return None
        size = 0 if amount < WHOLE else -(-amount // WHOLE)
        most = max(nodes.largest(GPU), 1)
        quarters = np.fromiter(
            (_neighbour_class(size, devices.sizes if devices is not None else {}) for devices in nodes.devices()),
            dtype=np.int64,
            count=len(nodes),
        )
        full = 25 * (most - np.clip(nodes.free(GPU), 0, most)) // most
        return (quarters * 25 + full) * POINT


def _neighbour_class(size: int, sizes: dict[int, int]) -> int:
    """3: only members of this size, 2: also others, 1: empty node, 0: only others."""
    if size in sizes:
        return 3 if len(sizes) == 1 else 2
    return 0 if sizes else 1


class GpuRandom:
    """A random node and GPU: the baseline for comparison. The same seed and history give the same choices."""

    name = "gpu_random"
    reads: Reads = "cluster"

    def __init__(self, seed: int = 0) -> None:
        self._seed = int(seed)

    def key(self, member: Member) -> Hashable:
        return None

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        rows = np.arange(len(nodes.table.names), dtype=np.uint64)[nodes.rows]
        return (self._numbers(rows, nodes) >> np.uint64(2)).astype(np.int64)

    def normalize(self, raw: Ints, feasible: Mask) -> Ints:
        """The highest number among the feasible nodes gets all points."""
        out = np.zeros(len(raw), dtype=np.int64)
        if feasible.any():
            out[int(np.where(feasible, raw, -1).argmax())] = MAX_SCORE
        return out

    def choose_gpu(self, member: Member, nodes: Nodes, view: View) -> int | None:
        part = member.task.request.get(GPU, 0) % WHOLE
        [columns] = np.nonzero(nodes.gpus()[0] >= part)
        numbers = self._numbers(columns.astype(np.uint64) + np.uint64(1 << 32), nodes)
        return int(columns[int(numbers.argmax())]) if len(columns) else None

    def _numbers(self, places: NDArray[np.uint64], nodes: Nodes) -> NDArray[np.uint64]:
        """A number per place that differs by seed and by placement (splitmix64)."""
        placement = int(nodes.table.last_placed.max(initial=0))
        start = (self._seed * 0x9E3779B97F4A7C15 + placement * 0xD1342543DE82EF95) % 2**64
        mixed: Any = places * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(start)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        found: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
        return found
