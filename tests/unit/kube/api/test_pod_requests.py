"""The resource requests of pods, by Kubernetes' formula."""

import pytest

from hodei.kube.api.quantities import DEFAULT_REQUESTS, RequestOptions, requests_of
from unit.kube.pod_factory import a_pod


def _container(cpu: str = "", always: bool = False, name: str = "c", **more: str) -> dict:
    requests = ({"cpu": cpu} if cpu else {}) | more
    return {"name": name, "resources": {"requests": requests}} | ({"restartPolicy": "Always"} if always else {})


@pytest.mark.parametrize(
    ("containers", "starting", "cpu"),
    [
        (["1", "2"], [], 3000),
        (["1"], [("5", False)], 5000),
        (["6"], [("5", False), ("2", False)], 6000),
        (["1"], [("1", True)], 2000),
        (["1"], [("1", True), ("3", False)], 4000),
        (["1"], [("3", False), ("1", True)], 3000),
        (["1"], [("1", True), ("3", False), ("1", True)], 4000),
        (["4"], [("1", True), ("2", False), ("1", True)], 6000),
    ],
    ids=[
        "containers add up",
        "the largest init container",
        "containers are more than any init container",
        "a sidecar counts with the containers",
        "a sidecar counts with the init containers after it",
        "but not with those before it",
        "sidecars before and after",
        "all sidecars count with the containers",
    ],
)
def test_init_containers_and_sidecars(containers, starting, cpu):
    pod = a_pod(
        containers=[_container(cpu) for cpu in containers],
        initContainers=[_container(cpu, always) for cpu, always in starting],
    )
    assert requests_of(pod) == {"cpu": cpu, "pods": 1}


def test_pod_level_resources_replace_the_sum_and_overhead_is_added():
    pod = a_pod(
        containers=[_container("1", **{"nvidia.com/gpu": "2"})],
        resources={"requests": {"cpu": "500m", "memory": "1Gi"}},
        overhead={"cpu": "100m"},
    )
    assert requests_of(pod) == {"cpu": 600, "memory": 2**30, "nvidia.com/gpu": 2, "pods": 1}


def test_a_limit_alone_is_a_request():
    pod = a_pod(containers=[{"resources": {"limits": {"cpu": "2", "nvidia.com/gpu": "1"}, "requests": {"cpu": "1"}}}])
    assert requests_of(pod) == {"cpu": 1000, "nvidia.com/gpu": 1, "pods": 1}


def test_ignored_resources_are_left_out_by_name_or_domain():
    pod = a_pod(requests={"cpu": "1", "a.com/x": "1", "b.com/y": "1", "c.com/z": "1"})
    assert requests_of(pod, RequestOptions(frozenset({"a.com/x", "b.com"}))) == {"cpu": 1000, "c.com/z": 1, "pods": 1}


def test_default_requests_apply_to_containers_that_declare_none():
    pod = a_pod(containers=[_container("1"), _container()])
    assert requests_of(pod, RequestOptions(default_requests=DEFAULT_REQUESTS)) == {
        "cpu": 1100,
        "memory": 400 * 2**20,
        "pods": 1,
    }


@pytest.mark.parametrize(
    ("reason", "cpu"),
    [("", 3000), ("Deferred", 3000), ("Infeasible", 2000)],
    ids=["in progress", "deferred", "infeasible"],
)
def test_a_pod_being_resized_counts_with_the_larger_request(reason, cpu):
    status = {
        "containerStatuses": [
            {"name": "c", "resources": {"requests": {"cpu": "1"}}, "allocatedResources": {"cpu": "2"}}
        ],
        "conditions": [{"type": "PodResizePending", "reason": reason}] if reason else [],
    }
    pod = a_pod(containers=[_container("3")], nodeName="n1", status=status)
    assert requests_of(pod)["cpu"] == cpu
