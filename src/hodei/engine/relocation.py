"""A gang that is moved goes elsewhere: not to the nodes that it leaves, or to the one that it is sent to.

No opinion that a profile could leave out: somebody said so of this one job, so it is judged in every profile.
"""

from __future__ import annotations

import numpy as np

from hodei.engine.nodes import Table
from hodei.engine.points import Layout, Layouts, Trigger
from hodei.engine.view import Gang, View
from hodei.model.decision import Reason


class RelocationFilter:
    name = "move"
    cured_by: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def layouts(self, gang: Gang, table: Table, view: View) -> Layouts | None:
        if not gang.leaves and not gang.goes_to:
            return None
        rows = np.full(len(table.names), not gang.goes_to)
        for name in (gang.goes_to,) if gang.goes_to else gang.leaves:
            if name in table.row:
                rows[table.row[name]] = bool(gang.goes_to)
        return Layouts([Layout((rows,) * len(gang.members))], Reason(self.name, "MOVING", _text(gang), evictable=True))


def _text(gang: Gang) -> str:
    if gang.goes_to:
        return f"it is being moved to {gang.goes_to}, which has no room for it"
    names = ", ".join(gang.leaves[:5]) + (f" and {len(gang.leaves) - 5} more" if len(gang.leaves) > 5 else "")
    return f"it is being moved off {names}, and no other node has room for it"


MOVES = RelocationFilter()
