"""Parsing of job files: both forms, defaults, spellings, and every check."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hodei.jobfile.parse import decode_jobs, parse_job, parse_jobs
from hodei.model.affinity import NodeTerm, Requirement
from hodei.model.errors import InvalidInput
from hodei.model.job import (
    Affinity,
    BackendChoice,
    Batch,
    DataProcessing,
    Interactive,
    LongRunning,
    PreferredTerm,
    Serverless,
    Toleration,
)
from hodei.model.node import Location

MI, GI = 2**20, 2**30


def flat(**keys: Any) -> dict[str, Any]:
    return {"name": "job", "command": ["/bin/true"], **keys}


def full(*, metadata: dict[str, Any] | None = None, task: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "hodei/v1",
        "kind": "Job",
        "metadata": {"name": "job", **(metadata or {})},
        "spec": {"tasks": [{"command": ["/bin/true"], **(task or {})}], **spec},
    }


def problems_of(data: object) -> dict[str, str]:
    with pytest.raises(InvalidInput) as caught:
        parse_job(data)
    assert caught.value.problems
    return dict(caught.value.problems)


def test_the_short_and_the_full_form_parse_to_the_same_job() -> None:
    short = flat(
        project="team-a", labels={"a": "b"}, priority="high", env={"X": "1"}, cpu="500m", memory="1Gi",
        limits={"memory": "2Gi"}, count=3, timeout="5m", node_selector={"disk": "ssd"}, backend="local", retries=2,
    )  # fmt: skip
    long = full(
        metadata={"project": "team-a", "labels": {"a": "b"}},
        task={
            "count": 3, "env": {"X": "1"}, "node_selector": {"disk": "ssd"},
            "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        },
        priority="high", timeout="5m", backend="local", retries=2,
    )  # fmt: skip
    assert parse_job(short) == parse_job(long)


def test_a_string_command_is_run_by_the_shell() -> None:
    assert parse_job(flat(command="echo a | wc")).tasks[0].command == ("/bin/sh", "-c", "echo a | wc")


@pytest.mark.parametrize(
    ("command", "name"),
    [("echo hi", "echo"), (["/usr/bin/python3", "x.py"], "python3"), (["./My_Tool.sh"], "my-tool.sh"), (["é"], "job")],
    ids=["the first word", "without its directory", "invalid characters", "nothing usable"],
)
def test_a_job_without_a_name_gets_the_name_of_its_program(command: object, name: str) -> None:
    assert parse_job({"command": command}).name == name


@pytest.mark.parametrize(
    ("keys", "request_", "limits"),
    [
        ({}, {"cpu": 1000, "memory": 256 * MI}, {}),
        ({"cpu": 0}, {"cpu": 0, "memory": 256 * MI}, {}),
        ({"limits": {"cpu": 2}}, {"cpu": 2000, "memory": 256 * MI}, {"cpu": 2000}),
        ({"cpu": 1, "limits": {"cpu": 2}}, {"cpu": 1000, "memory": 256 * MI}, {"cpu": 2000}),
        ({"resources": {"example.com/fpga": 2}}, {"cpu": 1000, "memory": 256 * MI, "example.com/fpga": 2}, {}),
        ({"resources": {"requests": {"mem": "1Gi"}}, "storage": "1Gi"},
         {"cpu": 1000, "memory": GI, "ephemeral-storage": GI}, {}),
        ({"cpu": 0.25, "gpu": "500m"}, {"cpu": 250, "gpu": 500, "memory": 256 * MI}, {}),
    ],
    ids=["defaults", "zero is kept", "a limit sets the request", "both", "a custom name", "the shape of kubernetes",
         "fractions"],
)  # fmt: skip
def test_requests_and_limits(keys: dict[str, Any], request_: dict[str, int], limits: dict[str, int]) -> None:
    task = parse_job(flat(**keys)).tasks[0]
    assert (task.request, task.limits) == (request_, limits)


ZONE = NodeTerm((Requirement("zone", "In", ("a", "b")),))
SSD = NodeTerm((Requirement("disk", "In", ("ssd",)),))
AFFINITY = Affinity((ZONE, SSD), (PreferredTerm(10, SSD),))


@pytest.mark.parametrize(
    "affinity",
    [
        {"required": ["zone in (a, b)", "disk=ssd"], "preferred": [{"weight": 10, "match": "disk=ssd"}]},
        {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]},
                        {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]},
                    ]
                },
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 10,
                        "preference": {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]},
                    }
                ],
            }
        },
    ],
    ids=["short", "kubernetes"],
)
def test_affinity_in_either_shape(affinity: dict[str, Any]) -> None:
    assert parse_job(flat(affinity=affinity)).tasks[0].affinity == AFFINITY


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("gpu=yes:NoSchedule", Toleration("gpu", "Equal", "yes", "NoSchedule")),
        ("gpu:NoExecute", Toleration("gpu", "Exists", "", "NoExecute")),
        ("example.com/gpu", Toleration("example.com/gpu", "Exists")),
        ({"operator": "Exists"}, Toleration(operator="Exists")),
        ({"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
         Toleration("a", "Exists", "", "NoExecute", 60)),
    ],
    ids=["pair and effect", "key and effect", "key", "everything", "for some time"],
)  # fmt: skip
def test_tolerations_in_either_shape(value: object, expected: Toleration) -> None:
    assert parse_job(flat(tolerations=[value])).tasks[0].tolerations == (expected,)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("any", BackendChoice()),
        ("local", BackendChoice("specific", ("local",))),
        ({"specific": ["a", "b"]}, BackendChoice("specific", ("a", "b"))),
        ({"preferred": ["a"]}, BackendChoice("preferred", ("a",))),
    ],
    ids=["any", "a name", "specific", "preferred"],
)
def test_backend_choices(value: object, expected: BackendChoice) -> None:
    assert parse_job(flat(backend=value)).backend == expected


def test_near_is_kept_in_millionths_of_a_degree() -> None:
    near = {"region": "eu", "zone": "eu-1", "datacenter": "d", "rack": "r7", "lat": 40.4168, "lng": -3.7038}
    assert parse_job(flat(near=near)).near == Location("eu", "eu-1", "d", "r7", 40_416_800, -3_703_800)


@pytest.mark.parametrize(
    ("workload", "expected", "general"),
    [
        ("interactive", Interactive(), {}),
        ({"type": "long-running", "max_duration": "1h", "restart_policy": "Always"}, LongRunning(3_600_000),
         {"timeout_ms": 3_600_000, "restart": "always"}),
        ({"type": "batch", "estimated_duration": "10m", "max_retries": 3}, Batch(),
         {"estimate_ms": 600_000, "retries": 3}),
        ({"type": "serverless", "timeout": 30, "cold_start_acceptable": False}, Serverless(False),
         {"timeout_ms": 30_000}),
        ({"type": "data-processing", "input_size": "1Gi", "output_size": 5}, DataProcessing(GI, 5), {}),
        ({"type": "interactive", "max_execution_time": "8h", "idle_timeout": "20m"}, Interactive(1_200_000),
         {"timeout_ms": 28_800_000}),
    ],
    ids=["a type alone", "long-running", "batch", "serverless", "data-processing", "interactive"],
)  # fmt: skip
def test_a_workload_fills_the_general_keys(workload: object, expected: object, general: dict[str, Any]) -> None:
    spec = parse_job(flat(workload=workload))
    assert spec.workload == expected
    assert {key: getattr(spec, key) for key in general} == general


def test_a_workload_may_repeat_a_general_key_but_not_contradict_it() -> None:
    workload = {"type": "interactive", "max_execution_time": "1h"}
    assert parse_job(flat(workload=workload, timeout="60m")).timeout_ms == 3_600_000
    text = problems_of(flat(workload=workload, timeout="2h"))["timeout"]
    assert "timeout is 2h" in text
    assert "workload.max_execution_time is 1h" in text


@pytest.mark.parametrize(
    ("deadline", "at_ms"),
    [("1970-01-02T00:00:00Z", 86_400_000), ("1970-01-02T02:00:00+02:00", 86_400_000), ("1h", 3_601_000), (60, 61_000)],
    ids=["a time", "a time with a zone", "a duration", "seconds"],
)
def test_a_deadline_is_a_time_or_counts_from_submission(deadline: object, at_ms: int) -> None:
    assert parse_job(flat(deadline=deadline), now_ms=1000).deadline_ms == at_ms


def test_kubernetes_spelling_is_accepted_everywhere() -> None:
    snake_case = flat(node_selector={"a": "b"}, scheduling_timeout="1h", gpu=1, gpu_type="a100")
    camel_case = flat(nodeSelector={"a": "b"}, schedulingTimeout="1h", gpu=1, gpuType="a100")
    assert parse_job(camel_case) == parse_job(snake_case)
    snake = full()
    snake["api_version"] = snake.pop("apiVersion")
    assert parse_job(snake) == parse_job(full())
    assert "two spellings" in problems_of(flat(node_selector={}, nodeSelector={}))["nodeSelector"]


def test_null_values_count_as_not_given() -> None:
    assert parse_job(flat(env=None, labels=None, cpu=None)) == parse_job(flat())


@pytest.mark.parametrize(
    ("keys", "path", "text"),
    [
        ({"name": "A_b"}, "name", "try 'a-b'"),
        ({"name": ""}, "name", "is not a job name"),
        ({"project": "a.b"}, "project", "is not a name"),
        ({"labels": {"-x": "y"}}, "labels", "is not a label key"),
        ({"labels": {"x": "a b"}}, "labels.x", "is not a label value"),
        ({"labels": {"x": 1}}, "labels.x", "expected a string, got a number; put it in quotes"),
        ({"priority": "hgih"}, "priority", "did you mean 'high'?"),
        ({"priority": 2**31 + 1}, "priority", "out of range"),
        ({"priority": True}, "priority", "got true"),
        ({"command": []}, "command", "empty"),
        ({"command": ""}, "command", "missing"),
        ({"command": ["a\0b"]}, "command", "NUL"),
        ({"command": 3}, "command", "expected a list of strings or a string, got a number"),
        ({"command": ["x" * 131_072] * 2}, "command", "longer than 128 KiB"),
        ({"env": {"1A": "x"}}, "env", "is not the name of a variable"),
        ({"env": {"A": "\0"}}, "env", "NUL"),
        ({"env": {"A": 1.5}}, "env.A", "put it in quotes"),
        ({"workdir": "tmp"}, "workdir", "absolute"),
        ({"count": 0}, "count", "from 1 to 100000"),
        ({"count": 100_001}, "count", "from 1 to 100000"),
        ({"count": 1.5}, "count", "expected a whole number"),
        ({"cpu": -1}, "cpu", "negative"),
        ({"cpu": True}, "cpu", "got true"),
        ({"cpu": float("nan")}, "cpu", "not an amount"),
        ({"cpu": float("inf")}, "cpu", "not an amount"),
        ({"memory": "1e30"}, "memory", "larger than any machine"),
        ({"memory": "8GB"}, "memory", "leave out the B"),
        ({"memory": 10**400}, "memory", "out of range"),
        ({"memory": "9" * 31}, "memory", "larger than any machine"),
        ({"memroy": "1Gi"}, "memroy", "did you mean 'memory'?"),
        ({"resources": {"requests": {"memroy": 1}}}, "resources.requests.memroy", "did you mean 'memory'?"),
        ({"resources": {"cpu": 1}, "cpu": 1}, "resources.cpu", "given twice"),
        ({"cpu": 2, "limits": {"cpu": 1}}, "limits.cpu", "the limit 1 is below the request 2"),
        ({"gpu_type": "a100"}, "gpu_type", "without a gpu"),
        ({"affinity": {"required": ["zone in ()"]}}, "affinity.required[0]", "at least one value"),
        ({"affinity": {"required": [""]}}, "affinity.required[0]", "empty selector"),
        ({"affinity": {"preferred": [{"weight": 0, "match": "a"}]}}, "affinity.preferred[0].weight", "from 1 to 100"),
        ({"tolerations": ["a:NoExcute"]}, "tolerations[0]", "did you mean 'NoExecute'?"),
        ({"tolerations": [{"value": "x"}]}, "tolerations[0]", "needs operator: Exists"),
        ({"backend": {"specific": ["a"], "preferred": ["b"]}}, "backend", "not both"),
        ({"near": {"lat": 1}}, "near", "lat and lng belong together"),
        ({"near": {"lat": float("nan"), "lng": 1}}, "near.lat", "out of range"),
        ({"workload": "bach"}, "workload", "did you mean 'batch'?"),
        ({"workload": {"type": "long_running"}}, "workload.type", "did you mean 'long-running'?"),
        ({"workload": {}}, "workload.type", "missing key"),
        ({"timeout": "soon"}, "timeout", "is not a duration"),
        ({"timeout": -1}, "timeout", "is not a duration"),
        ({"deadline": "2030-01-31T18:00"}, "deadline", "time zone"),
        ({"deadline": "2030-13-31T18:00Z"}, "deadline", "is not a time"),
        ({"restart": "maybe"}, "restart", "never, on_failure or always"),
        ({"retries": -1}, "retries", "from 0 to 1000"),
        ({"user": "root"}, "user", "unknown key"),
        ({"annotations": {"a": "\ud800"}}, "annotations", "surrogate"),
        ({"name": "a\u202eb"}, "name", "\\u202e"),
    ],
)  # fmt: skip
def test_an_error_has_its_path_and_its_reason(keys: dict[str, Any], path: str, text: str) -> None:
    assert text in problems_of(flat(**keys))[path]


@pytest.mark.parametrize(
    ("change", "path", "text"),
    [
        ({"apiVersion": "hodei/v2"}, "apiVersion", "is not one of hodei/v1"),
        ({"metadata": {}}, "metadata.name", "missing key"),
        ({"spec": {"tasks": []}}, "spec.tasks", "empty"),
        ({"spec": {"tasks": [{"command": "x"}] * 65}}, "spec.tasks", "at most 64"),
        ({"spec": {"tasks": [{"command": "x", "name": "a"}] * 2}}, "spec.tasks[1].name", "two tasks"),
        ({"spec": {"tasks": [{"command": "x", "count": 60_000}] * 2}}, "spec.tasks", "more than 100000 members"),
        ({"spec": {"tasks": [{}]}}, "spec.tasks[0].command", "missing"),
        ({"spec": {"tasks": [{"command": "x", "resources": {"requests": {"memroy": 1}}}]}},
         "spec.tasks[0].resources.requests.memroy", "did you mean 'memory'?"),
        ({"spec": {"tasks": [{"command": ["x" * 100_000]}] * 11}}, "spec", "larger than 1024 KiB"),
    ],
    ids=["another version", "no name", "no tasks", "too many tasks", "same name", "too many members", "no command",
         "a misspelt nested key", "too large in total"],
)  # fmt: skip
def test_errors_of_the_full_form(change: dict[str, Any], path: str, text: str) -> None:
    assert text in problems_of(full() | change)[path]


def test_wrong_types_and_wrong_values_are_reported_together() -> None:
    document = full() | {
        "apiVersion": 1,
        "metadata": {"labels": {"a": 5, "b": "c d"}},
        "spec": {
            "priority": 10**30,
            "timeout": "soon",
            "tasks": [{"command": "x", "count": "many", "resources": {"requests": {"cpu": True, "memory": "8GB"}}}, 7,
                      {"command": "x", "name": "A b"}],
        },
    }  # fmt: skip
    assert set(problems_of(document)) == {
        "apiVersion", "metadata.name", "metadata.labels.a", "metadata.labels.b", "spec.priority", "spec.timeout",
        "spec.tasks[0].count", "spec.tasks[0].resources.requests.cpu", "spec.tasks[0].resources.requests.memory",
        "spec.tasks[1]", "spec.tasks[2].name",
    }  # fmt: skip
    assert problems_of(flat(count=10**30))["count"] == f"out of range: {10**30} is not from 1 to 100000"
    flat_problems = problems_of(flat(cpu="lots", after={"of": 5}, timeout="x", ports=["a", 99999], env=[]))
    assert set(flat_problems) == {"cpu", "after.of", "timeout", "ports[0]", "ports[1]", "env"}


def test_all_errors_are_reported_at_once() -> None:
    found = problems_of(flat(nmae="x", cpu=True, memory="8GB", tolerations=["a:b"], labels={"x": "-"}, priority="hi"))
    assert set(found) == {"nmae", "cpu", "memory", "tolerations[0]", "labels.x", "priority"}


def test_many_jobs_are_a_list_or_under_jobs_and_paths_name_the_job() -> None:
    assert [spec.name for spec in parse_jobs([flat(name="a"), full()])] == ["a", "job"]
    assert len(parse_jobs({"jobs": [flat(), flat()]})) == 2
    assert len(parse_jobs(flat())) == 1
    with pytest.raises(InvalidInput) as caught:
        parse_jobs({"jobs": [flat(), flat(cpu="x"), flat(bogus=1)]})
    assert [path for path, _ in caught.value.problems] == ["jobs[1].cpu", "jobs[2].bogus"]
    with pytest.raises(InvalidInput, match="at most 10000"):
        parse_jobs([flat()] * 10_001)


@pytest.mark.parametrize(
    "body", [flat(), full(), [flat(), flat()], [full()], {"jobs": [flat()]}, {"jobs": [full(), flat()]}, []],
    ids=["flat", "full", "list", "list of full", "bulk", "mixed bulk", "none"],
)  # fmt: skip
def test_a_body_parses_to_the_same_as_its_data(body: Any) -> None:
    raw = msgspec.json.encode(body)
    assert decode_jobs(raw, "application/json; charset=utf-8") == parse_jobs(body)
    if body:
        assert decode_jobs(raw, "application/yaml") == parse_jobs(body)


def test_a_body_of_several_yaml_documents_holds_several_jobs() -> None:
    raw = b"name: a\ncommand: x\n---\nname: b\ncommand: y\n"
    assert [spec.name for spec in decode_jobs(raw, "application/yaml")] == ["a", "b"]


@pytest.mark.parametrize(
    ("body", "path"),
    [(flat(cpu="x"), "cpu"), ([flat(cpu="x")], "[0].cpu"), ({"jobs": [flat(cpu="x")]}, "jobs[0].cpu"),
     (flat(cpus="x"), "cpus"), ([flat(cpus="x")], "[0].cpus"), ({"jobs": [flat(cpus="x")]}, "jobs[0].cpus")],
    ids=["fast one", "fast list", "fast bulk", "slow one", "slow list", "slow bulk"],
)  # fmt: skip
def test_the_fast_and_the_slow_path_report_the_same_paths(body: Any, path: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode_jobs(msgspec.json.encode(body), "application/json")
    assert [where for where, _ in caught.value.problems] == [path]


def test_equal_parts_of_jobs_share_one_object() -> None:
    first, second = parse_jobs([flat(name=name, cpu="2", memory="1Gi", labels={"a": "b"}) for name in ("a", "b")])
    assert first.tasks[0].request is second.tasks[0].request
    assert first.labels is second.labels
