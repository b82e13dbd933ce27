"""The caches are exact: after any sequence of changes a cached ranking equals one computed from scratch."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, note
from hypothesis import strategies as st
from msgspec import structs

from builders import a_job_spec, a_task
from hodei.engine.nodes import OneNode, Table
from hodei.engine.profile import Profile
from hodei.engine.ranking import Rankings
from hodei.engine.runner import Runner
from hodei.engine.view import Member, View, gang_of
from hodei.model.node import Node
from hodei.model.resources import Resources
from hodei.plugins.registry import PLUGINS, build_profile, find_plugin
from property.clusters import NODE_NAMES, clusters, nodes, plain_tasks, profiles, specs
from property.examples import examples

where = st.sampled_from(NODE_NAMES)
requests = st.sampled_from(({"cpu": 500}, {"cpu": 1000, "memory": 2**30}, {"gpu": 1000}, {"example.com/fpga": 1}))
changes = st.one_of(
    st.tuples(st.just("place"), where, requests),
    st.tuples(st.just("place"), where, requests),
    st.tuples(st.just("release"), where, st.none()),
    st.tuples(st.just("put"), nodes(), st.none()),
    st.tuples(st.just("remove"), where, st.none()),
    st.tuples(st.just("try"), where, requests),
)
# Several changes between two reads, so that both the incremental and the full update are used.
rounds = st.lists(st.lists(changes, min_size=1, max_size=12), min_size=1, max_size=6)
VIEW = View(0)


class ReplayedTable:
    """A table with its history, so that an equal table without caches can be built."""

    def __init__(self) -> None:
        self.table = Table()
        self.history: list[tuple[str, Any, Any]] = []
        self._held: dict[str, list[Resources]] = {}

    def change(self, what: str, on: Any, request: Resources | None) -> None:
        table = self.table
        if what == "put":
            table.put(on)
            table.settle()
        elif what == "remove":
            table.remove(on)
            table.settle()
            self._held.pop(on, None)
        elif on in table.row:
            if what == "place" and request is not None:
                table.place(table.row[on], request)
                self._held.setdefault(on, []).append(request)
            elif what == "try" and request is not None:
                with table.trial():
                    table.place(table.row[on], request)
                    table.release(table.row[on], request)
            elif what == "release" and self._held.get(on):
                table.release(table.row[on], self._held[on].pop())
        self.history.append((what, on, request))

    def rebuild(self) -> Table:
        other = ReplayedTable()
        for what, on, request in self.history:
            other.change(what, on, request)
        return other.table


def _members(profile: Profile, jobs: list[Any]) -> list[tuple[Member, Any]]:
    out = []
    for number, spec in enumerate(jobs):
        gang = gang_of(number, spec, 0)
        profile.admit(gang)
        out += list(zip(gang.members, gang.shapes, strict=True))
    return out


every_strategy = st.sampled_from(
    ("", "least_loaded", "most_free", "resource_balance", "bin_packing", "round_robin", "locality_aware")
)


@examples(80)
@given(clusters(), st.lists(specs(), min_size=1, max_size=3), rounds, every_strategy)
def test_a_cached_ranking_equals_one_from_scratch(cluster, jobs, history, strategy):
    profile = build_profile("default", worker_selection=strategy)
    replayed, runner = ReplayedTable(), Runner()
    cached = Rankings(replayed.table, runner)
    for node in cluster:
        replayed.change("put", node, None)
    members = _members(profile, jobs)
    for batch in history:
        for change in batch:
            replayed.change(*change)
        fresh_table = replayed.rebuild()
        assert [fresh_table.usage(row) for row in range(len(fresh_table.names))] == [
            replayed.table.usage(row) for row in range(len(replayed.table.names))
        ]
        for member, shape in members:
            fresh = Rankings(fresh_table, Runner()).of(profile, member, shape, VIEW)
            ranking = cached.of(profile, member, shape, VIEW)
            note(f"{member.task.name}: {ranking.order()} cached, {fresh.order()} from scratch")
            assert np.array_equal(ranking.order(), fresh.order())
            assert (ranking.feasible, ranking.weight) == (fresh.feasible, fresh.weight)
            assert ranking.decide() == fresh.decide()
            assert np.array_equal(ranking.order(), fresh.order()), "reading a ranking has changed it"
    assert not runner.faults


scalar_plugins = st.sampled_from(
    [type(plugin) for plugin in map(find_plugin, PLUGINS) if getattr(plugin, "scalar", False)]
)


@examples(120)
@given(clusters(), st.lists(changes, max_size=10), plain_tasks(), scalar_plugins)
def test_a_scalar_plugin_gives_the_same_answer_for_one_node_as_for_many(cluster, history, task, kind):
    replayed = ReplayedTable()
    for node in cluster:
        replayed.change("put", node, None)
    for change in history:
        replayed.change(*change)
    _compare(kind(), task, replayed.table)


huge = st.integers(0, 2**45)


@examples(120)
@given(st.lists(st.tuples(huge, huge, huge, huge), min_size=1, max_size=4), huge, huge, scalar_plugins)
def test_a_scalar_plugin_gives_the_same_answer_for_very_large_and_overfull_nodes(sizes, cpu, memory, kind):
    table = Table(Node(f"n{i}", "b", capacity={"cpu": size[0], "memory": size[1]}) for i, size in enumerate(sizes))
    table.settle()
    for row, size in enumerate(sizes):
        table.place(row, {"cpu": size[2], "memory": size[3]})
    _compare(kind(), structs.replace(a_task(), request={"cpu": cpu, "memory": memory}), table)


def _compare(plugin: Any, task: Any, table: Table) -> None:
    member = Member(a_job_spec("one", tasks=[task]), task)
    many = table.view()
    for row in range(len(table.names)):
        one = OneNode(table, row)
        if hasattr(plugin, "filter"):
            in_array = [bool(mask[row]) for mask, _ in plugin.filter(member, many, VIEW)]
            assert [bool(mask) for mask, _ in plugin.filter(member, one, VIEW)] == in_array
        if hasattr(plugin, "score"):
            scores = plugin.score(member, many, VIEW)
            assert plugin.score(member, one, VIEW) == (None if scores is None else scores[row])


def test_the_random_profiles_use_several_kinds_of_queues():
    assert {profile.queue.name for profile in profiles().values()} == {"priority", "fair", "fifo"}
