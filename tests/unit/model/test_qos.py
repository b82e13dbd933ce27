"""Quality of service: Kubernetes' rule, as a table."""

from __future__ import annotations

import pytest

from hodei.jobfile.parse import parse_job
from hodei.model.job import JobSpec, TaskSpec, cpu_shares, job_qos, oom_score_adj, qos

FULL = {"cpu": 1000, "memory": 2**30}


@pytest.mark.parametrize(
    ("request_", "limits", "expected"),
    [
        pytest.param(FULL, FULL, "guaranteed", id="limits equal to requests"),
        pytest.param({}, FULL, "guaranteed", id="a limit without a request is also the request"),
        pytest.param(FULL | {"gpu": 1000}, FULL, "guaranteed", id="only cpu and memory matter"),
        pytest.param(FULL, {}, "burstable", id="no limits"),
        pytest.param(FULL, {"memory": 2**30}, "burstable", id="a limit for one of them"),
        pytest.param(FULL, {"cpu": 2000, "memory": 2**30}, "burstable", id="a limit above its request"),
        pytest.param({"cpu": 0, "memory": 2**30}, FULL, "burstable", id="a request of zero below a limit"),
        pytest.param({}, {"cpu": 1000}, "burstable", id="one limit and nothing else"),
        pytest.param({"cpu": 1}, {}, "burstable", id="a small request of one"),
        pytest.param({}, {}, "best-effort", id="nothing"),
        pytest.param({"cpu": 0, "memory": 0}, {"cpu": 0}, "best-effort", id="zeros count as nothing"),
        pytest.param({"cpu": 0, "gpu": 1000}, {"gpu": 1000}, "best-effort", id="other resources make no difference"),
    ],
)
def test_the_class_of_a_task(request_, limits, expected):
    assert qos(TaskSpec(request=request_, limits=limits)) == expected


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        pytest.param({}, "burstable", id="nothing given: the defaults are its requests"),
        pytest.param({"cpu": 0, "memory": 0}, "best-effort", id="zero given"),
        pytest.param({"limits": {"cpu": 1, "memory": "1Gi"}}, "guaranteed", id="only limits given"),
        pytest.param({"limits": {"memory": "1Gi"}}, "burstable", id="the default of the other has no limit"),
    ],
)
def test_the_class_of_a_job_file(document, expected):
    assert job_qos(parse_job({"name": "a", "command": ["x"], **document})) == expected


def test_a_job_has_the_lowest_class_of_its_tasks():
    guaranteed, burstable, best_effort = TaskSpec("a", limits=FULL), TaskSpec("b", request=FULL), TaskSpec("c")
    assert job_qos(JobSpec(name="j", tasks=(guaranteed, guaranteed))) == "guaranteed"
    assert job_qos(JobSpec(name="j", tasks=(guaranteed, burstable))) == "burstable"
    assert job_qos(JobSpec(name="j", tasks=(burstable, best_effort, guaranteed))) == "best-effort"


@pytest.mark.parametrize(
    ("request_", "limits", "expected"),
    [
        pytest.param(FULL, FULL, -997, id="guaranteed"),
        pytest.param({}, {}, 1000, id="best-effort"),
        pytest.param({"memory": 4 << 30}, {}, 750, id="burstable, a quarter of the memory"),
        pytest.param({"cpu": 100}, {}, 999, id="burstable, no memory"),
        pytest.param({"memory": 16 << 30}, {}, 3, id="burstable, all of the memory"),
    ],
)
def test_the_oom_score_is_that_of_the_kubelet(request_, limits, expected):
    assert oom_score_adj(TaskSpec(request=request_, limits=limits), 16 << 30) == expected


@pytest.mark.parametrize(
    ("request_", "limits", "expected"),
    [
        pytest.param({"cpu": 1500}, {}, 1536, id="by the request"),
        pytest.param({}, {"cpu": 1000}, 1024, id="a limit without a request is also the request"),
        pytest.param({}, {}, 2, id="the minimum for best-effort"),
        pytest.param({"cpu": 10_000_000}, {}, 262_144, id="at most the maximum"),
    ],
)
def test_cpu_shares_follow_the_request(request_, limits, expected):
    assert cpu_shares(TaskSpec(request=request_, limits=limits)) == expected
