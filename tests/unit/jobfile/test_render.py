"""Rendering: documents that parse to the same job, and cheap views."""

from __future__ import annotations

import timeit
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import a_job
from hodei.jobfile.parse import decode_jobs, parse_job
from hodei.jobfile.render import iso, job_document, job_view, node_view, run_view
from hodei.model.affinity import NodeTerm, Requirement
from hodei.model.job import (
    Affinity,
    BackendChoice,
    Batch,
    Checkpoint,
    DataProcessing,
    Distribution,
    GangRules,
    Interactive,
    JobSpec,
    LongRunning,
    PreferredTerm,
    Run,
    Serverless,
    TaskSpec,
    Toleration,
    TransferCost,
)
from hodei.model.node import Grant, Location, Node, Socket, Taint
from property.examples import examples

names = st.sampled_from(["a", "7", "a-b", "default", "main", "x" * 63, "node-1"])
values = names | st.sampled_from(["A.b_c", "NVIDIA-A100", "1.2", "true", "any"])
keys = values | st.builds(lambda prefix, name: f"{prefix}.io/{name}", names, values)
optional_value = st.just("") | values
labels = st.dictionaries(keys, optional_value, max_size=3)
durations = st.just(0) | st.integers(1, 10**10)
amounts = st.integers(0, 2**40)
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
requirements = st.one_of(
    st.builds(
        Requirement, keys, st.sampled_from(["In", "NotIn"]), st.lists(optional_value, min_size=1, max_size=3).map(tuple)
    ),
    st.builds(Requirement, keys, st.sampled_from(["Exists", "DoesNotExist"])),
    st.builds(Requirement, keys, st.sampled_from(["Gt", "Lt"]), st.integers(0, 99).map(lambda n: (str(n),))),
)
fields = st.builds(lambda node: Requirement("metadata.name", "In", (node,)), names)
terms = st.builds(
    NodeTerm, st.lists(requirements, min_size=1, max_size=3).map(tuple), st.lists(fields, max_size=1).map(tuple)
)
affinities = st.builds(
    Affinity,
    st.lists(terms, max_size=2).map(tuple),
    st.lists(st.builds(PreferredTerm, st.integers(1, 100), terms), max_size=2).map(tuple),
)
tolerations = st.one_of(
    st.builds(Toleration, keys, st.just("Equal"), optional_value, st.sampled_from(["", "NoSchedule", "NoExecute"])),
    st.builds(
        Toleration,
        st.just("") | keys,
        st.just("Exists"),
        st.just(""),
        st.just("NoExecute"),
        st.none() | st.integers(0, 99),
    ),
)


@st.composite
def tasks(draw: st.DrawFn, name: str) -> TaskSpec:
    custom = draw(st.dictionaries(names.map(lambda name: f"example.com/{name}"), amounts, max_size=2))
    request = {"cpu": draw(amounts), "memory": draw(amounts), **custom}
    if draw(st.booleans()):
        request["gpu"] = draw(st.integers(1, 1000) | st.integers(1, 1000).map(lambda gpus: gpus * 1000))
    binding: Any = draw(st.sampled_from(["", "cores", "numa"]))
    if binding:
        request["cpu"] = draw(st.integers(1, 1000)) * 1000
    limited = draw(st.sets(st.sampled_from(sorted(request))))
    count = draw(st.integers(1, 100))
    return TaskSpec(
        name=name,
        count=count,
        command=(draw(text.filter(bool)), *draw(st.lists(text, max_size=3))),
        env=draw(st.dictionaries(st.sampled_from(["A", "_x", "PATH", "B2", "a.b"]), text, max_size=3)),
        workdir=draw(st.just("") | text.map(lambda path: f"/{path}")),
        image=draw(st.sampled_from(["", "python:3.12"])),
        request=request,
        limits={name: request[name] + (draw(st.integers(0, 5)) if name != "gpu" else 0) for name in sorted(limited)},
        arch=draw(st.sampled_from(["", "amd64"])),
        gpu_type=draw(st.sampled_from(["", "a100"])) if "gpu" in request else "",
        node_selector=draw(labels),
        affinity=draw(affinities),
        tolerations=tuple(draw(st.lists(tolerations, max_size=2))),
        min_count=draw(st.integers(0, count)),
        backends=tuple(draw(st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True))),
        binding=binding,
    )


gangs = st.builds(
    GangRules,
    keys,
    st.booleans(),
    st.sampled_from(["restart", "repair"]),
    durations,
) | st.builds(GangRules, on_failure=st.just("repair"))
checkpoints = st.one_of(
    st.just(Checkpoint()),
    st.builds(Checkpoint, st.sampled_from(["USR1", "TERM"]), timeout_ms=st.integers(1, 10**9), file=st.just("/a/b c")),
    st.builds(Checkpoint, command=st.tuples(text.filter(bool), text), timeout_ms=st.integers(1, 10**9)),
    st.builds(Checkpoint, file=text.map(lambda path: f"/{path}")),
)
costs = st.dictionaries(st.sampled_from([("a", "b"), ("c", "a"), ("b", "c")]), st.integers(0, 10**9), max_size=3).map(
    lambda by_pair: tuple(TransferCost(pair, cost) for pair, cost in by_pair.items())
)


@st.composite
def distributions(draw: st.DrawFn, tasks: tuple[TaskSpec, ...]) -> Distribution:
    model: Any = draw(st.sampled_from(["", "colocated", "distributed", "hub_and_spoke"]))
    if model == "colocated" and len({"", *(task.backends for task in tasks)}) > 2:
        model = ""
    hub = draw(st.sampled_from([task.name for task in tasks])) if model == "hub_and_spoke" else ""
    return Distribution(model, hub, draw(costs) if model in ("distributed", "hub_and_spoke") else ())


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    workload: Any = draw(
        st.one_of(
            st.just(Batch()),
            st.builds(LongRunning, durations),
            st.builds(Serverless, st.booleans()),
            st.builds(DataProcessing, amounts, amounts),
            st.builds(Interactive, durations),
        )
    )
    longest = workload.max_duration_ms if isinstance(workload, LongRunning) else 0
    task_names = draw(st.lists(names, min_size=1, max_size=2, unique=True))
    degrees = st.integers(-90_000_000, 90_000_000)
    all_tasks = tuple(draw(tasks(name)) for name in task_names)
    gang = draw(gangs)
    if any(task.needed < task.count for task in all_tasks):
        gang = msgspec.structs.replace(gang, elastic=draw(st.booleans()))
    return JobSpec(
        name=draw(names),
        tasks=all_tasks,
        project=draw(names),
        labels=draw(labels),
        annotations=draw(st.dictionaries(keys, text, max_size=2)),
        priority=draw(st.sampled_from([500, 1000, 0]) | st.integers(-(2**31), 2**31)),
        profile=draw(values),
        backend=draw(
            st.just(BackendChoice())
            | st.builds(BackendChoice, st.just("preferred"), st.tuples(values, values))
            | st.builds(BackendChoice, st.just("specific"), st.just(("a", "b")))
        ),
        near=draw(
            st.builds(Location, optional_value, optional_value, optional_value, optional_value)
            | st.builds(Location, optional_value, lat_micro=degrees, lng_micro=degrees)
        ),
        workload=workload,
        estimate_ms=draw(durations),
        timeout_ms=longest or draw(durations),
        scheduling_timeout_ms=draw(durations),
        max_queue_time_ms=draw(durations),
        deadline_ms=draw(st.just(0) | st.integers(1, 253_402_300_799_999)),
        grace_ms=draw(durations),
        retries=draw(st.integers(0, 1000)),
        restart=draw(st.sampled_from(["never", "on_failure", "always"])),
        inputs=tuple(draw(st.lists(values, max_size=3, unique=True))),
        gang=gang,
        distribution=draw(distributions(all_tasks)),
        checkpoint=draw(checkpoints),
    )


@examples(100)
@given(specs())
def test_a_rendered_job_reads_back_as_the_same_job(spec: JobSpec) -> None:
    document = job_document(spec)
    assert parse_job(document) == spec
    assert decode_jobs(msgspec.json.encode(document), "application/json") == [spec]


def test_defaults_are_left_out_of_a_document() -> None:
    document = job_document(parse_job({"name": "a", "command": ["x"]}))
    assert document == {
        "apiVersion": "hodei/v1",
        "kind": "Job",
        "metadata": {"name": "a"},
        "spec": {
            "tasks": [
                {
                    "name": "main",
                    "count": 1,
                    "command": ["x"],
                    "resources": {"requests": {"cpu": "1", "memory": "256Mi"}},
                }
            ]
        },
    }


def test_simple_affinity_is_shown_as_selectors() -> None:
    affinity = {"required": ["zone in (a, b), !spot"], "preferred": [{"weight": 5, "match": "disk=ssd"}]}
    document = job_document(parse_job({"command": "x", "affinity": affinity}))
    assert document["spec"]["tasks"][0]["affinity"] == affinity


def test_values_of_secret_variables_can_be_hidden() -> None:
    env = {"API_TOKEN": "a", "db_password": "b", "CLIENT_SECRET": "c", "SSH_KEY": "d", "KEYBOARD": "e"}
    spec = parse_job({"command": "x", "env": env})
    assert job_document(spec)["spec"]["tasks"][0]["env"] == env
    hidden = job_document(spec, env="plain")["spec"]["tasks"][0]["env"]
    assert hidden == {**dict.fromkeys(env, "***"), "KEYBOARD": "e"}
    assert job_document(spec, env="names")["spec"]["tasks"][0]["env"] == dict.fromkeys(env, "***")


@pytest.mark.parametrize(
    ("ms", "shown"),
    [(0, ""), (1, "1970-01-01T00:00:00.001Z"), (1_700_000_000_123, "2023-11-14T22:13:20.123Z")],
    ids=["none", "the first", "any"],
)
def test_times_are_iso_8601_in_utc(ms: int, shown: str) -> None:
    assert iso(ms) == shown


def test_the_view_of_a_job() -> None:
    view = job_view(a_job(7, state="running", name="x", count=3, started_ms=1_700_000_000_000, nodes="n1"))
    assert (view.id, view.name, view.state, view.tasks, view.members) == (7, "x", "running", 1, 3)
    assert (view.started_at, view.finished_at, view.nodes) == ("2023-11-14T22:13:20.000Z", "", ["n1"])


def test_the_view_of_a_run() -> None:
    view = run_view(Run("7.0.1", 7, "main", 0, 1, "n1", "local", "failed", 1000, 2000, 3000, 9, "oom", "out of memory"))
    assert (view.id, view.exit_code, view.reason_code) == ("7.0.1", 9, "oom")
    assert view.finished_at == "1970-01-01T00:00:03.000Z"
    assert (view.rank, view.cpus, view.gpus, view.checkpoint_at) == (0, [], {}, "")


def test_a_run_shows_its_rank_its_devices_and_its_last_checkpoint() -> None:
    grant = Grant((2, 3), ((0, 1000), (1, 500)))
    view = run_view(
        Run("7.2.1", 7, "main", 2, 1, "n1", "local", "running", 1000, rank=1, checkpoint_ms=2000, grant=grant)
    )
    assert (view.rank, view.cpus, view.gpus) == (1, [2, 3], {"0": 1.0, "1": 0.5})
    assert view.checkpoint_at == "1970-01-01T00:00:02.000Z"


def test_a_node_shows_its_sockets_and_its_address() -> None:
    node = Node("n1", "local", sockets=(Socket((0, 1), (0,)), Socket((2, 3))), address="10.0.0.7")
    view = node_view(node, {}, 0)
    assert [(socket.cpus, socket.gpus) for socket in view.sockets] == [([0, 1], [0]), ([2, 3], [])]
    assert view.address == "10.0.0.7"


@pytest.mark.parametrize(
    ("ready", "cordoned", "state"),
    [(True, False, "ready"), (True, True, "cordoned"), (False, False, "not-ready"), (False, True, "not-ready")],
    ids=["ready", "cordoned", "not ready", "not ready wins"],
)
def test_the_view_of_a_node(ready: bool, cordoned: bool, state: str) -> None:
    node = Node(
        "n1", "local", capacity={"cpu": 4000, "memory": 2**30}, taints=(Taint("a", "b"),), ready=ready,
        cordoned=cordoned, location=Location("eu", lat_micro=1_500_000, lng_micro=0),
    )  # fmt: skip
    view = node_view(node, {"cpu": 1500, "memory": 0}, 2)
    assert (view.state, view.runs) == (state, 2)
    assert (view.capacity, view.used) == ({"cpu": "4", "memory": "1Gi"}, {"cpu": "1500m", "memory": "0"})
    assert view.location == {"region": "eu", "lat": 1.5, "lng": 0.0}


def test_views_and_bulk_parsing_are_fast() -> None:
    """The targets are 5 and 25 microseconds; these bounds only catch a change of magnitude on a busy machine."""
    jobs = [a_job(i, submitted_ms=1_700_000_000_000 + i * 977, started_ms=1_700_000_100_000 + i) for i in range(500)]
    raw = msgspec.json.encode(
        [{"name": f"job-{i}", "command": ["/bin/true"], "cpu": "500m", "memory": "128Mi"} for i in range(500)]
    )
    view_s = min(timeit.repeat(lambda: [job_view(job) for job in jobs], number=1, repeat=5)) / 500
    read_s = min(timeit.repeat(lambda: decode_jobs(raw, "application/json"), number=1, repeat=5)) / 500
    assert view_s < 25e-6
    assert read_s < 75e-6
