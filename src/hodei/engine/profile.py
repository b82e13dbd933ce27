"""A profile: a named set of plugins with weights. Jobs name one; each has a line of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from msgspec import Struct, field, structs

from hodei.engine.points import SILENT, Bind, Filter, LayoutPoint, Permit, PreFilter, QueueSort, Reserve, Score
from hodei.engine.preemption.victims import class_of
from hodei.engine.relocation import MOVES
from hodei.engine.view import Gang, Member
from hodei.model.array import same_mould
from hodei.model.job import JobSpec

_SHAPES_KEPT = 100_000
_SPECS_KEPT = 4096
_TAKES_NO_PLACE = -1  # no class has this number


class Weighted(Struct, frozen=True):
    plugin: Score
    weight: int


class Shapes:
    """A small number for each shape, because a number is looked up much faster than all that it stands for."""

    __slots__ = ("_last", "_numbers")

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._last = 0

    def number(self, shape: Hashable) -> int:
        found = self._numbers.get(shape)
        if found is None:
            if len(self._numbers) >= _SHAPES_KEPT:
                self._numbers.clear()  # numbers are never used again, so equals are only told apart, not mixed up
            self._last += 1
            found = self._numbers[shape] = self._last
        return found


class _Known:
    """What is the same for all gangs of one spec. `tenant` None: its groups are not known yet."""

    __slots__ = ("alike", "group", "judged", "laid_by", "members", "shapes", "spec", "tenant")

    def __init__(
        self,
        spec: JobSpec,
        members: tuple[Member, ...],
        shapes: tuple[Hashable, ...],
        judged: int,
        laid_by: tuple[LayoutPoint, ...],
    ) -> None:
        self.spec, self.members, self.shapes, self.judged, self.laid_by = spec, members, shapes, judged, laid_by
        self.tenant: str | None = None
        self.alike: tuple[Any, ...] = ()
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
    # Those who judge nodes for a member, and those who judge the gang as a whole.
    readers: tuple[Any, ...] = ()
    judges: tuple[Any, ...] = ()
    last_words: tuple[tuple[str, Any], ...] = ()
    # How each of them tells members apart, and which of the judges lay gangs out: looked up once, used for every gang.
    reader_keys: tuple[Callable[[Member], Hashable], ...] = ()
    judge_keys: tuple[Callable[[Member], Hashable], ...] = ()
    laying: tuple[tuple[int, LayoutPoint], ...] = ()
    shapes: Shapes = field(default_factory=Shapes)
    specs: dict[int, _Known] = {}
    same: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    # Whether the priority number itself, not the class, tells who may take whose place: so says the policy of preemption.
    by_number: bool = False

    def __post_init__(self) -> None:
        scores = (weighted.plugin for weighted in self.scores)
        structs.force_setattr(self, "readers", _once(*self.filters, *scores))
        reserves, permits = (("reserve", p) for p in self.reserves), (("permit", p) for p in self.permits)
        structs.force_setattr(self, "last_words", (*reserves, *permits))
        structs.force_setattr(self, "judges", _once(*self.pre_filters, *self.layouts, *self.reserves, *self.permits))
        structs.force_setattr(self, "reader_keys", tuple(getattr(p, "key", _Itself) for p in self.readers))
        structs.force_setattr(self, "judge_keys", tuple(getattr(p, "key", _Itself) for p in self.judges))
        laying = ((place, p) for place, p in enumerate(self.judges) if any(p is each for each in self.layouts))
        structs.force_setattr(self, "laying", tuple(laying))

    def admit(self, gang: Gang) -> None:
        """Fill in what the queue and the caches need to know of a gang, once."""
        gang.order = (*self.queue.queue_sort(gang), gang.id)
        known, tenant = self._known(gang), self.queue.tenant(gang)
        if known.tenant != tenant:
            # Who may take whose place is told by the class, so gangs of different classes do not wait for each other.
            counts = (*map(len, gang.needed), *map(len, gang.extra))
            rank: Hashable = class_of(gang.job.priority) if gang.job.preempts else _TAKES_NO_PLACE
            if self.by_number:
                rank = (gang.job.priority, gang.job.preempts)
            alike = known.alike = self._one((rank, known.shapes, counts))
            known.group = self._one((self.name, tenant, *alike, known.judged))
            known.tenant = tenant
        # The same objects for all who are alike: a queue holds many of them.
        gang.tenant, gang.alike, gang.group = known.tenant, known.alike, known.group
        gang.shapes, gang.laid_by = known.alike[1], known.laid_by
        if known.spec is gang.job and not gang.joins:
            gang.members = known.members
        if gang.leaves or gang.goes_to:
            gang.laid_by = (*gang.laid_by, MOVES)
            gang.group = (*known.group, gang.leaves, gang.goes_to)

    def _one(self, words: tuple[Any, ...]) -> tuple[Any, ...]:
        """The first of all equal ones."""
        if len(self.same) >= _SPECS_KEPT:
            self.same.clear()
        return self.same.setdefault(words, words)

    def _known(self, gang: Gang) -> _Known:
        """What the plugins tell gangs apart by; jobs that share one spec (an array, a trace) are looked at once."""
        place = gang.job.array
        known_as = id(gang.job) if place is None else -place.first
        seen = self.specs.get(known_as)
        if seen is not None and not gang.joins and (place is None or same_mould(seen.spec, gang.job)):
            return seen
        shapes = tuple([self._shape(member) for member in gang.members])
        judged = tuple([self._judged(member) for member in gang.members])
        heard = {place for keys in judged for place, _ in self.laying if keys[place] != SILENT}
        laid_by = self._laid_by(heard)
        # A number for all of it: groups are looked up several times for each gang.
        found = _Known(gang.job, gang.members, shapes, self.shapes.number(judged), laid_by)
        if not gang.joins:
            if len(self.specs) >= _SPECS_KEPT:
                self.specs.clear()
            # The spec is kept with it, so that no other can come to stand where it stood.
            self.specs[known_as] = found
        return found

    def _laid_by(self, heard: set[int]) -> tuple[Any, ...]:
        """The same object for all who are laid by the same plugins."""
        laid_by = tuple([plugin for place, plugin in self.laying if place in heard])
        return self.same.setdefault(("laid by", *sorted(heard)), laid_by)

    def _shape(self, member: Member) -> Hashable:
        """Members that no filter or score of this profile can tell apart have equal shapes."""
        request = tuple(member.task.request.items())
        try:
            number = self.shapes.number((*[key(member) for key in self.reader_keys], request))
        except Exception:
            number = self.shapes.number((*[key_of(plugin, member) for plugin in self.readers], request))
        return (self.name, number)

    def _judged(self, member: Member) -> tuple[Hashable, ...]:
        """The same for those who judge the gang as a whole."""
        try:
            keys = tuple([key(member) for key in self.judge_keys])
            hash(keys)
            return keys
        except Exception:
            return tuple([key_of(plugin, member) for plugin in self.judges])


def _once(*plugins: Any) -> tuple[Any, ...]:
    return tuple({id(plugin): plugin for plugin in plugins}.values())


class _Itself:
    """A key that is like no other; it holds on to its member, so that no later one can take its identity."""

    __slots__ = ("_member",)

    def __init__(self, member: Member) -> None:
        self._member = member

    def __hash__(self) -> int:
        return id(self._member)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._member is other._member


def key_of(plugin: Any, member: Member) -> Hashable:
    """What the plugin reads of a member; a plugin without a (working, hashable) key is asked about each anew."""
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
    name: str,
    queue: QueueSort,
    plugins: Sequence[Any],
    weights: dict[str, int],
    *,
    max_pending: int = 1_000_000,
) -> Profile:
    """Sort the plugins to the points that they implement; a score plugin takes part only with a weight above 0."""

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
