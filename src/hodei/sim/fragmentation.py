"""How much of what is free could a typical job not use? The measure of fragmentation that a simulated run is sampled with.

Typical is what the first jobs of the workload ask for, so it is the same under every policy. Where jobs ask for GPUs it is
the measure that `plugins.fragmentation` places by; elsewhere cpu counts, and what is free on a node is of no use to a job
that does not fit there.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np

from hodei.engine.nodes import Nodes, Table
from hodei.model.resources import CPU, GPU, Resources
from hodei.plugins.fragmentation import Fragments, Shape, typical_of
from hodei.sim.traces import Workload

# So many jobs are looked at, and so many different requests of theirs: measuring must stay cheap on ten thousand nodes.
_LOOKED_AT = 5000
_REQUESTS = 16
# A measurement is good for this part of the steps taken so far: the pictures show fewer points than that.
_PART = 250


class Fragmentation:
    """Measures when asked, but not each time: between measurements the last one is the answer."""

    def __init__(self, workload: Workload, table: Table) -> None:
        self._workload, self._table = workload, table
        self._requests: list[tuple[Resources, int]] | None = None
        self._fragments: Fragments | None = None
        self._due, self._last = 0, 0

    def share(self, step: int) -> int:
        """In thousandths of what is free, after so many steps of the run; 0 on a single node, where nothing can be split."""
        if step >= self._due:
            self._due = step + max(step // _PART, 1)
            self._last = self._measured() if len(self._table.names) > 1 else 0
        return self._last

    def _measured(self) -> int:
        if self._requests is None:
            self._requests = self._look()
        nodes = Nodes(self._table)
        if self._fragments is not None:
            gpus = nodes.gpus()
            free = int(np.maximum(gpus, 0).sum())
            kinds = self._fragments.kinds(nodes)
            usable = int(self._fragments.usable(kinds, nodes.free(CPU), gpus).sum())
            return 1000 - usable * 1000 // (free * self._fragments.weight) if free else 0
        cpu = np.maximum(nodes.free(CPU), 0)
        free, weight = int(cpu.sum()), sum(times for _, times in self._requests)
        usable = 0
        for request, times in self._requests:
            fits = np.logical_and.reduce([nodes.free(resource) >= amount for resource, amount in request.items()])
            usable += times * int(cpu[fits].sum())
        return 1000 - usable * 1000 // (free * weight) if free and weight else 0

    def _look(self) -> list[tuple[Resources, int]]:
        """What members ask for, the most frequent first."""
        seen: Counter[tuple[tuple[str, int], ...]] = Counter()
        for arrival in islice(iter(self._workload.arrivals), _LOOKED_AT):
            for task in arrival.spec.tasks:
                seen[tuple(sorted((name, amount) for name, amount in task.request.items() if amount))] += task.count
        seen.pop((), None)
        requests = [(dict(request), times) for request, times in seen.most_common()]
        if self._table.gpus.shape[1]:
            shapes: Counter[Shape] = Counter()
            for request, times in requests:
                if GPU in request:
                    shapes[Shape(request.get(CPU, 0), request[GPU])] += times
            self._fragments = Fragments(typical_of(shapes.elements())) if shapes else None
        return requests[:_REQUESTS]
