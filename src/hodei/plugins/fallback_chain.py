"""The fallback chain: backends in order of use. When one fails, the next takes its work.

A job uses the first backend of the chain with capacity. An unreachable, unhealthy, disabled or removed one has none. A
backend where the job failed to start or was lost comes last for it. With `only_after_failure` the next backend is used
only for these reasons: a job waits while an earlier backend is available, even if full; a backend that could not run it
even when idle is skipped. Backends outside the chain are unaffected. Jobs that name their backends, and per-node jobs,
ignore the chain.
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
        """The first of the chain (with all backends outside it), then one more each time."""
        column = table.view().by("backend and readiness", lambda node: (node.backend, node.ready))
        available = {name for name, ready in column.values if ready}
        order = [name for name in self._chain if name in available and name not in gang.job.failed_on]
        order += [name for name in self._chain if name in available and name in gang.job.failed_on]
        if len(order) < 2:
            return None  # no choice
        chained = frozenset(self._chain)
        if self._only_after_failure:
            order = [name for name in order if _fits_idle(gang, column, chained, name, capacity)] or order
            standby = ", ".join(order[1:])
            text = (
                f"backend {standby} is on standby: {order[0]} is available" if standby else f"no capacity on {order[0]}"
            )
            reason = Reason(self.name, "BACKEND_STANDBY" if standby else "FALLBACK_FULL", text)
            order = order[:1]
        else:
            reason = Reason(
                self.name, "FALLBACK_FULL", f"no capacity on the backends of the fallback chain: {', '.join(order)}"
            )
        options = []
        for number in range(len(order)):
            used = frozenset(order[: number + 1])
            rows = column.where(partial(_is_open, used, chained))
            options.append(Layout((rows,) * len(gang.members)))
        return Layouts(options, reason)


def _fits_idle(gang: Gang, column: Interned, chained: frozenset[str], name: str, capacity: Sequence[Ints]) -> bool:
    """Whether the gang would fit there, and on the backends outside the chain, if they were idle."""
    here = column.where(lambda state: state[0] == name)
    open_to = column.where(partial(_is_open, frozenset((name,)), chained))
    return all(
        bool((most[here] > 0).any()) and int(most[open_to].sum()) >= len(numbers)
        for most, numbers in zip(capacity, gang.needed, strict=bool(capacity))
        if numbers
    )


def _is_open(used: frozenset[str], chained: frozenset[str], state: tuple[str, bool]) -> bool:
    return state[0] in used or state[0] not in chained
