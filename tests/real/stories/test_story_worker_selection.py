"""Story US-009, algorithms to select a worker: each is the choice of a profile, and one server can have them all."""

from __future__ import annotations

import pytest

from real.stories.cluster import HOSTNAME, Cluster, node, scores, weights

pytestmark = pytest.mark.real

STRATEGIES = "".join(
    f'[scheduling.profiles.{name}]\nworker_selection = "{name}"\n'
    for name in ("least_loaded", "resource_balance", "bin_packing", "round_robin")
)


def test_least_loaded_selects_the_worker_with_the_lowest_load(cluster: Cluster) -> None:
    # Given three workers with loads of 80 %, 40 % and 60 %
    cluster.of(node("w1", cpu=10), node("w2", cpu=10), node("w3", cpu=10), config=STRATEGIES)
    for worker, load in (("w1", 8), ("w2", 4), ("w3", 6)):
        cluster.fill(worker, cpu=load)
    # When a worker is selected for a new job
    job = cluster.run("job", profile="least_loaded")
    # Then it is the one with 40 % load
    assert cluster.node_of(job) == "w2"
    assert scores(cluster.decision(job)) == {"w2": 60, "w3": 40, "w1": 20}
    assert "least_loaded" in weights(cluster.decision(job).chosen)


def test_resource_balance_selects_the_worker_that_balances_the_cluster_best(cluster: Cluster) -> None:
    # Given a cluster whose workers have different ratios of cpu to memory
    cluster.of(
        node("cores", cpu=8, memory="2Gi"),
        node("even", cpu=4, memory="4Gi"),
        node("memory", cpu=2, memory="8Gi"),
        config=STRATEGIES,
    )
    # When resource balance is applied
    hungry_for_cpu = cluster.run("cpu", cpu=2, memory="512Mi", profile="resource_balance")
    hungry_for_memory = cluster.run("memory", cpu="500m", memory="2Gi", profile="resource_balance")
    # Then each job goes to the worker that it leaves used to equal shares
    assert (cluster.node_of(hungry_for_cpu), cluster.node_of(hungry_for_memory)) == ("cores", "memory")
    # (a quarter of the cores and a quarter of the memory; on the others one would be left stranded)
    assert scores(cluster.decision(hungry_for_cpu)) == {"cores": 100, "even": 62, "memory": 6}


def test_bin_packing_packs_jobs_of_different_sizes_with_little_fragmentation(cluster: Cluster) -> None:
    # Given jobs of different sizes
    cluster.of(*(node(name, cpu=4) for name in ("w1", "w2", "w3")), config=STRATEGIES)
    # When bin packing is applied to them, the largest first
    jobs = [cluster.run(f"job-{i}", cpu=size, profile="bin_packing") for i, size in enumerate((3, 2, 2, 1))]
    # Then they fill as few workers as they can
    assert [cluster.node_of(job) for job in jobs] == ["w1", "w2", "w2", "w1"]
    # And what is left is in one piece: a job as large as a worker still fits
    whole = cluster.run("whole", cpu=4, profile="bin_packing")
    assert cluster.node_of(whole) == "w3"


def test_round_robin_lets_workers_take_turns_whatever_their_load(cluster: Cluster) -> None:
    # Given workers of which one is half full and one is much larger
    cluster.of(node("w1", cpu=4), node("w2", cpu=16), node("w3", cpu=4), config=STRATEGIES)
    cluster.run("ballast", cpu=2, profile="round_robin", node_selector={HOSTNAME: "w3"})
    # When six jobs come one after the other
    jobs = [cluster.run(f"job-{i}", cpu="100m", profile="round_robin") for i in range(6)]
    # Then they go round, and the worker that had work last is the last to be asked
    assert [cluster.node_of(job) for job in jobs] == ["w1", "w2", "w3", "w1", "w2", "w3"]
