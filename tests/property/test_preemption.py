"""Who goes for whom, against brute force on small clusters; and what becomes of every eviction in a whole story."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import combinations
from typing import Any

from hypothesis import given, note
from hypothesis import strategies as st

from builders import NOW_MS, a_job_spec, a_node
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Eviction, Refusal
from hodei.engine.preemption.search import Preemption, Preemptions
from hodei.engine.preemption.victims import FOREVER, Place, VictimCandidate, VictimIndex, class_of
from hodei.engine.view import Gang, Member, View, gang_of
from hodei.model.effects import SaveEvent
from hodei.model.facts import RunObserved
from hodei.model.job import GangRules
from hodei.plugins.registry import build_profile
from property.examples import examples
from property.random_runs import Story, calm_stories

VIEW = View(NOW_MS)
# What a tenant is as a value: job, number of the member ("-1": the gang as a whole).
Unit = tuple[int, int]

cpus = st.sampled_from(("1", "2", "3"))
tenants = st.fixed_dictionaries(
    {
        "cpu": cpus,
        "memory": st.sampled_from(("0", "1Gi", "3Gi")),
        "gpu": st.sampled_from(("", "", "500m", "1")),
        "priority": st.sampled_from(("high", "medium", "low", "batch", 300)),
        "count": st.sampled_from((1, 1, 1, 2, 3)),
        "surplus": st.integers(0, 2),
        "minutes": st.integers(0, 3),
        "state": st.sampled_from(("runs", "runs", "runs", "runs", "stops", "is safe", "is safe for ever")),
    }
)
wishes = st.fixed_dictionaries(
    {
        "cpu": st.sampled_from(("1", "2", "4")),
        "memory": st.sampled_from(("0", "1Gi", "4Gi")),
        "gpu": st.sampled_from(("", "", "500m", "1", "2")),
        "priority": st.sampled_from(("critical", "high", "medium")),
    }
)
# Many small tenants and few kinds of wishes, so that the same is asked for again and again on the same nodes.
small_tenants = st.fixed_dictionaries(
    {
        "cpu": st.just("1"),
        "memory": st.sampled_from(("0", "1Gi")),
        "priority": st.sampled_from(("medium", "low", "batch")),
        "count": st.sampled_from((1, 1, 2)),
        "surplus": st.integers(0, 1),
        "minutes": st.integers(0, 3),
        "state": st.sampled_from(("runs", "runs", "runs", "stops", "is safe")),
    }
)
few_wishes = st.lists(
    st.sampled_from([{"cpu": cpu, "memory": "0", "priority": priority} for cpu in "12" for priority in ("high", 1000)]),
    min_size=4, max_size=10,
)  # fmt: skip
places = st.lists(st.sampled_from((("4", "4Gi", ""), ("6", "8Gi", "1"), ("3", "16Gi", "2"))), min_size=1, max_size=3)


class Cluster:
    """A table with tenants on it, put wherever there is room, by the engine."""

    def __init__(self, nodes: Iterable[tuple[str, str, str]], tenants: Iterable[dict[str, Any]]) -> None:
        self.table = Table(a_node(f"n{i}", cpu, memory, gpu=gpu) for i, (cpu, memory, gpu) in enumerate(nodes))
        self.table.settle()
        self.profile = build_profile("default")
        self.engine = Engine(self.table, {"default": self.profile})
        self.victim_index = VictimIndex(self.table)
        self.preemptions = Preemptions(self.engine, self.victim_index)
        for id, wanted in enumerate(tenants, 1):
            self._let_in(id, **wanted)

    def gang(self, id: int, **fields: Any) -> Gang:
        gang = gang_of(id, a_job_spec(**fields), NOW_MS)
        self.profile.admit(gang)
        return gang

    def _let_in(self, id: int, *, count: int, surplus: int, minutes: int, state: str, **fields: Any) -> None:
        spared = min(surplus, count - 1)
        gang = self.gang(id, count=count, min_count=count - spared, gang=GangRules(elastic=True), **fields)
        placed = self.engine.place(gang, VIEW)
        if isinstance(placed, Refusal):
            return
        since = NOW_MS - minutes * 60_000
        homes = {each.index: Place(each.node.name, each.member, each.grant) for each in placed}
        core = tuple(place for number, place in homes.items() if number < count - spared)
        safe = {"is safe": NOW_MS + 1, "is safe for ever": FOREVER}.get(state, 0)
        units = [
            VictimCandidate(
                id, gang.job, core if state != "stops" else tuple(homes.values()), since, unsaved_ms=(since,) * len(homes),
                stopping=state == "stops", protected_until_ms=safe,
            )
        ]  # fmt: skip
        if state != "stops":
            units += [
                VictimCandidate(id, gang.job, (place,), since, members=(number,), order=number)
                for number, place in homes.items()
                if number >= count - spared
            ]
        self.victim_index.put(id, units)

    def units(self) -> dict[Unit, VictimCandidate]:
        return {(t.id, t.members[0] if t.members else -1): t for ts in self.victim_index.of_job.values() for t in ts}

    def movable(self, rank: int) -> dict[Unit, VictimCandidate]:
        return {
            unit: tenant
            for unit, tenant in self.units().items()
            if not tenant.stopping and tenant.protected_until_ms <= NOW_MS and class_of(tenant.job.priority) < rank
        }

    def fits_without(self, member: Member, gone: Collection[Unit]) -> set[str]:
        """The nodes with room for the member when those have gone, and all who go anyway; gangs take their surplus with
        them. Done on a table of its own."""
        ends = {id for id, number in gone if number == -1}
        table = Table(self.table.nodes)
        table.settle()
        for unit, tenant in self.units().items():
            if not (tenant.stopping or unit in gone or unit[0] in ends):
                for name, resident, grant in tenant.places:
                    table.hold(name, resident.task.request, resident, grant)
        engine = Engine(table, {"default": self.profile})
        gang = Gang(0, member.job, NOW_MS, (member,), ((0,),), ((),))
        self.profile.admit(gang)
        rows = [row for row in range(len(table.names)) if not _refused(engine, gang, table, row)]
        return {table.names[row] for row in rows}

    def state(self) -> list[Any]:
        return [
            (
                {resource: amount for resource, amount in held.used.items() if amount},
                held.runs, held.last_placed, dict(held.kinds), dict(held.grants),
                held.parts and (held.parts.cores, dict(held.parts.gpus)),
            )
            for held in self.table.holds
        ]  # fmt: skip

    def send_away(self, id: int) -> None:
        for tenant in self.victim_index.of_job[id]:
            for name, member, grant in tenant.places:
                self.table.let_go(name, member.task.request, member, grant)
        self.victim_index.remove(id)


def _refused(engine: Engine, gang: Gang, table: Table, row: int) -> bool:
    nodes = table.view(slice(row, row + 1))
    masks = [engine.runner.refused(plugin, gang.members[0], nodes, VIEW) for plugin in engine.profile(gang).filters]
    return any(mask is not None and mask[0] for mask in masks)


def _named(found: Preemption) -> set[Unit]:
    """The victims as units."""
    return {(victim.id, number) for victim in found.victims for number in (victim.members or (-1,))}


def _asked(nodes: Any, there: Any, wish: Any) -> tuple[Cluster, Gang, Preemption | None]:
    cluster = Cluster(nodes, there)
    gang = cluster.gang(99, **wish)
    before = cluster.state()
    result = cluster.engine.place(gang, VIEW)
    if not isinstance(result, Refusal):
        cluster.engine.withdraw(gang, result)
        return cluster, gang, None
    found = cluster.preemptions.find(gang, VIEW)
    assert cluster.state() == before, "a search leaves no mark"
    note(f"tenants: {[(unit, tenant.holds) for unit, tenant in cluster.units().items()]}")
    note(f"found: {found and _named(found)}")
    return cluster, gang, found


@examples(150)
@given(places, st.lists(tenants, max_size=5), wishes)
def test_the_victims_are_of_lower_classes_and_no_fewer_of_them_would_do(nodes, there, wish):
    cluster, gang, found = _asked(nodes, there, wish)
    if found is None:
        return
    member, victims = gang.members[0], _named(found)
    movable = cluster.movable(class_of(gang.job.priority))
    assert victims <= set(movable), "someone may not be told to go"
    assert found.placements[0].node.name in cluster.fits_without(member, victims)
    for size in range(len(victims)):
        for fewer in combinations(sorted(victims), size):
            assert not cluster.fits_without(member, set(fewer)), f"{fewer} would have been enough"


@examples(150)
@given(places, st.lists(tenants, max_size=5), wishes)
def test_a_way_is_found_whenever_there_is_one_and_never_at_the_cost_of_a_higher_priority_than_must_be(
    nodes, there, wish
):
    cluster, gang, found = _asked(nodes, there, wish)
    member = gang.members[0]
    if not isinstance(cluster.engine.place(gang, VIEW), Refusal):
        return  # there is room as it is
    movable = cluster.movable(class_of(gang.job.priority))
    priorities = sorted({tenant.job.priority for tenant in movable.values()})
    for limit in [None, *priorities]:
        gone = {unit for unit, tenant in movable.items() if limit is not None and tenant.job.priority <= limit}
        # On one node at a time, as the search does: whoever holds something there.
        for name in cluster.table.names:
            here = {unit for unit in gone if name in movable[unit].holds}
            if name in cluster.fits_without(member, here):
                assert found is not None, f"all up to {limit} on {name} could have made room"
                highest = max((movable[unit].job.priority for unit in _named(found)), default=None)
                assert highest is None or (limit is not None and highest <= limit)
                return
    assert found is None


@examples(100)
@given(places, st.lists(tenants, min_size=1, max_size=5), wishes)
def test_a_gang_ends_only_where_the_members_that_it_can_do_without_are_not_enough(nodes, there, wish):
    cluster, gang, found = _asked(nodes, there, wish)
    if found is None:
        return
    victims, movable = _named(found), cluster.movable(class_of(gang.job.priority))
    for id in {id for id, number in victims if number == -1}:
        spared = {unit for unit in movable if unit[0] == id and unit[1] != -1}
        instead = {unit for unit in victims if unit[0] != id} | spared
        assert not cluster.fits_without(gang.members[0], instead), f"the surplus of {id} would have been enough"


@examples(100)
@given(places, st.lists(small_tenants, min_size=4, max_size=12), few_wishes)
def test_what_is_kept_from_one_search_to_the_next_changes_no_answer(nodes, there, asked):
    cluster = Cluster(nodes, there)
    for number, wish in enumerate(asked):
        gang = cluster.gang(50 + number, **wish)
        result = cluster.engine.place(gang, VIEW)
        if not isinstance(result, Refusal):
            homes = tuple(Place(each.node.name, each.member, each.grant) for each in result)
            cluster.victim_index.put(
                gang.id, [VictimCandidate(gang.id, gang.job, homes, NOW_MS, protected_until_ms=NOW_MS + 1)]
            )
            continue
        kept = cluster.preemptions.find(gang, VIEW)
        anew = Preemptions(Engine(cluster.table, {"default": cluster.profile}), cluster.victim_index).find(gang, VIEW)
        assert (kept is None) == (anew is None)
        if kept is not None and anew is not None:
            assert (kept.victims, kept.leaving) == (anew.victims, anew.leaving)
            assert [placed.node.name for placed in kept.placements] == [placed.node.name for placed in anew.placements]
            for victim in kept.victims:
                cluster.send_away(victim.id)


class War(Story):
    """Writes down who was told to go for whom, and all that was said of jobs after that."""

    def __init__(self) -> None:
        self.evictions: list[tuple[int, Eviction]] = []
        self.said: list[tuple[int, str, int]] = []
        super().__init__(warlike=True)

    def step(self, facts: Any) -> Any:
        jobs = dict(self.auditor.jobs)
        done = super().step(facts)
        self.said += [
            (save.event.seq, save.event.kind, save.event.job) for save in done.saves if isinstance(save, SaveEvent)
        ]
        for eviction in done.plan.evictions:
            at = max(seq for seq, kind, job in self.said if kind == "job.preempting" and job == eviction.preemptor)
            self.evictions.append((at, eviction))
            winner, loser = self.auditor.jobs[eviction.preemptor].spec, jobs[eviction.job].spec
            assert class_of(loser.priority) < class_of(winner.priority), "an equal or a higher one was told to go"
            if eviction.members:
                assert loser.gang.elastic
        return done


@examples(60)
@given(calm_stories)
def test_in_the_end_every_eviction_has_led_to_a_start_or_there_is_a_reason_on_record(story):
    told = War().tell(*story)
    for _ in range(60):
        going = [run for run in told.auditor.live() if run.stop_reason]
        if not going and not told.controller.preemption.holds:
            break
        told.now_ms += 1000
        told.step([RunObserved(run.id, "stopped", told.now_ms, 143, "killed") for run in going])
    assert not told.controller.preemption.holds, "someone waits for room that nobody will give"
    for at, eviction in told.evictions:
        since = {kind for seq, kind, job in told.said if job == eviction.preemptor and seq > at}
        # Given up on record; or, if it was a member that its running gang wanted back, the gang has ended meanwhile.
        answers = {"job.scheduled", "gang.member_joined", "job.preemption_abandoned", "job.cancel_requested", "job.held", "job.ended",
                   "job.requeued"}  # fmt: skip
        assert since & answers, f"nothing came of {eviction}: {since}"
