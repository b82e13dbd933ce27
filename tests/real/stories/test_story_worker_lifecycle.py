"""Story US-012, the scheduler and the life of its workers: a job is assigned and told, a worker that fails gives its job
back, and one that comes back is used."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from agent_host import alive
from real.installation import pids_in, until
from real.stories.cluster import Cluster, one_job_per_node

pytestmark = pytest.mark.real


def test_scenario_a_job_is_assigned_to_an_available_worker(cluster: Cluster) -> None:
    # Given a job and an available worker
    cluster.of(*one_job_per_node("worker"))
    # When the scheduler assigns the job
    job = cluster.want("job")
    cluster.until_running(job)
    # Then the worker was told: it runs there, as one process of the agent
    assert cluster.node_of(job) == "worker"
    assert cluster.ok("node", "show", "worker", "-o", "json").json["runs"]
    # And the state of the job followed, each change with an event
    cluster.finish("job")
    (detail,) = cluster.ended(job)
    assert detail.job.state == "succeeded"
    history = [kind for kind in cluster.history(job) if kind.startswith("job.")]
    assert history == ["job.submitted", "job.scheduled", "job.started", "job.ended"]


def test_scenario_a_worker_fails_while_a_job_runs_on_it(cluster: Cluster, tmp_path: Path) -> None:
    # Given a job that runs on a worker
    cluster.of(*one_job_per_node("worker"))
    pids = tmp_path / "pids"
    job = cluster.want("job", command=["sh", "-c", f"echo $$ >>{pids}; exec sleep 600"])
    cluster.until_running(job)
    (first,) = pids_in(pids, 1)
    # And the worker fails unexpectedly: its agent and everything on it are gone at once
    wrapper = os.getpgid(first)
    agent = cluster.agent()
    os.kill(agent, signal.SIGKILL)
    os.killpg(wrapper, signal.SIGKILL)
    until(lambda: not alive(first), "the run is gone")
    # When that is noticed, then the scheduler is told, and puts the job back into the queue
    lost = until(lambda: [run for run in cluster.job(job).runs if run.state == "lost"], "the run is known to be lost")
    assert [run.attempt for run in lost] == [1]
    # And it is scheduled again
    pids_in(pids, 2)
    cluster.until_running(job)
    assert cluster.job(job).job.attempt == 2
    cluster.delete(job)


def test_scenario_a_worker_becomes_available_while_jobs_wait(cluster: Cluster) -> None:
    # Given a scheduler that looks for workers, and one that is on its way out
    cluster.of(*one_job_per_node("worker"))
    cluster.ok("node", "drain", "worker")
    job = cluster.want("job")
    said = cluster.until_refused(job)
    assert said.code == "NODE_CORDONED"
    # When the worker becomes available
    cluster.ok("node", "uncordon", "worker")
    # Then it is part of the next decision
    cluster.until_running(job)
    assert cluster.node_of(job) == "worker"
