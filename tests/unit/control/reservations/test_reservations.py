"""Reservations: the choice of nodes, every queue respects them, they end by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from builders import NOW_MS, a_node, amounts
from hodei.control.explain import why as explain
from hodei.control.explain.why import holds_on
from hodei.control.reservations.reservations import choose_nodes, late_runs
from hodei.engine.availability import StartReservation
from hodei.model.errors import Conflict, InvalidInput, NotFound
from hodei.model.facts import NodeOverridden, ReservationDeleted, ReservationMade
from hodei.model.reservation import LateRun, Reservation, ReservationSpec
from hodei.plugins.registry import build_profile
from unit.control.harness import Harness, a_harness, some_nodes

MINUTE = 60_000
HOUR = 60 * MINUTE


def a_reservation_spec(name: str = "nightly", start: int = HOUR, length: int = HOUR, **fields: Any) -> ReservationSpec:
    fields = {"project": "ml", "count": 0 if "named" in fields else 1} | fields
    return ReservationSpec(name, start_ms=NOW_MS + start, end_ms=NOW_MS + start + length, **fields)


def reserve(harness: Harness, *args: Any, **fields: Any) -> Reservation:
    reservation = choose_nodes(harness.controller.cluster, a_reservation_spec(*args, **fields), harness.now_ms)
    harness.step(ReservationMade(reservation))
    return reservation


def nodes_of(reservation: Reservation) -> list[str]:
    return [node for node, _ in reservation.places]


def test_whole_nodes_are_reserved_if_no_amounts_are_named():
    reservation = reserve(a_harness(4), count=1)
    assert reservation.places == (("n1", amounts(4, "64Gi")),)


def test_nodes_that_are_free_soonest_are_chosen_and_ties_go_by_name():
    harness = Harness(*[a_node(f"n{i}", 4, "64Gi", labels={"on": f"n{i}"}) for i in range(1, 5)])
    for id, (node, estimate) in enumerate({"n1": 0, "n2": 5 * HOUR, "n3": 90 * MINUTE}.items(), 1):
        harness.submit(id, cpu=4, estimate_ms=estimate, node_selector={"on": node})
    cluster = harness.controller.cluster
    assert nodes_of(choose_nodes(cluster, a_reservation_spec(count=2, request=amounts(4)), NOW_MS)) == ["n3", "n4"]
    assert nodes_of(choose_nodes(cluster, a_reservation_spec(count=3, request=amounts(4)), NOW_MS)) == [
        "n2",
        "n3",
        "n4",
    ]
    assert not cluster.tracks_availability, "the choice of nodes changes no state"
    assert nodes_of(choose_nodes(a_harness(4, 4, 4).controller.cluster, a_reservation_spec(count=2), NOW_MS)) == [
        "n1",
        "n2",
    ]


def test_cordoned_nodes_are_taken_only_by_name():
    harness = a_harness(4, 4)
    harness.step(NodeOverridden("n1", cordon=True))
    cluster = harness.controller.cluster
    assert nodes_of(choose_nodes(cluster, a_reservation_spec(), NOW_MS)) == ["n2"]
    assert nodes_of(choose_nodes(cluster, a_reservation_spec(named=("n1",)), NOW_MS)) == ["n1"]


def test_reservations_share_a_node_and_conflicting_ones_are_named():
    harness = a_harness(4)
    reserve(harness, "first", request=amounts(3))
    reserve(harness, "second", request=amounts(1))
    with pytest.raises(Conflict) as refusal:
        reserve(harness, "third", request=amounts(1))
    assert refusal.value.code == "RESERVATION_DOES_NOT_FIT"
    assert "reservation first of project ml takes 1 node" in refusal.value.message
    assert "reservation second of project ml takes 1 node" in refusal.value.message
    reserve(harness, "later", start=2 * HOUR, request=amounts(4))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        pytest.param({"count": 2}, Conflict, "1 of 2 nodes", id="more nodes than there are"),
        pytest.param({"request": amounts(8)}, Conflict, "n1 has cpu 4", id="larger than any node"),
        pytest.param({"named": ("n9",)}, NotFound, "n9", id="an unknown node"),
        pytest.param({"start": -2 * HOUR}, InvalidInput, "over before", id="in the past"),
    ],
)
def test_a_reservation_that_does_not_fit_is_refused_with_the_reason(fields, error, message):
    with pytest.raises(error, match=message):
        choose_nodes(a_harness(4).controller.cluster, a_reservation_spec(**fields), NOW_MS)


def test_a_name_is_used_once():
    harness = a_harness(4)
    reserve(harness)
    with pytest.raises(Conflict, match="already"):
        reserve(harness, start=10 * HOUR)


def test_capacity_of_a_start_reservation_is_not_reserved_again():
    harness = a_harness(4)
    harness.controller.cluster.track_availability()
    harness.controller.cluster.availability.add_start_reservation(
        StartReservation(7, NOW_MS + HOUR, NOW_MS + 3 * HOUR, (("n1", amounts(2)),))
    )
    with pytest.raises(Conflict, match="the start reservation of job 7 takes 1 node"):
        reserve(harness, request=amounts(3))
    reserve(harness, request=amounts(2))


def test_runs_that_may_not_end_before_the_start_are_named():
    harness = a_harness(4)
    harness.submit(1, cpu=2)
    harness.submit(2, cpu=2, estimate_ms=90 * MINUTE)
    reservation = reserve(harness, request=amounts(3))
    assert late_runs(harness.controller.cluster, reservation, harness.now_ms) == [
        LateRun("n1", "2.0.1", NOW_MS + 90 * MINUTE), LateRun("n1", "1.0.1"),
    ]  # fmt: skip
    part = reserve(harness, "part", start=100 * MINUTE, length=MINUTE, request=amounts(1), project="web")
    assert late_runs(harness.controller.cluster, part, harness.now_ms) == [], "there is capacity next to job 1"


def queues() -> dict[str, Any]:
    profiles = {name: build_profile(name, queue=name) for name in ("fifo", "fair")}
    for kind in ("easy", "conservative"):
        profiles[kind] = build_profile(kind, queue="batch", queue_arguments={"backfill": kind})
    return {"default": build_profile("default"), **profiles}


@pytest.mark.parametrize("profile", list(queues()))
def test_every_queue_respects_a_reservation_and_admits_its_project(profile):
    harness = Harness(*some_nodes(4), profiles=queues())
    reserve(harness)
    harness.submit(1, profile=profile, estimate_ms=2 * HOUR)
    assert harness.started() == []
    assert harness.reason()[0] in ("RESERVED", ""), "a backfill queue may reserve its start without a try"
    harness.submit(2, profile=profile, estimate_ms=30 * MINUTE, name="short")
    assert harness.started() == ["2.0.1"]
    harness.submit(3, profile=profile, estimate_ms=2 * HOUR, project="ml")
    assert harness.started() == ["3.0.1"]


def test_a_job_without_an_estimate_does_not_start_on_a_reserved_node_and_why_has_a_hint():
    harness = a_harness(4)
    reserve(harness)
    harness.submit(1)
    assert harness.reason() == ("RESERVED", "reservation nightly of project ml has it until 2023-11-15 00:13:20 UTC")
    answer = explain.why(harness.controller, 1, harness.now_ms)
    assert answer.code == "RESERVED"
    assert [(hold.node, hold.name, hold.project) for hold in answer.held_for] == [("n1", "nightly", "ml")]
    assert "timeout or an estimate" in answer.hint


def test_a_pending_job_starts_when_the_window_ends():
    harness = a_harness(4)
    reservation = reserve(harness, start=0)
    harness.submit(1)
    assert harness.started() == []
    assert harness.controller.next_wakeup_ms(harness.now_ms) == reservation.end_ms
    harness.now_ms = reservation.end_ms
    harness.step()
    assert harness.started() == ["1.0.1"]
    assert holds_on(harness.controller.cluster, "n1") == ()
    assert [kind for kind in harness.event_kinds() if kind.startswith("reservation")] == [
        "reservation.created", "reservation.started", "reservation.ended",
    ]  # fmt: skip
    assert harness.controller.next_wakeup_ms(harness.now_ms) is None


def test_a_cancelled_reservation_lets_pending_jobs_start():
    harness = a_harness(4)
    reserve(harness)
    harness.submit(1)
    harness.step(ReservationDeleted("nightly", by="ann"))
    assert harness.started() == ["1.0.1"]
    assert harness.events[-1].kind != "reservation.ended"
    assert any(event.kind == "reservation.deleted" and event.detail["by"] == "ann" for event in harness.events)
    harness.step(ReservationDeleted("nightly", by="ann"))  # a repetition changes nothing
    assert harness.event_kinds().count("reservation.deleted") == 1


def test_the_project_uses_its_reservation_and_other_projects_the_rest():
    harness = a_harness(4)
    reserve(harness, start=0, request=amounts(2))
    harness.submit(1, cpu=2, project="ml")
    harness.submit(2, cpu=2, project="web")
    harness.submit(3, cpu=1, project="web")
    assert [harness.state(id) for id in (1, 2, 3)] == ["scheduled", "scheduled", "pending"]
    harness.observe("1.0.1", "succeeded", 0)
    assert harness.state(3) == "pending", "the two cores are still reserved"


def test_a_reservation_survives_a_restart():
    harness = a_harness(4)
    harness.submit(1, cpu=2, estimate_ms=HOUR)
    reservation = reserve(harness, request=amounts(4))
    restored = a_harness()
    restored.step(ReservationMade(reservation, restored=True))
    assert restored.controller.cluster.availability.reservations == {"nightly": reservation}
    assert "reservation.created" not in restored.event_kinds()
    restored.step(ReservationMade(reservation, restored=True))
    restored.now_ms = reservation.start_ms
    restored.step()
    assert restored.event_kinds().count("reservation.started") == 1


def test_the_members_of_a_gang_on_one_node_count_together():
    harness = a_harness(4)
    reserve(harness, request=amounts(3))
    harness.submit(1, cpu=1, count=2)
    assert harness.started() == []
    harness.submit(2, cpu=1, name="alone")
    assert harness.started() == ["2.0.1"]


def test_the_holds_on_a_node_are_listed():
    harness = a_harness(4)
    reservation = reserve(harness, request=amounts(2))
    (hold,) = holds_on(harness.controller.cluster, "n1")
    assert (hold.name, hold.project, hold.request) == ("nightly", "ml", amounts(2))
    assert (hold.start_ms, hold.end_ms) == (reservation.start_ms, reservation.end_ms)
