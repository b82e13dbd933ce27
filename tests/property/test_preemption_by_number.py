"""Victims by priority number and with budgets, against a plain implementation of kube-scheduler's algorithm, and with few or
many distinct priorities."""

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
from hodei.engine.preemption import victims as module
from hodei.engine.preemption.search import Preemption, Preemptions
from hodei.engine.preemption.victims import Disruption, Place, VictimCandidate, VictimIndex
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
preemptors = st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((0, 2)), numbers)
budgets = st.tuples(st.integers(0, 2), st.integers(0, 2))


class Cluster:
    """Three nodes of 4 cores and 4Gi, with pods as far as they fit."""

    def __init__(self, running: Iterable[dict[str, Any]], allowed: Sequence[int] = ()) -> None:
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
        for id, pod in enumerate(running, 1):
            self._add(id, pod)

    def gang(self, id: int, cpu: int, memory: int, priority: int, count: int = 1) -> Gang:
        spec = a_job_spec(cpu=str(cpu), memory=f"{memory}Gi", priority=priority, count=count)
        gang = gang_of(id, spec, NOW_MS)
        self.profile.admit(gang)
        return gang

    def _add(self, id: int, pod: dict[str, Any]) -> None:
        row = pod["node"]
        if self.free(row, set()) < (0, 0) or not self._fits(row, set(), pod["cpu"], pod["memory"]):
            return
        self.pods[id] = pod
        gang = self.gang(id, pod["cpu"], pod["memory"], pod["priority"])
        member, since = gang.members[0], NOW_MS - 60_000 * pod["minutes"]
        grant = self.table.place_by_name(f"n{row}", member)
        self.victim_index.put(id, [VictimCandidate(id, gang.job, (Place(f"n{row}", member, grant),), since)])

    def guarded(self, job: int) -> bool:
        return self.pods[job]["budget"] >= 0

    def violations(self, disruptions: Sequence[Disruption]) -> list[int]:
        left, out = list(self.allowed), []
        for id, _ in disruptions:
            number = self.pods[id]["budget"]
            if number >= 0:
                left[number] -= 1
            out.append(int(number >= 0 and left[number] < 0))
        return out

    def free(self, row: int, removed: set[int]) -> tuple[int, int]:
        on_node = [pod for id, pod in self.pods.items() if pod["node"] == row and id not in removed]
        return 4 - sum(pod["cpu"] for pod in on_node), 4 - sum(pod["memory"] for pod in on_node)

    def _fits(self, row: int, removed: set[int], cpu: int, memory: int) -> bool:
        free = self.free(row, removed)
        return free[0] >= cpu and free[1] >= memory

    def victims_on(self, row: int, cpu: int, memory: int, priority: int) -> tuple[tuple[int, ...], set[int]] | None:
        """Cost and victims: all lower pods are removed, then reprieved one by one, those that violate a budget first."""
        lower = [id for id, pod in self.pods.items() if pod["node"] == row and pod["priority"] < priority]
        removed = set(lower)
        if not lower or not self._fits(row, removed, cpu, memory):
            return None
        lower.sort(key=lambda id: (-self.pods[id]["priority"], -self.pods[id]["minutes"], id))
        violates = dict(
            zip(lower, self.violations([(id, ()) for id in lower]) if self.allowed else [0] * len(lower), strict=True)
        )
        for id in sorted(lower, key=lambda id: not violates[id]):
            removed.discard(id)
            if not self._fits(row, removed, cpu, memory):
                removed.add(id)
        if not removed:
            return None
        priorities = [self.pods[id]["priority"] for id in removed]
        highest = max(priorities)
        oldest = max(self.pods[id]["minutes"] for id in removed if self.pods[id]["priority"] == highest)
        total = sum(number + (1 << 31) for number in priorities)
        return (sum(violates[id] for id in removed), highest, total, len(removed), oldest, row), removed


def _victims(found: Preemption | None) -> set[int] | None:
    return None if found is None else {victim.id for victim in found.victims}


def _compare(running: Any, preemptor: tuple[int, int, int], allowed: Sequence[int]) -> None:
    cluster = Cluster(running, allowed)
    cpu, memory, priority = preemptor
    gang = cluster.gang(99, cpu, memory, priority)
    result = cluster.engine.place(gang, VIEW)
    if not isinstance(result, Refusal):
        return
    candidates = [
        candidate for row in range(3) if (candidate := cluster.victims_on(row, cpu, memory, priority)) is not None
    ]
    expected = min(candidates)[1] if candidates else None
    found = cluster.preemptions.find(gang, VIEW)
    note(f"pods: {cluster.pods}, candidates: {candidates}")
    assert _victims(found) == expected
    assert _victims(cluster.preemptions.find(gang, VIEW)) == expected, "the same with warm caches"


@examples(250)
@given(st.lists(pods, max_size=12), preemptors)
def test_the_victims_are_the_same_as_in_kube_scheduler(running, preemptor):
    _compare(running, preemptor, ())


@examples(250)
@given(st.lists(pods, max_size=12), preemptors, budgets)
def test_the_victims_are_the_same_as_in_kube_scheduler_with_budgets(running, preemptor, allowed):
    _compare(running, preemptor, allowed)


@examples(100)
@given(st.lists(pods, max_size=12), st.lists(st.tuples(preemptors, st.integers(1, 3)), min_size=1, max_size=6))
def test_the_number_of_distinct_priorities_does_not_change_the_result(running, requested):
    with pytest.MonkeyPatch.context() as patch:
        few = Cluster(running)
        patch.setattr(module, "_MOST_COLUMNS", 1)  # two distinct priorities count as many
        many = Cluster(running)
        for number, (preemptor, count) in enumerate(requested):
            answers = []
            for cluster in (few, many):
                gang = cluster.gang(50 + number, *preemptor, count=count)
                if isinstance(cluster.engine.place(gang, VIEW), Refusal):
                    found = cluster.preemptions.find(gang, VIEW)
                    answers.append((_victims(found), found and [placed.node.name for placed in found.placements]))
                    for id in _victims(found) or ():
                        (victim,) = cluster.victim_index.of_job[id]
                        for place in victim.places:
                            cluster.table.release_by_name(*place)
                        cluster.victim_index.remove(id)
            assert answers[:1] == answers[1:]
