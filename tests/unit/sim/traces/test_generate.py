"""Generated workloads: deterministic for a seed, generated lazily, and with the requested load."""

from __future__ import annotations

from itertools import islice, pairwise
from random import Random
from statistics import fmean

import pytest

from hodei.model.job import TaskSpec
from hodei.model.resources import Resources
from hodei.sim.traces import Workload, open_workload
from hodei.sim.traces.generate import ALL, Lublin, gamma_cdf
from hodei.sim.traces.workload import JobSizes
from unit.sim.traces.shared import TRACES, needs_traces

SPECS = [
    "generate:lublin?jobs=500",
    "generate:lublin?jobs=500&types=two&nodes=8&cpus=16&load=0.5",
    "generate:ci?jobs=500",
    "generate:gpu?jobs=500&shared_percent=50",
    "generate:mixed?jobs=500",
]


@pytest.mark.parametrize("spec", SPECS)
def test_jobs_depend_on_the_seed_alone(spec: str) -> None:
    first, repeated, other = (open_workload(f"{spec}&seed={seed}") for seed in (3, 3, 4))
    assert list(first.arrivals) == list(repeated.arrivals) == list(first.arrivals)
    assert list(first.arrivals) != list(other.arrivals)
    assert first.nodes == repeated.nodes


@pytest.mark.parametrize("spec", SPECS)
def test_jobs_are_ordered_numbered_from_one_and_fit_the_nodes(spec: str) -> None:
    workload = open_workload(spec)
    jobs = list(workload.arrivals)
    assert len(jobs) == len(workload.arrivals) == 500
    assert [job.id for job in jobs] == list(range(1, 501))
    assert all(job.at_ms <= later.at_ms for job, later in pairwise(jobs))
    capacity = total(workload)
    for job in jobs:
        assert 0 < job.run_ms <= job.spec.estimate_ms
        for resource, amount in total_request(job.spec.tasks).items():
            assert amount <= capacity[resource]
        for task in job.spec.tasks:
            assert any(
                all(node.capacity.get(resource, 0) >= amount for resource, amount in task.request.items())
                for node in workload.nodes
            )


def test_a_billion_jobs_are_generated_lazily() -> None:
    workload = open_workload("generate:lublin?jobs=1000000000")
    assert len(workload.arrivals) == 1_000_000_000
    assert [job.id for job in islice(iter(workload.arrivals), 3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("spec", "resource"),
    [
        pytest.param("generate:lublin?nodes=16&load=0.6&jobs=20000", "cpu", id="Lublin"),
        pytest.param("generate:ci?load=0.6&jobs=20000", "cpu", id="CI"),
        pytest.param("generate:gpu?load=0.6&jobs=20000", "gpu", id="GPU"),
    ],
)
def test_the_load_is_about_the_requested_one(spec: str, resource: str) -> None:
    workload = open_workload(spec)
    held = last_ms = 0
    for job in workload.arrivals:
        held += total_request(job.spec.tasks).get(resource, 0) * job.run_ms
        last_ms = job.at_ms
    assert held / (total(workload)[resource] * last_ms) == pytest.approx(0.6, rel=0.25)


def test_actual_estimates_are_the_run_times() -> None:
    for job in open_workload("generate:gpu?jobs=50", estimates="actual").arrivals:
        assert job.spec.estimate_ms == job.run_ms


def test_a_push_submits_many_jobs_of_one_project_at_once() -> None:
    pushes: dict[int, set[str]] = {}
    jobs = list(open_workload("generate:ci?jobs=2000").arrivals)
    for job in jobs:
        pushes.setdefault(job.at_ms, set()).add(job.spec.project)
    assert all(len(projects) == 1 for projects in pushes.values())
    assert 8 < len(jobs) / len(pushes) < 16


def test_gangs_have_members_of_at_most_a_node() -> None:
    jobs = [job for job in open_workload("generate:gpu?jobs=5000&gpus=4&nodes=100").arrivals if job.spec.size > 1]
    assert jobs
    for job in jobs:
        assert all(task.request["gpu"] == 4000 for task in job.spec.tasks)


def test_processors_given_by_the_user_define_the_machine() -> None:
    workload = open_workload("generate:lublin?jobs=10", procs=64)
    assert total(workload) == {"cpu": 64_000}


@pytest.mark.parametrize(
    ("x", "alpha", "beta", "expected"),
    [
        pytest.param(1.0, 1.0, 1.0, 0.632120559, id="an exponential"),
        pytest.param(4.0, 2.0, 2.0, 0.593994150, id="the sum of two exponentials"),
        pytest.param(58.5, 8.1737, 3.9631, 0.976413, id="the end of the day"),
    ],
)
def test_the_gamma_distribution(x: float, alpha: float, beta: float, expected: float) -> None:
    assert gamma_cdf(x, alpha, beta) == pytest.approx(expected, abs=5e-6)


@needs_traces
def test_the_model_has_the_distributions_of_lublins_program() -> None:
    """Means over ten thousand jobs of his program, with 256 processors, and of the model; the bounds allow for the seed."""
    published = list(open_workload(TRACES / "lublin-256" / "lublin_256.swf.gz").arrivals)
    model, rng = Lublin("job", ALL, 256, 1, JobSizes(), "user"), Random(1)
    sizes = [model.size(rng) for _ in range(10_000)]
    runs = [model.run_s(rng, size) for size in sizes]
    gaps = [model.gap_s(rng) for _ in range(10_000)]
    cpus = [job.spec.tasks[0].request["cpu"] // 1000 for job in published]
    assert fmean(sizes) == pytest.approx(fmean(cpus), rel=0.1)
    assert sum(size == 1 for size in sizes) == pytest.approx(sum(cpu == 1 for cpu in cpus), rel=0.1)
    assert fmean(runs) == pytest.approx(fmean(job.run_ms / 1000 for job in published), rel=0.1)
    assert fmean(gaps) == pytest.approx(published[-1].at_ms / 1000 / len(published), rel=0.25)


def total_request(tasks: tuple[TaskSpec, ...]) -> Resources:
    out: Resources = {}
    for task in tasks:
        for resource, amount in task.request.items():
            out[resource] = out.get(resource, 0) + amount * task.count
    return out


def total(workload: Workload) -> Resources:
    out: Resources = {}
    for node in workload.nodes:
        for resource, amount in node.capacity.items():
            out[resource] = out.get(resource, 0) + amount
    return out
