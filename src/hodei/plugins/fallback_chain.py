"""The fallback chain: backends in the order in which they are used. When one fails, the next takes its work.

A job goes to the first backend of the chain that has room for it. One that is out of reach, not well, disabled or gone has
none. A backend on which the job itself could not be started, or was lost, comes last for it. With `only_after_failure` the
next backend is used for these reasons alone: a job waits while a backend before it is available, though full. A backend
that could not take it even if it were idle is passed over. Backends that are not in the chain are used as ever. A job that
names its backends itself is not held to the chain, nor is one that runs on every node.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial

from hodei.engine.nodes import Interned, Ints, Table
from hodei.engine.points import ANY_TRIGGER, NO_OPINION, Layout, Layouts
from hodei.engine.view import Gang, Member, View
from hodei.model.job import Reason


class FallbackChain:
    name = "fallback_chain"
    requeue_on = ANY_TRIGGER

    def __init__(self, chain: Iterable[str] = (), only_after_failure: bool = False) -> None:
        self._chain, self._only_after_failure = tuple(chain), only_after_failure
        self.wants_capacity = only_after_failure

    def key(self, member: Member) -> Hashable:
        job = member.job
        if job.backend.mode != "any" or member.task.backends or job.gang.per_node:
            return NO_OPINION
        return tuple(name for name in self._chain if name in job.failed_on)

    def layouts(self, gang: Gang, table: Table, view: View, capacity: Sequence[Ints] = ()) -> Layouts | None:
        """First the backends outside the chain with the first of the chain, then with one more each time."""
        column = table.view().by("backend and whether it is well", lambda node: (node.backend, node.ready))
        well = {name for name, ready in column.values if ready}
        order = [name for name in self._chain if name in well and name not in gang.job.failed_on]
        order += [name for name in self._chain if name in well and name in gang.job.failed_on]
        if len(order) < 2:
            return None  # there is nothing to choose
        chained = frozenset(self._chain)
        if self._only_after_failure:
            order = [name for name in order if _could(gang, column, chained, name, capacity)] or order
            standby = ", ".join(order[1:])
            text = f"backend {standby} stands by: {order[0]} is available" if standby else f"no room on {order[0]}"
            reason = Reason(self.name, "BACKEND_STANDBY" if standby else "FALLBACK_FULL", text)
            order = order[:1]
        else:
            reason = Reason(
                self.name, "FALLBACK_FULL", f"no room on the backends of the fallback chain: {', '.join(order)}"
            )
        options = []
        for number in range(len(order)):
            used = frozenset(order[: number + 1])
            rows = column.where(partial(_is_open, used, chained))
            options.append(Layout((rows,) * len(gang.members)))
        return Layouts(options, reason)


def _could(gang: Gang, column: Interned, chained: frozenset[str], name: str, capacity: Sequence[Ints]) -> bool:
    """Whether the gang would have room there, and on the backends outside the chain, if nothing else ran."""
    here = column.where(lambda state: state[0] == name)
    open_to = column.where(partial(_is_open, frozenset((name,)), chained))
    return all(
        bool((most[here] > 0).any()) and int(most[open_to].sum()) >= len(numbers)
        for most, numbers in zip(capacity, gang.needed, strict=bool(capacity))
        if numbers
    )


def _is_open(used: frozenset[str], chained: frozenset[str], state: tuple[str, bool]) -> bool:
    return state[0] in used or state[0] not in chained
