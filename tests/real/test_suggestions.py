"""Suggestions of `why`, through a real server and the command line: the change is made, and the job runs."""

from __future__ import annotations

import pytest

from real.installation import Installation
from real.virtual_nodes import THREE, cancel, filler, node_of, why

pytestmark = pytest.mark.real


def test_a_suggestion_of_why_lets_the_job_start(installation: Installation) -> None:
    installation.configure(THREE).up()
    running = [filler(installation, cpu=1, node_selector={"zone": zone}, estimate="1h") for zone in ("east", "west")]
    pending = installation.submit(cpu=2)
    answer = why(installation, pending)
    changes = {
        suggestion["change"]: (suggestion["nodes"], suggestion["example"]) for suggestion in answer["suggestions"]
    }
    assert changes["cpu 2 to 1"][0] == 2
    assert changes["tolerate gpu=reserved:NoSchedule"] == (1, "c")
    assert "ends, expected in" in answer["hint"]
    shown = installation.ok("why", str(pending)).out
    assert "any one of these changes would let it start now" in shown
    assert "tolerate gpu=reserved:NoSchedule  1      c" in shown
    assert node_of(installation, installation.submit(cpu=1)) in ("a", "b")
    assert node_of(installation, installation.submit(cpu=2, tolerations=["gpu=reserved:NoSchedule"])) == "c"
    cancel(installation, *running)
    assert node_of(installation, pending) in ("a", "b")


def test_why_explains_one_node(installation: Installation) -> None:
    installation.configure(THREE).up()
    job = installation.submit(cpu=4, node_selector={"zone": "east"})
    answer = installation.ok("why", str(job), "--node", "c", "-o", "json").json
    assert {blocker["code"] for blocker in answer["blockers"]} == {"SELECTOR_MISMATCH", "UNTOLERATED_TAINT"}
    answer = installation.ok("why", str(job), "--node", "a", "-o", "json").json
    assert (answer["code"], answer["nearest"]["text"]) == ("INSUFFICIENT_CPU", "lacks 2 cpu (2 of 2 free, 4 requested)")
    assert installation.hodei("why", str(job), "--node", "nowhere").code == 3
    done = installation.submit(cpu=1)
    node = node_of(installation, done)
    assert f"{node} could take another one like it now" in installation.ok("why", str(done), "--node", node).out


def test_a_timeout_is_shown_in_seconds(installation: Installation) -> None:
    installation.configure(THREE).up()
    job = installation.submit("sleep", "60", timeout="1s")
    installation.ended(job)
    assert "longer than its timeout of 1s" in why(installation, job)["summary"]
