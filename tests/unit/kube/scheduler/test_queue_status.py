"""Backfill over pods: who is promised what, and what those who wait are told."""

from __future__ import annotations

import pytest

from hodei.kube.scheduler.build import Options
from hodei.kube.scheduler.messages import Told
from hodei.kube.scheduler.status_reporter import QueueStatus
from hodei.model.config import EstimatesConfig, ProfileConfig, SchedulingConfig
from hodei.model.estimate import RuntimeSample
from hodei.model.facts import HistoryRestored
from hodei.model.ids import JobId
from unit.kube.town import NOW_MS, Town

HOUR_MS = 3_600_000


def _batch(backfill: str = "easy", source: str = "user") -> Options:
    profile = ProfileConfig(queue="batch", options={"batch": {"backfill": backfill}})
    estimates = EstimatesConfig(source=source)
    return Options(scheduling=SchedulingConfig(profiles={"default": profile}, estimates=estimates))


def _waiting_town(options: Options | None = None) -> Town:
    """One core of four is free until `first` has its turn, in an hour."""
    town = Town(options or _batch())
    town.node("n1")
    town.pod("runs", "3", estimate="1h")
    town.step()
    town.pod("first", "4", estimate="1h")
    town.step()
    return town


def _told(town: Town) -> dict[str, Told]:
    said: dict[str, Told] = {}

    def tell(job: JobId, told: Told) -> None:
        for entry in town.harness.pods.of_job(job):
            said[entry.pod.metadata.name] = told

    QueueStatus(town.harness.controller, town.harness.pods, town.harness.explainer, tell, lambda: town.now_ms).look()
    return said


@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_who_is_over_in_time_goes_ahead_and_who_is_not_waits(backfill: str):
    town = _waiting_town(_batch(backfill))
    start_reservation = town.harness.controller.cluster.availability.start_reservations[town.job("first")]
    assert start_reservation.start_ms == NOW_MS + HOUR_MS
    town.pod("long", "1", estimate="2h")
    town.pod("short", "1", estimate="30m")
    town.step()
    assert (town.where("long"), town.where("short")) == ("", "n1")
    assert (
        town.harness.controller.cluster.availability.start_reservations[town.job("first")].start_ms
        == start_reservation.start_ms
    )


def test_without_backfill_nobody_passes_the_first():
    town = _waiting_town(_batch("none"))
    town.pod("short", "1", estimate="30m")
    town.step()
    assert town.where("short") == ""
    assert _told(town)["short"].reason == "WaitingForTurn"


def test_who_would_delay_a_promise_waits_for_a_turn_and_is_told_whose():
    town = _waiting_town()
    town.pod("long", "1", estimate="2h")
    town.step()
    told = _told(town)
    assert told["long"].reason == "WaitingForTurn"
    assert told["long"].message == "it would delay pod ns/first, which has a start reservation for this capacity"
    assert told["first"].reason == "Unschedulable"
    assert told["first"].message.startswith("0/1 nodes are available: 1 Insufficient cpu.")


def test_who_lacks_room_is_unschedulable_even_if_a_promise_stands_in_the_way_too():
    town = _waiting_town()
    town.pod("large", "2", estimate="2h")
    town.step()
    assert _told(town)["large"].reason == "Unschedulable"


def test_nobody_counts_on_the_end_of_a_service():
    town = Town(_batch())
    town.node("n1")
    owner = [{"kind": "ReplicaSet", "name": "web", "uid": "1", "controller": True}]
    town.pod("web", "3", owners=owner)
    town.step()
    town.pod("first", "4", estimate="1h")
    town.step()
    start_reservation = town.harness.controller.cluster.availability.start_reservations.get(town.job("first"))
    assert start_reservation is None or start_reservation.start_ms > NOW_MS + 1000 * HOUR_MS


def test_what_was_learned_of_finished_pods_counts_for_those_who_wait():
    town = _waiting_town(_batch(source="learned"))
    owner = [{"kind": "Job", "name": "nightly-7", "uid": "1", "controller": True}]
    town.now_ms += 1000
    town.pod("quick", "1", owners=owner)
    town.step()
    # Nothing said and nothing known: an hour is assumed, which is too long by the second that has passed.
    assert town.where("quick") == ""
    town.gone("quick")
    ran = RuntimeSample("ns", "", "Job/nightly-#", "", 1000)
    town.step(*[HistoryRestored(samples=(ran,)) for _ in range(3)])
    town.pod("quick-again", "1", owners=owner)
    town.step()
    assert town.where("quick-again") == "n1"
