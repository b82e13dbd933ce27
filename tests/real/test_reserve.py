"""Reservations on a real server: made, honoured, over by themselves, and there again after a crash."""

from __future__ import annotations

import time

import pytest

from hodei.cli.times import ms_of
from real.house import House, until

pytestmark = pytest.mark.real

TWO = '[[nodes]]\nname = "a"\ncpu = "2"\n[[nodes]]\nname = "b"\ncpu = "2"\n'


def reserve(house: House, name: str, *more: str) -> dict:
    return house.ok("reserve", "create", name, "--project", "ml", "-o", "json", *more).json


ON_A = {"kubernetes.io/hostname": "a"}


def test_a_reservation_keeps_others_out_and_lets_its_own_project_in(house: House) -> None:
    house.configure(TWO).up()
    made = reserve(house, "now", "--for", "1h", "--nodes", "1", "--cpu", "2")
    assert [place["node"] for place in made["places"]] == ["a"]
    others = house.submit("true", cpu=2, node_selector=ON_A)
    ours = house.submit("true", project="ml", cpu=2, node_selector=ON_A)
    assert house.ended(ours)[0].job.state == "succeeded"
    answer = house.ok("why", str(others), "-o", "json").json
    assert (answer["status"], answer["code"]) == ("waiting", "BOOKED")
    assert "until" in house.ok("why", str(others)).out
    house.ok("reserve", "delete", "now")
    assert house.ended(others)[0].job.state == "succeeded"


def test_a_reservation_is_over_by_itself_when_its_window_ends(house: House) -> None:
    house.configure(TWO).up()
    made = reserve(house, "soon", "--for", "4s", "--nodes", "1", "--cpu", "2")
    others = house.submit("true", cpu=2, node_selector=ON_A)  # on a slow machine perhaps after the window already
    (theirs,) = house.ended(others)
    assert theirs.job.state == "succeeded"
    assert theirs.job.scheduled_at >= made["end_at"]
    until(lambda: house.ok("reserve", "list", "-o", "json").json == [], "it is over")
    kinds = [event["kind"] for event in house.ok("events", "-o", "json").json]
    assert [kind for kind in kinds if kind.startswith("reservation")] == [
        "reservation.made", "reservation.started", "reservation.ended",
    ]  # fmt: skip


def test_a_reservation_survives_a_crash_and_is_shown_until_it_is_given_up(house: House) -> None:
    house.configure(TWO).up()
    reserve(house, "long", "--from", "+1h", "--for", "1h", "--node", "a", "--node", "b")
    refused = house.hodei(
        "reserve", "create", "other", "--project", "web", "--from", "+90m", "--for", "1h", "--nodes", "1"
    )
    assert refused.code != 0
    assert "reservation long of project ml takes 2 nodes" in refused.err
    house.kill()
    house.up()
    until(lambda: len(house.ok("nodes", "-o", "json").json) == 2, "the nodes are back")
    (node, _) = house.ok("nodes", "-o", "json").json
    assert node["holds"][0]["reservation"] == "long"
    waiting = house.submit("true")
    until(lambda: house.ok("why", str(waiting), "-o", "json").json["code"] == "BOOKED", "the reservation is honoured")
    bounded = house.submit("true", timeout="1m")
    assert house.ended(bounded)[0].job.state == "succeeded", "what is over by then may start"
    house.ok("reserve", "delete", "long")
    assert house.ended(waiting)[0].job.state == "succeeded"


def test_a_server_that_learns_says_how_long_a_job_should_take_also_after_a_restart(house: House) -> None:
    house.configure('[scheduling.estimates]\nsource = "learned"\n' + TWO).up()
    for _ in range(3):
        house.ended(house.submit("true", name="quick"))
    house.stop()
    house.up()
    id = house.submit("sleep", "600", name="quick")
    house.until_state(id, "running")
    job = house.ok("job", "show", str(id), "-o", "json").json["job"]
    assert job["expected_by"] == "P75 of its last 3 runs"
    assert "P75 of its last 3 runs" in house.ok("why", str(id)).out
    house.ok("cancel", str(id))
    house.ended(id)


def test_a_window_clears_its_room_when_it_begins_also_if_the_server_was_away_then(house: House) -> None:
    house.configure(TWO).up()
    on_a = {"kubernetes.io/hostname": "a"}
    others = house.submit("sleep", "600", cpu=2, node_selector=on_a, grace="1s")
    beside = house.submit("sleep", "600", cpu=2, node_selector={"kubernetes.io/hostname": "b"})
    house.until_state(others, "running")
    made = reserve(house, "demo", "--from", "+2s", "--for", "1h", "--node", "a", "--cpu", "2", "--at-start", "stop")
    assert [late["run"] for late in made["late"]] == [f"{others}.0.1"]
    house.kill()
    until(lambda: time.time_ns() // 1_000_000 > ms_of(made["start_at"]), "the window has begun")
    house.up()
    ours = house.submit("true", project="ml", cpu=2, node_selector=on_a)
    assert house.ended(ours)[0].job.state == "succeeded"
    job = house.ok("job", "show", str(others), "-o", "json").json["job"]
    assert (job["state"], job["reason_code"]) == ("pending", "BOOKED")
    told = [event for event in house.ok("events", "-o", "json").json if event["job"] == others]
    (cleared,) = [event for event in told if event["kind"] == "reservation.stopped"]
    assert cleared["detail"]["name"] == "demo"
    (again,) = [event for event in told if event["kind"] == "job.requeued"]
    assert again["detail"]["reason_code"] == "CLEARED"
    assert house.ok("job", "show", str(beside), "-o", "json").json["job"]["state"] == "running", "it is in nobody's way"
    house.ok("reserve", "delete", "demo")
    house.until_state(others, "running")
    house.ok("cancel", str(others), str(beside))
    house.ended(others, beside)
