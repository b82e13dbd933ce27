"""Incidents exported as scenarios: `hodei test` reproduces them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
import yaml

from real.installation import CommandResult, Installation, until, wait_for_file

pytestmark = pytest.mark.real

TWO = """
[[nodes]]
name = "a"
cpu = 2
memory = "1Gi"
labels = {disk = "ssd"}

[[nodes]]
name = "b"
cpu = 2
memory = "1Gi"
"""


def exported(installation: Installation, job: int, path: Path) -> dict[str, object]:
    text = installation.ok("job", "export", str(job), "--scenario").out
    path.write_text(text)
    document = yaml.load(text, yaml.BaseLoader)
    assert isinstance(document, dict)
    return document


def run_scenario(installation: Installation, path: Path) -> CommandResult:
    return installation.hodei("test", str(path))


def test_an_exported_incident_is_reproduced(installation: Installation, tmp_path: Path) -> None:
    installation.configure(TWO).up()
    # It runs before the exported incident begins, on the node that picky selects, and leaves capacity there for picky.
    before = installation.submit(
        *wait_for_file(tmp_path / "before"), name="before", cpu=1, node_selector={"disk": "ssd"}
    )
    installation.until_state(before, "running")
    big = installation.submit(*wait_for_file(tmp_path / "big"), name="big", cpu=2, env={"API_TOKEN": "a-secret"})
    installation.until_state(big, "running")
    wide = installation.submit("sleep", "0.5", name="wide", cpu=1, count=4, estimate="1s")
    picky = installation.submit("sleep", "600", name="picky", cpu=1, node_selector={"disk": "ssd"})
    installation.until_state(picky, "running")
    (tmp_path / "big").touch()
    installation.ended(big)
    installation.ok("cancel", str(picky))
    installation.ended(picky)
    failing = installation.submit("sh", "-c", "sleep 0.2; exit 3", name="failing", cpu=1)
    installation.ended(failing)
    assert installation.state(wide) == "pending"
    (tmp_path / "before").touch()
    installation.ended(before, wide)
    document = exported(installation, big, tmp_path / "big.scenario.yaml")
    assert "a-secret" not in (tmp_path / "big.scenario.yaml").read_text()
    assert [job["name"] for job in document["jobs"]][:2] == ["before", "big"]  # type: ignore[attr-defined]
    result = run_scenario(installation, tmp_path / "big.scenario.yaml")
    assert result.code == 0, result.out + result.err + (tmp_path / "big.scenario.yaml").read_text()
    # The scenario of this job is longer: it includes a job that was cancelled after others had ended.
    exported(installation, wide, tmp_path / "wide.scenario.yaml")
    result = run_scenario(installation, tmp_path / "wide.scenario.yaml")
    assert result.code == 0, result.out + result.err + (tmp_path / "wide.scenario.yaml").read_text()
    assert "held          picky ends cancelled for the reason CANCELLED" in result.out
    again = installation.hodei("test", "-o", "json", str(tmp_path / "wide.scenario.yaml")).json["scenarios"][0]
    (start,) = next(job["starts"] for job in again["jobs"] if job["name"] == "wide")
    view = installation.job(wide).job
    waited = datetime.fromisoformat(view.scheduled_at) - datetime.fromisoformat(view.submitted_at)
    # Both are times of scheduler steps, so that the load of the machine does not matter.
    assert abs(start["at_ms"] - waited.total_seconds() * 1000) <= 100


def test_drains_cordons_and_preemptions_are_exported(installation: Installation, tmp_path: Path) -> None:
    installation.configure(TWO).up()
    installation.ok("node", "cordon", "b")
    moved = installation.submit("sleep", "600", name="moved", cpu=2, priority="low")
    installation.until_state(moved, "running")
    installation.ok("node", "uncordon", "b")
    installation.ok("node", "drain", "a")
    until(lambda: installation.job(moved).job.nodes == ["b"], "the job has moved to b")
    installation.until_state(moved, "running")
    urgent = installation.submit("sleep", "1", name="urgent", cpu=2, priority="critical")
    installation.ended(urgent)
    installation.until_state(moved, "running")
    installation.ok("cancel", str(moved))
    installation.ended(moved)
    document = exported(installation, moved, tmp_path / "moved.scenario.yaml")
    verbs = [next(key for key in fact if key != "at") for fact in document["facts"]]  # type: ignore[attr-defined]
    assert verbs == ["cordon", "uncordon", "drain", "cancel"]
    result = run_scenario(installation, tmp_path / "moved.scenario.yaml")
    assert result.code == 0, result.out + result.err + (tmp_path / "moved.scenario.yaml").read_text()
    assert "held          moved is preempted by urgent" in result.out
    assert "(attempt 3)" in result.out


def test_a_pending_job_is_exported_with_its_reason(installation: Installation, tmp_path: Path) -> None:
    installation.configure(TWO).up()
    pending = installation.submit("true", name="pending", cpu=1, node_selector={"disk": "tape"})
    until(lambda: installation.job(pending).job.reason_code, "the job was tried and refused")
    document = exported(installation, pending, tmp_path / "pending.scenario.yaml")
    assert document["expect"][-1]["reason"] == installation.job(pending).job.reason_code  # type: ignore[index]
    result = run_scenario(installation, tmp_path / "pending.scenario.yaml")
    assert result.code == 0, result.out + result.err
    installation.ok("cancel", str(pending))


def test_an_export_needs_a_format(installation: Installation) -> None:
    installation.configure(TWO).up()
    result = installation.hodei("job", "export", str(installation.submit("true")))
    assert result.code == 2
    assert "--scenario" in result.err


def test_an_incident_is_exported_after_a_restart(installation: Installation, tmp_path: Path) -> None:
    installation.configure(TWO).up()
    job = installation.submit("true")
    installation.ended(job)
    before = exported(installation, job, tmp_path / "job.scenario.yaml")
    assert installation.stop() == 0
    installation.up()
    after = exported(installation, job, tmp_path / "job.scenario.yaml")
    assert [node["name"] for node in after["cluster"]] == ["a", "b"]  # type: ignore[attr-defined]
    assert [(node["name"], node.get("there")) for node in after["cluster"]] == [  # type: ignore[attr-defined]
        (node["name"], node.get("there"))
        for node in before["cluster"]  # type: ignore[attr-defined]
    ]
    result = run_scenario(installation, tmp_path / "job.scenario.yaml")
    assert result.code == 0, result.out + result.err
