"""Backfill of pods: start reservations, and the status of pending pods."""

from __future__ import annotations

import pytest

from hodei.kube.scheduler.messages import PendingStatus
from hodei.kube.scheduler.run import Options
from hodei.kube.scheduler.status_reporter import QueueStatus
from hodei.model.config import EstimatesConfig, ProfileConfig, SchedulingConfig
from hodei.model.estimate import RuntimeSample
from hodei.model.facts import HistoryRestored
from hodei.model.ids import JobId
from unit.kube.fake_cluster import NOW_MS, FakeCluster

HOUR_MS = 3_600_000


def _batch(backfill: str = "easy", source: str = "user") -> Options:
    profile = ProfileConfig(queue="batch", options={"batch": {"backfill": backfill}})
    estimates = EstimatesConfig(source=source)
    return Options(scheduling=SchedulingConfig(profiles={"default": profile}, estimates=estimates))


def _cluster_with_start_reservation(options: Options | None = None) -> FakeCluster:
    """One core of four is free until `first` starts, in an hour."""
    cluster = FakeCluster(options or _batch())
    cluster.node("n1")
    cluster.pod("runs", "3", estimate="1h")
    cluster.step()
    cluster.pod("first", "4", estimate="1h")
    cluster.step()
    return cluster


def _statuses(cluster: FakeCluster) -> dict[str, PendingStatus]:
    statuses: dict[str, PendingStatus] = {}

    def record(job: JobId, status: PendingStatus) -> None:
        for entry in cluster.parts.pods.entries_of(job):
            statuses[entry.pod.metadata.name] = status

    QueueStatus(
        cluster.parts.controller, cluster.parts.pods, cluster.parts.explainer, record, lambda: cluster.now_ms
    ).check()
    return statuses


@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_a_pod_is_backfilled_only_if_it_ends_in_time(backfill: str):
    cluster = _cluster_with_start_reservation(_batch(backfill))
    start_reservation = cluster.parts.controller.cluster.availability.start_reservations[cluster.job("first")]
    assert start_reservation.start_ms == NOW_MS + HOUR_MS
    cluster.pod("long", "1", estimate="2h")
    cluster.pod("short", "1", estimate="30m")
    cluster.step()
    assert (cluster.node_of("long"), cluster.node_of("short")) == ("", "n1")
    assert (
        cluster.parts.controller.cluster.availability.start_reservations[cluster.job("first")].start_ms
        == start_reservation.start_ms
    )


def test_without_backfill_no_pod_starts_before_the_first():
    cluster = _cluster_with_start_reservation(_batch("none"))
    cluster.pod("short", "1", estimate="30m")
    cluster.step()
    assert cluster.node_of("short") == ""
    assert _statuses(cluster)["short"].reason == "WaitingForTurn"


def test_a_pod_that_would_delay_a_start_reservation_waits_and_names_the_pod():
    cluster = _cluster_with_start_reservation()
    cluster.pod("long", "1", estimate="2h")
    cluster.step()
    status = _statuses(cluster)
    assert status["long"].reason == "WaitingForTurn"
    assert status["long"].message == "it would delay pod ns/first, which has a start reservation for this capacity"
    assert status["first"].reason == "Unschedulable"
    assert status["first"].message.startswith("0/1 nodes are available: 1 Insufficient cpu.")


def test_a_pod_without_capacity_is_unschedulable_despite_start_reservations():
    cluster = _cluster_with_start_reservation()
    cluster.pod("large", "2", estimate="2h")
    cluster.step()
    assert _statuses(cluster)["large"].reason == "Unschedulable"


def test_pods_of_services_are_not_expected_to_end():
    cluster = FakeCluster(_batch())
    cluster.node("n1")
    owner = [{"kind": "ReplicaSet", "name": "web", "uid": "1", "controller": True}]
    cluster.pod("web", "3", owners=owner)
    cluster.step()
    cluster.pod("first", "4", estimate="1h")
    cluster.step()
    start_reservation = cluster.parts.controller.cluster.availability.start_reservations.get(cluster.job("first"))
    assert start_reservation is None or start_reservation.start_ms > NOW_MS + 1000 * HOUR_MS


def test_learned_run_times_apply_to_pending_pods():
    cluster = _cluster_with_start_reservation(_batch(source="learned"))
    owner = [{"kind": "Job", "name": "nightly-7", "uid": "1", "controller": True}]
    cluster.now_ms += 1000
    cluster.pod("quick", "1", owners=owner)
    cluster.step()
    # Without an estimate and samples an hour is assumed, which is too long by the second that has passed.
    assert cluster.node_of("quick") == ""
    cluster.delete("quick")
    sample = RuntimeSample("ns", "", "Job/nightly-#", "", 1000)
    cluster.step(*[HistoryRestored(samples=(sample,)) for _ in range(3)])
    cluster.pod("quick-again", "1", owners=owner)
    cluster.step()
    assert cluster.node_of("quick-again") == "n1"
