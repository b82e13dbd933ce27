"""Who goes where priority numbers and budgets count, against kube-scheduler's way written down plainly; and that it makes
no difference whether numbers are few or many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from builders import NOW_MS, a_job_spec, a_node
from hodei.engine.cycle import Engine
from hodei.engine.nodes import Table
from hodei.engine.plan import Refusal
from hodei.engine.preemption import victims as tenancy_module
from hodei.engine.preemption.search import Preemption, Preemptions
from hodei.engine.preemption.victims import Going, Place, VictimCandidate, VictimIndex
from hodei.engine.view import Gang, View, gang_of
from hodei.plugins.registry import build_profile
from property.examples import examples

VIEW = View(NOW_MS)
GIB = 1 << 30
numbers = st.sampled_from((-7, -1, 0, 1, 5, 5, 600, 2_000_001_000))
pods = st.fixed_dictionaries(
    {
        "node": st.integers(0, 2),
        "cpu": st.sampled_from((1, 1, 2)),
        "memory": st.sampled_from((0, 1, 2)),
        "priority": numbers,
        "minutes": st.integers(0, 3),
        "budget": st.sampled_from((-1, -1, 0, 1)),
    }
)
wishes = st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((0, 2)), numbers)
budgets = st.tuples(st.integers(0, 2), st.integers(0, 2))


class Cluster:
    """Three nodes of 4 cores and 4Gi, with pods on them as far as there is room."""

    def __init__(self, there: Iterable[dict[str, Any]], allowed: Sequence[int] = ()) -> None:
        self.table = Table(a_node(f"n{i}", 4, "4Gi") for i in range(3))
        self.table.settle()
        self.profile = build_profile("default")
        self.engine = Engine(self.table, {"default": self.profile})
        self.victim_index = VictimIndex(self.table, "number")
        self.preemptions = Preemptions(self.engine, self.victim_index)
        self.pods: dict[int, dict[str, Any]] = {}
        self.version, self.allowed = 0, allowed
        if allowed:
            self.victim_index.guard = self
        for id, pod in enumerate(there, 1):
            self._let_in(id, pod)

    def gang(self, id: int, cpu: int, memory: int, priority: int, count: int = 1) -> Gang:
        spec = a_job_spec(cpu=str(cpu), memory=f"{memory}Gi", priority=priority, count=count)
        gang = gang_of(id, spec, NOW_MS)
        self.profile.admit(gang)
        return gang

    def _let_in(self, id: int, pod: dict[str, Any]) -> None:
        row = pod["node"]
        if self.free(row, set()) < (0, 0) or not self._fits(row, set(), pod["cpu"], pod["memory"]):
            return
        self.pods[id] = pod
        gang = self.gang(id, pod["cpu"], pod["memory"], pod["priority"])
        member, since = gang.members[0], NOW_MS - 60_000 * pod["minutes"]
        grant = self.table.hold(f"n{row}", member.task.request, member)
        self.victim_index.put(id, [VictimCandidate(id, gang.job, (Place(f"n{row}", member, grant),), since)])

    def guarded(self, job: int) -> bool:
        return self.pods[job]["budget"] >= 0

    def violations(self, going: Sequence[Going]) -> list[int]:
        left, out = list(self.allowed), []
        for id, _ in going:
            number = self.pods[id]["budget"]
            if number >= 0:
                left[number] -= 1
            out.append(int(number >= 0 and left[number] < 0))
        return out

    def free(self, row: int, gone: set[int]) -> tuple[int, int]:
        here = [pod for id, pod in self.pods.items() if pod["node"] == row and id not in gone]
        return 4 - sum(pod["cpu"] for pod in here), 4 - sum(pod["memory"] for pod in here)

    def _fits(self, row: int, gone: set[int], cpu: int, memory: int) -> bool:
        free = self.free(row, gone)
        return free[0] >= cpu and free[1] >= memory

    def victims_on(self, row: int, cpu: int, memory: int, priority: int) -> tuple[tuple[int, ...], set[int]] | None:
        """Harm and victims: all lower ones taken off, then let off one by one, those who breach a budget first."""
        lower = [id for id, pod in self.pods.items() if pod["node"] == row and pod["priority"] < priority]
        gone = set(lower)
        if not lower or not self._fits(row, gone, cpu, memory):
            return None
        lower.sort(key=lambda id: (-self.pods[id]["priority"], -self.pods[id]["minutes"], id))
        breach = dict(
            zip(lower, self.violations([(id, ()) for id in lower]) if self.allowed else [0] * len(lower), strict=True)
        )
        for id in sorted(lower, key=lambda id: not breach[id]):
            gone.discard(id)
            if not self._fits(row, gone, cpu, memory):
                gone.add(id)
        if not gone:
            return None
        priorities = [self.pods[id]["priority"] for id in gone]
        highest = max(priorities)
        oldest = max(self.pods[id]["minutes"] for id in gone if self.pods[id]["priority"] == highest)
        total = sum(number + (1 << 31) for number in priorities)
        return (sum(breach[id] for id in gone), highest, total, len(gone), oldest, row), gone


def _victims(found: Preemption | None) -> set[int] | None:
    return None if found is None else {victim.id for victim in found.victims}


def _compare(there: Any, wish: tuple[int, int, int], allowed: Sequence[int]) -> None:
    cluster = Cluster(there, allowed)
    cpu, memory, priority = wish
    gang = cluster.gang(99, cpu, memory, priority)
    result = cluster.engine.place(gang, VIEW)
    if not isinstance(result, Refusal):
        return
    ways = [way for row in range(3) if (way := cluster.victims_on(row, cpu, memory, priority)) is not None]
    expected = min(ways)[1] if ways else None
    found = cluster.preemptions.find(gang, VIEW)
    note(f"pods: {cluster.pods}, ways: {ways}")
    assert _victims(found) == expected
    assert _victims(cluster.preemptions.find(gang, VIEW)) == expected, "and again, by what is known now"


@examples(250)
@given(st.lists(pods, max_size=12), wishes)
def test_the_victims_are_the_same_as_in_kube_scheduler(there, wish):
    _compare(there, wish, ())


@examples(250)
@given(st.lists(pods, max_size=12), wishes, budgets)
def test_the_victims_are_the_same_as_in_kube_scheduler_with_budgets(there, wish, allowed):
    _compare(there, wish, allowed)


@examples(100)
@given(st.lists(pods, max_size=12), st.lists(st.tuples(wishes, st.integers(1, 3)), min_size=1, max_size=6))
def test_it_makes_no_difference_whether_numbers_are_few_or_many(there, asked):
    with pytest.MonkeyPatch.context() as patch:
        few = Cluster(there)
        patch.setattr(tenancy_module, "_MOST_COLUMNS", 1)  # two different ones are many
        many = Cluster(there)
        for number, (wish, count) in enumerate(asked):
            answers = []
            for cluster in (few, many):
                gang = cluster.gang(50 + number, *wish, count=count)
                if isinstance(cluster.engine.place(gang, VIEW), Refusal):
                    found = cluster.preemptions.find(gang, VIEW)
                    answers.append((_victims(found), found and [placed.node.name for placed in found.placements]))
                    for id in _victims(found) or ():
                        (tenant,) = cluster.victim_index.of_job[id]
                        for name, member, grant in tenant.places:
                            cluster.table.let_go(name, member.task.request, member, grant)
                        cluster.victim_index.remove(id)
            assert answers[:1] == answers[1:]
