"""Reservations on a real server: created, enforced, expired, and restored after a crash."""

from __future__ import annotations

import time

import pytest

from hodei.cli.times import ms_of
from real.installation import Installation, until

pytestmark = pytest.mark.real

TWO = '[[nodes]]\nname = "a"\ncpu = "2"\n[[nodes]]\nname = "b"\ncpu = "2"\n'


def reserve(installation: Installation, name: str, *options: str) -> dict:
    return installation.ok("reservation", "create", name, "--project", "ml", "-o", "json", *options).json


ON_A = {"kubernetes.io/hostname": "a"}


def test_a_reservation_admits_only_its_own_project(installation: Installation) -> None:
    installation.configure(TWO).up()
    made = reserve(installation, "now", "--for", "1h", "--nodes", "1", "--cpu", "2")
    assert [placed["node"] for placed in made["places"]] == ["a"]
    other_project = installation.submit("true", cpu=2, node_selector=ON_A)
    own_project = installation.submit("true", project="ml", cpu=2, node_selector=ON_A)
    assert installation.ended(own_project)[0].job.state == "succeeded"
    answer = installation.ok("why", str(other_project), "-o", "json").json
    assert (answer["status"], answer["code"]) == ("waiting", "RESERVED")
    assert "until" in installation.ok("why", str(other_project)).out
    installation.ok("reservation", "delete", "now")
    assert installation.ended(other_project)[0].job.state == "succeeded"


def test_a_reservation_ends_with_its_window(installation: Installation) -> None:
    installation.configure(TWO).up()
    made = reserve(installation, "soon", "--for", "4s", "--nodes", "1", "--cpu", "2")
    # On a busy machine this may happen after the window. The assertions hold also then.
    (detail,) = installation.ended(installation.submit("true", cpu=2, node_selector=ON_A))
    assert detail.job.state == "succeeded"
    assert detail.job.scheduled_at >= made["end_at"]
    until(lambda: installation.ok("reservation", "list", "-o", "json").json == [], "the reservation has ended")
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
    until(lambda: len(installation.ok("nodes", "-o", "json").json) == 2, "the nodes have joined again")
    (node, _) = installation.ok("nodes", "-o", "json").json
    assert node["holds"][0]["reservation"] == "long"
    waiting = installation.submit("true")
    until(
        lambda: installation.ok("why", str(waiting), "-o", "json").json["code"] == "RESERVED",
        "the reservation keeps the job pending",
    )
    bounded = installation.submit("true", timeout="1m")
    assert installation.ended(bounded)[0].job.state == "succeeded", "a job that ends before the reservation may start"
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
    other_project = installation.submit("sleep", "600", cpu=2, node_selector=ON_A, grace="1s")
    on_b = installation.submit("sleep", "600", cpu=2, node_selector={"kubernetes.io/hostname": "b"})
    installation.until_state(other_project, "running")
    made = reserve(
        installation, "demo", "--from", "+5s", "--for", "1h", "--node", "a", "--cpu", "2", "--at-start", "stop"
    )
    assert [late["run"] for late in made["late"]] == [f"{other_project}.0.1"]
    installation.kill()
    until(lambda: time.time_ns() // 1_000_000 > ms_of(made["start_at"]), "the window has begun")
    installation.up()
    own_project = installation.submit("true", project="ml", cpu=2, node_selector=ON_A)
    assert installation.ended(own_project)[0].job.state == "succeeded"
    job = installation.ok("job", "show", str(other_project), "-o", "json").json["job"]
    assert (job["state"], job["reason_code"]) == ("pending", "RESERVED")
    events = [event for event in installation.ok("events", "-o", "json").json if event["job"] == other_project]
    (stopped,) = [event for event in events if event["kind"] == "reservation.run_stopped"]
    assert stopped["detail"]["name"] == "demo"
    (requeued,) = [event for event in events if event["kind"] == "job.requeued"]
    assert requeued["detail"]["reason_code"] == "RESERVATION_STARTED"
    assert installation.ok("job", "show", str(on_b), "-o", "json").json["job"]["state"] == "running", (
        "its node is not reserved"
    )
    installation.ok("reservation", "delete", "demo")
    installation.until_state(other_project, "running")
    installation.ok("cancel", str(other_project), str(on_b))
    installation.ended(other_project, on_b)
