"""Nodes that take a job, fail while they run one, and become available again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from agent_host import alive
from real.acceptance.cluster import Cluster, single_core_nodes
from real.installation import pids_in, until

pytestmark = pytest.mark.real


def test_a_job_is_placed_on_an_available_node_and_each_change_is_an_event(cluster: Cluster) -> None:
    # Given a job and an available node
    cluster.up_with(*single_core_nodes("worker"))
    # When the job is scheduled
    job = cluster.run_job("job")
    # Then it runs on the node
    assert cluster.node_of(job) == "worker"
    assert cluster.ok("node", "show", "worker", "-o", "json").json["runs"]
    # And each change of its state is an event
    cluster.finish("job")
    (detail,) = cluster.ended(job)
    assert detail.job.state == "succeeded"
    history = [kind for kind in cluster.history(job) if kind.startswith("job.")]
    assert history == ["job.submitted", "job.scheduled", "job.started", "job.ended"]


def test_a_job_whose_node_fails_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    # Given a job that runs on a node
    cluster.up_with(*single_core_nodes("worker"))
    pids = tmp_path / "pids"
    job = cluster.submit_job("job", command=["sh", "-c", f"echo $$ >>{pids}; exec sleep 600"])
    cluster.until_running(job)
    (first,) = pids_in(pids, 1)
    # When the node fails: its agent and all its processes are killed
    wrapper = os.getpgid(first)
    os.kill(cluster.agent(), signal.SIGKILL)
    os.killpg(wrapper, signal.SIGKILL)
    until(lambda: not alive(first), "the run has exited")
    # Then the run is lost
    lost = until(lambda: [run for run in cluster.job(job).runs if run.state == "lost"], "the run is lost")
    assert [run.attempt for run in lost] == [1]
    # And the job is scheduled again
    pids_in(pids, 2)
    cluster.until_running(job)
    assert cluster.job(job).job.attempt == 2
    cluster.cancel(job)


def test_a_pending_job_starts_when_a_node_becomes_available(cluster: Cluster) -> None:
    # Given a drained node and a pending job
    cluster.up_with(*single_core_nodes("worker"))
    cluster.ok("node", "drain", "worker")
    job = cluster.submit_job("job")
    assert cluster.until_refused(job).code == "NODE_CORDONED"
    # When the node becomes available
    cluster.ok("node", "uncordon", "worker")
    # Then the job starts on it
    cluster.until_running(job)
    assert cluster.node_of(job) == "worker"
