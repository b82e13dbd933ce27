"""The scheduling cycle of a job: filter, score, bind."""

from __future__ import annotations

import pytest

from real.acceptance.cluster import Cluster, node, nodes_refusing, scores, weights

pytestmark = pytest.mark.real


def test_a_job_is_scheduled_through_the_complete_pipeline(cluster: Cluster) -> None:
    # Given a job with resource requests
    cluster.up_with(node("large", cpu=8), node("middle", cpu=4), node("small", cpu=1))
    # When the scheduler processes the job
    job = cluster.run_job("job", cpu=2)
    # Then it considers all nodes, filters them, scores the feasible ones and binds
    decision = cluster.decision(job)
    assert decision.nodes == 3
    assert decision.feasible == 2
    assert set(scores(decision)) == {"large", "middle"}
    assert cluster.history(job) == ["job.submitted", "job.scheduled", "job.started"]
    # And the job is placed on the node with the best score
    assert cluster.node_of(job) == decision.chosen.node == "large"


def test_the_filter_phase_eliminates_infeasible_nodes(cluster: Cluster) -> None:
    # Given a job that requests a GPU, and nodes that have none
    cluster.up_with(node("plain-1", cpu=8), node("plain-2", cpu=8), node("with-gpu", cpu=2, gpu=1))
    # When the scheduler filters
    job = cluster.run_job("job", gpu=1)
    # Then nodes without a GPU are not feasible
    assert list(scores(cluster.decision(job))) == ["with-gpu"]
    # And `why` of another such job, which is pending, has a reason for each node
    waiting = cluster.submit_job("another", gpu=1)
    assert nodes_refusing(cluster.until_refused(waiting), "INSUFFICIENT_GPU") == {"plain-1", "plain-2", "with-gpu"}
    assert cluster.why(waiting, "plain-1").code == "INSUFFICIENT_GPU"
    assert "gpu" in cluster.ok("why", str(waiting)).out


CRITERIA = """
[scheduling.profiles.by-cost]
scores = {cost = 100}
[scheduling.profiles.by-load]
scores = {resource = 70, load = 30}
"""


def test_the_score_phase_ranks_feasible_nodes(cluster: Cluster) -> None:
    # Given five feasible nodes
    nodes = [node(f"n{i}", cpu=i, cost=float(i)) for i in range(2, 7)]
    cluster.up_with(*nodes, config=CRITERIA)
    for profile, criteria, best in (
        ("by-cost", {"cost": 100}, "n2"),
        ("by-load", {"resource": 70, "load": 30}, "n6"),
    ):
        # When the scheduler scores
        job = cluster.run_job(profile, profile=profile)
        decision = cluster.decision(job)
        # Then each has a score from the configured plugins and weights
        assert decision.feasible == 5
        assert weights(decision.chosen) == criteria
        # And the node with the highest score is selected
        ranked = scores(decision)
        assert cluster.node_of(job) == decision.chosen.node == max(ranked, key=lambda name: ranked[name]) == best
        cluster.finish(profile)
        cluster.ended(job)


def test_the_bind_phase_starts_the_job_on_the_selected_node(cluster: Cluster) -> None:
    # Given a node for the job
    cluster.up_with(node("worker", cpu=2))
    job = cluster.submit_job("job", command=["sh", "-c", "echo $HODEI_RUN_ID runs on $HODEI_NODE"])
    # When the scheduler binds
    (detail,) = cluster.ended(job)
    # Then the job is scheduled before it starts
    events = {event.kind: event for event in cluster.events(job)}
    assert events["job.scheduled"].seq < events["job.started"].seq
    assert events["job.scheduled"].detail["nodes"] == ["worker"]
    assert detail.job.scheduled_at <= detail.job.started_at
    # And it runs on the node
    assert (detail.job.state, detail.runs[0].node) == ("succeeded", "worker")
    assert cluster.log_of(job) == f"{job}.0.1 runs on worker\n"
