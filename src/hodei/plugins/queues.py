"""Queue policies: fifo, priority, fair turns between tenants, multifactor; and tie-breakers within equal keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

from hodei.engine.points import QueueSort
from hodei.engine.view import Gang, View
from hodei.model.errors import InvalidInput
from hodei.model.explanation import PriorityTerm
from hodei.model.resources import CPU

_TURN = 1_000_000


@lru_cache(maxsize=4096)
def _minus(priority: int) -> int:
    """Cached, so that equal keys share one object: a queue holds many."""
    return -priority


class Fifo:
    """In order of submission."""

    name = "fifo"
    ignores_priority = True
    preempts = False  # no priorities, so nothing to preempt for

    def queue_sort(self, gang: Gang) -> tuple[int, ...]:
        return (gang.queued_ms,)

    def tenant(self, gang: Gang) -> str:
        return ""

    def charge(self, gang: Gang) -> int:
        return 0


class Priority(Fifo):
    """The highest priority first, and within it in order of submission."""

    name = "priority"
    ignores_priority = False
    preempts = True

    def primary_keys(self, gang: Gang) -> tuple[int, ...]:
        """The keys without the time of submission."""
        return (_minus(gang.priority),)

    def queue_sort(self, gang: Gang) -> tuple[int, ...]:
        return (_minus(gang.priority), gang.queued_ms)


class Fair(Priority):
    """Tenants take turns; in its turn a tenant starts one quantum of work times its weight.

    Work is the estimate times the members, in whole quanta; a job without an estimate counts one quantum per member.
    Within a tenant the order is by priority. An idle tenant does not accumulate turns.
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


_HOUR_MS = 3_600_000
_MOST = 1_000_000
_EVER_MS = 1 << 62


class Multifactor(Priority):
    """A sum of points: the job's priority, its age, the fair share of its account, and the priority inherited from jobs
    that wait for it. Thousandths internally, so that every machine agrees.

    `age_per_hour` and `age_max`: points per hour of waiting, and their maximum. `share`: points of a full fair share (0
    without accounting). By default age counts less than share: many old jobs of one project delay the first job of
    another only until both have the maximum age.
    """

    name = "multifactor"

    def __init__(self, age_per_hour: int = 10, age_max: int = 50, share: int = 200) -> None:
        for setting, points in (("age_per_hour", age_per_hour), ("age_max", age_max), ("share", share)):
            if isinstance(points, bool) or not isinstance(points, int) or not 0 <= points <= _MOST:
                raise InvalidInput(f"{setting} = {points!r}", hint=f"whole points, from 0 to {_MOST}")
        self._age_per_hour, self._age_max_milli, self._share = age_per_hour, age_max * 1000, share
        self.shared = share > 0

    def tenant(self, gang: Gang) -> str:
        return f"{gang.job.project}/{gang.job.user}" if self.shared else ""

    def charge(self, gang: Gang) -> int:
        return 0

    def rank_milli(self, gang: Gang, view: View) -> int:
        """The sum of the terms."""
        return gang.priority * 1000 + self._age_milli(gang, view) + self.share_milli(gang, view)

    def queued_before_ms(self, age_milli: int, now_ms: int) -> int:
        """Gangs queued until then have at least that many points of age; far in the past if none can."""
        if age_milli > self._age_max_milli or (not self._age_per_hour and age_milli > 0):
            return -_EVER_MS
        if not self._age_per_hour:
            return _EVER_MS
        return now_ms - -(-age_milli * _HOUR_MS // (self._age_per_hour * 1000))

    def max_age_ms(self, gang: Gang) -> int | None:
        """When the gang reaches the maximum age; None if age gives no points."""
        if not self._age_per_hour:
            return None
        return gang.queued_ms + -(-self._age_max_milli * _HOUR_MS // (self._age_per_hour * 1000))

    def terms(self, gang: Gang, view: View) -> tuple[PriorityTerm, ...]:
        own, waited = gang.job.priority * 1000, max(view.now_ms - gang.queued_ms, 0)
        age, share = self._age_milli(gang, view), self.share_milli(gang, view)
        out = [
            PriorityTerm("priority", own, "as submitted"),
            PriorityTerm(
                "age", age,
                f"{waited / _HOUR_MS:.2f} h of waiting at {self._age_per_hour} an hour, at most {self._age_max_milli // 1000}",
            ),
        ]  # fmt: skip
        inherited_priority = gang.priority * 1000 - own
        if inherited_priority:
            out.append(PriorityTerm("inherited", inherited_priority, "a job of higher priority waits for it"))
        if self.shared:
            factor = self._factor_milli(gang, view)
            said = f"{factor / 1000:.3f} of {self._share}" if factor is not None else "fair share is not configured"
            out.append(PriorityTerm("fair share", share, said))
        return tuple(out)

    def _age_milli(self, gang: Gang, view: View) -> int:
        # Negative for gangs queued after the time of the view, so that ranks of one time remain comparable.
        return min(self._age_per_hour * (view.now_ms - gang.queued_ms) * 1000 // _HOUR_MS, self._age_max_milli)

    def _factor_milli(self, gang: Gang, view: View) -> int | None:
        return view.shares.factor_milli(gang.job.project, gang.job.user) if view.shares is not None else None

    def share_milli(self, gang: Gang, view: View) -> int:
        """The points of its account's fair share."""
        return self._share * (self._factor_milli(gang, view) or 0) if self.shared else 0


_NEVER_MS = 1 << 62


class TieBreaker(Protocol):
    """A stateless second order for gangs with equal keys, smallest first; remaining ties go by submission."""

    name: str

    def keys(self, gang: Gang) -> tuple[int, ...]: ...


class Shortest:
    """The shortest estimate first; gangs without one last."""

    name = "shortest"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        return (gang.expected_ms or gang.estimate_ms or _NEVER_MS,)


class Smallest:
    """The fewest cores first, over all members."""

    name = "smallest"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        return (_cores(gang),)


class Largest:
    """The most cores first: large jobs are harder to place later."""

    name = "largest"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        return (-_cores(gang),)


class Deadline:
    """The nearest deadline first; gangs without one last."""

    name = "deadline"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        return (gang.job.deadline_ms or _NEVER_MS,)


class Newest:
    """The latest submission first."""

    name = "newest"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        # Jobs of one bulk submission have the same time: the higher id is newer.
        return (-gang.queued_ms, -gang.id)


class HighestPriority:
    """The highest priority first, for queues whose order ignores it."""

    name = "priority"

    def keys(self, gang: Gang) -> tuple[int, ...]:
        return (-gang.priority,)


TIE_BREAKERS: dict[str, type[Any]] = {
    made.name: made for made in (Shortest, Smallest, Largest, Deadline, Newest, HighestPriority)
}


class TieBreakingQueue:
    """A queue with a tie-breaker; everything except the order is the queue's own."""

    def __init__(self, primary: QueueSort, secondary: TieBreaker) -> None:
        self.primary, self.secondary = primary, secondary
        self.name, self.preempts = primary.name, primary.preempts
        self.ignores_priority = getattr(primary, "ignores_priority", False)
        # `primary_keys`, if present, omits the time of submission.
        self._keys = getattr(primary, "primary_keys", primary.queue_sort)

    def queue_sort(self, gang: Gang) -> tuple[int, ...]:
        return (*self._keys(gang), *self.secondary.keys(gang), gang.queued_ms)

    def tenant(self, gang: Gang) -> str:
        return self.primary.tenant(gang)

    def charge(self, gang: Gang) -> int:
        return self.primary.charge(gang)


def _cores(gang: Gang) -> int:
    sizes = zip(gang.members, gang.needed, strict=True)
    return sum(len(numbers) * member.task.request.get(CPU, 0) for member, numbers in sizes)
