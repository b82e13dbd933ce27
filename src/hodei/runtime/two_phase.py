"""Gangs on a backend that can set room aside: first room for all of its members there, then their starts; else none starts.

Each backend answers for its own members; a gang over several backends is held together by the controller, which stops the
others when one does not come.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from hodei.model.effects import Start
from hodei.model.errors import BackendError, BackendRefused
from hodei.model.ids import RunId
from hodei.ports import Backend

Failed = dict[RunId, BackendError | BackendRefused]


async def start(backend: Backend, orders: Sequence[Start], unsure: Set[RunId] = frozenset()) -> Failed:
    """As `Backend.start`: what is not in the answer was accepted. `unsure`: runs that may have begun already. For a gang with
    one of these no room is asked for: "no room" would be taken for "has not begun", and it may be what fills the room."""
    gangs: dict[tuple[int, int], list[Start]] = {}
    for order in orders:
        if order.world_size > 1:
            gangs.setdefault((order.run.job, order.run.attempt), []).append(order)
    for id in [id for id, members in gangs.items() if any(order.run.id in unsure for order in members)]:
        del gangs[id]
    failed: Failed = {}
    for members in gangs.values():
        try:
            await backend.reserve(members)
        except (BackendError, BackendRefused) as error:
            failed.update({order.run.id: error for order in members})
    left = [order for order in orders if order.run.id not in failed]
    refused = await backend.start(left) if left else {}
    if refused and gangs:
        await backend.unreserve([order.run.id for order in left if order.run.id in refused and order.world_size > 1])
    return {**failed, **refused}
