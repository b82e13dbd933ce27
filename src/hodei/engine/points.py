"""POINTS: where a plugin can have its say, as contracts. A plugin implements those it cares about and no others.

Plugins are pure: the same arguments give the same answer, nothing is kept between calls, nothing is written into the
arrays they are given. Caching is the cycle's business; `key` and `reads` tell it what an answer depends on.

In the order they are called for a gang:

queue_sort(gang) -> tuple of ints     Its place in the line, smallest first. One such plugin per profile (see QueueSort).
pre_filter(gang, view) -> Reason|None Before any node is looked at; a Reason refuses the whole gang.
layouts(gang, table, view)            For a gang whose members must lie in a certain way to each other: the ways to try,
                                      best first, and what to say if none has room; None for no such wish,
                                      a Reason if there is no way at all. With `wants_capacity = True` it is also given, for
                                      each kind of member, how many of them each node would take if it were idle.
still_open(gang, member, within, table, view)  Optional, beside layouts: what of `within` is left to one more member, when
                                      others of its gang are in the table already.
filter(member, nodes, view)           Which nodes cannot take a member: pairs of (mask, Reason), empty for no objection.
                                      Every pair is reported by `why`; a node may appear in several.
post_filter(gang, view) -> None       After a refusal: a chance to make room (not to say yes).
score(member, nodes, view)            0 to MAX_SCORE per node, higher is better; None for no opinion on this member.
normalize(raw, feasible)              Optional: brings raw scores (any whole numbers, also several columns of them) to
                                      0..MAX_SCORE, knowing which nodes are left.
choose_gpu(member, nodes, view)       Optional, beside a score: of the one node that was chosen, the column of `nodes.gpus()`
                                      that a fraction should be taken of; None (or one without room): the tightest.
reserve(gang, placements, view)       The whole gang has nodes; a Reason undoes all of it. `unreserve` takes it back.
permit(gang, placements, view)        The last word before the plan; a Reason undoes all of it.
bind(gang, placements, view)          The gang is in the plan; may return the placements with more detail.

And for `why`, both optional: `lacks` (how far one node is from yes) and `repairs` (see `engine.changes`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, Protocol

from msgspec import Struct

from hodei.engine.nodes import Ints, Mask, Nodes, Table
from hodei.engine.view import Gang, Member, View
from hodei.model.decision import Decision, Reason
from hodei.model.node import Grant, Node

MAX_SCORE = 10_000  # hundredths of a point: 100.00

Reads = Literal["static", "usage", "cluster"]
# What can turn a refusal into a yes; the backlog sleeps until one of those that the refusing plugins named.
Trigger = Literal["run_ended", "node_joined", "node_changed", "job_ended", "run_placed", "time"]
ANY_TRIGGER: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed", "job_ended", "run_placed", "time")
Refusals = Sequence[tuple[Mask, Reason]]


SILENT: Hashable = ("silent",)


class Layout(Struct):
    """One way to lay a gang over the cluster: for each of `gang.members` the rows that it may go to."""

    rows: tuple[Mask, ...]


class Layouts(Struct):
    """The ways to try, best first (a wish ends with all rows for everyone), and the reason given if none has room.
    `crowded`: further ways, that have no room as things stand and would have some if others went; made when asked for."""

    options: Sequence[Layout]
    reason: Reason
    crowded: Callable[[], Sequence[Layout]] = tuple

    def if_others_went(self) -> Iterator[Layout]:
        """All ways, for those who would make room."""
        return chain(self.options, self.crowded())


class Placed(Struct):
    """One member of a gang and the row and node that it was given."""

    member: Member
    index: int
    row: int
    node: Node
    decision: Decision | None = None
    grant: Grant | None = None


class Plugin(Protocol):
    """What every plugin has. `reads`: what its filter and score look at besides the member:

    - "static": only what a node is (labels, capacity); its answers hold for a whole generation
    - "usage": also that node's own usage; refreshed for the nodes that changed
    - "cluster": anything else; asked anew each time (the safe choice, and the default if not said)

    `plain = True`: its filter and score are written with operators and the words of `nodes` alone, so that they may be
    given a `OneNode` and answer with a plain bool or int: much faster when a single node has changed.
    `cured_by`: which triggers can turn its refusals into a yes (default: any of them).
    """

    name: str


class Keyed(Protocol):
    def key(self, member: Member) -> Hashable:
        """All that the plugin reads of a member: members with equal keys get equal answers.
        Without this method every job counts as different from every other.
        `SILENT`: its filter and score have nothing to say about such members, whatever the nodes."""


class Stamped(Protocol):
    def stamp(self, member: Member, table: Table) -> Hashable:
        """For a plugin that reads "cluster": a value that changes whenever its answer for this member could, apart from
        the node's own usage; its answers are kept while it stays. None: ask anew each time (as without this method).
        Members with equal keys may have unequal stamps, and then unequal answers."""


class QueueSort(Protocol):
    """`preempts`: whether gangs of this line may take the place of running work of a lower class."""

    name: str
    preempts: bool

    def queue_sort(self, gang: Gang) -> tuple[int, ...]: ...

    def tenant(self, gang: Gang) -> str:
        """Gangs of one tenant wait in one line; lines take turns. "" for a single line."""

    def charge(self, gang: Gang) -> int:
        """How far the tenant's clock moves on when this gang starts; the line with the lowest clock is next."""


class Waiting(Struct):
    """Who waits in a line, as columns; for one alone, as single numbers of NumPy. `cpus` is what all needed members ask for together, in thousandths."""

    ids: Ints
    submitted_ms: Ints
    estimate_ms: Ints
    cpus: Ints
    priority: Ints
    deadline_ms: Ints


class TimedQueue(QueueSort, Protocol):
    """A line that promises starts. `promises`: how many of those who can not start are promised one, in order; nobody
    behind them may start if that would break a promise (0: nobody behind the first may start at all). `restless`: the
    order of two gangs may change while they wait. `by_submission`: it is that of submission. `balances`: gaps are filled by whom most of
    what is left is used evenly. `lookahead`: how many are looked at, the first in order (if that does not
    change; else all are). Keys of the order are given to each by itself, whoever else waits."""

    promises: int
    restless: bool
    by_submission: bool
    balances: bool
    lookahead: int

    def estimate_ms(self, gang: Gang) -> int:
        """How long a gang is expected to run, also if nobody said."""

    def order(self, waiting: Waiting, now_ms: int) -> Ints:
        """Whole numbers, the smallest is first; ties by submission."""

    def fill_order(self, waiting: Waiting, now_ms: int) -> Ints | None:
        """The same for those who may go ahead of the promised ones; None for the same order."""


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
    """The simple form, for authors in a hurry: say it for one node, the engine does the rest.

    Override either method. `refuse` returns a text to say no, `points` a number from 0 to 100. `used` is what
    runs hold of the node now. Slower than the array form (a Python call per node), and cached like it.
    """

    name = "per-node"
    reads: Reads = "usage"
    cured_by: tuple[Trigger, ...] = ANY_TRIGGER

    def refuse(self, member: Member, node: Node, used: dict[str, int]) -> str | None:
        return None

    def points(self, member: Member, node: Node, used: dict[str, int]) -> float | None:
        return None

    def filter(self, member: Member, nodes: Nodes, view: View) -> Refusals:
        if type(self).refuse is PerNode.refuse:
            return ()
        masks: dict[str, Mask] = {}
        for place, node in enumerate(nodes.each()):
            text = self.refuse(member, node, nodes.used_by(node.name))
            if text is not None:
                masks.setdefault(text, nodes.none())[place] = True
        code = self.name.upper().replace("-", "_")
        return [(mask, Reason(self.name, code, text)) for text, mask in masks.items()]

    def score(self, member: Member, nodes: Nodes, view: View) -> Ints | None:
        if type(self).points is PerNode.points:
            return None
        out = nodes.zeros()
        for place, node in enumerate(nodes.each()):
            points = self.points(member, node, nodes.used_by(node.name)) or 0
            out[place] = min(max(round(points * 100), 0), MAX_SCORE)
        return out


def reads_of(plugin: Any) -> Reads:
    reads: Reads = getattr(plugin, "reads", "cluster")
    return reads


def cures_of(plugin: Any) -> tuple[Trigger, ...]:
    cures: tuple[Trigger, ...] = getattr(plugin, "cured_by", ANY_TRIGGER)
    return cures
