"""Suspend, resume, save, migrate, drain, health, idleness and failures, through a real server and the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from real.house import House, until
from real.test_placement import filler, nodes

pytestmark = pytest.mark.real

# Counts on from what it saved; saves on USR1. Ends well, with its work saved, when there is a file that says so.
COUNTS = """
import os, signal, sys, time
file, enough = sys.argv[1:]
step = int(open(file).read()) if os.path.exists(file) else 0
def save(*_):
    with open(file + ".new", "w") as out:
        out.write(str(step))
    os.rename(out.name, file)
signal.signal(signal.SIGUSR1, save)
print("from", step, flush=True)
while not os.path.exists(enough):
    step += 1
    time.sleep(0.01)
save()
"""


def training(house: House, file: Path, **fields: object) -> int:
    """A job that saves its work into `file`, when it has begun."""
    command = [sys.executable, "-S", "-c", COUNTS, str(file), f"{file}.enough"]
    checkpoint = {"signal": "USR1", "file": str(file), "timeout": "20s"}
    id = house.submit(*command, **{"cpu": 1, "checkpoint": checkpoint, **fields})
    begun(house, id, 1)
    return id


def begun(house: House, id: int, attempt: int) -> str:
    """What it said first in this attempt: then it hears signals."""

    def said() -> str:
        found = house.job(id)
        return house.log_of(id, attempt=attempt) if found.job.attempt >= attempt else ""

    return until(said, f"attempt {attempt} of job {id} has begun")


def events_of(house: House, id: int) -> list[str]:
    with house.client() as client:
        return [event.kind for event in client.events(job=id)]


def test_a_job_is_suspended_with_its_work_saved_and_resumed_where_it_was(house: House, tmp_path: Path) -> None:
    house.configure(nodes("a 1 1Gi")).up()
    file = tmp_path / "model"
    id = training(house, file)
    assert "suspend requested" in house.ok("suspend", str(id)).out
    held = house.until_state(id, "held")
    assert (held.job.reason_code, held.job.failure, held.runs[0].state) == ("SUSPENDED", "", "stopped")
    assert held.runs[0].checkpoint_at
    saved = int(file.read_text())
    assert house.ended(house.submit(cpu=1))[0].job.state == "succeeded", "its node is free"
    assert "suspended" in house.ok("suspend", str(id)).out
    house.kill()
    house.up()
    assert house.state(id) == "held"
    assert "resumed" in house.ok("resume", str(id)).out
    assert begun(house, id, 2) == f"from {saved}\n"
    house.ok("cancel", str(id))
    assert {"job.suspend_requested", "job.suspended", "job.released"} <= set(events_of(house, id))


def test_a_waiting_job_is_suspended_at_once_and_an_ended_one_never(house: House) -> None:
    house.configure(nodes("a 1 1Gi")).up()
    holding = filler(house, cpu=1)
    waiting = house.submit(cpu=1)
    assert "suspended" in house.ok("suspend", str(waiting)).out
    assert house.job(waiting).job.reason_code == "SUSPENDED"
    house.ok("cancel", str(holding))
    house.ended(holding)
    assert house.state(waiting) == "held"
    house.ok("release", str(waiting))
    house.ended(waiting)
    said = house.hodei("suspend", str(waiting))
    assert (said.code, "has succeeded already" in said.err) == (8, True)
    assert house.hodei("resume", str(waiting)).code == 8


def test_work_is_saved_on_demand_and_a_job_that_can_not_is_told_so(house: House, tmp_path: Path) -> None:
    house.configure(nodes("a 2 1Gi")).up()
    id, plain = training(house, tmp_path / "model"), filler(house, cpu=1)
    assert "told to save its work" in house.ok("checkpoint", str(id)).out
    run = until(lambda: next((run for run in house.job(id).runs if run.checkpoint_at), None), "it has saved its work")
    assert run.state == "running"
    said = house.hodei("checkpoint", str(plain))
    assert (said.code, "NO_CHECKPOINT" in said.err, "how its work is saved" in said.err) == (8, True, True)
    assert "CHECKPOINT" in house.ok("job", "show", str(id)).out


def test_a_running_job_is_moved_only_if_another_node_can_take_it(house: House, tmp_path: Path) -> None:
    house.configure(nodes("a 1 1Gi", "b 1 1Gi")).up()
    id = training(house, tmp_path / "model")
    before = house.job(id).runs[0].node
    other = filler(house, cpu=1)
    said = house.hodei("migrate", str(id))
    assert (said.code, "stays where it is" in said.err, "--force" in said.err) == (8, True, True)
    assert house.hodei("migrate", str(id), "--to", "nowhere").code == 3
    house.ok("cancel", str(other))
    house.ended(other)
    assert "is leaving" in house.ok("migrate", str(id)).out
    begun(house, id, 2)
    detail = house.job(id)
    assert ([run.state for run in detail.runs], detail.runs[1].node != before) == (["stopped", "running"], True)
    assert house.hodei("migrate", str(id), "--to", detail.runs[1].node).code == 8
    house.ok("migrate", str(id), "--to", before)
    begun(house, id, 3)
    assert house.job(id).runs[2].node == before
    requeued = [event for event in house.client().events(job=id) if event.kind == "job.requeued"]
    assert [event.detail["reason_code"] for event in requeued] == ["MIGRATED", "MIGRATED"]
    house.ok("cancel", str(id))
    house.ended(id)
    assert house.hodei("migrate", str(id)).code == 8


def test_a_drain_tells_how_many_are_left_until_none_is(house: House, tmp_path: Path) -> None:
    house.configure(nodes("a 1 1Gi", "b 1 1Gi")).up()
    id = training(house, tmp_path / "model")
    before = house.job(id).runs[0].node
    said = house.ok("node", "drain", before, "--wait", "--timeout", "25s")
    assert f"1 run left on {before}" in said.err
    assert f"node {before} drained" in said.out
    begun(house, id, 2)
    assert house.job(id).runs[1].node != before
    requeued = [event for event in house.client().events(job=id) if event.kind == "job.requeued"]
    assert [event.detail["reason_code"] for event in requeued] == ["DRAINED"]


def test_a_job_that_is_not_well_is_stopped_and_tried_again_if_it_says_so(house: House) -> None:
    house.configure(nodes("a 1 1Gi")).up()
    health = {"command": ["sh", "-c", "test $HODEI_ATTEMPT = 2"], "every": "1s", "failures": 1}
    id = house.submit(
        "sh", "-c", "test $HODEI_ATTEMPT = 2 || sleep 600", cpu=1, health=health, retries=3, retry_on=["unhealthy"]
    )
    (detail,) = house.ended(id)
    assert (detail.job.state, [run.reason_code for run in detail.runs]) == ("succeeded", ["unhealthy", ""])
    bad = house.submit(
        "sleep", "600", cpu=1, health={**health, "command": ["false"]}, retry_on=["node_lost"], retries=3
    )
    (detail,) = house.ended(bad)
    assert (detail.job.state, detail.job.reason_code, detail.job.failure) == ("failed", "UNHEALTHY", "unhealthy")
    assert len(detail.runs) == 1
    shown = house.ok("job", "show", str(bad)).out
    assert "failure" in shown
    assert "its health check failed once: exit code 1" in shown
    metrics = house.request("GET", "/metrics").body.decode()
    assert 'hodei_job_failures_total{failure="unhealthy"} 2.0' in metrics


def test_how_a_run_is_doing_is_shown(house: House) -> None:
    house.configure(nodes("a 1 1Gi")).up()
    id = house.submit("sleep", "600", cpu=1, health={"command": ["true"], "every": "1s"})
    until(lambda: house.job(id).runs and house.job(id).runs[0].health == "ok", "it was looked at")
    shown = house.ok("job", "show", str(id)).out
    assert "HEALTH" in shown


def test_a_health_check_can_not_be_aimed_at_others(house: House) -> None:
    house.up()
    body = b'{"command": ["true"], "health": {"http": "http://169.254.169.254/latest"}}'
    answer = house.request("POST", "/api/v1/jobs", body, headers={"Content-Type": "application/json"})
    assert (answer.status, answer.json["problems"][0][0]) == (422, "health.http")


def test_an_interactive_job_in_which_nothing_happens_ends(house: House) -> None:
    house.configure(nodes("a 1 1Gi")).up()
    id = house.submit("sleep", "600", cpu=1, workload={"type": "interactive", "idle_timeout": "1s"}, retries=5)
    (detail,) = house.ended(id)
    assert (detail.job.state, detail.job.reason_code, detail.job.failure) == ("failed", "IDLE_TIMEOUT", "idle")
    assert detail.job.reason == "nothing happened in it for 1s"
    assert len(detail.runs) == 1
