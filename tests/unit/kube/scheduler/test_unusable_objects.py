"""An unusable object is refused by name and affects no other."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from hodei.kube.api.objects import Meta, Node, Pod
from hodei.kube.scheduler.cache import Indexer, Refusals, RefusedObject, by_name, by_uid
from hodei.kube.scheduler.pods import Entry
from hodei.kube.scheduler.run import Options
from hodei.model.config import SchedulingConfig
from unit.kube.fake_cluster import FakeCluster
from unit.kube.pod_factory import a_node, a_pod

BATCH = Options(scheduling=msgspec.convert({"profiles": {"default": {"queue": "batch"}}}, SchedulingConfig))
MAX_EXEC = "kueue.x-k8s.io/max-exec-time-seconds"


def entry(cluster: FakeCluster, name: str) -> Entry:
    return cluster.parts.pods.entries[f"uid-{name}"]


@pytest.mark.parametrize("options", [Options(), BATCH], ids=["priority", "batch"])
@pytest.mark.parametrize("value", ["²", "٣", "9" * 25, "9" * 400, "-1", "1e3", "NaN"])
def test_no_time_limit_of_kueue_crashes_the_scheduler(value: str, options: Options):
    cluster = FakeCluster(options)
    cluster.node("a")
    cluster.pod("odd", annotations={MAX_EXEC: value})
    cluster.pod("foreign", annotations={MAX_EXEC: value}, schedulerName="default-scheduler", nodeName="a")
    cluster.pod("sane")
    cluster.step()
    assert cluster.node_of("sane") == "a"
    assert cluster.node_of("foreign") == "a"
    if set(value) == {"9"}:
        assert cluster.node_of("odd") == "a"  # a valid number, limited to a century
    else:
        assert [reason.code for reason in entry(cluster, "odd").reasons] == ["INVALID_POD"]
        assert MAX_EXEC in entry(cluster, "odd").reasons[0].text


@pytest.mark.parametrize("value", ["²", "9" * 25, "--3"])
def test_a_priority_that_is_not_a_number_is_ignored(value: str):
    cluster = FakeCluster(Options(priority_annotation="p"))
    cluster.node("a")
    cluster.pod("odd", annotations={"p": value})
    cluster.step()
    assert cluster.node_of("odd") == "a"


def test_unreadable_amounts_of_a_node_count_as_zero(caplog: pytest.LogCaptureFixture):
    cluster = FakeCluster()
    refused: list[RefusedObject] = []
    cluster.parts.refusals.listeners.append(refused.append)
    allocatable = {"cpu": "4", "memory": "64Gi", "pods": "110", "example.com/fpga": "-1"}
    with caplog.at_level(logging.WARNING):
        cluster.parts.pods.node_changed("a", None, a_node("a", allocatable=allocatable))
        cluster.parts.pods.node_changed("a", None, a_node("a", allocatable=allocatable))
    cluster.pod("plain")
    cluster.step()
    assert cluster.node_of("plain") == "a"
    assert [(each.resource, each.name) for each in refused] == [("/api/v1/nodes", "a")]
    assert "example.com/fpga" in refused[0].why
    assert len([message for message in caplog.messages if "cannot be used" in message]) == 1
    assert cluster.parts.refusals.now() == {"/api/v1/nodes": 1}
    cluster.parts.pods.node_changed("a", None, a_node("a"))
    assert cluster.parts.refusals.now() == {}


def test_a_node_with_a_million_plain_gpus_is_a_node():
    cluster = FakeCluster()
    cluster.parts.pods.node_changed(
        "a", None, a_node("a", allocatable={"cpu": "4", "memory": "1Gi", "pods": "9", "gpu": "9E"})
    )
    cluster.pod("plain")
    cluster.step()
    assert cluster.node_of("plain") == "a"


def test_huge_requests_do_not_overflow():
    """The pods name their node themselves, as any user may."""
    cluster = FakeCluster()
    cluster.node("a")
    for index in range(1100):
        cluster.pod(f"huge-{index}", cpu="999999E", nodeName="a", schedulerName="another-scheduler")
    cluster.node("b")
    cluster.pod("sane")
    cluster.step()
    assert cluster.node_of("sane") == "b"


@pytest.mark.parametrize("stamp", ["0001-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59Z", "²"])
def test_timestamps_of_pods_are_limited_to_the_last_year(stamp: str):
    cluster = FakeCluster(Options(scheduling=msgspec.convert({"shares": {"enabled": True}}, SchedulingConfig)))
    cluster.node("a")
    cluster.pod("old", nodeName="a", status={"startTime": stamp, "phase": "Running"})
    cluster.pod("sane")
    cluster.step()
    cluster.delete("old")
    cluster.step()
    assert cluster.node_of("sane") == "a"


def make_indexer(on_change: Any, key: Any = by_name) -> tuple[Indexer[Any], Refusals]:
    indexer: Indexer[Any] = Indexer(key, on_change, lambda: None)
    indexer.resource = "/api/v1/nodes"
    return indexer, indexer.refusals


def test_an_unusable_object_is_refused_by_name_and_the_next_is_accepted():
    accepted: list[str] = []

    def on_change(name: str, before: Node | None, after: Node | None) -> None:
        if name == "bad" and after is not None and after.spec.unschedulable:
            raise ZeroDivisionError("unexpected")
        accepted.append(name)

    indexer, refusals = make_indexer(on_change)
    indexer.listed([a_node("bad", unschedulable=True), a_node("good")])
    indexer.changed("MODIFIED", a_node("bad", unschedulable=True))
    assert accepted == ["good"]
    assert refusals.total == {"/api/v1/nodes": 1}
    indexer.changed("MODIFIED", a_node("bad"))
    assert accepted == ["good", "bad"]
    assert refusals.now() == {}


def test_an_object_that_becomes_undecodable_stays_until_it_is_deleted():
    deleted: list[str] = []
    indexer, refusals = make_indexer(lambda name, before, after: deleted.append(name) if after is None else None)
    indexer.listed([a_node("a"), a_node("b")])
    indexer.unreadable("MODIFIED", Meta(name="a"), "spec: expected object")
    assert set(indexer.objects) == {"a", "b"}
    assert refusals.now() == {"/api/v1/nodes": 1}
    indexer.unreadable("ADDED", Meta(name="a"), "spec: expected object")
    indexer.listed([])
    assert deleted == ["b"]
    indexer.unreadable("DELETED", Meta(name="a"), "spec: expected object")
    assert deleted == ["b", "a"]
    assert refusals.now() == {}


def test_an_object_without_a_name_or_a_uid_is_refused():
    accepted: list[str] = []
    indexer, refusals = make_indexer(lambda uid, before, after: accepted.append(uid), by_uid)
    indexer.changed("ADDED", Pod())
    indexer.changed("ADDED", a_pod("nameless", uid=""))
    indexer.changed("ADDED", a_pod("sane"))
    assert accepted == ["uid-sane"]
    assert refusals.total == {"/api/v1/nodes": 2}


def test_refused_objects_are_kept_up_to_a_limit():
    refusals = Refusals()
    for index in range(10_050):
        refusals.put("/api/v1/pods", Meta(name=f"p{index}"), "no")
    assert refusals.now()["/api/v1/pods"] == 10_000
    assert refusals.total["/api/v1/pods"] == 10_050
