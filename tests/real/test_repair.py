"""What `why` proposes, through a real server and the command line: the change is made, and the job runs."""

from __future__ import annotations

import pytest

from real.house import House
from real.test_placement import THREE, cancelled, filler, node_of, why

pytestmark = pytest.mark.real


def test_a_job_that_waits_is_told_what_would_help_and_it_does(house: House) -> None:
    house.configure(THREE).up()
    holding = [filler(house, cpu=1, node_selector={"zone": zone}, estimate="1h") for zone in ("east", "west")]
    waiting = house.submit(cpu=2)
    answer = why(house, waiting)
    told = {repair["change"]: (repair["nodes"], repair["example"]) for repair in answer["repairs"]}
    assert told["cpu 2 to 1"][0] == 2
    assert told["tolerate gpu=reserved:NoSchedule"] == (1, "c")
    assert "ends, expected in" in answer["hint"]
    shown = house.ok("why", str(waiting)).out
    assert "any one of these changes would let it start now" in shown
    assert "tolerate gpu=reserved:NoSchedule  1      c" in shown
    assert node_of(house, house.submit(cpu=1)) in ("a", "b")
    assert node_of(house, house.submit(cpu=2, tolerations=["gpu=reserved:NoSchedule"])) == "c"
    cancelled(house, *holding)
    assert node_of(house, waiting) in ("a", "b")


def test_one_node_is_asked_about_one_job(house: House) -> None:
    house.configure(THREE).up()
    job = house.submit(cpu=4, node_selector={"zone": "east"})
    said = house.ok("why", str(job), "--node", "c", "-o", "json").json
    assert {blocker["code"] for blocker in said["blockers"]} == {"SELECTOR_MISMATCH", "UNTOLERATED_TAINT"}
    said = house.ok("why", str(job), "--node", "a", "-o", "json").json
    assert (said["code"], said["nearest"]["text"]) == ("INSUFFICIENT_CPU", "lacks 2 cpu (2 of 2 free, 4 asked)")
    assert house.hodei("why", str(job), "--node", "nowhere").code == 3
    done = house.submit(cpu=1)
    node = node_of(house, done)
    assert f"{node} could take another like it now" in house.ok("why", str(done), "--node", node).out


def test_a_timeout_is_told_in_seconds(house: House) -> None:
    house.configure(THREE).up()
    job = house.submit("sleep", "60", timeout="1s")
    house.ended(job)
    assert "longer than its timeout of 1s" in why(house, job)["summary"]
