"""Suspend, resume, checkpoint, migrate, drain, health checks and idle timeouts, through a real server and its command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from real.installation import Installation, until
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


def training(installation: Installation, file: Path, **fields: object) -> int:
    """A job that saves its work into `file`, when it has begun."""
    command = [sys.executable, "-S", "-c", COUNTS, str(file), f"{file}.enough"]
    checkpoint = {"signal": "USR1", "file": str(file), "timeout": "20s"}
    id = installation.submit(*command, **{"cpu": 1, "checkpoint": checkpoint, **fields})
    begun(installation, id, 1)
    return id


def begun(installation: Installation, id: int, attempt: int) -> str:
    """What it said first in this attempt: then it hears signals."""

    def said() -> str:
        found = installation.job(id)
        return installation.log_of(id, attempt=attempt) if found.job.attempt >= attempt else ""

    return until(said, f"attempt {attempt} of job {id} has begun")


def events_of(installation: Installation, id: int) -> list[str]:
    with installation.client() as client:
        return [event.kind for event in client.events(job=id)]


def test_a_job_is_suspended_with_a_checkpoint_and_resumed_from_it(installation: Installation, tmp_path: Path) -> None:
    installation.configure(nodes("a 1 1Gi")).up()
    file = tmp_path / "model"
    id = training(installation, file)
    assert "suspend requested" in installation.ok("suspend", str(id)).out
    held = installation.until_state(id, "held")
    assert (held.job.reason_code, held.job.failure, held.runs[0].state) == ("SUSPENDED", "", "stopped")
    assert held.runs[0].checkpoint_at
    saved = int(file.read_text())
    assert installation.ended(installation.submit(cpu=1))[0].job.state == "succeeded", "its node is free"
    assert "suspended" in installation.ok("suspend", str(id)).out
    installation.kill()
    installation.up()
    assert installation.state(id) == "held"
    assert "resumed" in installation.ok("resume", str(id)).out
    assert begun(installation, id, 2) == f"from {saved}\n"
    installation.ok("cancel", str(id))
    assert {"job.suspend_requested", "job.suspended", "job.resumed"} <= set(events_of(installation, id))


def test_a_waiting_job_is_suspended_at_once_and_an_ended_one_never(installation: Installation) -> None:
    installation.configure(nodes("a 1 1Gi")).up()
    holding = filler(installation, cpu=1)
    waiting = installation.submit(cpu=1)
    assert "suspended" in installation.ok("suspend", str(waiting)).out
    assert installation.job(waiting).job.reason_code == "SUSPENDED"
    installation.ok("cancel", str(holding))
    installation.ended(holding)
    assert installation.state(waiting) == "held"
    installation.ok("release", str(waiting))
    installation.ended(waiting)
    said = installation.hodei("suspend", str(waiting))
    assert (said.code, "has already succeeded" in said.err) == (8, True)
    assert installation.hodei("resume", str(waiting)).code == 8


def test_a_checkpoint_on_demand_is_refused_for_a_job_without_a_hook(installation: Installation, tmp_path: Path) -> None:
    installation.configure(nodes("a 2 1Gi")).up()
    id, plain = training(installation, tmp_path / "model"), filler(installation, cpu=1)
    assert "checkpoint requested" in installation.ok("checkpoint", str(id)).out
    run = until(
        lambda: next((run for run in installation.job(id).runs if run.checkpoint_at), None), "it has saved its work"
    )
    assert run.state == "running"
    said = installation.hodei("checkpoint", str(plain))
    assert (said.code, "NO_CHECKPOINT" in said.err, "how to take a checkpoint" in said.err) == (8, True, True)
    assert "CHECKPOINT" in installation.ok("job", "show", str(id)).out


def test_a_running_job_is_moved_only_if_another_node_can_take_it(installation: Installation, tmp_path: Path) -> None:
    installation.configure(nodes("a 1 1Gi", "b 1 1Gi")).up()
    id = training(installation, tmp_path / "model")
    before = installation.job(id).runs[0].node
    other = filler(installation, cpu=1)
    said = installation.hodei("migrate", str(id))
    assert (said.code, "cannot be moved" in said.err, "--force" in said.err) == (8, True, True)
    assert installation.hodei("migrate", str(id), "--to", "nowhere").code == 3
    installation.ok("cancel", str(other))
    installation.ended(other)
    assert "migration requested" in installation.ok("migrate", str(id)).out
    begun(installation, id, 2)
    detail = installation.job(id)
    assert ([run.state for run in detail.runs], detail.runs[1].node != before) == (["stopped", "running"], True)
    assert installation.hodei("migrate", str(id), "--to", detail.runs[1].node).code == 8
    installation.ok("migrate", str(id), "--to", before)
    begun(installation, id, 3)
    assert installation.job(id).runs[2].node == before
    requeued = [event for event in installation.client().events(job=id) if event.kind == "job.requeued"]
    assert [event.detail["reason_code"] for event in requeued] == ["MIGRATED", "MIGRATED"]
    installation.ok("cancel", str(id))
    installation.ended(id)
    assert installation.hodei("migrate", str(id)).code == 8


def test_a_drain_reports_the_remaining_runs(installation: Installation, tmp_path: Path) -> None:
    installation.configure(nodes("a 1 1Gi", "b 1 1Gi")).up()
    id = training(installation, tmp_path / "model")
    before = installation.job(id).runs[0].node
    said = installation.ok("node", "drain", before, "--wait", "--timeout", "25s")
    assert f"1 run left on {before}" in said.err
    assert f"node {before} drained" in said.out
    begun(installation, id, 2)
    assert installation.job(id).runs[1].node != before
    requeued = [event for event in installation.client().events(job=id) if event.kind == "job.requeued"]
    assert [event.detail["reason_code"] for event in requeued] == ["DRAINED"]


def test_an_unhealthy_job_is_stopped_and_retried_if_configured(installation: Installation) -> None:
    installation.configure(nodes("a 1 1Gi")).up()
    health = {"command": ["sh", "-c", "test $HODEI_ATTEMPT = 2"], "every": "1s", "failures": 1}
    id = installation.submit(
        "sh", "-c", "test $HODEI_ATTEMPT = 2 || sleep 600", cpu=1, health=health, retries=3, retry_on=["unhealthy"]
    )
    (detail,) = installation.ended(id)
    assert (detail.job.state, [run.reason_code for run in detail.runs]) == ("succeeded", ["unhealthy", ""])
    bad = installation.submit(
        "sleep", "600", cpu=1, health={**health, "command": ["false"]}, retry_on=["node_lost"], retries=3
    )
    (detail,) = installation.ended(bad)
    assert (detail.job.state, detail.job.reason_code, detail.job.failure) == ("failed", "UNHEALTHY", "unhealthy")
    assert len(detail.runs) == 1
    shown = installation.ok("job", "show", str(bad)).out
    assert "failure" in shown
    assert "its health check failed once: exit code 1" in shown
    metrics = installation.request("GET", "/metrics").body.decode()
    assert 'hodei_job_failures_total{failure="unhealthy"} 2.0' in metrics


def test_the_health_of_a_run_is_shown(installation: Installation) -> None:
    installation.configure(nodes("a 1 1Gi")).up()
    id = installation.submit("sleep", "600", cpu=1, health={"command": ["true"], "every": "1s"})
    until(lambda: installation.job(id).runs and installation.job(id).runs[0].health == "ok", "it was looked at")
    shown = installation.ok("job", "show", str(id)).out
    assert "HEALTH" in shown


def test_a_health_check_cannot_target_other_hosts(installation: Installation) -> None:
    installation.up()
    body = b'{"command": ["true"], "health": {"http": "http://169.254.169.254/latest"}}'
    answer = installation.request("POST", "/api/v1/jobs", body, headers={"Content-Type": "application/json"})
    assert (answer.status, answer.json["problems"][0][0]) == (422, "health.http")


def test_an_idle_interactive_job_ends(installation: Installation) -> None:
    installation.configure(nodes("a 1 1Gi")).up()
    id = installation.submit("sleep", "600", cpu=1, workload={"type": "interactive", "idle_timeout": "1s"}, retries=5)
    (detail,) = installation.ended(id)
    assert (detail.job.state, detail.job.reason_code, detail.job.failure) == ("failed", "IDLE_TIMEOUT", "idle")
    assert detail.job.reason == "it was idle for 1s"
    assert len(detail.runs) == 1
