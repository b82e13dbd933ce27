"""GPU placement by fragmentation: how much of a node's free GPUs could a typical job not use?

Fragmentation Gradient Descent (Weng et al., USENIX ATC 2023): of a node's free GPUs, a job of the typical workload can
use those with enough left, if everything else it requests is free too; the rest is a fragment for that job. The mean
over the workload, weighted by frequency, is the node's fragmentation. A member is placed where fragmentation grows
least.

Integers throughout, with tables over free cpu and free thousandths of GPUs: evaluating a node is a few lookups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from math import log
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hodei.engine.device_slots import WHOLE
from hodei.engine.nodes import Ints, Nodes
from hodei.engine.points import MAX_SCORE, Reads
from hodei.engine.view import Member, View
from hodei.model.errors import InvalidInput
from hodei.model.resources import CPU, GPU, parse_resources
from hodei.plugins.gpu_packing import cpu_and_gpu, free_after

_IMPOSSIBLE = np.iinfo(np.int64).min // 2


class Shape(Struct, frozen=True, order=True):
    """A request of the typical workload: thousandths of cpu and GPU, and the accepted GPU types (empty: any)."""

    cpu: int
    gpu: int
    gpu_types: tuple[str, ...] = ()


# The default: mostly single GPUs and fractions, with four cores each.
DEFAULT_WORKLOAD: dict[Shape, int] = {
    Shape(1000, 250): 4, Shape(2000, 500): 4, Shape(4000, 1000): 8,
    Shape(8000, 2000): 2, Shape(16_000, 4000): 1, Shape(32_000, 8000): 1,
}  # fmt: skip


def typical_workload(seen: Iterable[Shape], percent: int = 95) -> dict[Shape, int]:
    """The most frequent shapes that make up `percent` of those seen, with their counts."""
    counted = Counter(seen)
    kept: dict[Shape, int] = {}
    for shape, times in sorted(counted.items(), key=lambda pair: (pair[1], pair[0]), reverse=True):
        if sum(kept.values()) * 100 >= percent * counted.total():
            break
        kept[shape] = times
    return kept


def parse_workload(given: Sequence[dict[str, Any]]) -> dict[Shape, int]:
    """From configuration: `[{cpu = 4, gpu = 0.5, weight = 10, gpu_types = ["T4"]}, ...]`."""
    out: dict[Shape, int] = {}
    for entry in given:
        unknown = sorted(set(entry) - {"cpu", "gpu", "weight", "gpu_types"})
        if unknown:
            raise InvalidInput(f"a typical shape has no {unknown[0]!r}", hint="it has cpu, gpu, weight and gpu_types")
        weight = entry.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int) or not 0 < weight <= 1_000_000:
            raise InvalidInput(f"the weight of a typical shape must be a whole number up to 1000000, not {weight!r}")
        amounts = parse_resources({name: entry[name] for name in (CPU, GPU) if name in entry})
        types = tuple(sorted(str(kind).lower() for kind in entry.get("gpu_types", ())))
        shape = Shape(amounts.get(CPU, 0), amounts.get(GPU, 0), types)
        out[shape] = out.get(shape, 0) + weight
    return out


class Fragments:
    """The typical workload as tables. For each GPU type and step of free cpu: the weight that could use a GPU with so
    many free thousandths (`_shares`), and a node with so many free GPUs (`_full`)."""

    def __init__(self, typical: dict[Shape, int]) -> None:
        self.weight = sum(typical.values())
        self._types = sorted({kind for shape in typical for kind in shape.gpu_types})
        self._cpus = np.array(sorted({shape.cpu for shape in typical}), dtype=np.int64)
        most = max([_gpu_count(shape.gpu) for shape in typical], default=0)
        self._most = most
        self._shares = np.zeros((len(self._types) + 1, len(self._cpus) + 1, WHOLE + 1), dtype=np.int64)
        self._full = np.zeros((len(self._types) + 1, len(self._cpus) + 1, most + 1), dtype=np.int64)
        for shape, weight in typical.items():
            if not shape.gpu:
                continue  # cpu jobs cannot use any GPU: the same for all nodes
            enough = int(np.searchsorted(self._cpus, shape.cpu)) + 1
            for number, kind in enumerate(["", *self._types]):
                if shape.gpu_types and kind not in shape.gpu_types:
                    continue
                if shape.gpu < WHOLE:
                    self._shares[number, enough:, shape.gpu :] += weight
                else:
                    self._full[number, enough:, _gpu_count(shape.gpu) :] += weight

    def kinds(self, nodes: Nodes) -> NDArray[np.intp]:
        numbers = {kind: number + 1 for number, kind in enumerate(self._types)}
        column = nodes.by("gpu_type lower case", lambda node: node.gpu_type.lower())
        return column.numbers(lambda kind: numbers.get(kind, 0)).astype(np.intp)

    def usable(self, kinds: NDArray[np.intp], cpu: Ints, gpus: Ints) -> Ints:
        """Per row: the free thousandths that each typical job could use, times its weight, summed."""
        free = np.maximum(gpus, 0)
        step = np.searchsorted(self._cpus, cpu, side="right")
        full = (free >= WHOLE).sum(axis=1)
        shares = self._shares[kinds[:, None], step[:, None], np.minimum(free, WHOLE)]
        wholes = self._full[kinds, step, np.minimum(full, self._most)]
        found: Ints = (free * shares).sum(axis=1) + full * WHOLE * wholes
        return found

    def gains(self, member: Member, nodes: Nodes) -> Ints:
        """The decrease of each node's fragmentation by a placement, times the total weight, for each GPU that could
        provide the fraction (one column without a fraction); `_IMPOSSIBLE` without capacity."""
        cpu, gpu = cpu_and_gpu(member)
        whole, part = divmod(gpu, WHOLE)
        kinds, free, gpus = self.kinds(nodes), nodes.free(CPU), nodes.gpus()
        before, after = self.usable(kinds, free, gpus), free - cpu
        # A fragment is free and unusable; placed capacity is no longer free.
        gain = gpu * self.weight - before
        idle = gpus >= WHOLE
        taken = np.where(idle & (np.cumsum(idle, axis=1) <= whole), gpus - WHOLE, gpus) if whole else gpus
        enough = idle.sum(axis=1) >= whole
        if not part:
            found: Ints = np.where(enough, gain + self.usable(kinds, after, taken), _IMPOSSIBLE)[:, None]
            return found
        out = np.full(gpus.shape, _IMPOSSIBLE, dtype=np.int64)
        rows, columns = np.nonzero((taken >= part) & (taken == gpus) & enough[:, None])
        trial = taken[rows]
        trial[np.arange(len(rows)), columns] -= part
        out[rows, columns] = gain[rows] + self.usable(kinds[rows], after[rows], trial)
        return out


class Fgd:
    """The node and GPU where fragmentation grows least. `typical`: the workload. Scores are steps of a logistic curve
    that is steep around "no change"."""

    name = "fgd"
    reads: Reads = "usage"
    steps = 100

    def __init__(self, typical: Sequence[dict[str, Any]] = (), workload: dict[Shape, int] | None = None) -> None:
        """`typical` comes from the configuration; `workload` is the result of `typical_workload`."""
        self._fragments = Fragments(workload or parse_workload(typical) or DEFAULT_WORKLOAD)
        self._thresholds = _thresholds(self.steps, self._fragments.weight)

    def key(self, member: Member) -> Hashable:
        return cpu_and_gpu(member)

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        if not nodes.table.gpus.shape[1]:
            return None
        best = self._fragments.gains(member, nodes).max(axis=1)
        return np.maximum(self._points(best), 0) * (MAX_SCORE // self.steps)

    def choose_gpu(self, member: Member, nodes: Nodes, view: View) -> int | None:
        """The first with the highest score."""
        return int(self._points(self._fragments.gains(member, nodes)[0]).argmax())

    def _points(self, gains: Ints) -> Ints:
        """Steps from 0 to `steps`; -1 without capacity."""
        found = np.searchsorted(self._thresholds, gains, side="right").astype(np.int64)
        return np.where(gains == _IMPOSSIBLE, -1, found)


class GpuHodei(Fgd):
    """Coarser steps of fragmentation, and best fit within a step: keeping nodes empty predicts more."""

    name = "gpu_hodei"
    steps = 50

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        points = super().score(member, nodes, view)
        if points is None:
            return None
        step = MAX_SCORE // self.steps
        fuller = (MAX_SCORE - np.clip(free_after(member, nodes), 0, MAX_SCORE)) * (step - 1) // MAX_SCORE
        found: Ints = np.clip(points + fuller, 0, MAX_SCORE)
        return found


def _thresholds(steps: int, weight: int) -> Ints:
    """The gain at which each step of the logistic curve is reached."""
    corners = [round(1_000_000 * log(step / (steps - step))) for step in range(1, steps)]
    # In millionths of a GPU: the same integers on every machine.
    return np.array([-(-corner * weight // 1000) for corner in corners], dtype=np.int64)


def _gpu_count(gpu: int) -> int:
    """Number of GPUs touched; a fraction counts as one."""
    return -(-gpu // WHOLE)
