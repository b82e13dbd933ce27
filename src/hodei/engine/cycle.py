"""One gang through the points: whole or not at all. The heart of the engine, on one screen.

`try_gang` changes the table only if it returns placements; a refusal leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

import numpy as np

from hodei.engine.explain import objections, verdicts
from hodei.engine.nodes import Ints, Mask, Table
from hodei.engine.packing import pack
from hodei.engine.plan import Refusal
from hodei.engine.points import ANY_TRIGGER, Layout, Layouts, Placed, Trigger, cures_of
from hodei.engine.profile import Profile
from hodei.engine.ranking import Rankings
from hodei.engine.relocation import MOVES
from hodei.engine.runner import Runner
from hodei.engine.view import Gang, Member, View
from hodei.model.decision import Reason, Verdict

# Ways to lay a gang that are tried when two plugins have wishes about it.
_LAYOUTS_TRIED = 1024
_LAYOUTS_CROSSED = 20_000
_OPENINGS_KEPT = 4096


class Engine:
    """Decides for every gang of every profile, over one table."""

    def __init__(self, table: Table, profiles: Mapping[str, Profile]) -> None:
        self.table = table
        self.profiles = dict(profiles)
        self.runner = Runner()
        self._rankings = Rankings(table, self.runner)
        self._openings: dict[Hashable, tuple[int, Mask]] = {}

    def use(self, profiles: Mapping[str, Profile]) -> None:
        """Other profiles from now on; gangs must be admitted anew. What was worked out by the old ones is forgotten."""
        self.profiles.clear()
        self.profiles.update(profiles)
        self._rankings = Rankings(self.table, self.runner)
        self._openings.clear()

    def profile(self, gang: Gang) -> Profile:
        """That of the gang; one that runs may outlive its own."""
        return self.profiles.get(gang.job.profile) or self.profiles["default"]

    def try_gang(self, gang: Gang, view: View) -> list[Placed] | Refusal:
        """Placements that are in the table now, or why not, with the table as it was."""
        result = self.place(gang, view)
        if isinstance(result, Refusal):
            for plugin in self.profile(gang).post_filters:
                self.runner.ask(plugin, "post_filter", gang, view)
        return result

    def place(self, gang: Gang, view: View, *, search: bool = True, extras: bool = True) -> list[Placed] | Refusal:
        """The same for those who ask "what if": nobody is told of a refusal. Without `search` a gang of unequal members
        may be refused that a longer look would find room for; without `extras` only the needed members are placed."""
        profile = self.profile(gang)
        self.runner.job = gang.id
        plugin: Any
        for plugin in profile.pre_filters:
            reason = self.runner.ask(plugin, "pre_filter", gang, view)
            if reason is not None:
                return self._refuse_all(gang, reason, cures_of(plugin))

        placements = self._lay(gang, profile, view, search, extras)
        if isinstance(placements, Refusal):
            return placements

        for done, (point, plugin) in enumerate(profile.last_words):
            reason = self.runner.ask(plugin, point, gang, placements, view)
            if reason is not None:
                self._unreserve(profile, gang, placements, upto=done)
                self.undo(placements)
                return self._refuse_all(gang, reason, cures_of(plugin))
        for plugin in profile.binds:
            placements = self.runner.bind(plugin, gang, placements, view)
        return placements

    def room_for(self, gang: Gang, view: View) -> list[Placed] | Refusal:
        """Where the needed members of a gang that has been let in already would go now, or why nowhere. The room is taken
        in the table until `undo`; nobody else is asked about the gang as a whole."""
        self.runner.job = gang.id
        return self._lay(gang, self.profile(gang), view, search=True, extras=False)

    def undo(self, placements: Sequence[Placed]) -> None:
        """Give the room back."""
        for placed in reversed(placements):
            self.table.release(placed.row, placed.member.task.request, placed.member, placed.grant)

    def withdraw(self, gang: Gang, placements: Sequence[Placed]) -> None:
        """As if the gang had never been tried: for those who only wanted to know."""
        profile = self.profile(gang)
        self._unreserve(profile, gang, placements, upto=len(profile.reserves))
        self.undo(placements)

    def layouts(self, gang: Gang, view: View) -> Layouts | Reason | None:
        """The ways in which the gang may lie, best first; None for any way at all, a Reason if there is none."""
        whole: Layouts | None = None
        for plugin in gang.laid_by:
            more = (self._capacity(gang, view),) if getattr(plugin, "wants_capacity", False) else ()
            found = self.runner.layouts(plugin, gang, self.table, view, *more)
            if isinstance(found, Reason):
                return found
            if plugin is MOVES and gang.joins and found is not None and whole is not None:
                found.reason = whole.reason  # it is not moved: what keeps it from its node is what the others say
            if found is not None:
                whole = found if whole is None else _crossed(gang, whole, found)
        return whole

    def _capacity(self, gang: Gang, view: View) -> tuple[Ints, ...]:
        """For each kind of member how many of them each node would take if nothing else ran there."""
        nodes, out = self.table.view(), list[Ints]()
        for member, numbers in zip(gang.members, gang.needed, strict=True):
            most = np.where(self.open_to(gang, member, view), max(len(numbers), 1), 0)
            for resource, amount in member.task.request.items():
                if amount:
                    most = np.minimum(most, nodes.capacity(resource) // amount)
            out.append(most)
        return tuple(out)

    def _lay(self, gang: Gang, profile: Profile, view: View, search: bool, extras: bool) -> list[Placed] | Refusal:
        """In the first layout that has room; if none has, but the gang would fit without, that is the reason."""
        layouts = self.layouts(gang, view) if gang.laid_by else None
        if layouts is None:
            return self._within(gang, profile, view, None, search, extras)
        if isinstance(layouts, Reason):
            return self._refuse_all(gang, layouts, _cures_by(profile, layouts))
        most = 0
        needed = [kind for kind, numbers in enumerate(gang.needed) if numbers]
        # The same for every layout, as each that has no room leaves the table as it was.
        open_to = {kind: self._feasible(gang, kind, profile, view) for kind in needed}
        for layout in layouts.options:
            if not all((layout.rows[kind] & open_to[kind]).any() for kind in needed):
                continue  # there can be thousands: most are seen to be full without a try
            result = self._within(gang, profile, view, layout, search, extras)
            if not isinstance(result, Refusal):
                return result
            most = max(most, result.fitted)
        if gang.size > 1 or not open_to[needed[0]].any():  # a single member that has a node would go there
            anywhere = self._within(gang, profile, view, None, search, extras=False)
            if isinstance(anywhere, Refusal):
                return anywhere
            self.undo(anywhere)
        refusing, cures = (Verdict(layouts.reason),), _cures_by(profile, layouts.reason)
        return Refusal(gang.id, refusing, fitted=most, nodes=len(self.table.names), cured_by=cures, for_room=True)

    def _within(
        self, gang: Gang, profile: Profile, view: View, layout: Layout | None, search: bool, extras: bool
    ) -> list[Placed] | Refusal:
        placements = self._greedy(gang, profile, view, layout)
        if isinstance(placements, Refusal):
            # Unequal members can stand in each other's way; look for an order in which they do not.
            unequal = search and len(gang.members) > 1
            packed = pack(gang, profile, self._rankings, self.table, view, layout) if unequal else None
            if packed is None:
                return placements
            placements = packed
        if extras:
            for kind, (member, numbers) in enumerate(zip(gang.members, gang.extra, strict=True)):
                for number in numbers:
                    if not self._put(gang, kind, number, member, profile, view, layout, placements):
                        break
        return placements

    def _greedy(self, gang: Gang, profile: Profile, view: View, layout: Layout | None) -> list[Placed] | Refusal:
        """Each member in turn to its best node; for members of one shape this finds room whenever there is room."""
        table, placements = self.table, list[Placed]()
        for kind, number, member in gang.each():
            if not self._put(gang, kind, number, member, profile, view, layout, placements):
                # Of many layouts nobody asks why each has no room.
                found = None if layout else objections(profile, self.runner, member, table, view)
                refusing = verdicts(found, table) if found else ()
                refusal = Refusal(
                    job=gang.id,
                    verdicts=refusing,
                    for_room=found is not None and found.for_room,
                    task=member.task.name,
                    fitted=len(placements),
                    nodes=len(table.names),
                    cured_by=self._cures(profile, refusing),
                )
                self.undo(placements)
                return refusal
        return placements

    def _put(
        self,
        gang: Gang,
        kind: int,
        number: int,
        member: Member,
        profile: Profile,
        view: View,
        layout: Layout | None,
        placements: list[Placed],
    ) -> bool:
        """One member to its best node, if there is one."""
        within = None if layout is None else layout.rows[kind]
        if placements and layout is not None:
            # Some count what is laid already: together members may be too much, where each alone is not.
            for plugin in gang.laid_by:
                if hasattr(plugin, "still_open"):
                    within = self.runner.still_open(plugin, gang, member, within, self.table, view)
        found = self._rankings.of(profile, member, gang.shapes[kind], view).decide(within)
        if found is None:
            return False
        row, decision = found
        grant = self.runner.grant(profile.gpu_choosers, member, self.table, row, view)
        grant = self.table.place(row, member.task.request, member, grant)
        placements.append(Placed(member, number, row, self.table.nodes[row], decision, grant))
        return True

    def _feasible(self, gang: Gang, kind: int, profile: Profile, view: View) -> Mask:
        found: Mask = self._rankings.of(profile, gang.members[kind], gang.shapes[kind], view).rank >= 0
        return found

    def best_row(self, gang: Gang, kind: int, view: View, layout: Layout | None = None) -> int:
        """The row where one of the gang's members of that kind would go now; -1 for nowhere."""
        within = None if layout is None else layout.rows[kind]
        return self._rankings.of(self.profile(gang), gang.members[kind], gang.shapes[kind], view).best(within)

    def open_rows(self, gang: Gang, kind: int, view: View) -> Mask:
        """As `open_to`, and quicker where nothing but room depends on what runs."""
        shape, generation = gang.shapes[kind], self.table.generation
        known = self._openings.get(shape)
        if known is not None and known[0] == generation:
            return known[1]
        ranking = self._rankings.of(self.profile(gang), gang.members[kind], shape, view)
        if not ranking.plain:
            return self.open_to(gang, gang.members[kind], view)
        if len(self._openings) >= _OPENINGS_KEPT:
            self._openings.clear()
        self._openings[shape] = (generation, ranking.openings())
        return self._openings[shape][1]

    def open_to(self, gang: Gang, member: Member, view: View) -> Mask:
        """The nodes that nothing keeps the member from but what others' going could change."""
        nodes = self.table.view()
        closed = nodes.none()
        for plugin in self.profile(gang).filters:
            for mask, reason in self.runner.refusals(plugin, member, nodes, view):
                if not reason.evictable:
                    closed = closed | mask
        return ~closed

    def _cures(self, profile: Profile, refusing: Sequence[Verdict]) -> tuple[Trigger, ...]:
        named = {cure for plugin in profile.filters for cure in cures_of(plugin)}
        # Something is placed all the time: that wakes only those who were refused by a rule about company.
        said_no = {verdict.reason.plugin for verdict in refusing}
        if not any("run_placed" in cures_of(plugin) for plugin in profile.filters if plugin.name in said_no):
            named.discard("run_placed")
        return tuple(trigger for trigger in ANY_TRIGGER if trigger in named)

    def _refuse_all(self, gang: Gang, reason: Reason, cures: tuple[Trigger, ...]) -> Refusal:
        return Refusal(gang.id, (Verdict(reason),), nodes=len(self.table.names), cured_by=cures)

    def _unreserve(self, profile: Profile, gang: Gang, placements: Sequence[Placed], upto: int) -> None:
        for plugin in profile.reserves[:upto]:
            if hasattr(plugin, "unreserve"):
                self.runner.ask(plugin, "unreserve", gang, placements)


def _crossed(gang: Gang, one: Layouts, other: Layouts) -> Layouts:
    """What satisfies both. If one side alone has no way, that is what is told."""

    def crowded() -> list[Layout]:
        ways, others = one.crowded(), other.crowded()
        pairs = ((ways, other.options), (one.options, others), (ways, others))
        return [layout for some, more in pairs for layout in _meeting(gang, some, more)]

    reason = other.reason if one.options else one.reason
    return Layouts(_meeting(gang, one.options, other.options), reason, crowded)


def _meeting(gang: Gang, some: Sequence[Layout], others: Sequence[Layout]) -> list[Layout]:
    """Layouts that satisfy both sides and leave every needed member a row, in the order of the first."""
    if not some or not others:
        return []
    needed = [kind for kind, numbers in enumerate(gang.needed) if numbers]

    def pairs() -> Iterator[Layout]:
        for one, other in islice(product(some, others), _LAYOUTS_CROSSED):
            if all((one.rows[kind] & other.rows[kind]).any() for kind in needed):
                yield _both(one, other)

    kept = list(islice(pairs(), _LAYOUTS_TRIED))
    if len(kept) == _LAYOUTS_TRIED or len(some) * len(others) > _LAYOUTS_CROSSED:
        # The last of either side is the widest (all rows, for a wish): never cut off.
        kept.append(_both(some[-1], others[-1]))
    return kept


def _both(one: Layout, other: Layout) -> Layout:
    return Layout(tuple(map(np.logical_and, one.rows, other.rows)))


def _cures_by(profile: Profile, reason: Reason) -> tuple[Trigger, ...]:
    """What the plugin that gave the reason says could help."""
    return cures_of(next(plugin for plugin in (*profile.layouts, MOVES) if plugin.name == reason.plugin))
