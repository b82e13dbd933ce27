"""The strategies of `worker_selection`. Each profile has its own, so one server can use them all."""

from __future__ import annotations

import pytest

from real.acceptance.cluster import HOSTNAME, Cluster, node, scores, weights

pytestmark = pytest.mark.real

STRATEGIES = "".join(
    f'[scheduling.profiles.{name}]\nworker_selection = "{name}"\n'
    for name in ("least_loaded", "resource_balance", "bin_packing", "round_robin")
)


def test_least_loaded_selects_the_node_with_the_lowest_load(cluster: Cluster) -> None:
    # Given three nodes with loads of 80 %, 40 % and 60 %
    cluster.up_with(node("w1", cpu=10), node("w2", cpu=10), node("w3", cpu=10), config=STRATEGIES)
    for name, load in (("w1", 8), ("w2", 4), ("w3", 6)):
        cluster.run_on(name, cpu=load)
    # When a new job is placed
    job = cluster.run_job("job", profile="least_loaded")
    # Then it is placed on the node with 40 % load
    assert cluster.node_of(job) == "w2"
    assert scores(cluster.decision(job)) == {"w2": 60, "w3": 40, "w1": 20}
    assert "least_loaded" in weights(cluster.decision(job).chosen)


def test_resource_balance_selects_the_node_that_stays_most_balanced(cluster: Cluster) -> None:
    # Given nodes with different ratios of cpu to memory
    cluster.up_with(
        node("cores", cpu=8, memory="2Gi"),
        node("even", cpu=4, memory="4Gi"),
        node("memory", cpu=2, memory="8Gi"),
        config=STRATEGIES,
    )
    # When one job requests mainly cpu and another mainly memory
    cpu_heavy = cluster.run_job("cpu", cpu=2, memory="512Mi", profile="resource_balance")
    memory_heavy = cluster.run_job("memory", cpu="500m", memory="2Gi", profile="resource_balance")
    # Then each is placed on the node whose cpu and memory it uses in equal parts
    assert (cluster.node_of(cpu_heavy), cluster.node_of(memory_heavy)) == ("cores", "memory")
    # (a quarter of both on "cores"; on the other nodes more of one than of the other)
    assert scores(cluster.decision(cpu_heavy)) == {"cores": 100, "even": 62, "memory": 6}


def test_bin_packing_uses_as_few_nodes_as_possible(cluster: Cluster) -> None:
    # Given jobs of different sizes
    cluster.up_with(*(node(name, cpu=4) for name in ("w1", "w2", "w3")), config=STRATEGIES)
    # When they are placed, the largest first
    jobs = [cluster.run_job(f"job-{i}", cpu=size, profile="bin_packing") for i, size in enumerate((3, 2, 2, 1))]
    # Then they fill two nodes
    assert [cluster.node_of(job) for job in jobs] == ["w1", "w2", "w2", "w1"]
    # And a job as large as a node still fits
    whole = cluster.run_job("whole", cpu=4, profile="bin_packing")
    assert cluster.node_of(whole) == "w3"


def test_round_robin_uses_nodes_in_turn_whatever_their_load(cluster: Cluster) -> None:
    # Given nodes of which one is half full and one is much larger
    cluster.up_with(node("w1", cpu=4), node("w2", cpu=16), node("w3", cpu=4), config=STRATEGIES)
    cluster.run_job("ballast", cpu=2, profile="round_robin", node_selector={HOSTNAME: "w3"})
    # When six jobs are submitted one after the other
    jobs = [cluster.run_job(f"job-{i}", cpu="100m", profile="round_robin") for i in range(6)]
    # Then the nodes are used in turn, and the one that was used last comes last
    assert [cluster.node_of(job) for job in jobs] == ["w1", "w2", "w3", "w1", "w2", "w3"]
