"""Gangs, binding, distribution and checkpoints in job files: parsing, mistakes and rendering."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.jobfile.parse import parse_job
from hodei.jobfile.render import job_document
from hodei.jobfile.sections.gang import SIGNALS
from hodei.jobfile.values import format_numbers, parse_numbers
from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.errors import InvalidInput
from hodei.model.job import Checkpoint, Distribution, GangRules, JobSpec, TransferCost

ALL_KEYS = """
apiVersion: hodei/v1
kind: Job
metadata: {name: train}
spec:
  gang:
    topology: {key: rack, required: false}
    on_failure: repair
    assembly_timeout: 5m
    elastic: true
  distribution:
    model: hub_and_spoke
    hub: leader
    transfer_costs:
      - {between: [a, b], cost: 0.09}
      - {between: [c, b], cost: 2}
  checkpoint:
    signal: SIGUSR1
    timeout: 45s
    file: /srv/checkpoint.json
  tasks:
    - name: leader
      command: [./lead]
    - name: worker
      count: 8
      min: 4
      backends: [a, b, a]
      binding: numa
      command: [./work]
      resources: {requests: {cpu: 2, gpu: 1}}
"""


def flat(**keys: Any) -> dict[str, Any]:
    return {"name": "job", "command": ["/bin/true"], **keys}


def two_tasks(
    *, first: dict[str, Any] | None = None, second: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    tasks = [{"name": "leader", "command": "a", **(first or {})}, {"name": "worker", "command": "b", **(second or {})}]
    return {"apiVersion": "hodei/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": {"tasks": tasks, **spec}}


def problems_of(data: object) -> dict[str, str]:
    with pytest.raises(InvalidInput) as caught:
        parse_job(data)
    return dict(caught.value.problems)


def job_with_all_keys() -> JobSpec:
    (document,) = load_yaml(ALL_KEYS)
    return parse_job(document)


def test_every_key_reaches_the_model() -> None:
    spec = job_with_all_keys()
    leader, worker = spec.tasks
    assert (leader.min_count, leader.backends, leader.binding) == (0, (), "")
    assert (worker.count, worker.min_count, worker.backends, worker.binding) == (8, 4, ("a", "b"), "numa")
    assert spec.gang == GangRules("rack", False, "repair", 300_000, True)
    costs = (TransferCost(("a", "b"), 90), TransferCost(("c", "b"), 2000))
    assert spec.distribution == Distribution("hub_and_spoke", "leader", costs)
    assert spec.checkpoint == Checkpoint("USR1", (), 45_000, "/srv/checkpoint.json")


def test_every_key_is_rendered_and_reads_back() -> None:
    spec = job_with_all_keys()
    document = job_document(spec)
    assert document["spec"]["gang"]["topology"] == {"key": "rack", "required": False}
    assert document["spec"]["tasks"][1]["min"] == 4
    assert parse_job(document) == spec


def test_the_short_form_has_the_keys_of_gangs() -> None:
    spec = parse_job(
        flat(
            count=4,
            min=2,
            backends=["a"],
            binding="cores",
            gang={"topology": "zone", "elastic": True},
            checkpoint={"command": "save --now"},
            distribution={"model": "colocated"},
        )
    )
    (task,) = spec.tasks
    assert (task.min_count, task.needed, task.backends, task.binding) == (2, 2, ("a",), "cores")
    assert spec.gang == GangRules("zone", elastic=True)
    assert spec.checkpoint == Checkpoint(command=("/bin/sh", "-c", "save --now"))
    assert spec.distribution == Distribution("colocated")


def test_defaults_are_not_rendered() -> None:
    spec = parse_job(flat())
    assert (spec.gang, spec.distribution, spec.checkpoint) == (GangRules(), Distribution(), Checkpoint())
    assert not {"gang", "distribution", "checkpoint"} & job_document(spec)["spec"].keys()


def test_a_checkpoint_may_have_only_a_file() -> None:
    checkpoint = parse_job(flat(checkpoint={"file": "/a"})).checkpoint
    assert (checkpoint.file, checkpoint.has_hook) == ("/a", False)


@pytest.mark.parametrize("value", ["USR1", "SIGUSR1", "usr1", "sigusr1"])
def test_a_signal_has_several_spellings(value: str) -> None:
    assert parse_job(flat(checkpoint={"signal": value})).checkpoint.signal == "USR1"


@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_that_is_offered_exists(name: str) -> None:
    import signal

    assert hasattr(signal, f"SIG{name}")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.5, 500), ("250m", 250), (1, 1000), (3, 3000), (0, 0)],
    ids=["half", "a quarter", "one", "three", "none"],
)
def test_gpus_are_a_fraction_of_one_or_whole_ones(value: object, expected: int) -> None:
    assert parse_job(flat(gpu=value)).tasks[0].request["gpu"] == expected


TWO = {"between": ["a", "b"], "cost": 1}


@pytest.mark.parametrize(
    ("document", "path", "text"),
    [
        (flat(gpu=1.5), "gpu", "more than one GPU, but not a whole number"),
        (flat(resources={"requests": {"gpu": "2500m"}}), "resources.requests.gpu", "more than one GPU, but not a whole number"),
        (flat(limits={"gpu": 1.5}), "limits.gpu", "more than one GPU, but not a whole number"),
        (flat(count=4, min=5), "min", "5 is more than the count, 4"),
        (flat(min=2), "min", "2 is more than the count, 1"),
        (flat(min=0), "min", "out of range"),
        (flat(min=True), "min", "a whole number"),
        (two_tasks(second={"count": 2, "min": 3}), "spec.tasks[1].min", "3 is more than the count, 2"),
        (flat(mni=2), "mni", "did you mean 'min'"),
        (flat(backends=[]), "backends", "empty"),
        (flat(backends=["a b"]), "backends[0]", "'a b' is not a name"),
        (flat(backends=["a"], backend="b"), "backends", "allowed by the job's backend, b"),
        (two_tasks(second={"backends": ["a"]}, backend={"specific": ["b", "c"]}), "spec.tasks[1].backends", "b, c"),
        (flat(binding="socket"), "binding", "'socket' is not one of cores, numa"),
        (flat(binding="core"), "binding", "did you mean 'cores'"),
        (flat(binding="cores", cpu="500m"), "binding", "a whole number of cores, but the request is 0.5"),
        (flat(binding="numa", cpu=1.5), "binding", "the request is 1.5"),
        (flat(binding="numa", cpu=0), "binding", "the request is 0"),
        (flat(gang={"topolgy": "rack"}), "gang.topolgy", "did you mean 'topology'"),
        (flat(gang={"topology": "a b"}), "gang.topology", "not a label key"),
        (flat(gang={"topology": {"key": "-"}}), "gang.topology.key", "not a label key"),
        (flat(gang={"topology": {"required": True}}), "gang.topology.key", "missing key"),
        (flat(gang={"topology": 1}), "gang.topology", "expected a string or a mapping"),
        (flat(gang={"on_failure": "repairs"}), "gang.on_failure", "did you mean 'repair'"),
        (flat(gang={"assembly_timeout": "soon"}), "gang.assembly_timeout", "not a duration"),
        (flat(gang={"elastic": "yes"}), "gang.elastic", "true or false"),
        (flat(count=3, gang={"elastic": True}), "gang.elastic", "a task whose min is below its count"),
        (flat(count=3, min=3, gang={"elastic": True}), "gang.elastic", "a task whose min is below its count"),
        (flat(gang="rack"), "gang", "expected a mapping"),
        (flat(distribution={}), "distribution.model", "missing key"),
        (flat(distribution={"model": "hub-and-spoke"}), "distribution.model", "did you mean 'hub_and_spoke'"),
        (two_tasks(distribution={"model": "hub_and_spoke"}), "spec.distribution.hub", "one of leader, worker"),
        (two_tasks(distribution={"model": "hub_and_spoke", "hub": "leder"}), "spec.distribution.hub",
         "did you mean 'leader'"),
        (two_tasks(distribution={"model": "distributed", "hub": "leader"}), "spec.distribution.hub",
         "needs model: hub_and_spoke"),
        (two_tasks(distribution={"model": "colocated", "transfer_costs": [TWO]}), "spec.distribution.transfer_costs",
         "remove them"),
        (two_tasks(first={"backends": ["a"]}, second={"backends": ["b"]}, distribution={"model": "colocated"}),
         "spec.distribution.model", "the tasks have no backend in common"),
        (flat(distribution={"model": "distributed", "transfer_costs": [{"between": ["a"], "cost": 1}]}),
         "distribution.transfer_costs[0].between", "two different backends"),
        (flat(distribution={"model": "distributed", "transfer_costs": [{"between": ["a", "a"], "cost": 1}]}),
         "distribution.transfer_costs[0].between", "two different backends"),
        (flat(distribution={"model": "distributed", "transfer_costs": [TWO, {"between": ["b", "a"], "cost": 2}]}),
         "distribution.transfer_costs[1].between", "given twice"),
        (flat(distribution={"model": "distributed", "transfer_costs": [{"between": ["a", "b"], "cost": -1}]}),
         "distribution.transfer_costs[0].cost", "out of range"),
        (flat(distribution={"model": "distributed", "transfer_costs": [{"between": ["a", "b"], "cost": float("nan")}]}),
         "distribution.transfer_costs[0].cost", "out of range"),
        (flat(distribution={"model": "distributed", "transfer_costs": [{"between": ["a", "b"]}]}),
         "distribution.transfer_costs[0].cost", "missing key"),
        (flat(checkpoint={}), "checkpoint", "give a signal or a command that takes the checkpoint"),
        (flat(checkpoint={"timeout": "1m"}), "checkpoint", "give a signal or a command that takes the checkpoint"),
        (flat(checkpoint={"signal": "USR1", "command": "save"}), "checkpoint", "not both"),
        (flat(checkpoint={"signal": "KILL"}), "checkpoint.signal", "cannot catch"),
        (flat(checkpoint={"signal": "SIGSTOP"}), "checkpoint.signal", "cannot catch"),
        (flat(checkpoint={"signal": "USER1"}), "checkpoint.signal", "did you mean 'USR1'"),
        (flat(checkpoint={"signal": 10}), "checkpoint.signal", "expected a string"),
        (flat(checkpoint={"command": " "}), "checkpoint.command", "give the program"),
        (flat(checkpoint={"command": ["a\0"]}), "checkpoint.command", "NUL"),
        (flat(checkpoint={"signal": "USR1", "timeout": 0}), "checkpoint.timeout", "too short"),
        (flat(checkpoint={"file": "/a", "timeout": "1m"}), "checkpoint.timeout", "needs a signal or a command"),
        (flat(checkpoint={"signal": "USR1", "timeout": "soon"}), "checkpoint.timeout", "not a duration"),
        (flat(checkpoint={"file": "model.json"}), "checkpoint.file", "not an absolute path"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_invalid_rules_are_refused_with_a_reason(document: object, path: str, text: str) -> None:
    found = problems_of(document)
    assert text in found[path]


def test_all_errors_are_reported_at_once() -> None:
    found = problems_of(
        flat(min=2, binding="cores", cpu="1500m", gang={"elastic": True}, checkpoint={"signal": "KILL"})
    )
    assert set(found) == {"min", "binding", "gang.elastic", "checkpoint.signal"}


@pytest.mark.parametrize(
    ("value", "numbers", "shown"),
    [
        ("0-3", (0, 1, 2, 3), "0-3"),
        (" 8, 0-1 ", (0, 1, 8), "0-1,8"),
        ((3, 1, 2), (1, 2, 3), "1-3"),
        (5, (5,), "5"),
        ("", (), ""),
    ],
    ids=["a range", "ranges and numbers", "a list", "one number", "none"],
)
def test_cores_have_the_format_of_linux(value: Any, numbers: tuple[int, ...], shown: str) -> None:
    assert parse_numbers(value) == numbers
    assert format_numbers(numbers) == shown


@pytest.mark.parametrize("value", ["0-", "a", "1,,2", "-1", "3-1", "0,0-1", "0-99999999", (0, -1)])
def test_an_invalid_list_of_cores_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput):
        parse_numbers(value)


def test_a_per_node_job_is_parsed_and_rendered_back():
    spec = parse_job(flat(per_node=True))
    assert spec.gang == GangRules(per_node=True)
    assert job_document(spec)["spec"]["per_node"] is True
    assert parse_job(job_document(spec)) == spec
    assert "per_node" not in job_document(parse_job(flat()))["spec"]
    assert parse_job(flat(per_node=False)).gang == GangRules()


@pytest.mark.parametrize(
    "more", [{"count": 2}, {"gang": {"topology": "rack"}}, {"array": 3}, {"distribution": {"model": "colocated"}}]
)
def test_a_per_node_job_has_one_task_and_no_gang_rules(more: dict[str, Any]):
    with pytest.raises(InvalidInput, match="per_node"):
        parse_job(flat(per_node=True, **more))
