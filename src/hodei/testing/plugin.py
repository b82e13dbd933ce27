"""The contracts of plugins and queue policies (`hodei.engine.points`) and of event sinks (`hodei.ports.EventSink`)."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from hodei.engine.nodes import OneNode, Table
from hodei.engine.points import ANY_TRIGGER, MAX_SCORE, reads_of, requeue_triggers
from hodei.engine.profile import key_of
from hodei.engine.runner import Runner
from hodei.engine.view import Gang, Member, View, gang_of
from hodei.model.affinity import NodeTerm, Requirement
from hodei.model.config import SchedulingConfig
from hodei.model.facts import JobReleased, JobSubmitted, NodeJoined, RunObserved
from hodei.model.job import Affinity, BackendChoice, PreferredTerm, Reason, Toleration
from hodei.model.node import Location, Taint
from hodei.runtime.observers import METHODS, Observers
from hodei.testing.builders import NOW_MS, a_job, a_job_spec, a_node
from hodei.wiring import make_controller

VIEW = View(1_700_000_000_000)
RESOURCES = ("cpu", "memory", "gpu", "example.com/fpga")
SSD = NodeTerm((Requirement("disk", "In", ("ssd",)),))


def _table() -> Table:
    table = Table(
        [
            a_node(
                "a", 4, "16Gi", labels={"disk": "ssd", "zone": "z1"}, location=Location("eu", "z1"), data=("words",)
            ),
            a_node("b", 8, "8Gi", gpu="2", gpu_type="t4", arch="x86_64", backend="west", cost_milli=350),
            a_node("c", 2, "64Gi", taints=(Taint("dedicated", "team"), Taint("old", "", "PreferNoSchedule"))),
            a_node("d", 16, "32Gi", cordoned=True, arch="aarch64", location=Location("eu", "z2")),
            a_node("e", 1, "1Gi", ready=False, not_ready_reason="unreachable", capacity={"example.com/fpga": 2}),
            a_node("f", 0, "0", labels={"disk": "hdd"}),
        ]
    )
    table.settle()
    table.place(0, {"cpu": 3000, "memory": 2**33})
    table.place(1, {"cpu": 9000, "gpu": 1000})  # more than there is: a node may shrink under its runs
    table.place(2, {"cpu": 500})
    table.release(2, {"cpu": 500})
    return table


REQUESTS: list[dict[str, Any]] = [
    {},
    {"cpu": "2", "memory": "4Gi"},
    {"cpu": 0, "memory": 0},
    {"cpu": "1", "gpu": "1", "gpu_type": "T4"},
    {"request": {"example.com/fpga": 1}},
    {"cpu": 0, "memory": 0, "request": {"example.com/absent": 3}},
    {"arch": "arm64"},
    {"node_selector": {"disk": "ssd"}},
    {"affinity": Affinity((SSD,), (PreferredTerm(50, SSD), PreferredTerm(1, NodeTerm())))},
    {"tolerations": (Toleration("", "Exists"),)},
    {"backend": BackendChoice("specific", ("west",))},
    {"backend": BackendChoice("preferred", ("west", "local"))},
    {"near": Location("eu", "z1")},
    {"inputs": ("words", "maps")},
    {"near": Location(lat_micro=1_000_000, lng_micro=2_000_000)},
]
SETTINGS: list[dict[str, Any]] = [{}, {"project": "other", "priority": "critical", "labels": {"x": "y"}, "count": 3}]
GANGS: list[Gang] = [
    gang_of(number, a_job_spec(f"job-{number}", **request, **setting), number)
    for number, (request, setting) in enumerate(product(REQUESTS, SETTINGS))
]
MEMBERS: list[Member] = [gang.members[0] for gang in GANGS]


def _results(plugin: Any, member: Member, table: Table, rows: Any = slice(None)) -> tuple[list[Any], Any]:
    """Refusals as (reason, mask) and scores as lists, with the shape checks of the runner."""
    runner, view = Runner(), table.view(rows)
    refused, scored = [], None
    if hasattr(plugin, "filter"):
        pairs = runner.refusals(plugin, member, view, VIEW)
        refused = [(reason, mask.tolist()) for mask, reason in pairs]
    if hasattr(plugin, "score"):
        scores = runner.score(plugin, member, view, VIEW)
        scored = None if scores is None else scores.tolist()
    assert not runner.faults, runner.faults
    return refused, scored


def _by_row(refused: list[tuple[Reason, list[bool]]], count: int) -> list[set[tuple[str, str]]]:
    return [{(reason.code, reason.text) for reason, mask in refused if mask[row]} for row in range(count)]


class PluginConformance:
    """Subclass it, name the subclass `Test...`, and define `make_plugin`. It is called for jobs and nodes of many shapes."""

    def make_plugin(self) -> Any:
        """A new plugin, equal to the one before."""
        raise TypeError(f"{type(self).__name__} does not define make_plugin")

    def test_it_declares_a_name_what_it_reads_and_its_requeue_triggers(self) -> None:
        plugin = self.make_plugin()
        assert plugin.name
        assert plugin.name == plugin.name.lower()
        assert reads_of(plugin) in ("static", "usage", "cluster")
        assert set(requeue_triggers(plugin)) <= set(ANY_TRIGGER)

    def test_its_key_is_hashable_and_stable(self) -> None:
        plugin = self.make_plugin()
        assert hasattr(plugin, "key"), "without a key every job counts as different from every other"
        for member in MEMBERS:
            assert hash(plugin.key(member)) == hash(plugin.key(member))
            assert key_of(plugin, member) == plugin.key(member)

    def test_members_with_equal_keys_get_equal_results(self) -> None:
        plugin, table = self.make_plugin(), _table()
        seen: dict[Any, Any] = {}
        for member in MEMBERS:
            result = _results(plugin, member, table)
            assert seen.setdefault(plugin.key(member), result) == result

    def test_equal_calls_get_equal_results(self) -> None:
        plugin, other, table = self.make_plugin(), self.make_plugin(), _table()
        for member in MEMBERS:
            assert _results(plugin, member, table) == _results(plugin, member, table) == _results(other, member, table)

    def test_it_does_not_write_into_the_table(self) -> None:
        plugin, table = self.make_plugin(), _table()

        def snapshot() -> list[list[int]]:
            view = table.view()
            columns = [
                getattr(view, column)(resource) for column in ("capacity", "used", "free") for resource in RESOURCES
            ]
            return [column.tolist() for column in (*columns, table.runs, table.last_placed)]

        before = snapshot()
        for member in MEMBERS:
            _results(plugin, member, table)
            if hasattr(plugin, "normalize"):
                raw = plugin.score(member, table.view(), VIEW)
                if raw is not None:
                    kept = raw.copy()
                    plugin.normalize(raw, ~table.view().none())
                    assert np.array_equal(raw, kept)
        assert snapshot() == before

    def test_its_scores_are_in_range(self) -> None:
        plugin, table = self.make_plugin(), _table()
        if not hasattr(plugin, "score"):
            pytest.skip("it has no score")
        all_nodes, no_nodes = ~table.view().none(), table.view().none()
        for member in MEMBERS:
            scores = plugin.score(member, table.view(), VIEW)
            for feasible in (all_nodes, no_nodes, np.arange(len(all_nodes)) % 2 == 0):
                if scores is not None:
                    final = plugin.normalize(scores, feasible) if hasattr(plugin, "normalize") else scores
                    assert final.dtype == np.int64
                    assert final.shape == (6,)
                    assert 0 <= final[feasible].min(initial=0) <= final[feasible].max(initial=0) <= MAX_SCORE

    @pytest.mark.parametrize("rows", [[0], [5], [1, 3], [0, 2, 4, 5], []], ids=str)
    def test_results_for_some_nodes_equal_those_for_all_nodes(self, rows: list[int]) -> None:
        plugin, table = self.make_plugin(), _table()
        if reads_of(plugin) == "cluster":
            pytest.skip("it reads the cluster, so it always gets all nodes")
        for member in MEMBERS:
            refused, scored = _results(plugin, member, table)
            some_refused, some_scored = _results(plugin, member, table, np.array(rows, dtype=np.intp))
            assert _by_row(some_refused, len(rows)) == [_by_row(refused, 6)[row] for row in rows]
            assert some_scored == (None if scored is None else [scored[row] for row in rows])

    def test_if_it_is_scalar_one_node_gets_the_same_result(self) -> None:
        plugin, table = self.make_plugin(), _table()
        if not getattr(plugin, "scalar", False):
            pytest.skip("it is not scalar")
        for member, row in product(MEMBERS, range(6)):
            refused, scored = _results(plugin, member, table)
            one = OneNode(table, row)
            if hasattr(plugin, "filter"):
                assert [bool(mask) for mask, _ in plugin.filter(member, one, VIEW)] == [
                    mask[row] for _, mask in refused
                ]
            if hasattr(plugin, "score"):
                assert (plugin.score(member, one, VIEW) or 0) == (0 if scored is None else scored[row])

    def test_its_reasons_have_stable_codes_and_its_own_name(self) -> None:
        plugin, table = self.make_plugin(), _table()
        for member in MEMBERS:
            for reason, _ in _results(plugin, member, table)[0]:
                assert reason.plugin == plugin.name
                assert reason.code == reason.code.upper()
                assert reason.code.replace("_", "").isalnum()
                assert 0 < len(reason.text) <= 500

    def test_it_accepts_an_empty_cluster(self) -> None:
        table = Table()
        table.settle()
        for member in MEMBERS:
            refused, scored = _results(self.make_plugin(), member, table)
            assert all(mask == [] for _, mask in refused)
            assert scored in (None, [])


class QueueConformance:
    """Subclass it, name the subclass `Test...`, and define `make_queue`."""

    def make_queue(self) -> Any:
        raise TypeError(f"{type(self).__name__} does not define make_queue")

    def test_a_queue_sorts_by_integers_and_charges_nothing_negative(self) -> None:
        queue = self.make_queue()
        assert queue.name == queue.name.lower()
        for gang in GANGS:
            order = queue.queue_sort(gang)
            assert isinstance(order, tuple)
            assert all(isinstance(part, int) for part in order)
            assert order == queue.queue_sort(gang)
            assert isinstance(queue.tenant(gang), str)
            assert queue.charge(gang) >= 0

    def test_a_queue_says_whether_its_jobs_may_preempt(self) -> None:
        assert self.make_queue().preempts in (True, False)


# Job 2 preempts job 1 on a node that fits one of them and fails; job 1 runs again and succeeds. Job 3 is submitted on
# hold, released, and too large for the node.
STEPS: list[list[Any]] = [
    [NodeJoined(a_node("n1", 1))],
    [JobSubmitted(a_job(1, priority="low"))],
    [RunObserved("1.0.1", "running", NOW_MS)],
    [JobSubmitted(a_job(2, priority="critical"))],
    [RunObserved("1.0.1", "stopped", NOW_MS, 143)],
    [RunObserved("2.0.1", "running", NOW_MS)],
    [RunObserved("2.0.1", "failed", NOW_MS, 7)],
    [RunObserved("1.0.2", "running", NOW_MS)],
    [RunObserved("1.0.2", "succeeded", NOW_MS, 0)],
    [JobSubmitted(a_job(3, state="held", cpu=2))],
    [JobReleased(3)],
]


def run_sink(sink: Any) -> int:
    """Report what happens to three jobs, then close the sink, as a server does. Returns how many calls raised."""
    registry = CollectorRegistry()
    controller = make_controller(SchedulingConfig())
    observers = Observers(registry, controller.cluster.jobs.get)
    observers.add_sink("sink", sink)
    for number, facts in enumerate(STEPS):
        observers.publish(controller.step(NOW_MS + number, facts).saves)
    asyncio.run(observers.close(30))
    return int(registry.get_sample_value("hodei_sink_errors_total", {"sink": "sink"}) or 0)


class SinkConformance:
    """Subclass it, name the subclass `Test...`, and define `make_sink`."""

    def make_sink(self, directory: Path) -> Any:
        raise TypeError(f"{type(self).__name__} does not define make_sink")

    def test_it_has_a_hook(self, tmp_path: Path) -> None:
        sink = self.make_sink(tmp_path)
        assert any(callable(getattr(sink, method, None)) for method in METHODS), f"give it one of {METHODS}"

    def test_its_hooks_accept_everything_that_happens_to_a_job(self, tmp_path: Path) -> None:
        assert run_sink(self.make_sink(tmp_path)) == 0
