"""Who is next: first in first out, by priority, or in turns between tenants."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from hodei.engine.view import Gang

_TURN = 1_000_000


@lru_cache(maxsize=4096)
def _minus(priority: int) -> int:
    """One object for all of that priority: a queue holds many."""
    return -priority


class Fifo:
    """In order of submission."""

    name = "fifo"
    preempts = False  # a line that knows no priorities sends nobody away for one

    def queue_sort(self, gang: Gang) -> tuple[int, ...]:
        return (gang.queued_ms,)

    def tenant(self, gang: Gang) -> str:
        return ""

    def charge(self, gang: Gang) -> int:
        return 0


class Priority(Fifo):
    """The highest priority first, and within it in order of submission."""

    name = "priority"
    preempts = True

    def primary_keys(self, gang: Gang) -> tuple[int, ...]:
        """Those with equal ones are equal to this queue but for the time of submission."""
        return (_minus(gang.priority),)

    def queue_sort(self, gang: Gang) -> tuple[int, ...]:
        return (_minus(gang.priority), gang.queued_ms)


class Fair(Priority):
    """Tenants take turns; in its turn a tenant starts one quantum of work times its weight.

    Work is the estimate times the members, counted in whole quanta; a job without an estimate counts as one quantum for
    each member. Within a tenant the order is by priority. A tenant that was idle does not save up turns.
    """

    name = "fair"

    def __init__(
        self, *, tenant_key: str = "project", weights: Mapping[str, int] | None = None, quantum_ms: int = 60_000
    ):
        self.tenant_key = tenant_key
        self.weights = dict(weights or {})
        self.quantum_ms = max(quantum_ms, 1)

    def tenant(self, gang: Gang) -> str:
        if self.tenant_key.startswith("label:"):
            return gang.job.labels.get(self.tenant_key.removeprefix("label:"), "")
        return gang.job.user if self.tenant_key == "user" else gang.job.project

    def charge(self, gang: Gang) -> int:
        quanta = max(1, -(-gang.job.estimate_ms // self.quantum_ms)) * gang.size
        return quanta * _TURN // max(self.weights.get(self.tenant(gang), 1), 1)
