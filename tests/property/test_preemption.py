"""The choice of victims against brute force on small clusters, and the result of every preemption in random runs."""

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
from property.random_runs import RandomRun, runs_without_restarts

VIEW = View(NOW_MS)
# A victim candidate as a value: job and number of the member (-1: the gang as a whole).
Unit = tuple[int, int]

cpus = st.sampled_from(("1", "2", "3"))
candidates = st.fixed_dictionaries(
    {
        "cpu": cpus,
        "memory": st.sampled_from(("0", "1Gi", "3Gi")),
        "gpu": st.sampled_from(("", "", "500m", "1")),
        "priority": st.sampled_from(("high", "medium", "low", "batch", 300)),
        "count": st.sampled_from((1, 1, 1, 2, 3)),
        "surplus": st.integers(0, 2),
        "minutes": st.integers(0, 3),
        "state": st.sampled_from(("runs", "runs", "runs", "runs", "stops", "is protected", "is protected forever")),
    }
)
preemptors = st.fixed_dictionaries(
    {
        "cpu": st.sampled_from(("1", "2", "4")),
        "memory": st.sampled_from(("0", "1Gi", "4Gi")),
        "gpu": st.sampled_from(("", "", "500m", "1", "2")),
        "priority": st.sampled_from(("critical", "high", "medium")),
    }
)
# Many small candidates and few kinds of preemptors, so that the same search is repeated on the same nodes.
small_candidates = st.fixed_dictionaries(
    {
        "cpu": st.just("1"),
        "memory": st.sampled_from(("0", "1Gi")),
        "priority": st.sampled_from(("medium", "low", "batch")),
        "count": st.sampled_from((1, 1, 2)),
        "surplus": st.integers(0, 1),
        "minutes": st.integers(0, 3),
        "state": st.sampled_from(("runs", "runs", "runs", "stops", "is protected")),
    }
)
few_preemptors = st.lists(
    st.sampled_from([{"cpu": cpu, "memory": "0", "priority": priority} for cpu in "12" for priority in ("high", 1000)]),
    min_size=4, max_size=10,
)  # fmt: skip
places = st.lists(st.sampled_from((("4", "4Gi", ""), ("6", "8Gi", "1"), ("3", "16Gi", "2"))), min_size=1, max_size=3)


class Cluster:
    """A table with running jobs, placed by the engine as far as they fit."""

    def __init__(self, nodes: Iterable[tuple[str, str, str]], candidates: Iterable[dict[str, Any]]) -> None:
        self.table = Table(a_node(f"n{i}", cpu, memory, gpu=gpu) for i, (cpu, memory, gpu) in enumerate(nodes))
        self.table.settle()
        self.profile = build_profile("default")
        self.engine = Engine(self.table, {"default": self.profile})
        self.victim_index = VictimIndex(self.table)
        self.preemptions = Preemptions(self.engine, self.victim_index)
        for id, fields in enumerate(candidates, 1):
            self._add(id, **fields)

    def gang(self, id: int, **fields: Any) -> Gang:
        gang = gang_of(id, a_job_spec(**fields), NOW_MS)
        self.profile.admit(gang)
        return gang

    def _add(self, id: int, *, count: int, surplus: int, minutes: int, state: str, **fields: Any) -> None:
        extra = min(surplus, count - 1)
        gang = self.gang(id, count=count, min_count=count - extra, gang=GangRules(elastic=True), **fields)
        placed = self.engine.place(gang, VIEW)
        if isinstance(placed, Refusal):
            return
        since = NOW_MS - minutes * 60_000
        held_places = {each.index: Place(each.node.name, each.member, each.grant) for each in placed}
        core = tuple(place for number, place in held_places.items() if number < count - extra)
        protected_ms = {"is protected": NOW_MS + 1, "is protected forever": FOREVER}.get(state, 0)
        units = [
            VictimCandidate(
                id, gang.job, core if state != "stops" else tuple(held_places.values()), since, unsaved_ms=(since,) * len(held_places),
                stopping=state == "stops", protected_until_ms=protected_ms,
            )
        ]  # fmt: skip
        if state != "stops":
            units += [
                VictimCandidate(id, gang.job, (place,), since, members=(number,), order=number)
                for number, place in held_places.items()
                if number >= count - extra
            ]
        self.victim_index.put(id, units)

    def units(self) -> dict[Unit, VictimCandidate]:
        return {(t.id, t.members[0] if t.members else -1): t for ts in self.victim_index.of_job.values() for t in ts}

    def movable(self, rank: int) -> dict[Unit, VictimCandidate]:
        return {
            unit: candidate
            for unit, candidate in self.units().items()
            if not candidate.stopping
            and candidate.protected_until_ms <= NOW_MS
            and class_of(candidate.job.priority) < rank
        }

    def fits_without(self, member: Member, removed: Collection[Unit]) -> set[str]:
        """The nodes where the member fits without the removed and the stopping candidates, on a separate table. A removed gang
        includes its extra members."""
        ends = {id for id, number in removed if number == -1}
        table = Table(self.table.nodes)
        table.settle()
        for unit, candidate in self.units().items():
            if not (candidate.stopping or unit in removed or unit[0] in ends):
                for place in candidate.places:
                    table.place_by_name(*place)
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
                held.devices and (held.devices.cores, dict(held.devices.gpus)),
            )
            for held in self.table.node_usage
        ]  # fmt: skip

    def remove(self, id: int) -> None:
        for candidate in self.victim_index.of_job[id]:
            for place in candidate.places:
                self.table.release_by_name(*place)
        self.victim_index.remove(id)


def _refused(engine: Engine, gang: Gang, table: Table, row: int) -> bool:
    nodes = table.view(slice(row, row + 1))
    masks = [engine.runner.refused(plugin, gang.members[0], nodes, VIEW) for plugin in engine.profile(gang).filters]
    return any(mask is not None and mask[0] for mask in masks)


def _units(found: Preemption) -> set[Unit]:
    """The victims as units."""
    return {(victim.id, number) for victim in found.victims for number in (victim.members or (-1,))}


def _search(nodes: Any, running: Any, preemptor: Any) -> tuple[Cluster, Gang, Preemption | None]:
    cluster = Cluster(nodes, running)
    gang = cluster.gang(99, **preemptor)
    before = cluster.state()
    result = cluster.engine.place(gang, VIEW)
    if not isinstance(result, Refusal):
        cluster.engine.withdraw(gang, result)
        return cluster, gang, None
    found = cluster.preemptions.find(gang, VIEW)
    assert cluster.state() == before, "a search must not change the state"
    note(f"candidates: {[(unit, candidate.holds) for unit, candidate in cluster.units().items()]}")
    note(f"found: {found and _units(found)}")
    return cluster, gang, found


@examples(150)
@given(places, st.lists(candidates, max_size=5), preemptors)
def test_the_victims_are_of_lower_classes_and_no_subset_is_enough(nodes, running, preemptor):
    cluster, gang, found = _search(nodes, running, preemptor)
    if found is None:
        return
    member, victims = gang.members[0], _units(found)
    movable = cluster.movable(class_of(gang.job.priority))
    assert victims <= set(movable), "a victim is not of a lower class, or is protected"
    assert found.placements[0].node.name in cluster.fits_without(member, victims)
    for size in range(len(victims)):
        for fewer in combinations(sorted(victims), size):
            assert not cluster.fits_without(member, set(fewer)), f"{fewer} would have been enough"


@examples(150)
@given(places, st.lists(candidates, max_size=5), preemptors)
def test_victims_are_found_whenever_they_exist_and_of_the_lowest_possible_priority(nodes, running, preemptor):
    cluster, gang, found = _search(nodes, running, preemptor)
    member = gang.members[0]
    if not isinstance(cluster.engine.place(gang, VIEW), Refusal):
        return  # it fits without preemption
    movable = cluster.movable(class_of(gang.job.priority))
    priorities = sorted({candidate.job.priority for candidate in movable.values()})
    for limit in [None, *priorities]:
        removed = {unit for unit, candidate in movable.items() if limit is not None and candidate.job.priority <= limit}
        # One node at a time, like the search.
        for name in cluster.table.names:
            on_node = {unit for unit in removed if name in movable[unit].holds}
            if name in cluster.fits_without(member, on_node):
                assert found is not None, f"candidates up to {limit} on {name} would be enough"
                highest = max((movable[unit].job.priority for unit in _units(found)), default=None)
                assert highest is None or (limit is not None and highest <= limit)
                return
    assert found is None


@examples(100)
@given(places, st.lists(candidates, min_size=1, max_size=5), preemptors)
def test_a_gang_is_preempted_whole_only_if_its_extra_members_are_not_enough(nodes, running, preemptor):
    cluster, gang, found = _search(nodes, running, preemptor)
    if found is None:
        return
    victims, movable = _units(found), cluster.movable(class_of(gang.job.priority))
    for id in {id for id, number in victims if number == -1}:
        extra = {unit for unit in movable if unit[0] == id and unit[1] != -1}
        instead = {unit for unit in victims if unit[0] != id} | extra
        assert not cluster.fits_without(gang.members[0], instead), f"the extra members of {id} would be enough"


@examples(100)
@given(places, st.lists(small_candidates, min_size=4, max_size=12), few_preemptors)
def test_the_caches_of_the_search_do_not_change_its_result(nodes, running, requested):
    cluster = Cluster(nodes, running)
    for number, preemptor in enumerate(requested):
        gang = cluster.gang(50 + number, **preemptor)
        result = cluster.engine.place(gang, VIEW)
        if not isinstance(result, Refusal):
            held_places = tuple(Place(each.node.name, each.member, each.grant) for each in result)
            cluster.victim_index.put(
                gang.id, [VictimCandidate(gang.id, gang.job, held_places, NOW_MS, protected_until_ms=NOW_MS + 1)]
            )
            continue
        cached = cluster.preemptions.find(gang, VIEW)
        fresh = Preemptions(Engine(cluster.table, {"default": cluster.profile}), cluster.victim_index).find(gang, VIEW)
        assert (cached is None) == (fresh is None)
        if cached is not None and fresh is not None:
            assert (cached.victims, cached.stopping) == (fresh.victims, fresh.stopping)
            assert [placed.node.name for placed in cached.placements] == [
                placed.node.name for placed in fresh.placements
            ]
            for victim in cached.victims:
                cluster.remove(victim.id)


class PreemptionRun(RandomRun):
    """Records the evictions and all later events."""

    def __init__(self) -> None:
        self.evictions: list[tuple[int, Eviction]] = []
        self.emitted: list[tuple[int, str, int]] = []
        super().__init__(preemption=True)

    def step(self, facts: Any) -> Any:
        jobs = dict(self.auditor.jobs)
        done = super().step(facts)
        self.emitted += [
            (save.event.seq, save.event.kind, save.event.job) for save in done.saves if isinstance(save, SaveEvent)
        ]
        for eviction in done.plan.evictions:
            at = max(seq for seq, kind, job in self.emitted if kind == "job.preempting" and job == eviction.preemptor)
            self.evictions.append((at, eviction))
            preemptor, victim = self.auditor.jobs[eviction.preemptor].spec, jobs[eviction.job].spec
            assert class_of(victim.priority) < class_of(preemptor.priority), "the victim is not of a lower class"
            if eviction.members:
                assert victim.gang.elastic
        return done


@examples(60)
@given(runs_without_restarts)
def test_every_preemption_leads_to_a_start_or_to_an_event_with_the_reason(example):
    preemption_run = PreemptionRun().run(*example)
    for _ in range(60):
        stopping = [run for run in preemption_run.auditor.live() if run.stop_reason]
        if not stopping and not preemption_run.controller.preemption.holds:
            break
        preemption_run.now_ms += 1000
        preemption_run.step([RunObserved(run.id, "stopped", preemption_run.now_ms, 143, "killed") for run in stopping])
    assert not preemption_run.controller.preemption.holds, "a preemptor waits forever"
    for at, eviction in preemption_run.evictions:
        since = {kind for seq, kind, job in preemption_run.emitted if job == eviction.preemptor and seq > at}
        # A preemption for a member that a running gang replaces may also end with the gang.
        expected = {"job.scheduled", "gang.member_joined", "job.preemption_abandoned", "job.cancel_requested", "job.held", "job.ended",
                   "job.requeued"}  # fmt: skip
        assert since & expected, f"{eviction} has no result: {since}"
