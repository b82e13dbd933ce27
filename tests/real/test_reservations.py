"""Reservations on a real server: created, enforced, expired, and restored after a crash."""

from __future__ import annotations

import time

import pytest

from hodei.cli.times import ms_of
from real.installation import Installation, until

pytestmark = pytest.mark.real

TWO = '[[nodes]]\nname = "a"\ncpu = "2"\n[[nodes]]\nname = "b"\ncpu = "2"\n'


def reserve(installation: Installation, name: str, *more: str) -> dict:
    return installation.ok("reservation", "create", name, "--project", "ml", "-o", "json", *more).json


ON_A = {"kubernetes.io/hostname": "a"}


def test_a_reservation_admits_only_its_own_project(installation: Installation) -> None:
    installation.configure(TWO).up()
    made = reserve(installation, "now", "--for", "1h", "--nodes", "1", "--cpu", "2")
    assert [place["node"] for place in made["places"]] == ["a"]
    others = installation.submit("true", cpu=2, node_selector=ON_A)
    ours = installation.submit("true", project="ml", cpu=2, node_selector=ON_A)
    assert installation.ended(ours)[0].job.state == "succeeded"
    answer = installation.ok("why", str(others), "-o", "json").json
    assert (answer["status"], answer["code"]) == ("waiting", "RESERVED")
    assert "until" in installation.ok("why", str(others)).out
    installation.ok("reservation", "delete", "now")
    assert installation.ended(others)[0].job.state == "succeeded"


def test_a_reservation_ends_with_its_window(installation: Installation) -> None:
    installation.configure(TWO).up()
    made = reserve(installation, "soon", "--for", "4s", "--nodes", "1", "--cpu", "2")
    others = installation.submit(
        "true", cpu=2, node_selector=ON_A
    )  # on a slow machine perhaps after the window already
    (theirs,) = installation.ended(others)
    assert theirs.job.state == "succeeded"
    assert theirs.job.scheduled_at >= made["end_at"]
    until(lambda: installation.ok("reservation", "list", "-o", "json").json == [], "it is over")
    kinds = [event["kind"] for event in installation.ok("events", "-o", "json").json]
    assert [kind for kind in kinds if kind.startswith("reservation")] == [
        "reservation.created", "reservation.started", "reservation.ended",
    ]  # fmt: skip


def test_a_reservation_survives_a_crash_until_it_is_cancelled(installation: Installation) -> None:
    installation.configure(TWO).up()
    reserve(installation, "long", "--from", "+1h", "--for", "1h", "--node", "a", "--node", "b")
    refused = installation.hodei(
        "reservation", "create", "other", "--project", "web", "--from", "+90m", "--for", "1h", "--nodes", "1"
    )
    assert refused.code != 0
    assert "reservation long of project ml takes 2 nodes" in refused.err
    installation.kill()
    installation.up()
    until(lambda: len(installation.ok("nodes", "-o", "json").json) == 2, "the nodes are back")
    (node, _) = installation.ok("nodes", "-o", "json").json
    assert node["holds"][0]["reservation"] == "long"
    waiting = installation.submit("true")
    until(
        lambda: installation.ok("why", str(waiting), "-o", "json").json["code"] == "RESERVED",
        "the reservation is honoured",
    )
    bounded = installation.submit("true", timeout="1m")
    assert installation.ended(bounded)[0].job.state == "succeeded", "what is over by then may start"
    installation.ok("reservation", "delete", "long")
    assert installation.ended(waiting)[0].job.state == "succeeded"


def test_learned_estimates_survive_a_restart(installation: Installation) -> None:
    installation.configure('[scheduling.estimates]\nsource = "learned"\n' + TWO).up()
    for _ in range(3):
        installation.ended(installation.submit("true", name="quick"))
    installation.stop()
    installation.up()
    id = installation.submit("sleep", "600", name="quick")
    installation.until_state(id, "running")
    job = installation.ok("job", "show", str(id), "-o", "json").json["job"]
    assert job["expected_by"] == "P75 of its last 3 runs"
    assert "P75 of its last 3 runs" in installation.ok("why", str(id)).out
    installation.ok("cancel", str(id))
    installation.ended(id)


def test_a_reservation_evicts_runs_at_its_start_even_if_the_server_was_down(installation: Installation) -> None:
    installation.configure(TWO).up()
    on_a = {"kubernetes.io/hostname": "a"}
    others = installation.submit("sleep", "600", cpu=2, node_selector=on_a, grace="1s")
    beside = installation.submit("sleep", "600", cpu=2, node_selector={"kubernetes.io/hostname": "b"})
    installation.until_state(others, "running")
    made = reserve(
        installation, "demo", "--from", "+2s", "--for", "1h", "--node", "a", "--cpu", "2", "--at-start", "stop"
    )
    assert [late["run"] for late in made["late"]] == [f"{others}.0.1"]
    installation.kill()
    until(lambda: time.time_ns() // 1_000_000 > ms_of(made["start_at"]), "the window has begun")
    installation.up()
    ours = installation.submit("true", project="ml", cpu=2, node_selector=on_a)
    assert installation.ended(ours)[0].job.state == "succeeded"
    job = installation.ok("job", "show", str(others), "-o", "json").json["job"]
    assert (job["state"], job["reason_code"]) == ("pending", "RESERVED")
    told = [event for event in installation.ok("events", "-o", "json").json if event["job"] == others]
    (cleared,) = [event for event in told if event["kind"] == "reservation.run_stopped"]
    assert cleared["detail"]["name"] == "demo"
    (again,) = [event for event in told if event["kind"] == "job.requeued"]
    assert again["detail"]["reason_code"] == "RESERVATION_STARTED"
    assert installation.ok("job", "show", str(beside), "-o", "json").json["job"]["state"] == "running", (
        "it is in nobody's way"
    )
    installation.ok("reservation", "delete", "demo")
    installation.until_state(others, "running")
    installation.ok("cancel", str(others), str(beside))
    installation.ended(others, beside)
