"""Story US-007, the scheduling framework: a job goes through informing, filtering, scoring and binding to a worker."""

from __future__ import annotations

import pytest

from real.stories.cluster import Cluster, node, refusing, scores, weights

pytestmark = pytest.mark.real


def test_a_job_is_scheduled_through_the_complete_pipeline(cluster: Cluster) -> None:
    # Given a job with resource requirements in the queue
    cluster.of(node("large", cpu=8), node("middle", cpu=4), node("small", cpu=1))
    # When the scheduler processes the job
    job = cluster.run("job", cpu=2)
    # Then it goes through the four phases: it knows of all workers, filters, scores what is left, and binds
    decision = cluster.decision(job)
    assert decision.nodes == 3
    assert decision.feasible == 2
    assert set(scores(decision)) == {"large", "middle"}
    assert cluster.history(job) == ["job.submitted", "job.scheduled", "job.started"]
    # And the job is assigned to the most suitable worker
    assert cluster.node_of(job) == decision.chosen.node == "large"


def test_the_filter_phase_eliminates_infeasible_workers(cluster: Cluster) -> None:
    # Given a job that needs a GPU, and workers that have none
    cluster.of(node("plain-1", cpu=8), node("plain-2", cpu=8), node("with-gpu", cpu=2, gpu=1))
    # When the scheduler filters
    job = cluster.run("job", gpu=1)
    # Then workers without a GPU are no candidates
    assert list(scores(cluster.decision(job))) == ["with-gpu"]
    # (and another such job, which has to wait, is told so for each of them)
    waiting = cluster.want("another", gpu=1)
    assert refusing(cluster.until_refused(waiting), "INSUFFICIENT_GPU") == {"plain-1", "plain-2", "with-gpu"}
    assert cluster.why(waiting, "plain-1").code == "INSUFFICIENT_GPU"
    assert "gpu" in cluster.ok("why", str(waiting)).out


CRITERIA = """
[scheduling.profiles.thrifty]
scores = {cost = 100}
[scheduling.profiles.roomy]
scores = {resource = 70, load = 30}
"""


def test_the_score_phase_ranks_feasible_workers(cluster: Cluster) -> None:
    # Given five workers that could take a job
    workers = [node(f"w{i}", cpu=i, cost=float(i)) for i in range(2, 7)]
    cluster.of(*workers, config=CRITERIA)
    for profile, criteria, best in (
        ("thrifty", {"cost": 100}, "w2"),
        ("roomy", {"resource": 70, "load": 30}, "w6"),
    ):
        # When the scheduler scores
        job = cluster.run(profile, profile=profile)
        decision = cluster.decision(job)
        # Then each has a score by the criteria that were configured
        assert decision.feasible == 5
        assert weights(decision.chosen) == criteria
        # And the worker with the highest score is selected
        ranked = scores(decision)
        assert cluster.node_of(job) == decision.chosen.node == max(ranked, key=lambda name: ranked[name]) == best
        cluster.finish(profile)
        cluster.ended(job)


def test_the_bind_phase_assigns_the_job_to_the_worker(cluster: Cluster) -> None:
    # Given a worker that was selected
    cluster.of(node("worker", cpu=2))
    job = cluster.want("job", command=["sh", "-c", "echo $HODEI_RUN_ID runs on $HODEI_NODE"])
    # When the scheduler binds
    (detail,) = cluster.ended(job)
    # Then the job's state has become "scheduled", before anything of it ran
    history = {event.kind: event for event in cluster.events(job)}
    assert history["job.scheduled"].seq < history["job.started"].seq
    assert history["job.scheduled"].detail["nodes"] == ["worker"]
    assert detail.job.scheduled_at <= detail.job.started_at
    # And the worker was told, and has done it
    assert (detail.job.state, detail.runs[0].node) == ("succeeded", "worker")
    assert cluster.log_of(job) == f"{job}.0.1 runs on worker\n"
