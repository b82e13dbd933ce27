"""A profile: a named set of plugins with weights, and a queue of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field, structs

from hodei.engine.nodes import Table
from hodei.engine.points import (
    NO_OPINION,
    Bind,
    Filter,
    Layout,
    LayoutPoint,
    Layouts,
    Permit,
    PreFilter,
    QueueSort,
    Reserve,
    Score,
    Trigger,
)
from hodei.engine.preemption.victims import class_of
from hodei.engine.view import Gang, Member, View
from hodei.model.array import same_template
from hodei.model.job import JobSpec, Move, Reason


class RelocationFilter:
    """Keeps a gang that is being moved off its old nodes, or on the node that it is sent to."""

    name = "move"
    requeue_on: tuple[Trigger, ...] = ("run_ended", "node_joined", "node_changed")

    def layouts(self, gang: Gang, table: Table, view: View) -> Layouts | None:
        move = gang.move
        if move is None:
            return None
        rows = np.full(len(table.names), not move.to)
        for name in (move.to,) if move.to else move.off:
            if name in table.row:
                rows[table.row[name]] = bool(move.to)
        return Layouts([Layout((rows,) * len(gang.members))], Reason(self.name, "MOVING", _text(move), evictable=True))


def _text(move: Move) -> str:
    if move.to:
        return f"it is being moved to {move.to}, which has no capacity for it"
    names = ", ".join(move.off[:5]) + (f" and {len(move.off) - 5} more" if len(move.off) > 5 else "")
    return f"it is being moved off {names}, and no other node has capacity for it"


RELOCATION = RelocationFilter()


_SHAPES_KEPT = 100_000
_SPECS_KEPT = 4096
_NON_PREEMPTING = -1  # no class has this number


class Weighted(Struct, frozen=True):
    plugin: Score
    weight: int


class Shapes:
    """Small ids for shapes: cheaper to look up than the shape itself."""

    __slots__ = ("_last", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._last = 0

    def number(self, shape: Hashable) -> int:
        found = self._numbers.get(shape)
        if found is None:
            if len(self._numbers) >= _SHAPES_KEPT:
                self._numbers.clear()  # ids are never reused, so equal shapes may differ, never the reverse
            self._last += 1
            found = self._numbers[shape] = self._last
        return found


class _Known:
    """Cached values shared by all gangs of one spec. `tenant` None: groups are not computed yet."""

    __slots__ = ("gang_key", "group", "layout_plugins", "members", "shape_key", "shapes", "spec", "tenant")

    def __init__(
        self,
        spec: JobSpec,
        members: tuple[Member, ...],
        shapes: tuple[Hashable, ...],
        gang_key: int,
        layout_plugins: tuple[LayoutPoint, ...],
    ) -> None:
        self.spec, self.members, self.shapes = spec, members, shapes
        self.gang_key, self.layout_plugins = gang_key, layout_plugins
        self.tenant: str | None = None
        self.shape_key: tuple[Any, ...] = ()
        self.group: tuple[Any, ...] = ()


class Profile(Struct, frozen=True):
    name: str
    queue: QueueSort
    filters: tuple[Filter, ...] = ()
    scores: tuple[Weighted, ...] = ()
    pre_filters: tuple[PreFilter, ...] = ()
    layouts: tuple[LayoutPoint, ...] = ()
    post_filters: tuple[Any, ...] = ()
    reserves: tuple[Reserve, ...] = ()
    permits: tuple[Permit, ...] = ()
    binds: tuple[Bind, ...] = ()
    gpu_choosers: tuple[Any, ...] = ()
    max_pending: int = 1_000_000
    # Plugins that evaluate nodes, and plugins that evaluate whole gangs.
    node_plugins: tuple[Any, ...] = ()
    gang_plugins: tuple[Any, ...] = ()
    final_checks: tuple[tuple[str, Any], ...] = ()
    # Their `key` methods, and which gang plugins have layouts; looked up once.
    node_keys: tuple[Callable[[Member], Hashable], ...] = ()
    gang_keys: tuple[Callable[[Member], Hashable], ...] = ()
    layout_positions: tuple[tuple[int, LayoutPoint], ...] = ()
    shapes: Shapes = field(default_factory=Shapes)
    specs: dict[int, _Known] = {}
    same: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    # Preemption by priority number instead of class; set by the preemption policy.
    by_number: bool = False

    def __post_init__(self) -> None:
        scores = (weighted.plugin for weighted in self.scores)
        structs.force_setattr(self, "node_plugins", _once(*self.filters, *scores))
        reserves, permits = (("reserve", p) for p in self.reserves), (("permit", p) for p in self.permits)
        structs.force_setattr(self, "final_checks", (*reserves, *permits))
        structs.force_setattr(
            self, "gang_plugins", _once(*self.pre_filters, *self.layouts, *self.reserves, *self.permits)
        )
        structs.force_setattr(self, "node_keys", tuple(getattr(p, "key", _Itself) for p in self.node_plugins))
        structs.force_setattr(self, "gang_keys", tuple(getattr(p, "key", _Itself) for p in self.gang_plugins))
        layout_positions = (
            (place, p) for place, p in enumerate(self.gang_plugins) if any(p is each for each in self.layouts)
        )
        structs.force_setattr(self, "layout_positions", tuple(layout_positions))

    def admit(self, gang: Gang) -> None:
        """Set the order, shapes and groups of a gang."""
        gang.order = (*self.queue.queue_sort(gang), gang.id)
        known, tenant = self._known(gang), self.queue.tenant(gang)
        if known.tenant != tenant:
            # Preemption depends on the class, so classes are grouped apart.
            counts = (*map(len, gang.needed), *map(len, gang.extra))
            rank: Hashable = class_of(gang.job.priority) if gang.job.preempts else _NON_PREEMPTING
            if self.by_number:
                rank = (gang.job.priority, gang.job.preempts)
            shape_key = known.shape_key = self._one((rank, known.shapes, counts))
            known.group = self._one((self.name, tenant, *shape_key, known.gang_key))
            known.tenant = tenant
        # Share objects between equal gangs: queues hold many of them.
        gang.tenant, gang.shape_key, gang.group = known.tenant, known.shape_key, known.group
        gang.shapes, gang.layout_plugins = known.shape_key[1], known.layout_plugins
        if known.spec is gang.job and not gang.is_joining:
            gang.members = known.members
        if gang.move is not None:
            gang.layout_plugins = (*gang.layout_plugins, RELOCATION)
            gang.group = (*known.group, gang.move)

    def _one(self, words: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(self.same) >= _SPECS_KEPT:
            self.same.clear()
        return self.same.setdefault(words, words)

    def _known(self, gang: Gang) -> _Known:
        """Plugin keys of a gang; jobs that share one spec (an array, a trace) are computed once."""
        place = gang.job.array
        cache_key = id(gang.job) if place is None else -place.first
        seen = self.specs.get(cache_key)
        if seen is not None and not gang.is_joining and (place is None or same_template(seen.spec, gang.job)):
            return seen
        shapes = tuple([self._shape(member) for member in gang.members])
        gang_key = tuple([self._gang_key(member) for member in gang.members])
        active = {place for keys in gang_key for place, _ in self.layout_positions if keys[place] != NO_OPINION}
        layout_plugins = self._laid_by(active)
        # One id: groups are looked up several times per gang.
        found = _Known(gang.job, gang.members, shapes, self.shapes.number(gang_key), layout_plugins)
        if not gang.is_joining:
            if len(self.specs) >= _SPECS_KEPT:
                self.specs.clear()
            # Holding the spec keeps its id() from being reused.
            self.specs[cache_key] = found
        return found

    def _laid_by(self, active: set[int]) -> tuple[Any, ...]:
        """Intern the tuple of layout plugins."""
        layout_plugins = tuple([plugin for place, plugin in self.layout_positions if place in active])
        return self.same.setdefault(("laid by", *sorted(active)), layout_plugins)

    def _shape(self, member: Member) -> Hashable:
        """Members with equal shapes get equal answers from every filter and score."""
        request = tuple(member.task.request.items())
        try:
            number = self.shapes.number((*[key(member) for key in self.node_keys], request))
        except Exception:
            number = self.shapes.number((*[key_of(plugin, member) for plugin in self.node_plugins], request))
        return (self.name, number)

    def _gang_key(self, member: Member) -> tuple[Hashable, ...]:
        """The same for plugins that evaluate whole gangs."""
        try:
            keys = tuple([key(member) for key in self.gang_keys])
            hash(keys)
            return keys
        except Exception:
            return tuple([key_of(plugin, member) for plugin in self.gang_plugins])


def _once(*plugins: Any) -> tuple[Any, ...]:
    return tuple({id(plugin): plugin for plugin in plugins}.values())


class _Itself:
    """A key equal to no other; it holds its member so that the id() is not reused."""

    __slots__ = ("_member",)

    def __init__(self, member: Member) -> None:
        self._member = member

    def __hash__(self) -> int:
        return id(self._member)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._member is other._member


def key_of(plugin: Any, member: Member) -> Hashable:
    """The plugin's key for a member; a unique one if the plugin has no working, hashable key."""
    make = getattr(plugin, "key", None)
    if make is None:
        return _Itself(member)
    try:
        key: Hashable = make(member)
        hash(key)
        return key
    except Exception:
        return _Itself(member)


def _heaviest(weighted: Weighted) -> tuple[int, str]:
    return -weighted.weight, weighted.plugin.name


def make_profile(
    name: str, queue: QueueSort, plugins: Sequence[Any], weights: dict[str, int], *, max_pending: int = 1_000_000
) -> Profile:
    """Assign plugins to the points that they implement; a score takes part only with a weight above 0."""

    def with_point(point: str) -> tuple[Any, ...]:
        return tuple(plugin for plugin in plugins if hasattr(plugin, point))

    scores = tuple(Weighted(p, weights[p.name]) for p in with_point("score") if weights.get(p.name, 0) > 0)
    return Profile(
        name=name,
        queue=queue,
        filters=with_point("filter"),
        scores=scores,
        pre_filters=with_point("pre_filter"),
        layouts=with_point("layouts"),
        post_filters=with_point("post_filter"),
        reserves=with_point("reserve"),
        permits=with_point("permit"),
        binds=with_point("bind"),
        gpu_choosers=tuple(w.plugin for w in sorted(scores, key=_heaviest) if hasattr(w.plugin, "choose_gpu")),
        max_pending=max_pending,
    )
