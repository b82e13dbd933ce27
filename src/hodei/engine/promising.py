"""When a gang that can not start now is expected to be able to, and where: by the book, and by all filters."""

from __future__ import annotations

import numpy as np

from hodei.engine.book import FOREVER, Promise
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Mask
from hodei.engine.view import Gang, View
from hodei.model.ids import NodeName
from hodei.model.resources import Resources


def soonest(engine: Engine, gang: Gang, view: View) -> Promise | None:
    """The first time at which every needed member has a node by the book; None if no end in sight makes room.

    Members are given the node that is free first, one after another, and start together when the last has one. What
    rules about company will say by then is not known now; they are asked again when the time has come.
    """
    book = view.book
    assert book is not None, "promises need a book"
    duration_ms = gang.estimate_ms or FOREVER
    table, now_ms = engine.table, view.now_ms
    start_ms = now_ms
    taken: dict[NodeName, Resources] = {}
    open_rows: dict[int, Mask] = {}
    for kind, _, member in gang.each():
        if kind not in open_rows:
            open_rows[kind] = engine.open_rows(gang, kind, view)
        request = {resource: amount for resource, amount in member.task.request.items() if amount}
        best: tuple[int, NodeName] | None = None
        for row in np.flatnonzero(open_rows[kind]).tolist():
            name = table.names[row]
            asked = _plus(request, taken.get(name, {}))
            at_ms = book.earliest(name, asked, duration_ms, now_ms, gang.id, gang.job.project)
            if at_ms is not None and (best is None or (at_ms, name) < best):
                best = (at_ms, name)
                if at_ms <= start_ms:
                    break
        if best is None:
            return None
        start_ms = max(start_ms, best[0])
        taken[best[1]] = _plus(request, taken.get(best[1], {}))
    end_ms = min(start_ms + duration_ms, FOREVER)
    return Promise(gang.id, start_ms, end_ms, tuple(sorted(taken.items())), now_ms)


def _plus(some: Resources, more: Resources) -> Resources:
    return {resource: some.get(resource, 0) + more.get(resource, 0) for resource in {**some, **more}}
