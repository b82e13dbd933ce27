"""Preemption search on larger clusters: what it caches, how many nodes it evaluates, and that it changes nothing."""

from __future__ import annotations

from builders import NOW_MS, a_job_spec, a_node
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.preemption.search import Preemptions
from hodei.engine.preemption.victims import FOREVER, Place, VictimCandidate, VictimIndex
from hodei.engine.view import Gang, View, gang_of
from hodei.model.job import Toleration
from hodei.model.node import Taint
from hodei.plugins.registry import build_profile

VIEW = View(NOW_MS)


class Rows:
    """`count` nodes of two cores, with two jobs of one core on each."""

    def __init__(self, count: int, **node_fields: object) -> None:
        self.table = Table(a_node(f"n{i:04}", 2, "64Gi", **node_fields) for i in range(count))
        self.table.settle()
        self.profile = build_profile("default")
        self.engine = Engine(self.table, {"default": self.profile})
        self.victim_index = VictimIndex(self.table)
        self.preemptions = Preemptions(self.engine, self.victim_index)
        for id in range(1, 2 * count + 1):
            name = self.table.names[(id - 1) // 2]
            self.put(id, name, protected_until_ms=0)

    def gang(self, id: int, **fields: object) -> Gang:
        gang = gang_of(id, a_job_spec(**fields), NOW_MS)
        self.profile.admit(gang)
        return gang

    def put(self, id: int, name: str, *, priority: str = "low", since_ms: int = 0, **fields: object) -> None:
        gang = self.gang(id, cpu="1", memory="0", priority=priority)
        grant = self.table.place_by_name(name, gang.members[0])
        places, since = (Place(name, gang.members[0], grant),), since_ms or NOW_MS - 1000 * id
        self.victim_index.put(id, [VictimCandidate(id, gang.job, places, since, unsaved_ms=(since,), **fields)])

    def remove(self, id: int) -> None:
        for place in self.victim_index.of_job[id][0].places:
            self.table.release_by_name(*place)
        self.victim_index.remove(id)

    def protect(self, id: int, until_ms: int) -> None:
        (candidate,) = self.victim_index.of_job[id]
        self.victim_index.put(
            id,
            [
                VictimCandidate(
                    id,
                    candidate.job,
                    candidate.places,
                    candidate.since_ms,
                    candidate.unsaved_ms,
                    protected_until_ms=until_ms,
                )
            ],
        )


def test_a_warm_search_answers_like_a_fresh_one():
    rows = Rows(400)
    for number in range(300):
        gang = rows.gang(10_000 + number, cpu="2", memory="0", priority="high")
        found = rows.preemptions.find(gang, VIEW)
        assert found is not None
        if number % 25 == 0:
            fresh = Preemptions(Engine(rows.table, {"default": rows.profile}), rows.victim_index).find(gang, VIEW)
            assert fresh is not None
            assert (found.victims, found.stopping) == (fresh.victims, fresh.stopping)
        for victim in found.victims:
            rows.remove(victim.id)
        placed = rows.engine.place(gang, VIEW)
        assert not isinstance(placed, Refusal)
        assert placed[0].node.name == found.placements[0].node.name


def test_the_only_node_where_preemption_helps_is_found_among_many():
    rows = Rows(300)
    for id in range(1, 600):
        rows.protect(id, FOREVER)
    found = rows.preemptions.find(rows.gang(1000, cpu="1", memory="0", priority="high"), VIEW)
    assert found is not None
    assert [victim.id for victim in found.victims] == [600]
    assert not rows.preemptions.retry_later


def test_a_later_search_is_suggested_only_if_an_expiring_protection_blocks():
    rows = Rows(3)
    for id in range(1, 7):
        rows.protect(id, FOREVER if id > 2 else NOW_MS + 5000)
    gangs = [rows.gang(1000 + cpu, cpu=str(cpu), memory="0", priority="high") for cpu in (1, 2, 3)]
    assert [(rows.preemptions.find(gang, VIEW), rows.preemptions.retry_later) for gang in gangs] == [
        (None, True),
        (None, True),
        (None, False),  # no node is that large
    ]
    later = rows.preemptions.find(gangs[1], View(NOW_MS + 5000))
    assert later is not None
    assert [victim.id for victim in later.victims] == [1, 2]


def test_no_victims_are_taken_on_a_node_that_can_never_run_the_member():
    rows = Rows(2, taints=(Taint("dedicated"),))
    assert rows.preemptions.find(rows.gang(9, cpu="1", priority="high"), VIEW) is None
    tolerating = rows.gang(10, cpu="1", priority="high", tolerations=(Toleration("dedicated", "Exists"),))
    assert rows.preemptions.find(tolerating, VIEW) is not None


def test_nodes_that_join_and_leave_between_searches_are_seen_by_the_next():
    rows = Rows(3)
    gang = rows.gang(1000, cpu="2", memory="0", priority="high")
    assert rows.preemptions.find(gang, VIEW) is not None
    for name in ("n0000", "n0001"):
        rows.table.remove(name)
    rows.table.settle()
    found = rows.preemptions.find(gang, VIEW)
    assert found is not None
    assert [victim.nodes for victim in found.victims] == [("n0002",), ("n0002",)]


def test_the_table_is_unchanged_after_every_search():
    rows = Rows(3)
    before = [(dict(held.used), held.runs, held.last_placed, dict(held.kinds)) for held in rows.table.node_usage]
    for count, cpu in ((1, "2"), (3, "2"), (4, "2"), (1, "3")):
        rows.preemptions.find(rows.gang(1000, cpu=cpu, memory="0", count=count, priority="high"), VIEW)
        after = [(dict(held.used), held.runs, held.last_placed, dict(held.kinds)) for held in rows.table.node_usage]
        assert after == before
