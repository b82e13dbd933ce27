"""The extension points, as contracts. A plugin implements the points that it needs.

Plugins are pure: equal arguments give equal answers, no state between calls, no writes into the given
arrays. The engine caches; `key` and `reads` state what an answer depends on.

In the order they are called for a gang:

queue_sort(gang) -> tuple of ints     Its order in the queue, smallest first. One per profile (see QueueSort).
pre_filter(gang, view) -> Reason|None Before any node is evaluated; a Reason refuses the gang.
layouts(gang, table, view)            For gangs whose members depend on each other's place: the layouts to try,
                                      best first, and the reason if none has capacity; None for no restriction,
                                      a Reason if there is no layout. With `wants_capacity = True` it also gets, for
                                      each kind of member, how many each node would take if it were idle.
remaining_rows(gang, member, within, table, view)  Optional, with layouts: the rows of `within` left to one more member, when
                                      others of its gang are placed already.
filter(member, nodes, view)           Which nodes cannot take a member: pairs of (mask, Reason), empty for no objection.
                                      Every pair is reported by `why`; a node may appear in several.
post_filter(gang, view) -> None       After a refusal: may free capacity, cannot accept the gang.
score(member, nodes, view)            0 to MAX_SCORE per node, higher is better; None for no opinion on this member.
normalize(raw, feasible)              Optional: maps raw scores (integers, possibly several columns) to
                                      0..MAX_SCORE, given the feasible nodes.
choose_gpu(member, nodes, view)       Optional, with a score: for the chosen node, the column of `nodes.gpus()`
                                      to take a fraction from; None (or a full one): the tightest fit.
reserve(gang, placements, view)       The whole gang has nodes; a Reason undoes all of it. `unreserve` takes it back.
permit(gang, placements, view)        The last check before the plan; a Reason undoes all of it.
bind(gang, placements, view)          The gang is in the plan; may return the placements with more detail.

For `why`, both optional: `lacks` (the shortage of one node) and `suggest` (see `engine.explain`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, Protocol

from msgspec import Struct

from hodei.engine.nodes import Ints, Mask, Nodes, Table
from hodei.engine.view import Gang, Member, View
from hodei.model.job import Decision, Reason
from hodei.model.node import Grant, Node

MAX_SCORE = 10_000  # hundredths of a point: 100.00

Reads = Literal["static", "usage", "cluster"]
# Events that can make a refused gang schedulable; it is parked until one that the refusing plugins named.
Trigger = Literal["run_ended", "node_joined", "node_changed", "job_ended", "run_placed", "time"]
ANY_TRIGGER: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed", "job_ended", "run_placed", "time")
Refusals = Sequence[tuple[Mask, Reason]]


NO_OPINION: Hashable = ("silent",)


class Layout(Struct):
    """One layout of a gang: for each of `gang.members` the rows that it may use."""

    rows: tuple[Mask, ...]


class Layouts(Struct):
    """Layouts to try, best first (a preference ends with all rows), and the reason if none has capacity. `full`:
    further layouts that would need preemption; computed on demand."""

    options: Sequence[Layout]
    reason: Reason
    full: Callable[[], Sequence[Layout]] = tuple

    def with_preemption(self) -> Iterator[Layout]:
        """All layouts, for preemption."""
        return chain(self.options, self.full())


class Placed(Struct):
    member: Member
    index: int
    row: int
    node: Node
    decision: Decision | None = None
    grant: Grant | None = None


class Plugin(Protocol):
    """Every plugin has a name. `reads`: what its filter and score depend on besides the member:

    - "static": node properties (labels, capacity); answers are valid for a table generation
    - "usage": also that node's usage; recomputed for changed nodes
    - "cluster": anything else; called each time (the default)

    `scalar = True`: filter and score use only operators and the interface of `nodes`, so that they also accept
    a `OneNode` and return a bool or int: much faster when a single node has changed.
    `requeue_on`: the triggers that can change its refusals (default: all).

    Optional marks for admission, which tries jobs on idle nodes. `checks_size = True`: its filter compares amounts
    only, so that it alone decides whether a job is larger than the cluster. `needs_residents = True`: its filter may
    require other running jobs, so that it does not apply to an idle cluster. `needs_availability = True` and
    `needs_forecasts = True`: its layouts read expected ends of runs, and forecast starts of pending jobs.
    """

    name: str


class Keyed(Protocol):
    def key(self, member: Member) -> Hashable:
        """Everything the plugin reads of a member: members with equal keys get equal answers. Without this method
        each job counts as different. `NO_OPINION`: filter and score do nothing for such members."""


class Stamped(Protocol):
    def stamp(self, member: Member, table: Table) -> Hashable:
        """For a plugin that reads "cluster": a value that changes whenever its answer for this member could, apart
        from the node's own usage. None: call each time. Members with equal keys may have different stamps and
        answers."""


class QueueSort(Protocol):
    """`preempts`: whether its gangs may preempt running work of a lower class. `ignores_priority = True`: the order does
    not depend on the priority, and `why` does not list it."""

    name: str
    preempts: bool

    def queue_sort(self, gang: Gang) -> tuple[int, ...]: ...

    def tenant(self, gang: Gang) -> str:
        """Tenants take turns; "" for a single tenant."""

    def charge(self, gang: Gang) -> int:
        """How far the tenant's virtual time advances when this gang starts; the lowest is next."""


class PendingColumns(Struct):
    """Pending gangs as columns; NumPy scalars for a single one. `cpus`: thousandths over all needed members."""

    ids: Ints
    submitted_ms: Ints
    estimate_ms: Ints
    cpus: Ints
    priority: Ints
    deadline_ms: Ints


class TimedQueue(QueueSort, Protocol):
    """A queue with start reservations. `reservation_depth`: how many blocked gangs get one, in order; later gangs
    start only if that delays none of them (0: later gangs never overtake). `reorders`: the order of two gangs may
    change while they wait. `by_submission`: the order is that of submission. `balances`: backfill prefers gangs that
    use free resources evenly. `lookahead`: how many gangs are considered, if the order is fixed (else all). The key
    of a gang must not depend on other gangs."""

    reservation_depth: int
    reorders: bool
    by_submission: bool
    balances: bool
    lookahead: int

    def estimate_ms(self, gang: Gang) -> int:
        """Expected run time, with a default."""

    def order(self, waiting: PendingColumns, now_ms: int) -> Ints:
        """Integers, smallest first; ties by submission."""

    def fill_order(self, waiting: PendingColumns, now_ms: int) -> Ints | None:
        """The order of backfill; None for the same order."""


class PreFilter(Protocol):
    name: str

    def pre_filter(self, gang: Gang, view: View) -> Reason | None: ...


class LayoutPoint(Protocol):
    name: str

    def layouts(self, gang: Gang, table: Table, view: View) -> Layouts | Reason | None: ...


class Filter(Protocol):
    name: str

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals: ...


class Score(Protocol):
    name: str

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None: ...


class Normalizer(Protocol):
    def normalize(self, raw: Ints, feasible: Mask) -> Ints: ...


class Reserve(Protocol):
    name: str

    def reserve(self, gang: Gang, placements: Sequence[Placed], view: View) -> Reason | None: ...


class Permit(Protocol):
    name: str

    def permit(self, gang: Gang, placements: Sequence[Placed], view: View) -> Reason | None: ...


class Bind(Protocol):
    name: str

    def bind(self, gang: Gang, placements: Sequence[Placed], view: View) -> Sequence[Placed]: ...


class PerNode:
    """Base class for simple plugins that evaluate one node at a time.

    Override either method. `refuse` returns a text to refuse, `points` a number from 0 to 100. `used`: resources held
    on the node. Slower than the array form (a Python call per node), with the same caching.
    """

    name = "per-node"
    reads: Reads = "usage"
    requeue_on: tuple[Trigger, ...] = ANY_TRIGGER

    def refuse(self, member: Member, node: Node, used: dict[str, int]) -> str | None:
        return None

    def points(self, member: Member, node: Node, used: dict[str, int]) -> float | None:
        return None

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        if type(self).refuse is PerNode.refuse:
            return ()
        masks: dict[str, Mask] = {}
        for place, node in enumerate(nodes.as_list()):
            text = self.refuse(member, node, nodes.used_by(node.name))
            if text is not None:
                masks.setdefault(text, nodes.none())[place] = True
        code = self.name.upper().replace("-", "_")
        return [(mask, Reason(self.name, code, text)) for text, mask in masks.items()]

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        if type(self).points is PerNode.points:
            return None
        out = nodes.zeros()
        for place, node in enumerate(nodes.as_list()):
            points = self.points(member, node, nodes.used_by(node.name)) or 0
            out[place] = min(max(round(points * 100), 0), MAX_SCORE)
        return out


def reads_of(plugin: Any) -> Reads:
    reads: Reads = getattr(plugin, "reads", "cluster")
    return reads


def requeue_triggers(plugin: Any) -> tuple[Trigger, ...]:
    cures: tuple[Trigger, ...] = getattr(plugin, "requeue_on", ANY_TRIGGER)
    return cures
