"""Small random clusters: jobs, nodes and profiles whose rules often apply and often conflict."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from builders import a_job_spec, a_node, a_task
from hodei.engine.profile import Profile
from hodei.model.affinity import NodeTerm, Requirement
from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.model.job import Affinity, BackendChoice, GangRules, JobSpec, PreferredTerm, TaskSpec, Toleration
from hodei.model.node import Location, Node, Taint
from hodei.plugins.registry import build_profiles

NODE_NAMES = ("n1", "n2", "n3", "n4")
BACKENDS = ("east", "west")
TAINTS = (
    Taint("dedicated", "team", "NoSchedule"),
    Taint("spot", "", "NoExecute"),
    Taint("old", "", "PreferNoSchedule"),
)
PROFILES = SchedulingConfig(
    profiles={
        "fair": ProfileConfig(queue="fair", weights={"red": 3}, worker_selection="round_robin"),
        "packed": ProfileConfig(queue="fifo", worker_selection="bin_packing"),
    }
)


def profiles() -> dict[str, Profile]:
    return build_profiles(PROFILES)


def mostly(common: Any, *others: Any) -> st.SearchStrategy[Any]:
    """The common value, three times as often as all the others together."""
    return st.sampled_from((common,) * 3 * len(others) + others)


requirements = st.sampled_from(
    (
        Requirement("disk", "In", ("ssd", "nvme")),
        Requirement("disk", "NotIn", ("hdd",)),
        Requirement("cores", "Gt", ("4",)),
        Requirement("zone", "Exists"),
        Requirement("zone", "DoesNotExist"),
    )
)
names = st.sampled_from([Requirement("metadata.name", "In", (name,)) for name in NODE_NAMES])
terms = st.one_of(
    st.builds(NodeTerm, labels=st.lists(requirements, max_size=2).map(tuple)),
    st.builds(NodeTerm, fields=st.tuples(names)),
)
affinities = st.one_of(
    st.just(Affinity()),
    st.just(Affinity()),
    st.builds(
        Affinity,
        required=st.lists(terms, max_size=2).map(tuple),
        preferred=st.lists(st.builds(PreferredTerm, weight=st.integers(1, 100), term=terms), max_size=2).map(tuple),
    ),
)
tolerations = st.sampled_from(
    (
        (),
        (),
        (Toleration("dedicated", "Equal", "team", "NoSchedule"),),
        (Toleration("dedicated", "Equal", "other"), Toleration("spot", "Exists")),
        (Toleration("", "Exists"),),
    )
)


GANGS = (
    GangRules(on_failure="repair"),
    GangRules(on_failure="repair", elastic=True),
    GangRules(elastic=True),
    GangRules(assembly_timeout_ms=1000),
)


@st.composite
def plain_tasks(draw: st.DrawFn, name: str = "main") -> TaskSpec:
    """Tasks that request only capacity."""
    cpu, memory = draw(st.sampled_from(("500m", "1", "2"))), draw(st.sampled_from(("0", "1Gi", "3Gi")))
    count = draw(st.sampled_from((1, 1, 2, 3)))
    minimum = draw(st.sampled_from((0, 1))) if count > 1 else 0
    return a_task(name, cpu=cpu, memory=memory, count=count, min_count=minimum, tolerations=draw(tolerations))


@st.composite
def picky_tasks(draw: st.DrawFn, name: str = "main") -> TaskSpec:
    request: dict[str, Any] = {}
    if draw(mostly(False, True)):
        request["example.com/fpga"] = draw(st.integers(0, 2))
    return a_task(
        name,
        cpu=draw(st.sampled_from(("0", "500m", "1", "2", "3"))),
        memory=draw(st.sampled_from(("0", "1Gi", "3Gi"))),
        gpu=draw(mostly("", "1")),
        request=request,
        count=draw(mostly(1, 2, 3)),
        node_selector=draw(mostly({}, {"disk": "ssd"}, {"disk": "ssd", "zone": "a"})),
        affinity=draw(affinities),
        tolerations=draw(tolerations),
        arch=draw(mostly("", "arm64", "amd64")),
        gpu_type=draw(mostly("", "T4")),
    )


def tasks(name: str) -> st.SearchStrategy[TaskSpec]:
    return st.one_of(plain_tasks(name), plain_tasks(name), picky_tasks(name))


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    parts = [draw(tasks("first"))]
    if draw(mostly(False, True)):
        parts.append(draw(tasks("second")))
    return a_job_spec(
        draw(st.sampled_from(("sort", "train", "serve"))),
        tasks=parts,
        project=draw(st.sampled_from(("red", "blue"))),
        profile=draw(st.sampled_from(("default", "default", "fair", "packed"))),
        priority=draw(st.sampled_from(("critical", "high", "medium", "low"))),
        backend=draw(
            mostly(BackendChoice(), BackendChoice("specific", ("west",)), BackendChoice("preferred", BACKENDS))
        ),
        near=draw(mostly(Location(), Location(region="eu", zone="a"))),
        retries=draw(mostly(0, 2)),
        restart=draw(mostly("on_failure", "never", "always")),
        scheduling_timeout_ms=draw(mostly(0, 30_000)),
        estimate_ms=draw(mostly(0, 90_000)),
        gang=draw(st.sampled_from((GangRules(), *GANGS))),
    )


@st.composite
def nodes(draw: st.DrawFn, name: str | None = None) -> Node:
    capacity: dict[str, Any] = {}
    if draw(mostly(False, True)):
        capacity["example.com/fpga"] = draw(st.integers(1, 2))
    labels = {"disk": draw(st.sampled_from(("ssd", "hdd"))), "cores": draw(st.sampled_from(("2", "8", "many")))}
    if draw(st.booleans()):
        labels["zone"] = draw(st.sampled_from(("a", "b")))
    ready = draw(mostly(True, False))
    return a_node(
        name or draw(st.sampled_from(NODE_NAMES)),
        cpu=draw(st.sampled_from(("2", "3500m", "4", "6"))),
        memory=draw(st.sampled_from(("2Gi", "4Gi", "8Gi"))),
        gpu=draw(mostly("", "1", "2")),
        capacity=capacity,
        backend=draw(st.sampled_from(BACKENDS)),
        labels=labels,
        taints=draw(mostly((), *((taint,) for taint in TAINTS))),
        arch=draw(st.sampled_from(("x86_64", "aarch64", ""))),
        gpu_type=draw(st.sampled_from(("", "t4", "a100"))),
        location=draw(st.sampled_from((Location(), Location(region="eu", zone="a"), Location(region="eu", zone="b")))),
        ready=ready,
        not_ready_reason="" if ready else "kubelet stopped",
    )


def clusters(most: int = 4) -> st.SearchStrategy[list[Node]]:
    """Nodes with different names."""
    return (
        st.integers(1, most).flatmap(lambda count: st.tuples(*(nodes(name) for name in NODE_NAMES[:count]))).map(list)
    )
