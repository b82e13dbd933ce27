"""Backfill over pods: who is promised what, and what those who wait are told."""

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


def _waiting_town(options: Options | None = None) -> FakeCluster:
    """One core of four is free until `first` has its turn, in an hour."""
    cluster = FakeCluster(options or _batch())
    cluster.node("n1")
    cluster.pod("runs", "3", estimate="1h")
    cluster.step()
    cluster.pod("first", "4", estimate="1h")
    cluster.step()
    return cluster


def _told(cluster: FakeCluster) -> dict[str, PendingStatus]:
    said: dict[str, PendingStatus] = {}

    def tell(job: JobId, told: PendingStatus) -> None:
        for entry in cluster.parts.pods.entries_of(job):
            said[entry.pod.metadata.name] = told

    QueueStatus(
        cluster.parts.controller, cluster.parts.pods, cluster.parts.explainer, tell, lambda: cluster.now_ms
    ).check()
    return said


@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_who_is_over_in_time_goes_ahead_and_who_is_not_waits(backfill: str):
    cluster = _waiting_town(_batch(backfill))
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


def test_without_backfill_nobody_passes_the_first():
    cluster = _waiting_town(_batch("none"))
    cluster.pod("short", "1", estimate="30m")
    cluster.step()
    assert cluster.node_of("short") == ""
    assert _told(cluster)["short"].reason == "WaitingForTurn"


def test_who_would_delay_a_promise_waits_for_a_turn_and_is_told_whose():
    cluster = _waiting_town()
    cluster.pod("long", "1", estimate="2h")
    cluster.step()
    told = _told(cluster)
    assert told["long"].reason == "WaitingForTurn"
    assert told["long"].message == "it would delay pod ns/first, which has a start reservation for this capacity"
    assert told["first"].reason == "Unschedulable"
    assert told["first"].message.startswith("0/1 nodes are available: 1 Insufficient cpu.")


def test_who_lacks_room_is_unschedulable_even_if_a_promise_stands_in_the_way_too():
    cluster = _waiting_town()
    cluster.pod("large", "2", estimate="2h")
    cluster.step()
    assert _told(cluster)["large"].reason == "Unschedulable"


def test_nobody_counts_on_the_end_of_a_service():
    cluster = FakeCluster(_batch())
    cluster.node("n1")
    owner = [{"kind": "ReplicaSet", "name": "web", "uid": "1", "controller": True}]
    cluster.pod("web", "3", owners=owner)
    cluster.step()
    cluster.pod("first", "4", estimate="1h")
    cluster.step()
    start_reservation = cluster.parts.controller.cluster.availability.start_reservations.get(cluster.job("first"))
    assert start_reservation is None or start_reservation.start_ms > NOW_MS + 1000 * HOUR_MS


def test_what_was_learned_of_finished_pods_counts_for_those_who_wait():
    cluster = _waiting_town(_batch(source="learned"))
    owner = [{"kind": "Job", "name": "nightly-7", "uid": "1", "controller": True}]
    cluster.now_ms += 1000
    cluster.pod("quick", "1", owners=owner)
    cluster.step()
    # Nothing said and nothing known: an hour is assumed, which is too long by the second that has passed.
    assert cluster.node_of("quick") == ""
    cluster.delete("quick")
    ran = RuntimeSample("ns", "", "Job/nightly-#", "", 1000)
    cluster.step(*[HistoryRestored(samples=(ran,)) for _ in range(3)])
    cluster.pod("quick-again", "1", owners=owner)
    cluster.step()
    assert cluster.node_of("quick-again") == "n1"
