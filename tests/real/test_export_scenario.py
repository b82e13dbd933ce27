"""An incident becomes a scenario: what happened on a real server happens again when it is played."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
import yaml

from real.house import House, Said, until, until_told

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


def exported(house: House, job: int, path: Path) -> dict[str, object]:
    text = house.ok("job", "export", str(job), "--scenario").out
    path.write_text(text)
    document = yaml.load(text, yaml.BaseLoader)
    assert isinstance(document, dict)
    return document


def played(house: House, path: Path) -> Said:
    return house.hodei("test", str(path))


def test_an_incident_is_played_again_as_it_happened(house: House, tmp_path: Path) -> None:
    house.configure(TWO).up()
    # Runs already when the story begins, on the node that picky wants, and leaves room for it there.
    before = house.submit(*until_told(tmp_path / "before"), name="before", cpu=1, node_selector={"disk": "ssd"})
    house.until_state(before, "running")
    big = house.submit(*until_told(tmp_path / "big"), name="big", cpu=2, env={"API_TOKEN": "a-secret"})
    house.until_state(big, "running")
    wide = house.submit("sleep", "0.5", name="wide", cpu=1, count=4, estimate="1s")
    picky = house.submit("sleep", "600", name="picky", cpu=1, node_selector={"disk": "ssd"})
    house.until_state(picky, "running")
    (tmp_path / "big").touch()
    house.ended(big)
    house.ok("cancel", str(picky))
    house.ended(picky)
    failing = house.submit("sh", "-c", "sleep 0.2; exit 3", name="failing", cpu=1)
    house.ended(failing)
    assert house.state(wide) == "pending"
    (tmp_path / "before").touch()
    house.ended(before, wide)
    document = exported(house, big, tmp_path / "big.scenario.yaml")
    assert "a-secret" not in (tmp_path / "big.scenario.yaml").read_text()
    assert [job["name"] for job in document["jobs"]][:2] == ["before", "big"]  # type: ignore[attr-defined]
    said = played(house, tmp_path / "big.scenario.yaml")
    assert said.code == 0, said.out + said.err + (tmp_path / "big.scenario.yaml").read_text()
    # The story of a job that was cancelled after others had ended is longer, and is played again as well.
    exported(house, wide, tmp_path / "wide.scenario.yaml")
    said = played(house, tmp_path / "wide.scenario.yaml")
    assert said.code == 0, said.out + said.err + (tmp_path / "wide.scenario.yaml").read_text()
    assert "held          picky ends cancelled for the reason CANCELLED" in said.out
    again = house.hodei("test", "--json", str(tmp_path / "wide.scenario.yaml")).json["scenarios"][0]
    (start,) = next(job["starts"] for job in again["jobs"] if job["name"] == "wide")
    view = house.job(wide).job
    waited = datetime.fromisoformat(view.scheduled_at) - datetime.fromisoformat(view.submitted_at)
    # Of what the server saw, not of what it took: the times are those of its own steps.
    assert abs(start["at_ms"] - waited.total_seconds() * 1000) <= 100


def test_drains_cordons_and_preemptions_are_part_of_the_story(house: House, tmp_path: Path) -> None:
    house.configure(TWO).up()
    house.ok("node", "cordon", "b")
    moved = house.submit("sleep", "600", name="moved", cpu=2, priority="low")
    house.until_state(moved, "running")
    house.ok("node", "uncordon", "b")
    house.ok("node", "drain", "a")
    until(lambda: house.job(moved).job.nodes == ["b"] or None, "it has moved to b")
    house.until_state(moved, "running")
    urgent = house.submit("sleep", "1", name="urgent", cpu=2, priority="critical")
    house.ended(urgent)
    house.until_state(moved, "running")
    house.ok("cancel", str(moved))
    house.ended(moved)
    document = exported(house, moved, tmp_path / "moved.scenario.yaml")
    verbs = [next(key for key in fact if key != "at") for fact in document["facts"]]  # type: ignore[attr-defined]
    assert verbs == ["cordon", "uncordon", "drain", "cancel"]
    said = played(house, tmp_path / "moved.scenario.yaml")
    assert said.code == 0, said.out + said.err + (tmp_path / "moved.scenario.yaml").read_text()
    assert "held          moved is preempted by urgent" in said.out
    assert "(attempt 3)" in said.out


def test_a_job_that_waits_is_exported_with_its_reason(house: House, tmp_path: Path) -> None:
    house.configure(TWO).up()
    waits = house.submit("true", name="waits", cpu=1, node_selector={"disk": "tape"})
    until(lambda: house.job(waits).job.reason_code or None, "it has been refused")
    document = exported(house, waits, tmp_path / "waits.scenario.yaml")
    assert document["expect"][-1]["reason"] == house.job(waits).job.reason_code  # type: ignore[index]
    said = played(house, tmp_path / "waits.scenario.yaml")
    assert said.code == 0, said.out + said.err
    house.ok("cancel", str(waits))


def test_it_must_be_said_as_what_to_export(house: House) -> None:
    house.configure(TWO).up()
    said = house.hodei("job", "export", str(house.submit("true")))
    assert said.code == 2
    assert "--scenario" in said.err
