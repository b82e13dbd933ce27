"""A training job with checkpoints is suspended for an urgent job, resumed, and moved off a drained node.

Each attempt continues from the last checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from real.installation import Installation
from real.test_job_actions import begun, training
from real.test_placement import nodes

pytestmark = pytest.mark.real


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
    assert begun(installation, id, 2) == f"from {saved}\n"
    second = installation.job(id).runs[1].node

    installation.ok("node", "drain", second, "--wait")
    moved_at = int(begun(installation, id, 3).split()[1])
    assert moved_at >= saved
    (tmp_path / "model.enough").touch()

    (detail,) = installation.ended(id)
    assert (detail.job.state, detail.job.exit_code, detail.job.failure) == ("succeeded", 0, "")
    assert [run.state for run in detail.runs] == ["stopped", "stopped", "succeeded"]
    assert detail.runs[2].node != second
    assert int(model.read_text()) > moved_at
    assert all(run.checkpoint_at for run in detail.runs[:2])
    with installation.client() as client:
        requeued = [event.detail.get("reason_code") for event in client.events(job=id) if event.kind == "job.requeued"]
    assert requeued == ["DRAINED"]
