"""The scheduling cycle: one gang through the extension points, placed whole or not at all.

`try_gang` changes the table only if it returns placements.
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
from hodei.engine.points import ANY_TRIGGER, Layout, Layouts, Placed, Trigger, requeue_triggers
from hodei.engine.profile import RELOCATION, Profile
from hodei.engine.ranking import Rankings
from hodei.engine.runner import Runner
from hodei.engine.view import Gang, Member, View
from hodei.model.job import Reason, Verdict

# Combined layouts tried when two plugins restrict the layout.
_LAYOUTS_TRIED = 1024
_LAYOUTS_CROSSED = 20_000
_OPEN_ROWS_CACHED = 4096


class Engine:
    """Decides for every gang of every profile, over one table."""

    def __init__(self, table: Table, profiles: Mapping[str, Profile]) -> None:
        self.table = table
        self.profiles = dict(profiles)
        self.runner = Runner()
        self._rankings = Rankings(table, self.runner)
        self._open_rows: dict[Hashable, tuple[int, Mask]] = {}

    def use(self, profiles: Mapping[str, Profile]) -> None:
        """Replace the profiles and drop all caches; gangs must be admitted again."""
        self.profiles.clear()
        self.profiles.update(profiles)
        self._rankings = Rankings(self.table, self.runner)
        self._open_rows.clear()

    def profile(self, gang: Gang) -> Profile:
        """The gang's profile; a running gang may outlast its own, which then is `default`."""
        return self.profiles.get(gang.job.profile) or self.profiles["default"]

    def try_gang(self, gang: Gang, view: View) -> list[Placed] | Refusal:
        """Placements (then in the table), or a refusal that leaves the table unchanged."""
        result = self.place(gang, view)
        if isinstance(result, Refusal):
            for plugin in self.profile(gang).post_filters:
                self.runner.ask(plugin, "post_filter", gang, view)
        return result

    def place(self, gang: Gang, view: View, *, search: bool = True, extras: bool = True) -> list[Placed] | Refusal:
        """As `try_gang`, without post-filters. Without `search`, some gangs of unequal members are refused although
        they fit; without `extras`, only needed members are placed."""
        profile = self.profile(gang)
        self.runner.job = gang.id
        plugin: Any
        for plugin in profile.pre_filters:
            reason = self.runner.ask(plugin, "pre_filter", gang, view)
            if reason is not None:
                return self._refuse_all(gang, reason, requeue_triggers(plugin))

        placements = self._place_in_layouts(gang, profile, view, search, extras)
        if isinstance(placements, Refusal):
            return placements

        for done, (point, plugin) in enumerate(profile.final_checks):
            reason = self.runner.ask(plugin, point, gang, placements, view)
            if reason is not None:
                self._unreserve(profile, gang, placements, upto=done)
                self.undo(placements)
                return self._refuse_all(gang, reason, requeue_triggers(plugin))
        for plugin in profile.binds:
            placements = self.runner.bind(plugin, gang, placements, view)
        return placements

    def place_needed(self, gang: Gang, view: View) -> list[Placed] | Refusal:
        """Place the needed members of an admitted gang, without gang-wide checks. The capacity is held until `undo`."""
        self.runner.job = gang.id
        return self._place_in_layouts(gang, self.profile(gang), view, search=True, extras=False)

    def undo(self, placements: Sequence[Placed]) -> None:
        for placed in reversed(placements):
            self.table.release(placed.row, placed.member.task.request, placed.member, placed.grant)

    def withdraw(self, gang: Gang, placements: Sequence[Placed]) -> None:
        """Undo a trial placement, reservations of plugins included."""
        profile = self.profile(gang)
        self._unreserve(profile, gang, placements, upto=len(profile.reserves))
        self.undo(placements)

    def layouts(self, gang: Gang, view: View) -> Layouts | Reason | None:
        """Layouts for the gang, best first; None if any node will do, a Reason if there is none."""
        whole: Layouts | None = None
        for plugin in gang.layout_plugins:
            more = (self._capacity(gang, view),) if getattr(plugin, "wants_capacity", False) else ()
            found = self.runner.layouts(plugin, gang, self.table, view, *more)
            if isinstance(found, Reason):
                return found
            if plugin is RELOCATION and gang.is_joining and found is not None and whole is not None:
                found.reason = whole.reason  # a joining member is not moved: report what the other plugins say
            if found is not None:
                whole = found if whole is None else _combine(gang, whole, found)
        return whole

    def _capacity(self, gang: Gang, view: View) -> tuple[Ints, ...]:
        """Per kind of member, how many each node would take if it were idle."""
        nodes, out = self.table.view(), list[Ints]()
        for member, numbers in zip(gang.members, gang.needed, strict=True):
            most = np.where(self.open_to(gang, member, view), max(len(numbers), 1), 0)
            for resource, amount in member.task.request.items():
                if amount:
                    most = np.minimum(most, nodes.capacity(resource) // amount)
            out.append(most)
        return tuple(out)

    def _place_in_layouts(
        self, gang: Gang, profile: Profile, view: View, search: bool, extras: bool
    ) -> list[Placed] | Refusal:
        """Place in the first layout with capacity. If the gang fits only without a layout, the layout is the reason."""
        layouts = self.layouts(gang, view) if gang.layout_plugins else None
        if layouts is None:
            return self._place_in(gang, profile, view, None, search, extras)
        if isinstance(layouts, Reason):
            return self._refuse_all(gang, layouts, _triggers_of(profile, layouts))
        most = 0
        needed = [kind for kind, numbers in enumerate(gang.needed) if numbers]
        # The same for every layout: a failed try leaves the table unchanged.
        open_to = {kind: self._feasible(gang, kind, profile, view) for kind in needed}
        for layout in layouts.options:
            if not all((layout.rows[kind] & open_to[kind]).any() for kind in needed):
                continue  # there can be thousands of layouts: skip full ones without a try
            result = self._place_in(gang, profile, view, layout, search, extras)
            if not isinstance(result, Refusal):
                return result
            most = max(most, result.fitted)
        if gang.size > 1 or not open_to[needed[0]].any():  # a single feasible member would be placed
            anywhere = self._place_in(gang, profile, view, None, search, extras=False)
            if isinstance(anywhere, Refusal):
                return anywhere
            self.undo(anywhere)
        refusing, triggers = (Verdict(layouts.reason),), _triggers_of(profile, layouts.reason)
        return Refusal(
            gang.id, refusing, fitted=most, nodes=len(self.table.names), requeue_on=triggers, for_capacity=True
        )

    def _place_in(
        self, gang: Gang, profile: Profile, view: View, layout: Layout | None, search: bool, extras: bool
    ) -> list[Placed] | Refusal:
        placements = self._greedy(gang, profile, view, layout)
        if isinstance(placements, Refusal):
            # Unequal members can block each other: search for an order that works.
            unequal = search and len(gang.members) > 1
            packed = pack(gang, profile, self._rankings, self.table, view, layout) if unequal else None
            if packed is None:
                return placements
            placements = packed
        if extras:
            for kind, (member, numbers) in enumerate(zip(gang.members, gang.extra, strict=True)):
                for number in numbers:
                    if not self._place_member(gang, kind, number, member, profile, view, layout, placements):
                        break
        return placements

    def _greedy(self, gang: Gang, profile: Profile, view: View, layout: Layout | None) -> list[Placed] | Refusal:
        """Each member in turn goes to its best node; exact for members of one shape."""
        table, placements = self.table, list[Placed]()
        for kind, number, member in gang.needed_members():
            if not self._place_member(gang, kind, number, member, profile, view, layout, placements):
                # With many layouts, do not collect reasons for each.
                found = None if layout else objections(profile, self.runner, member, table, view)
                refusing = verdicts(found, table) if found else ()
                refusal = Refusal(
                    job=gang.id,
                    verdicts=refusing,
                    for_capacity=found is not None and found.for_capacity,
                    task=member.task.name,
                    fitted=len(placements),
                    nodes=len(table.names),
                    requeue_on=self._requeue_triggers(profile, refusing),
                )
                self.undo(placements)
                return refusal
        return placements

    def _place_member(
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
        within = None if layout is None else layout.rows[kind]
        if placements and layout is not None:
            # Members that fit alone may not fit together.
            for plugin in gang.layout_plugins:
                if hasattr(plugin, "remaining_rows"):
                    within = self.runner.remaining_rows(plugin, gang, member, within, self.table, view)
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
        """The best row for a member of that kind; -1 if there is none."""
        within = None if layout is None else layout.rows[kind]
        return self._rankings.of(self.profile(gang), gang.members[kind], gang.shapes[kind], view).best(within)

    def open_rows(self, gang: Gang, kind: int, view: View) -> Mask:
        """As `open_to`, cached where only capacity depends on what runs."""
        shape, generation = gang.shapes[kind], self.table.generation
        known = self._open_rows.get(shape)
        if known is not None and known[0] == generation:
            return known[1]
        ranking = self._rankings.of(self.profile(gang), gang.members[kind], shape, view)
        if not ranking.only_fit_reads_usage:
            return self.open_to(gang, gang.members[kind], view)
        if len(self._open_rows) >= _OPEN_ROWS_CACHED:
            self._open_rows.clear()
        self._open_rows[shape] = (generation, ranking.static_feasible())
        return self._open_rows[shape][1]

    def open_to(self, gang: Gang, member: Member, view: View) -> Mask:
        """Nodes that the member could use if other work were preempted."""
        nodes = self.table.view()
        closed = nodes.none()
        for plugin in self.profile(gang).filters:
            for mask, reason in self.runner.refusals(plugin, member, nodes, view):
                if not reason.evictable:
                    closed = closed | mask
        return ~closed

    def _requeue_triggers(self, profile: Profile, refusing: Sequence[Verdict]) -> tuple[Trigger, ...]:
        named = {cure for plugin in profile.filters for cure in requeue_triggers(plugin)}
        # Placements are frequent: they requeue only gangs refused by a rule about other jobs.
        refusing_plugins = {verdict.reason.plugin for verdict in refusing}
        if not any(
            "run_placed" in requeue_triggers(plugin) for plugin in profile.filters if plugin.name in refusing_plugins
        ):
            named.discard("run_placed")
        return tuple(trigger for trigger in ANY_TRIGGER if trigger in named)

    def _refuse_all(self, gang: Gang, reason: Reason, triggers: tuple[Trigger, ...]) -> Refusal:
        return Refusal(gang.id, (Verdict(reason),), nodes=len(self.table.names), requeue_on=triggers)

    def _unreserve(self, profile: Profile, gang: Gang, placements: Sequence[Placed], upto: int) -> None:
        for plugin in profile.reserves[:upto]:
            if hasattr(plugin, "unreserve"):
                self.runner.ask(plugin, "unreserve", gang, placements)


def _combine(gang: Gang, one: Layouts, other: Layouts) -> Layouts:
    """Layouts that satisfy both. If one side has none, its reason is reported."""

    def full() -> list[Layout]:
        ways, others = one.full(), other.full()
        pairs = ((ways, other.options), (one.options, others), (ways, others))
        return [layout for some, more in pairs for layout in _intersect(gang, some, more)]

    reason = other.reason if one.options else one.reason
    return Layouts(_intersect(gang, one.options, other.options), reason, full)


def _intersect(gang: Gang, some: Sequence[Layout], others: Sequence[Layout]) -> list[Layout]:
    """Layouts that satisfy both and leave every needed member a row, in the order of the first."""
    if not some or not others:
        return []
    needed = [kind for kind, numbers in enumerate(gang.needed) if numbers]

    def pairs() -> Iterator[Layout]:
        for one, other in islice(product(some, others), _LAYOUTS_CROSSED):
            if all((one.rows[kind] & other.rows[kind]).any() for kind in needed):
                yield _both(one, other)

    kept = list(islice(pairs(), _LAYOUTS_TRIED))
    if len(kept) == _LAYOUTS_TRIED or len(some) * len(others) > _LAYOUTS_CROSSED:
        # The last of either side is the widest (all rows, for a preference): keep it.
        kept.append(_both(some[-1], others[-1]))
    return kept


def _both(one: Layout, other: Layout) -> Layout:
    return Layout(tuple(map(np.logical_and, one.rows, other.rows)))


def _triggers_of(profile: Profile, reason: Reason) -> tuple[Trigger, ...]:
    return requeue_triggers(next(plugin for plugin in (*profile.layouts, RELOCATION) if plugin.name == reason.plugin))
