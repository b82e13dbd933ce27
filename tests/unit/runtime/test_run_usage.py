"""Live usage: queried from backends on request, as a rate between two measurements; and the metrics of ended runs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from builders import NOW_MS, a_job, a_run
from hodei.model.backend import Capabilities
from hodei.model.effects import SaveJob, SaveRun
from hodei.model.errors import BackendError
from hodei.model.job import Job, Run
from hodei.model.usage import RunUsage
from hodei.runtime.metrics import Metrics
from hodei.runtime.run_usage import LiveUsage, RunUsageReader


class Meter:
    def __init__(self, name: str = "local", **can: bool) -> None:
        self.name, self.capabilities = name, Capabilities(**{"run_usage": True, **can})
        self.used: dict[str, RunUsage] = {}
        self.queries: list[list[str]] = []
        self.fail_with: Exception | None = None

    async def run_usage(self, runs: Collection[str]) -> dict[str, RunUsage]:
        self.queries.append(list(runs))
        if self.fail_with is not None:
            raise self.fail_with
        return {run: self.used[run] for run in runs if run in self.used}


class Cluster:
    def __init__(self, *runs: Run, **of_jobs: Any) -> None:
        self.jobs = {run.job: a_job(run.job, state="running", **of_jobs) for run in runs}
        self.runs: dict[int, dict[str, Run]] = {}
        for run in runs:
            self.runs.setdefault(run.job, {})[run.id] = run

    def run(self, id: str) -> Run | None:
        return next((runs[id] for runs in self.runs.values() if id in runs), None)


def running(job: int = 1, **fields: Any) -> Run:
    return a_run(job, state="running", started_ms=NOW_MS - 10_000, **fields)


def a_reader(cluster: Cluster, *meters: Meter) -> tuple[RunUsageReader, SimpleNamespace]:
    at = SimpleNamespace(s=100.0)
    backends: Any = {meter.name: meter for meter in meters}
    return RunUsageReader(backends, cluster, lambda: NOW_MS, lambda: at.s), at  # type: ignore[arg-type]


def test_the_first_measurement_is_an_average_and_later_ones_are_rates():
    run, meter = running(), Meter()
    reader, at = a_reader(Cluster(run), meter)
    meter.used = {run.id: RunUsage(cpu_ms=5000)}
    assert asyncio.run(reader.read([run])) == {run.id: LiveUsage(RunUsage(cpu_ms=5000), 500)}
    at.s += 4
    meter.used = {run.id: RunUsage(cpu_ms=13_000)}
    assert asyncio.run(reader.read([run]))[run.id].cpu_milli == 2000
    at.s += 4
    meter.used = {run.id: RunUsage(peak_memory=7)}
    assert asyncio.run(reader.read([run]))[run.id] == LiveUsage(RunUsage(peak_memory=7))


def test_a_fresh_measurement_is_not_repeated():
    run, meter = running(), Meter()
    reader, at = a_reader(Cluster(run), meter)
    meter.used = {run.id: RunUsage(cpu_ms=1)}
    first = asyncio.run(reader.read([run]))
    at.s += 1
    assert asyncio.run(reader.read([run])) == first
    assert meter.queries == [[run.id]]


def test_each_backend_that_measures_runs_is_queried_for_its_own_runs():
    here, there, nowhere = running(1), running(2, backend="far"), running(3, backend="removed")
    meter, other = Meter(), Meter("far", run_usage=False)
    reader, _ = a_reader(Cluster(here, there, nowhere), meter, other)
    meter.used = {here.id: RunUsage(cpu_ms=1)}
    assert set(asyncio.run(reader.read([here, there, nowhere]))) == {here.id}
    assert (meter.queries, other.queries) == ([[here.id]], [])


@pytest.mark.parametrize("error", [BackendError("away"), ValueError("a bug")])
def test_a_backend_that_fails_leaves_the_usage_of_its_runs_unknown(error: Exception):
    here, there = running(1), running(2, backend="far")
    meter, other = Meter(), Meter("far")
    reader, _ = a_reader(Cluster(here, there), meter, other)
    meter.used, other.fail_with = {here.id: RunUsage(cpu_ms=1)}, error
    assert set(asyncio.run(reader.read([here, there]))) == {here.id}


def test_a_backend_that_hangs_costs_no_more_than_the_timeout():
    run, meter = running(), Meter()
    reader, _ = a_reader(Cluster(run), meter)

    async def hang(runs: Collection[str]) -> dict[str, RunUsage]:
        await asyncio.Event().wait()
        return {}

    meter.run_usage = hang  # type: ignore[method-assign]
    assert asyncio.run(reader.read([run], timeout_s=0.01)) == {}


def test_ended_runs_are_dropped_from_memory():
    run, other, meter = running(1), running(2), Meter()
    cluster = Cluster(run, other)
    reader, _ = a_reader(cluster, meter)
    meter.used = {run.id: RunUsage(cpu_ms=1), other.id: RunUsage(cpu_ms=1)}
    asyncio.run(reader.read([run, other]))
    del cluster.runs[1]
    asyncio.run(reader.read([other]))
    assert set(reader._samples["local"]) == {other.id}


def test_running_runs_are_found_by_project_user_and_node():
    cluster = Cluster(running(1), running(2, node="n2"), a_run(3), project="lab")
    reader, _ = a_reader(cluster)
    assert [run.id for _, run in reader.running()] == ["1.0.1", "2.0.1"]
    assert [run.id for _, run in reader.running(node="n2", project="lab")] == ["2.0.1"]
    assert reader.running(project="other") == reader.running(user="ada") == []


def ended(metrics: Metrics, job: Job, **usage: int) -> None:
    run = a_run(
        job.id,
        state="succeeded",
        started_ms=NOW_MS,
        finished_ms=NOW_MS + 10_000,
        usage=RunUsage(**usage) if usage else None,
    )
    metrics.runs_ended([SaveRun(run), SaveJob(job)], {})


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_cpu_requested_and_used_are_counted_by_project():
    metrics = Metrics()
    ended(metrics, a_job(1, cpu=4, memory="1Gi", project="lab"), cpu_ms=10_000, peak_memory=2**29)
    ended(metrics, a_job(2, cpu=4, project="lab"))
    assert value(metrics, "hodei_cpu_requested_seconds_total", project="lab") == 40
    assert value(metrics, "hodei_cpu_used_seconds_total", project="lab") == 10
    assert value(metrics, "hodei_run_cpu_used_ratio_sum") == 0.25
    assert value(metrics, "hodei_run_memory_used_ratio_sum") == 0.5
    assert value(metrics, "hodei_run_memory_used_ratio_count") == 1


def test_projects_beyond_the_first_two_hundred_share_one_series():
    metrics = Metrics()
    for number in range(1, 203):
        ended(metrics, a_job(number, cpu=1, project=f"p{number}"), cpu_ms=1000)
    assert value(metrics, "hodei_cpu_used_seconds_total", project="p200") == 1
    assert value(metrics, "hodei_cpu_used_seconds_total", project="other") == 2
