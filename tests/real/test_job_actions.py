"""Suspend, resume, checkpoint, migrate, drain, health checks and idle timeouts, through a real server and its command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from real.installation import Installation, until
from real.virtual_nodes import filler, nodes

pytestmark = pytest.mark.real

# Counts from its checkpoint and saves one on USR1. Saves and succeeds when the file `finish` exists.
COUNTS = """
import os, signal, sys, time
file, finish = sys.argv[1:]
step = int(open(file).read()) if os.path.exists(file) else 0
def save(*_):
    with open(file + ".new", "w") as out:
        out.write(str(step))
    os.rename(out.name, file)
signal.signal(signal.SIGUSR1, save)
print("from", step, flush=True)
while not os.path.exists(finish):
    step += 1
    time.sleep(0.01)
save()
"""


def training(installation: Installation, file: Path, **fields: object) -> int:
    """Start a job with checkpoints in `file`; it succeeds when `file`.finish exists."""
    command = [sys.executable, "-S", "-c", COUNTS, str(file), f"{file}.finish"]
    checkpoint = {"signal": "USR1", "file": str(file), "timeout": "5m"}
    id = installation.submit(*command, **{"cpu": 1, "checkpoint": checkpoint, **fields})
    until_output(installation, id, 1)
    return id


def until_output(installation: Installation, id: int, attempt: int) -> str:
    """Wait for the output of this attempt; from then on the job handles signals."""

    def output() -> str:
        found = installation.job(id)
        return installation.log_of(id, attempt=attempt) if found.job.attempt >= attempt else ""

    return until(output, f"attempt {attempt} of job {id} has written output")


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
    assert until_output(installation, id, 2) == f"from {saved}\n"
    installation.ok("cancel", str(id))
    assert {"job.suspend_requested", "job.suspended", "job.resumed"} <= set(events_of(installation, id))


def test_a_pending_job_is_suspended_at_once_and_an_ended_one_is_refused(installation: Installation) -> None:
    installation.configure(nodes("a 1 1Gi")).up()
    running = filler(installation, cpu=1)
    pending = installation.submit(cpu=1)
    assert "suspended" in installation.ok("suspend", str(pending)).out
    assert installation.job(pending).job.reason_code == "SUSPENDED"
    installation.ok("cancel", str(running))
    installation.ended(running)
    assert installation.state(pending) == "held"
    installation.ok("release", str(pending))
    installation.ended(pending)
    refused = installation.hodei("suspend", str(pending))
    assert (refused.code, "has already succeeded" in refused.err) == (8, True)
    assert installation.hodei("resume", str(pending)).code == 8


def test_a_checkpoint_on_demand_is_refused_for_a_job_without_a_hook(installation: Installation, tmp_path: Path) -> None:
    installation.configure(nodes("a 2 1Gi")).up()
    id, plain = training(installation, tmp_path / "model"), filler(installation, cpu=1)
    assert "checkpoint requested" in installation.ok("checkpoint", str(id)).out
    run = until(
        lambda: next((run for run in installation.job(id).runs if run.checkpoint_at), None), "there is a checkpoint"
    )
    assert run.state == "running"
    refused = installation.hodei("checkpoint", str(plain))
    assert (refused.code, "NO_CHECKPOINT" in refused.err, "how to take a checkpoint" in refused.err) == (8, True, True)
    assert "CHECKPOINT" in installation.ok("job", "show", str(id)).out


def test_a_running_job_is_migrated_only_if_another_node_can_take_it(installation: Installation, tmp_path: Path) -> None:
    installation.configure(nodes("a 1 1Gi", "b 1 1Gi")).up()
    id = training(installation, tmp_path / "model")
    before = installation.job(id).runs[0].node
    other = filler(installation, cpu=1)
    refused = installation.hodei("migrate", str(id))
    assert (refused.code, "cannot be moved" in refused.err, "--force" in refused.err) == (8, True, True)
    assert installation.hodei("migrate", str(id), "--to", "nowhere").code == 3
    installation.ok("cancel", str(other))
    installation.ended(other)
    assert "migration requested" in installation.ok("migrate", str(id)).out
    until_output(installation, id, 2)
    detail = installation.job(id)
    assert ([run.state for run in detail.runs], detail.runs[1].node != before) == (["stopped", "running"], True)
    assert installation.hodei("migrate", str(id), "--to", detail.runs[1].node).code == 8
    installation.ok("migrate", str(id), "--to", before)
    until_output(installation, id, 3)
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
    drained = installation.ok("node", "drain", before, "--wait", "--timeout", "2m")
    assert f"1 run left on {before}" in drained.err
    assert f"node {before} drained" in drained.out
    until_output(installation, id, 2)
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
    until(
        lambda: installation.job(id).runs and installation.job(id).runs[0].health == "ok", "a health check has passed"
    )
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


def test_a_training_job_continues_from_its_checkpoint_after_a_suspension_and_a_drain(
    installation: Installation, tmp_path: Path
) -> None:
    installation.configure(nodes("a 1 1Gi", "b 1 1Gi")).up()
    model = tmp_path / "model"
    id = training(installation, model, labels={"what": "training"})
    first = installation.job(id).runs[0].node

    installation.ok("checkpoint", str(id))
    installation.ok("suspend", str(id))
    held = installation.until_state(id, "held")
    assert held.job.reason_code == "SUSPENDED"
    saved = int(model.read_text())

    urgent = installation.submit("true", cpu=1, node_selector={"kubernetes.io/hostname": first}, priority="high")
    assert installation.ended(urgent)[0].job.state == "succeeded"

    installation.ok("resume", str(id))
    assert until_output(installation, id, 2) == f"from {saved}\n"
    second = installation.job(id).runs[1].node

    installation.ok("node", "drain", second, "--wait")
    moved_at = int(until_output(installation, id, 3).split()[1])
    assert moved_at >= saved
    (tmp_path / "model.finish").touch()

    (detail,) = installation.ended(id)
    assert (detail.job.state, detail.job.exit_code, detail.job.failure) == ("succeeded", 0, "")
    assert [run.state for run in detail.runs] == ["stopped", "stopped", "succeeded"]
    assert detail.runs[2].node != second
    assert int(model.read_text()) > moved_at
    assert all(run.checkpoint_at for run in detail.runs[:2])
    with installation.client() as client:
        requeued = [event.detail.get("reason_code") for event in client.events(job=id) if event.kind == "job.requeued"]
    assert requeued == ["DRAINED"]
