"""A training job with checkpoints: suspended for something urgent, resumed, moved off a node that is drained, done.

At every turn it goes on from what it had saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from real.house import House
from real.test_life import begun, training
from real.test_placement import nodes

pytestmark = pytest.mark.real


def test_a_training_job_is_suspended_resumed_moved_off_a_drained_node_and_ends_right(
    house: House, tmp_path: Path
) -> None:
    house.configure(nodes("a 1 1Gi", "b 1 1Gi")).up()
    model = tmp_path / "model"
    id = training(house, model, labels={"what": "training"})
    first = house.job(id).runs[0].node

    house.ok("checkpoint", str(id))
    house.ok("suspend", str(id))
    held = house.until_state(id, "held")
    assert held.job.reason_code == "SUSPENDED"
    saved = int(model.read_text())

    urgent = house.submit("true", cpu=1, node_selector={"kubernetes.io/hostname": first}, priority="high")
    assert house.ended(urgent)[0].job.state == "succeeded"

    house.ok("resume", str(id))
    assert begun(house, id, 2) == f"from {saved}\n"
    second = house.job(id).runs[1].node

    house.ok("node", "drain", second, "--wait")
    moved_at = int(begun(house, id, 3).split()[1])
    assert moved_at >= saved
    (tmp_path / "model.enough").touch()

    (detail,) = house.ended(id)
    assert (detail.job.state, detail.job.exit_code, detail.job.failure) == ("succeeded", 0, "")
    assert [run.state for run in detail.runs] == ["stopped", "stopped", "succeeded"]
    assert detail.runs[2].node != second
    assert int(model.read_text()) > moved_at
    assert all(run.checkpoint_at for run in detail.runs[:2])
    with house.client() as client:
        told = [event.detail.get("reason_code") for event in client.events(job=id) if event.kind == "job.requeued"]
    assert told == ["DRAINED"]
